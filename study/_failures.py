"""Failures of the runs of a file: the share of their updates that moved the weights,
and the classes of failure.
"""

from collections import Counter
from statistics import fmean

from _markdown import markdown

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row


def failures_table(file: Exported) -> str:
    """A line per row: the share of the updates that moved the weights, and the seeds in
    which each class was found.
    """
    header = ("rule", "of the movement asked for arrived", "classes of failure, seeds")
    lines = [_line(row) for row in file.rows if row.runs]
    return markdown(header, lines)


def _line(row: Row) -> tuple[str, ...]:
    classes = Counter(finding.kind for run in row.runs for finding in run.failures)
    told = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in classes.most_common())
    return f"`{row.label}`", _share(_mean(row, "arrived")), told or "none"


def _mean(row: Row, name: str) -> float | None:
    known = [value for run in row.runs if (value := run.number(name)) is not None]
    return fmean(known) if known else None


def _share(value: float | None) -> str:
    """A share, or a dash.

    >>> _share(0.125), _share(None)
    ('12.5%', '-')
    """
    return "-" if value is None else f"{value:.1%}"
