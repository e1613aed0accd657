"""Failures that the loss itself shows: not a number, a plateau, a divergence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nanogpt_bench.config.metrics import ABOVE, GRAD_HAS_NAN, GRAD_NORM, LOSS_IS_NAN, TRAIN_LOSS, VAL_LOSS
from nanogpt_bench.failures.criteria import clear, earliest, found, judge, not_judged
from nanogpt_bench.failures.evidence import Evidence, Series
from nanogpt_bench.failures.finding import Criterion, Facts, Finding
from nanogpt_bench.runs.curves import smooth

LOSS = TRAIN_LOSS.name
#: what was not a number: the metric that says so, or the figure that then is null
LOSSES = (LOSS_IS_NAN.name, LOSS, VAL_LOSS.name)
GRADIENTS = (GRAD_HAS_NAN.name, GRAD_NORM.name)
#: fewer steps tell nothing about a course
SHORTEST = 20


def nan(evidence: Evidence) -> Finding:
    """A loss or a gradient that is not finite."""
    if not evidence.records:
        return not_judged("nan", LOSS)
    criteria = [_not_finite(evidence, metrics) for metrics in (LOSSES, GRADIENTS)]
    first = earliest(criteria)
    if first is None or first.step is None:
        return clear("nan", "every loss and every gradient norm was finite", criteria)
    count = len(_bad_rows(evidence, LOSSES))
    what = "loss" if first.metric == LOSSES[0] else "gradient"
    message = f"the {what} was not finite at step {first.step}"
    return found("nan", first.step, message, criteria, first=what, steps_with_bad_loss=count)


def _not_finite(evidence: Evidence, metrics: Sequence[str]) -> Criterion:
    """The criterion over a series that is 1 at a step where one of the figures was not finite, 0 elsewhere."""
    bad = _bad_rows(evidence, metrics)
    rows = [(int(step or 0), float(row in bad)) for row, step in evidence.records.rows("step")]
    return judge(Series(metrics[0], tuple(step for step, _ in rows), tuple(flag for _, flag in rows)), ABOVE, 1.0, 1)


def _bad_rows(evidence: Evidence, metrics: Sequence[str]) -> set[int]:
    """The records whose flag (the first metric) is set, or in which a figure is null: not finite when written."""
    flag, *figures = metrics
    flagged = {row for row, value in evidence.records.rows(flag) if value == 1}
    return flagged | {row for name in figures for row, value in evidence.records.rows(name) if value is None}


@dataclass(frozen=True)
class Rest:
    """Where the training loss came to rest: `level` in nats, from `step` on, within `band`, after `fall` nats."""

    step: int
    level: float
    band: float
    fall: float
    #: mean of the last quarter
    end: float

    @property
    def stayed(self) -> bool:
        """Whether the loss has not risen again; the lowest of many means lies a band below their mean by chance."""
        return self.end <= self.level + 2 * self.band


def resting_level(evidence: Evidence) -> float | None:
    """The lowest mean of the training loss over a window; None for a run too short to tell."""
    rest = find_rest(evidence.series(LOSS), evidence.limits.smoothing, evidence.limits.plateau)
    return None if rest is None else rest.level


def find_rest(series: Series, window: int, share: float) -> Rest | None:
    """Find the first step whose windowed mean lies within a band of the lowest; None below SHORTEST steps.

    The band is `share` of the fall, or two standard errors of a windowed mean where those are more.
    """
    if len(series) < SHORTEST:
        return None
    width = max(window, len(series) // 40)
    means = _centred(series.values, width)
    level = min(means)
    fall = max(series.values[0] - level, 0.0)
    scatter = statistics.pstdev([v - m for v, m in zip(series.values[width:], means[width:], strict=True)] or [0.0])
    band = max(share * fall, 2 * scatter / width**0.5)
    first = next(index for index, mean in enumerate(means) if mean <= level + band)
    end = statistics.fmean(series.values[-max(len(series) // 4, 1) :])
    return Rest(series.steps[first], level, band, fall, end)


def _centred(values: Sequence[float], width: int) -> list[float]:
    """Means over `width` steps around each; fewer at the ends."""
    half, sums = width // 2, [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]


def plateau(evidence: Evidence) -> Finding:
    """A training loss that ceased to fall early in the run and stayed where it was."""
    series, limits = evidence.series(LOSS), evidence.limits
    rest = find_rest(series, limits.smoothing, limits.plateau)
    if rest is None:
        return _too_short("plateau", series, SHORTEST)
    # A run that the loop ended on its plateau would have stayed there: however late, it is one.
    share = limits.plateau_share if evidence.ended_by("plateau") is None else 1.0
    latest = share * series.steps[-1]
    criterion = _rest_criterion(rest, latest, len(series))
    facts: Facts = {
        "level": rest.level,
        "band": rest.band,
        "fall": rest.fall,
        "steps": series.steps[-1],
        "latest": latest,
    }
    said = (
        f"the training loss came within {rest.band:.3f} nats of its lowest level {rest.level:.3f} at step {rest.step}"
    )
    if not criterion.fired:
        after = "it fell until then" if rest.step > latest else "it rose again after that"
        return clear("plateau", f"{said} of {series.steps[-1]}: {after}", [criterion], **facts)
    return found("plateau", rest.step, f"{said} of {series.steps[-1]} and stayed there", [criterion], **facts)


def _rest_criterion(rest: Rest, latest: float, looks: int) -> Criterion:
    fired = rest.stayed and rest.step <= latest
    step = rest.step if fired else None
    return Criterion("step of the plateau", "below", latest, step, step, rest.step, rest.step, looks)


def _too_short(kind: str, series: Series, needed: int) -> Finding:
    if not series:
        return not_judged(kind, LOSS)
    return not_judged(kind, why=f"not judged: {len(series)} steps are too few, {needed} would tell")


def divergence(evidence: Evidence) -> Finding:
    """A training loss that rose above where it began, or above its lowest and never came back."""
    series = evidence.series(LOSS)
    if len(series) < 2:
        return _too_short("divergence", series, 2)
    criteria = _rises(series, evidence)
    alert = evidence.first_alert("early_divergence")
    alert_step = None if alert is None else alert.step
    starts = [criterion.step for criterion in criteria] + [alert_step, evidence.ended_by("divergence")]
    step = min((start for start in starts if start is not None), default=None)
    if step is None:
        return clear("divergence", "the training loss did not rise for good", criteria)
    highest = max(series.values)
    facts: Facts = {
        "first_loss": series.values[0],
        "lowest": min(series.values),
        "highest": highest,
        "last": series.values[-1],
    }
    message = f"the training loss rose to {highest:.3f} (first {facts['first_loss']:.3f}, last {facts['last']:.3f})"
    return found("divergence", step, message, criteria, **facts, alert_step=alert_step)


def _rises(series: Series, evidence: Evidence) -> list[Criterion]:
    """The two rises of the smoothed loss: above the first loss, and above the lowest so far up to the end."""
    limits = evidence.limits
    smoothed = [value for value in smooth(series.values, limits.smoothing) if value is not None]
    above_first = [value - series.values[0] for value in smoothed]
    above_lowest = [value - low for value, low in zip(smoothed, accumulate(smoothed, min), strict=True)]
    return [
        judge(
            Series(f"{LOSS} over its {name}", series.steps, tuple(rise)),
            ABOVE,
            limits.divergence,
            limits.patience,
            cut_off=evidence.died,
            lasting=lasting,
        )
        for name, rise, lasting in (("first", above_first, False), ("lowest", above_lowest, True))
    ]
