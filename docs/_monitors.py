"""What each monitor at a tenth of the training tells of the final gap, over all rules and over those without Muon."""

from collections.abc import Callable, Sequence

from _tables import markdown

from nanogpt_bench.report.exported import Exported
from nanogpt_bench.report.foretelling import LEVEL, TRIVIAL, Foretold, Point, foretold, points
from nanogpt_bench.report.results import Row, find_reference


def monitors(*files: Exported) -> str:
    """The loss itself, then the figures whose interval leaves 0 out and that add to it, strongest first.

    Runs of several files are told together, each against its file's reference; one that two hold counts once.
    """
    of_all = foretold(_points(files, lambda row: True))
    alone = {each.name: each for each in foretold(_points(files, lambda row: not row.rule.startswith("muon")))}
    shown = [
        each for each in of_all if each.name in TRIVIAL or (found(each) and each.holm is not None and each.holm < LEVEL)
    ]
    lines = [
        (_named(each), str(each.runs), *(cell for told in (each, alone.get(each.name)) for cell in _cells(told)))
        for each in shown
    ]
    header = ("figure at a tenth", "runs", "rank correlation", "AUC, > 1% behind", "without Muon", "AUC, > 1% behind")
    return markdown(header, lines)


def looked_early(file: Exported) -> bool:
    """Whether there are runs with a float32 AdamW beside them and a look within a tenth of their steps."""
    return any(row.rule == "fp32" for row in file.rows) and bool(_points([file], lambda row: True))


def _points(files: Sequence[Exported], kept: Callable[[Row], bool]) -> list[Point]:
    every = {}
    for file in files:
        reference = find_reference(file.rows, file.baseline)
        every |= points([row for row in file.rows if kept(row)], reference)
    return list(every.values())


def found(told: Foretold) -> bool:
    """Whether the interval of the rank correlation leaves 0 out."""
    return told.low is not None and told.high is not None and not told.low <= 0 <= told.high


def _named(told: Foretold) -> str:
    return told.name if told.name in TRIVIAL else f"`{told.name}`"


def _cells(told: Foretold | None) -> tuple[str, str]:
    if told is None or told.spearman is None:
        return "-", "-"
    ends = "" if told.low is None or told.high is None else f" [{told.low:+.2f}, {told.high:+.2f}]"
    return f"{told.spearman:+.2f}{ends}", "-" if told.auc is None else f"{told.auc:.2f}"
