"""Predictors of the final gap among figures monitored early: rank correlation, AUC, and
gain over the loss.
"""

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanogpt_bench.config.metrics import SMOOTHED_LOSS, TRAIN_LOSS
from nanogpt_bench.report.holm import holm
from nanogpt_bench.report.rows import Row, identity, references_of, seed_of, setting_of
from nanogpt_bench.runs.load import Run

#: share of a run's steps within which metrics count as early
TENTH = 0.1
#: a run is behind if its loss exceeds the reference's by this share of the reference's
BEHIND = 0.01
#: a metric that fewer runs have is not judged
FEWEST = 5
#: resamples of the bootstrap
RESAMPLES = 999
LEVEL = 0.05
#: the trivial predictors: the early loss, and that loss minus the reference's at the
#: same step
LOSS, LOSS_GAP = TRIVIAL = ("training loss", "training loss minus the reference's")


@dataclass(frozen=True)
class Point:
    """A run: its metrics at one time, its final gap (inf if it failed), whether it is
    behind, and its group `of`.

    Runs of one group (one setting, or one format) are not independent. Its key is the
    same in every file.
    """

    figures: Mapping[str, float]
    gap: float
    behind: bool
    of: str = ""


@dataclass(frozen=True)
class Predictor:
    """A metric's rank correlation and AUC with the final gap, over the runs that have
    it, and the loss's on those runs.

    `low` and `high` are the ends of the 95% interval of `spearman`, by bootstrap over
    rows or formats. `beyond` is the partial rank correlation of figure and gap given
    the loss, `p` its p-value, `holm` the same adjusted for the number of figures.
    """

    name: str
    runs: int
    spearman: float | None
    of_loss: float | None
    auc: float | None
    auc_of_loss: float | None
    low: float | None = None
    high: float | None = None
    beyond: float | None = None
    p: float | None = None
    holm: float | None = None


def early_points(
    rows: Sequence[Row], reference: Row | None, *, at: float = TENTH, over: str = "row"
) -> dict[Hashable, Point]:
    """Return runs with figures and a finished reference of the same seed, by identity,
    without the references.

    The figures are the last record within the share `at` of a run's steps. Two files
    may hold one run, so the identity is the key.
    """
    against = references_of(rows, reference)
    found: dict[Hashable, Point] = {}
    for row in rows:
        other = against.get(row.label)
        if other is None or other.label == row.label:
            continue
        for run in row.runs:
            twin = next(
                (
                    one
                    for one in other.runs
                    if seed_of(one) == seed_of(run) and one.status == "finished"
                ),
                None,
            )
            if twin is not None and (point := _point(run, twin, at)) is not None:
                found[identity(run)] = replace(
                    point, of=setting_of(run) if over == "row" else row.format
                )
    return found


def _point(run: Run, twin: Run, at: float) -> Point | None:
    own, its = _figures(run, at), _figures(twin, at)
    loss, base = run.at_end("final_val_loss"), twin.at_end("final_val_loss")
    if not own or base is None or run.status not in ("finished", "failed"):
        return None
    gap = math.inf if loss is None or run.status == "failed" else loss - base
    now, then = _loss(own), _loss(its)
    early = {
        LOSS: now,
        LOSS_GAP: None if then is None else (math.nan if now is None else now) - then,
    }
    known = {
        name: value for name, value in early.items() if value is not None and math.isfinite(value)
    }
    return Point(own | known, gap, gap > BEHIND * base)


def _figures(run: Run, at: float) -> dict[str, float]:
    """Return the figures last recorded within a share of the run's steps; {} without
    any.
    """
    limit = at * (run.number("steps_planned") or 0)
    step = max((step for step in run.looks if step <= limit), default=None)
    return {} if step is None else dict(run.looks[step])


def _loss(figures: Mapping[str, float]) -> float | None:
    return figures.get(SMOOTHED_LOSS.name, figures.get(TRAIN_LOSS.name))


def rank_predictors(found: Sequence[Point]) -> list[Predictor]:
    """Return the metrics that enough runs have: first the loss and its gap, then the
    others, best first.
    """
    seen = dict.fromkeys(name for point in found for name in point.figures)
    names = [name for name in seen if name not in (*TRIVIAL, TRAIN_LOSS.name, SMOOTHED_LOSS.name)]
    told = [_predictor(name, found) for name in (*TRIVIAL, *names)]
    kept = [each for each in told if each.runs >= FEWEST and each.spearman is not None]
    trivial = [each for each in kept if each.name in TRIVIAL]
    rest = _adjusted([each for each in kept if each not in trivial])
    return [*trivial, *sorted(rest, key=lambda each: -abs(each.beyond or 0.0))]


def _predictor(name: str, found: Sequence[Point]) -> Predictor:
    """Judge one metric and the loss, over the runs that have both."""
    from scipy.stats import linregress, pearsonr, rankdata

    runs = [point for point in found if name in point.figures and LOSS in point.figures]
    figure, loss = ([point.figures[key] for point in runs] for key in (name, LOSS))
    gaps, behind = [point.gap for point in runs], [point.behind for point in runs]
    told = Predictor(
        name,
        len(runs),
        *(_spearman(x, gaps) for x in (figure, loss)),
        *(_auc(x, behind) for x in (figure, loss)),
    )
    if len(runs) < FEWEST or told.spearman is None or told.of_loss is None or name in TRIVIAL:
        return replace(told, **_interval(runs, figure, gaps)) if told.spearman is not None else told
    ranks, of_gap, of_loss = (rankdata(values) for values in (figure, gaps, loss))
    left = []
    for each in (ranks, of_gap):
        line = linregress(of_loss, each)
        left.append(each - line.intercept - line.slope * of_loss)
    told = replace(told, **_interval(runs, figure, gaps))
    if any(max(abs(values)) < 1e-9 * len(runs) for values in left):
        return replace(told, beyond=0.0, p=1.0)  # nothing is left that the loss doesn't explain
    test = pearsonr(*left)
    return replace(told, beyond=float(test.statistic), p=float(test.pvalue))


def _spearman(values: Sequence[float], gaps: Sequence[float]) -> float | None:
    """Return the rank correlation; None if either is constant."""
    if min(len(set(values)), len(set(gaps))) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(values, gaps).statistic)


def _interval(
    runs: Sequence[Point], values: Sequence[float], gaps: Sequence[float]
) -> dict[str, Any]:
    """Return the 95% interval of the rank correlation, by bootstrap over groups of
    runs; {} if these are too few.
    """
    from scipy.stats import bootstrap, rankdata

    groups: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        groups.setdefault(run.of, []).append(place)
    if len(groups) < FEWEST:
        return {}
    places, pairs = list(groups.values()), list(zip(values, gaps, strict=True))

    def correlation(drawn: Sequence[float]) -> float:
        x, y = zip(*(pairs[place] for group in drawn for place in places[int(group)]), strict=True)
        ranks = [each - (len(x) + 1) / 2 for each in (rankdata(x), rankdata(y))]
        power = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
        return float((ranks[0] * ranks[1]).sum()) / power if power else 0.0  # constant: no order

    found = bootstrap(
        (list(range(len(groups))),),
        correlation,
        n_resamples=RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=0,
    ).confidence_interval
    return {"low": float(found.low), "high": float(found.high)}


def _auc(values: Sequence[float], behind: Sequence[bool]) -> float | None:
    """Return the probability that a run behind has the larger value; None if all or
    none are behind.
    """
    late, others = (
        [v for v, b in zip(values, behind, strict=True) if b is wanted] for wanted in (True, False)
    )
    if not late or not others:
        return None
    from scipy.stats import mannwhitneyu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant values
        return float(mannwhitneyu(late, others).statistic) / (len(late) * len(others))


def _adjusted(found: Sequence[Predictor]) -> list[Predictor]:
    tested = [each.p for each in found if each.p is not None]
    if not tested:
        return list(found)
    left = iter(holm(tested))
    return [each if each.p is None else replace(each, holm=next(left)) for each in found]
