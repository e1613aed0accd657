"""The tails of the weights' distribution by rule, from the monitors' records of the
runs.
"""

from collections.abc import Callable
from statistics import fmean

from _markdown import markdown

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run

TENTH = 0.1
"""The share of a run's steps within which a measurement is early."""
Look = Callable[[Run, str], float | None]
"""A function that reads a metric from a run's measurements."""
KURTOSIS = "quant/kurtosis/weight"
LOG2_STD, LOG2_SKEWNESS = "quant/log2_std/weight", "quant/log2_skewness/weight"


def kurtosis_table(file: Exported) -> str:
    """A table of the weights' kurtosis, which is 3 for a normal distribution."""
    return _table(file, lambda row, look: written(_mean(row, look, KURTOSIS)))


def logarithms_table(file: Exported) -> str | None:
    """A table of standard deviation and skewness of the weights' logarithms; None if
    the file's runs lack them.
    """
    if all(at_end(row, LOG2_STD) is None for row in file.rows):
        return None
    return _table(file, _logarithms)


def _logarithms(row: Row | None, look: Look) -> str:
    spread, skewness = (_mean(row, look, name) for name in (LOG2_STD, LOG2_SKEWNESS))
    return "-" if spread is None or skewness is None else f"{spread:.2f}, {skewness:+.2f}"


def _table(file: Exported, cell: Callable[[Row | None, Look], str]) -> str:
    """A line per rule; for each text a column after a tenth of the training and one at
    its end; means over seeds.

    The labels of a rule's rows on two texts differ in ``dir`` only.
    """
    texts = dict.fromkeys(data_of(row) for row in file.rows if row.runs)
    rules: dict[str, dict[str, Row]] = {}
    for row in file.rows:
        rules.setdefault(row.label.replace(f" dir={data_of(row)}", ""), {})[data_of(row)] = row
    header = [
        "rule",
        *(f"{text.split('/')[-1]}, {when}" for text in texts for when in ("a tenth", "the end")),
    ]
    lines = [
        [
            f"`{label}`",
            *(cell(of.get(text), look) for text in texts for look in (_of_a_tenth, _of_the_end)),
        ]
        for label, of in rules.items()
    ]
    return markdown(header, lines)


def data_of(row: Row) -> str:
    """The folder of the text that a row trained on."""
    return next((str(run.config["data"]["dir"]) for run in row.runs), "")


def at_end(row: Row, name: str) -> float | None:
    """The mean of a metric over the runs of a row, at each run's last measurement."""
    return _mean(row, _of_the_end, name)


def _mean(row: Row | None, look: Look, name: str) -> float | None:
    known = [value for run in (row.runs if row else ()) if (value := look(run, name)) is not None]
    return fmean(known) if known else None


def _of_a_tenth(run: Run, name: str) -> float | None:
    """The metric at the last measurement within a tenth of the steps; None if the first
    came later.
    """
    within = [step for step in run.looks if step <= TENTH * (run.number("steps") or 0)]
    return run.looks[max(within)].get(name) if within else None


def _of_the_end(run: Run, name: str) -> float | None:
    return run.looks[max(run.looks)].get(name) if run.looks else None


def written(value: float | None) -> str:
    """A number as text, or a dash for None.

    >>> written(217.3), written(4.2), written(None)
    ('217', '4.2', '-')
    """
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"
