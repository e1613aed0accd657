"""Correlation of each monitor at a tenth of the training with the final gap.

It is shown over rules of AdamW's kind, and over all rules.
"""

from collections.abc import Callable, Sequence

from _markdown import markdown
from _predictors import LEVEL, TRIVIAL, Point, Predictor, early_points, rank_predictors

from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference, row_key, row_runs
from nanogpt_bench.sweep.plan import baseline_of

#: every run's final gap is to this row of its file, or to the file's own reference where
#: it has no such row
REFERENCE_RULE = "fp32"


def monitors_table(*files: Exported) -> str:
    """Return a line for the loss, and for each metric that predicts the gap beyond it.

    Metrics are judged among rules without Muon, and the strongest comes first: among
    all runs most metrics only tell Muon from AdamW. Runs of several files are judged
    together, each against float32 AdamW. A run that two files have counts once.
    """
    over_all = {predictor.name: predictor for predictor in rank_predictors(_points(files, _is_any))}
    without_muon = rank_predictors(_points(files, _is_without_muon))
    shown = [predictor for predictor in without_muon if predictor.name in TRIVIAL]
    shown += sorted(
        filter(is_predictive, without_muon),
        key=lambda predictor: -abs(predictor.spearman or 0.0),
    )
    header = (
        "figure at a tenth",
        "runs",
        "rank correlation",
        "AUC, > 1% behind",
        "with Muon",
        "AUC, > 1% behind",
    )
    lines = []
    for predictor in shown:
        name = predictor.name if predictor.name in TRIVIAL else f"`{predictor.name}`"
        cells = [*_predictor_cells(predictor), *_predictor_cells(over_all.get(predictor.name))]
        lines.append([name, str(predictor.runs), *cells])
    return markdown(header, lines)


def _is_any(row: Row) -> bool:
    return True


def _is_without_muon(row: Row) -> bool:
    return not row.rule.startswith("muon")


def looked_early(file: Exported) -> bool:
    """Return whether the file has float32 AdamW and runs that were measured early."""
    return _has_reference(file) and bool(_points([file], _is_any))


def _has_reference(file: Exported) -> bool:
    return any(row.rule == REFERENCE_RULE for row in file.rows)


def _points(files: Sequence[Exported], is_wanted: Callable[[Row], bool]) -> list[Point]:
    """Return the runs of the wanted rows; their references may be any rows of the file."""
    points = {}
    for file in files:
        wanted_rows = [row for row in file.rows if is_wanted(row)]
        settings = {row_key(run) for _, run in row_runs(wanted_rows)}
        name = baseline_of(REFERENCE_RULE, file.rows) if _has_reference(file) else file.baseline
        for key, point in early_points(file.rows, find_reference(file.rows, name)).items():
            if point.group in settings:
                points[key] = point
    return list(points.values())


def is_predictive(predictor: Predictor) -> bool:
    """Return whether a metric predicts the gap, and more of it than the loss alone.

    The interval of its rank correlation excludes 0.
    """
    if predictor.low is None or predictor.high is None or predictor.holm is None:
        return False
    return not predictor.low <= 0 <= predictor.high and predictor.holm < LEVEL


def _predictor_cells(predictor: Predictor | None) -> tuple[str, str]:
    """Return the rank correlation with its interval, and the AUC."""
    if predictor is None or predictor.spearman is None:
        return "-", "-"
    correlation = f"{predictor.spearman:+.2f}"
    if predictor.low is not None and predictor.high is not None:
        correlation += f" [{predictor.low:+.2f}, {predictor.high:+.2f}]"
    return correlation, "-" if predictor.auc is None else f"{predictor.auc:.2f}"
