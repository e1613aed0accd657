"""The tails of the weights that a study's rules train, from what its runs saw of them."""

from collections.abc import Mapping
from statistics import fmean

from _tables import markdown

from nanogpt_bench.report.exported import Exported
from nanogpt_bench.report.results import Row

KURTOSIS = "quant/kurtosis/weight"


def kurtosis_table(file: Exported) -> str:
    """A line a rule, a column for a tenth of the training and for its end on each text; means over seeds.

    Of two texts' rows of one rule the labels differ in ``dir`` alone.
    """
    texts = dict.fromkeys(data_of(row) for row in file.rows if row.runs)
    rules: dict[str, dict[str, Row]] = {}
    for row in file.rows:
        rules.setdefault(row.label.replace(f" dir={data_of(row)}", ""), {})[data_of(row)] = row
    header = ["rule", *(f"{text.split('/')[-1]}, {when}" for text in texts for when in ("a tenth", "the end"))]
    lines = [
        [f"`{label}`", *(written(_mean(of.get(text), look)) for text in texts for look in (0, -1))]
        for label, of in rules.items()
    ]
    return markdown(header, lines)


def data_of(row: Row) -> str:
    """The folder of the text that a row trained on."""
    return next((str(run.config["data"]["dir"]) for run in row.runs), "")


def _mean(row: Row | None, look: int) -> float | None:
    """The mean over the runs of a row that have looked, at the first look that is kept or at the last."""
    known = [value for run in (row.runs if row else ()) if (value := _at(run.looks, look).get(KURTOSIS)) is not None]
    return fmean(known) if known else None


def _at(looks: Mapping[int, Mapping[str, float]], look: int) -> Mapping[str, float]:
    return looks[sorted(looks)[look]] if looks else {}


def written(value: float | None) -> str:
    """A figure, or a dash.

    >>> written(217.3), written(4.2), written(None)
    ('217', '4.2', '-')
    """
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
