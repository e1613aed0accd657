"""The tails of the weights' distribution by rule, from the monitors' records of the runs."""

from collections.abc import Callable

from _markdown import markdown

from nanogpt_bench.report.results import mean_of
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run

FIRST_SHARE = 0.1
"""The share of a run's steps within which a measurement is early."""
ReadMetric = Callable[[Run, str], float | None]
"""A function that reads a metric from one of a run's measurements."""
KURTOSIS = "quant/kurtosis/weight"
LOG2_STD = "quant/log2_std/weight"
LOG2_SKEWNESS = "quant/log2_skewness/weight"


def kurtosis_table(file: Exported) -> str:
    """Return a table of the weights' kurtosis, which is 3 for a normal distribution."""
    return _table(file, _kurtosis_cell)


def logarithms_table(file: Exported) -> str | None:
    """Return a table of standard deviation and skewness of the weights' logarithms.

    Returns None if the file's runs lack them.
    """
    if all(mean_at_end(row, LOG2_STD) is None for row in file.rows):
        return None
    return _table(file, _logarithms_cell)


def _kurtosis_cell(row: Row | None, read_metric: ReadMetric) -> str:
    return number_text(_mean(row, read_metric, KURTOSIS))


def _logarithms_cell(row: Row | None, read_metric: ReadMetric) -> str:
    spread = _mean(row, read_metric, LOG2_STD)
    skewness = _mean(row, read_metric, LOG2_SKEWNESS)
    return "-" if spread is None or skewness is None else f"{spread:.2f}, {skewness:+.2f}"


def _table(file: Exported, cell: Callable[[Row | None, ReadMetric], str]) -> str:
    """Return a line per rule, with two columns for each text, of means over seeds.

    One column is after a tenth of the training, the other at its end. The labels of a
    rule's rows on two texts differ in ``dir`` only.
    """
    folders = dict.fromkeys(data_of(row) for row in file.rows if row.runs)
    rules: dict[str, dict[str, Row]] = {}
    for row in file.rows:
        rules.setdefault(label_without_data(row), {})[data_of(row)] = row
    header = ["rule"]
    for data in folders:
        header += [f"{text_name(data)}, a tenth", f"{text_name(data)}, the end"]
    lines = []
    for label, row_by_data in rules.items():
        line = [f"`{label}`"]
        for data in folders:
            row_on_text = row_by_data.get(data)
            line += [cell(row_on_text, _read_at_a_tenth), cell(row_on_text, _read_at_end)]
        lines.append(line)
    return markdown(header, lines)


def data_of(row: Row) -> str:
    """Return the folder of the text that a row trained on."""
    return str(row.runs[0].config["data"]["dir"]) if row.runs else ""


def text_name(data: str) -> str:
    """Return the last part of a text's folder."""
    return data.split("/")[-1]


def label_without_data(row: Row) -> str:
    """Return the row's label without the folder of its text."""
    return row.label.replace(f" dir={data_of(row)}", "")


def mean_at_end(row: Row, name: str) -> float | None:
    """Return the mean of a metric over the runs of a row, at each run's last measurement."""
    return _mean(row, _read_at_end, name)


def _mean(row: Row | None, read_metric: ReadMetric, name: str) -> float | None:
    return None if row is None else mean_of(read_metric(run, name) for run in row.runs)


def _read_at_a_tenth(run: Run, name: str) -> float | None:
    """Read a metric at the last measurement within a tenth of the steps.

    Returns None if the first measurement came later.
    """
    limit = FIRST_SHARE * (run.number("steps") or 0)
    early_steps = [step for step in run.looks if step <= limit]
    return run.looks[max(early_steps)].get(name) if early_steps else None


def _read_at_end(run: Run, name: str) -> float | None:
    return run.looks[max(run.looks)].get(name) if run.looks else None


def number_text(value: float | None) -> str:
    """Return a number as text, or a dash for None.

    >>> number_text(217.3), number_text(4.2), number_text(None)
    ('217', '4.2', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
