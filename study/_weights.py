"""The tails of the weights that a study's rules train, from what its runs saw of them."""

from collections.abc import Callable
from statistics import fmean

from _markdown import markdown

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run

TENTH = 0.1
"""Of a run's steps."""
Look = Callable[[Run, str], float | None]
"""Reads a figure of a run."""
KURTOSIS = "quant/kurtosis/weight"
LOG2_STD, LOG2_SKEWNESS = "quant/log2_std/weight", "quant/log2_skewness/weight"


def kurtosis_table(file: Exported) -> str:
    """The kurtosis of the weights, where a normal distribution has 3."""
    return _table(file, lambda row, look: written(_mean(row, look, KURTOSIS)))


def logarithms_table(file: Exported) -> str | None:
    """Standard deviation and skewness of the logarithms of the weights; None of a file whose runs did not look."""
    if all(at_end(row, LOG2_STD) is None for row in file.rows):
        return None
    return _table(file, _logarithms)


def _logarithms(row: Row | None, look: Look) -> str:
    spread, skewness = (_mean(row, look, name) for name in (LOG2_STD, LOG2_SKEWNESS))
    return "-" if spread is None or skewness is None else f"{spread:.2f}, {skewness:+.2f}"


def _table(file: Exported, cell: Callable[[Row | None, Look], str]) -> str:
    """A line a rule, a column for a tenth of the training and for its end on each text; means over seeds.

    Of two texts' rows of one rule the labels differ in ``dir`` alone.
    """
    texts = dict.fromkeys(data_of(row) for row in file.rows if row.runs)
    rules: dict[str, dict[str, Row]] = {}
    for row in file.rows:
        rules.setdefault(row.label.replace(f" dir={data_of(row)}", ""), {})[data_of(row)] = row
    header = ["rule", *(f"{text.split('/')[-1]}, {when}" for text in texts for when in ("a tenth", "the end"))]
    lines = [
        [f"`{label}`", *(cell(of.get(text), look) for text in texts for look in (_of_a_tenth, _of_the_end))]
        for label, of in rules.items()
    ]
    return markdown(header, lines)


def data_of(row: Row) -> str:
    """The folder of the text that a row trained on."""
    return next((str(run.config["data"]["dir"]) for run in row.runs), "")


def at_end(row: Row, name: str) -> float | None:
    """The mean of a figure over the runs of a row, at their last looks."""
    return _mean(row, _of_the_end, name)


def _mean(row: Row | None, look: Look, name: str) -> float | None:
    known = [value for run in (row.runs if row else ()) if (value := look(run, name)) is not None]
    return fmean(known) if known else None


def _of_a_tenth(run: Run, name: str) -> float | None:
    """At the last look within a tenth of the steps; None where the first came later."""
    within = [step for step in run.looks if step <= TENTH * (run.number("steps") or 0)]
    return run.looks[max(within)].get(name) if within else None


def _of_the_end(run: Run, name: str) -> float | None:
    return run.looks[max(run.looks)].get(name) if run.looks else None


def written(value: float | None) -> str:
    """A figure, or a dash.

    >>> written(217.3), written(4.2), written(None)
    ('217', '4.2', '-')
    """
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
