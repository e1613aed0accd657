"""Failures of the runs of a file.

For each row: the share of its updates that moved the weights, and the classes of
failure that were found.
"""

from collections import Counter

from _markdown import markdown

from nanogpt_bench.report.results import mean_of
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row


def failures_table(file: Exported) -> str:
    """Return a line per row, with the number of seeds in which each class was found."""
    header = ("rule", "of the movement asked for arrived", "classes of failure, seeds")
    return markdown(header, [_failures_row(row) for row in file.rows if row.runs])


def _failures_row(row: Row) -> tuple[str, ...]:
    seeds: Counter[str] = Counter()
    for run in row.runs:
        seeds.update(finding.kind for finding in run.failures)
    classes = [f"{name.replace('_', ' ')} {count}" for name, count in seeds.most_common()]
    arrived = mean_of(run.number("arrived") for run in row.runs)
    return f"`{row.label}`", _share_text(arrived), ", ".join(classes) or "none"


def _share_text(share: float | None) -> str:
    """Return a share in percent, or a dash.

    >>> _share_text(0.125), _share_text(None)
    ('12.5%', '-')
    """
    return "-" if share is None else f"{share:.1%}"
