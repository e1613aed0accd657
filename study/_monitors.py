"""Correlation of each monitor at a tenth of the training with the final gap: rules of
AdamW's kind, and all rules.
"""

from collections.abc import Callable, Sequence

from _markdown import markdown
from _predictors import LEVEL, TRIVIAL, Point, Predictor, early_points, rank_predictors

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference, setting_of
from nanogpt_bench.sweep.plan import baseline_of

#: every run's final gap is that to this row of its file, or to the file's own reference
#: where it has no such row
REFERENCE = "fp32"


def monitors(*files: Exported) -> str:
    """A table of the loss and of the metrics that predict the gap among rules without
    Muon, strongest first.

    Among all runs most metrics only tell Muon from AdamW. Runs of several files are
    judged together, each against float32 AdamW; a run that two files have counts once.
    """
    of_all = {each.name: each for each in rank_predictors(_points(files, lambda row: True))}
    alone = rank_predictors(_points(files, lambda row: not row.rule.startswith("muon")))
    shown = [each for each in alone if each.name in TRIVIAL]
    shown += sorted(filter(found, alone), key=lambda each: -abs(each.spearman or 0.0))
    lines = [
        (
            _named(each),
            str(each.runs),
            *(cell for told in (each, of_all.get(each.name)) for cell in _cells(told)),
        )
        for each in shown
    ]
    header = (
        "figure at a tenth",
        "runs",
        "rank correlation",
        "AUC, > 1% behind",
        "with Muon",
        "AUC, > 1% behind",
    )
    return markdown(header, lines)


def looked_early(file: Exported) -> bool:
    """Return whether the file has float32 AdamW and runs that were measured within a
    tenth of their steps.
    """
    return _has_reference(file) and bool(_points([file], lambda row: True))


def _has_reference(file: Exported) -> bool:
    return any(row.rule == REFERENCE for row in file.rows)


def _points(files: Sequence[Exported], kept: Callable[[Row], bool]) -> list[Point]:
    """The runs of the rows that `kept` selects; their references are looked for among
    all rows.
    """
    every = {}
    for file in files:
        shown = {setting_of(run) for row in file.rows if kept(row) for run in row.runs}
        name = baseline_of(REFERENCE, file.rows) if _has_reference(file) else file.baseline
        measured = early_points(file.rows, find_reference(file.rows, name))
        every |= {key: point for key, point in measured.items() if point.of in shown}
    return list(every.values())


def found(told: Predictor) -> bool:
    """Return whether the rank correlation's interval excludes 0 and the metric predicts
    more than the loss alone.
    """
    if told.low is None or told.high is None or told.holm is None:
        return False
    return not told.low <= 0 <= told.high and told.holm < LEVEL


def _named(told: Predictor) -> str:
    return told.name if told.name in TRIVIAL else f"`{told.name}`"


def _cells(told: Predictor | None) -> tuple[str, str]:
    if told is None or told.spearman is None:
        return "-", "-"
    ends = "" if told.low is None or told.high is None else f" [{told.low:+.2f}, {told.high:+.2f}]"
    return f"{told.spearman:+.2f}{ends}", "-" if told.auc is None else f"{told.auc:.2f}"
