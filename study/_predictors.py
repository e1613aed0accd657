"""Which of the figures monitored early predict the final gap of a run.

    early_points      the runs of a file, each as a point: figures at a tenth of its
                      steps, and its gap to the reference's final loss
    rank_predictors   for each figure over all points: its rank correlation with the
                      gap and the AUC of being behind, as it is and beyond what the
                      early loss tells already

The early loss and its gap are the trivial predictors: whoever watches a run has them.
"""

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from nanogpt_bench.config.metrics import SMOOTHED_LOSS, TRAIN_LOSS
from nanogpt_bench.report.holm import holm
from nanogpt_bench.report.rows import Row, identity, references_by_label, row_key, seed_of
from nanogpt_bench.runs.load import Run

#: share of a run's steps within which metrics count as early
EARLY_SHARE = 0.1
#: a run is behind if its loss exceeds the reference's by this share of the reference's
BEHIND = 0.01
#: a metric that fewer runs have is not judged
FEWEST = 5
#: resamples of the bootstrap
RESAMPLES = 999
LEVEL = 0.05
#: the early loss, and that loss minus the reference's at the same step
LOSS_FIGURE = "training loss"
LOSS_GAP = "training loss minus the reference's"
TRIVIAL = (LOSS_FIGURE, LOSS_GAP)


class Group(Enum):
    """What runs that are not independent have in common."""

    SETTING = "setting"
    FORMAT = "format"


@dataclass(frozen=True)
class Point:
    """A run as the predictors see it.

    The bootstrap draws groups of runs, since those of one group are not independent. A
    group has the same name in every file.
    """

    #: metrics at one time
    figures: Mapping[str, float]
    #: final loss minus the reference's, inf if the run failed
    gap: float
    is_behind: bool
    group: str


@dataclass(frozen=True)
class Predictor:
    """How a metric predicts the final gap, over the runs that have it.

    `low` and `high` are the ends of the 95% interval of `spearman`, by bootstrap over
    groups of runs. `beyond` is the partial rank correlation of metric and gap given the
    loss, `p` its p-value, and `holm` that value adjusted for the number of metrics.
    """

    name: str
    runs: int
    #: rank correlation with the gap, and the loss's over the same runs
    spearman: float | None
    spearman_of_loss: float | None
    auc: float | None
    auc_of_loss: float | None
    low: float | None = None
    high: float | None = None
    beyond: float | None = None
    p: float | None = None
    holm: float | None = None


def early_points(
    rows: Sequence[Row],
    reference: Row | None,
    *,
    at: float = EARLY_SHARE,
    group: Group = Group.SETTING,
) -> dict[Hashable, Point]:
    """Return the runs that have figures and a finished reference of the same seed.

    They are by identity, since two files may hold one run. References are left out.

    Args:
        rows: the rows of a file.
        reference: the row that the others are compared with.
        at: the share of a run's steps within which its last record counts.
        group: what the runs of a group have in common.
    """
    references = references_by_label(rows, reference)
    points: dict[Hashable, Point] = {}
    for row in rows:
        reference_row = references.get(row.label)
        if reference_row is None or reference_row.label == row.label:
            continue
        for run in row.runs:
            reference_run = _finished_run(reference_row, seed_of(run))
            if reference_run is None:
                continue
            name = row_key(run) if group is Group.SETTING else row.format
            point = _point(run, reference_run, at, name)
            if point is not None:
                points[identity(run)] = point
    return points


def _finished_run(row: Row, seed: Hashable) -> Run | None:
    for run in row.runs:
        if seed_of(run) == seed and run.status == "finished":
            return run
    return None


def _point(run: Run, reference: Run, share: float, group: str) -> Point | None:
    figures = _figures_at(run, share)
    reference_loss = reference.at_end("final_val_loss")
    if not figures or reference_loss is None or run.status not in ("finished", "failed"):
        return None
    final_loss = run.at_end("final_val_loss")
    has_loss = final_loss is not None and run.status != "failed"
    gap = final_loss - reference_loss if has_loss else math.inf
    early_loss = _training_loss(figures)
    early_reference_loss = _training_loss(_figures_at(reference, share))
    if early_loss is not None and math.isfinite(early_loss):
        figures[LOSS_FIGURE] = early_loss
        if early_reference_loss is not None and math.isfinite(early_reference_loss):
            figures[LOSS_GAP] = early_loss - early_reference_loss
    return Point(figures, gap, gap > BEHIND * reference_loss, group)


def _figures_at(run: Run, share: float) -> dict[str, float]:
    """Return the figures last recorded within a share of the run's steps; {} without any."""
    limit = share * (run.number("steps_planned") or 0)
    steps = [step for step in run.looks if step <= limit]
    return dict(run.looks[max(steps)]) if steps else {}


def _training_loss(figures: Mapping[str, float]) -> float | None:
    return figures.get(SMOOTHED_LOSS.name, figures.get(TRAIN_LOSS.name))


def rank_predictors(points: Sequence[Point]) -> list[Predictor]:
    """Return the predictors that enough runs have, the two trivial ones first.

    The others are sorted by what they tell beyond the loss, the strongest first.
    """
    names = dict.fromkeys(TRIVIAL)
    for point in points:
        names |= dict.fromkeys(point.figures)
    for name in (TRAIN_LOSS.name, SMOOTHED_LOSS.name):
        names.pop(name, None)
    judged = [_judge(name, points) for name in names]
    known = [one for one in judged if one.runs >= FEWEST and one.spearman is not None]
    trivial = [one for one in known if one.name in TRIVIAL]
    metrics = _with_holm([one for one in known if one.name not in TRIVIAL])
    return [*trivial, *sorted(metrics, key=lambda predictor: -abs(predictor.beyond or 0.0))]


def _judge(name: str, points: Sequence[Point]) -> Predictor:
    """Judge one metric and the loss, over the runs that have both."""
    runs = [point for point in points if name in point.figures and LOSS_FIGURE in point.figures]
    values = [point.figures[name] for point in runs]
    losses = [point.figures[LOSS_FIGURE] for point in runs]
    gaps = [point.gap for point in runs]
    is_behind = [point.is_behind for point in runs]
    predictor = Predictor(
        name,
        len(runs),
        spearman=_spearman(values, gaps),
        spearman_of_loss=_spearman(losses, gaps),
        auc=_auc(values, is_behind),
        auc_of_loss=_auc(losses, is_behind),
    )
    if predictor.spearman is None:
        return predictor
    predictor = replace(predictor, **_bootstrap_interval(runs, values, gaps))
    if len(runs) < FEWEST or predictor.spearman_of_loss is None or name in TRIVIAL:
        return predictor
    return replace(predictor, **_partial_correlation(values, gaps, losses))


def _spearman(values: Sequence[float], gaps: Sequence[float]) -> float | None:
    """Return the rank correlation; None if either is constant."""
    if min(len(set(values)), len(set(gaps))) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(values, gaps).statistic)


def _partial_correlation(
    values: Sequence[float], gaps: Sequence[float], losses: Sequence[float]
) -> dict[str, float]:
    """Return the correlation of the ranks of values and gaps that the loss leaves over."""
    from scipy.stats import linregress, pearsonr, rankdata

    ranks_of_loss = rankdata(losses)
    residuals = []
    for ranks in (rankdata(values), rankdata(gaps)):
        line = linregress(ranks_of_loss, ranks)
        residuals.append(ranks - line.intercept - line.slope * ranks_of_loss)
    # Nothing may be left that the loss does not explain.
    if any(max(abs(residual)) < 1e-9 * len(values) for residual in residuals):
        return {"beyond": 0.0, "p": 1.0}
    test = pearsonr(*residuals)
    return {"beyond": float(test.statistic), "p": float(test.pvalue)}


def _bootstrap_interval(
    runs: Sequence[Point], values: Sequence[float], gaps: Sequence[float]
) -> dict[str, Any]:
    """Return the 95% interval of the rank correlation, by bootstrap over groups of runs.

    Returns {} for too few groups.
    """
    from scipy.stats import bootstrap

    pairs_by_group: dict[str, list[tuple[float, float]]] = {}
    for run, value, gap in zip(runs, values, gaps, strict=True):
        pairs_by_group.setdefault(run.group, []).append((value, gap))
    if len(pairs_by_group) < FEWEST:
        return {}
    groups = list(pairs_by_group.values())

    def correlation(sample: Sequence[float]) -> float:
        pairs: list[tuple[float, float]] = []
        for index in sample:
            pairs += groups[int(index)]
        return _correlation_of_ranks(pairs)

    interval = bootstrap(
        (list(range(len(groups))),),
        correlation,
        n_resamples=RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=0,
    ).confidence_interval
    return {"low": float(interval.low), "high": float(interval.high)}


def _correlation_of_ranks(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation; 0 if either side is constant, which has no order."""
    from scipy.stats import rankdata

    middle = (len(pairs) + 1) / 2
    x = rankdata([pair[0] for pair in pairs]) - middle
    y = rankdata([pair[1] for pair in pairs]) - middle
    power = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / power if power else 0.0


def _auc(values: Sequence[float], is_behind: Sequence[bool]) -> float | None:
    """Return the probability that a run behind has the larger value.

    Returns None if all or none are behind.
    """
    behind = [value for value, late in zip(values, is_behind, strict=True) if late]
    ahead = [value for value, late in zip(values, is_behind, strict=True) if not late]
    if not behind or not ahead:
        return None
    from scipy.stats import mannwhitneyu

    with warnings.catch_warnings():
        # scipy warns of constant values.
        warnings.simplefilter("ignore")
        statistic = float(mannwhitneyu(behind, ahead).statistic)
    return statistic / (len(behind) * len(ahead))


def _with_holm(predictors: Sequence[Predictor]) -> list[Predictor]:
    """Return predictors with their p-values adjusted together."""
    tested = [predictor.p for predictor in predictors if predictor.p is not None]
    adjusted = iter(holm(tested) if tested else [])
    result = []
    for predictor in predictors:
        if predictor.p is not None:
            predictor = replace(predictor, holm=next(adjusted))
        result.append(predictor)
    return result
