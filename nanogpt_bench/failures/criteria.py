"""When a series of figures has crossed its threshold for good, and how a class's outcome is put together."""

from __future__ import annotations

import statistics
from bisect import insort
from collections.abc import Mapping, Sequence

from nanogpt_bench.config.metrics import ABOVE
from nanogpt_bench.failures.evidence import Evidence, Series
from nanogpt_bench.failures.finding import CLEAR, FOUND, NOT_JUDGED, Criterion, Finding


def judge(
    series: Series, side: str, threshold: float, patience: int, *, cut_off: bool = False, lasting: bool = False
) -> Criterion:
    """Return whether, and from which step on, a series lay on the failing side `patience` looks in a row.

    A series with fewer looks must lie there throughout. `cut_off`: the run died, so that looks up to its last count
    however few they are. `lasting`: only looks that go on to the end count, a series that came back has not failed.
    """
    holds = [value >= threshold if side == ABOVE else value <= threshold for value in series.values]
    first = _first_run(holds, min(patience, len(holds)), cut_off, lasting)
    extreme = _extreme(series.values, side)
    return Criterion(
        metric=series.metric,
        side=side,
        threshold=threshold,
        step=None if first is None else series.steps[first],
        value=None if first is None else series.values[first],
        extreme=None if extreme is None else series.values[extreme],
        extreme_step=None if extreme is None else series.steps[extreme],
        looks=len(series),
    )


def _first_run(holds: Sequence[bool], needed: int, cut_off: bool, lasting: bool) -> int | None:
    """Index at which the first long enough run of true values begins."""
    begin = 0
    for index, held in enumerate([*holds, False]):
        if held:
            continue
        at_end = index == len(holds)
        long_enough = index - begin >= (1 if at_end and cut_off else max(needed, 1))
        if long_enough and (at_end or not lasting):
            return begin
        begin = index + 1
    return None


def _extreme(values: Sequence[float], side: str) -> int | None:
    pick = max if side == ABOVE else min
    return pick(range(len(values)), key=values.__getitem__, default=None)


def over_median(series: Series) -> Series:
    """Every value but the first over the median of all before it; where that is 0 there is none."""
    seen: list[float] = []
    kept: list[tuple[int, float]] = []
    for step, value in zip(series.steps, series.values, strict=True):
        median = statistics.median(seen) if seen else 0.0
        if median > 0:
            kept.append((step, value / median))
        insort(seen, value)
    return Series(f"{series.metric} over its median so far", tuple(s for s, _ in kept), tuple(v for _, v in kept))


def worst(evidence: Evidence, metric: str) -> Series:
    """The largest value at every look, over the whole and all layers.

    Of layers that are looked at in turn, the latest figure of as many looks back as a turn takes counts.
    """
    names = (metric, *(f"{metric}/{layer}" for layer in evidence.layers(metric)))
    found = [dict(zip(series.steps, series.values, strict=True)) for series in map(evidence.series, names)]
    steps = sorted(set().union(*found))
    turns = evidence.setting("monitor.turns")
    back = turns if isinstance(turns, int) else 1
    peaks = [_largest(found, steps[max(index + 1 - back, 0) : index + 1]) for index in range(len(steps))]
    return Series(metric, tuple(steps), tuple(peaks))


def _largest(found: Sequence[Mapping[int, float]], looks: Sequence[int]) -> float:
    """The largest of the latest values within some looks, the last of which has one."""
    latest = (next((values[step] for step in reversed(looks) if step in values), None) for values in found)
    return max(value for value in latest if value is not None)


def clear(kind: str, message: str, criteria: Sequence[Criterion] = (), **evidence: float | int | str | None) -> Finding:
    """A class that the records rule out."""
    return Finding(kind, CLEAR, None, message, evidence, tuple(criteria))


def found(
    kind: str, step: int, message: str, criteria: Sequence[Criterion], **evidence: float | int | str | None
) -> Finding:
    """A class whose criterion held from `step` on."""
    return Finding(kind, FOUND, step, message, evidence, tuple(criteria))


def not_judged(kind: str, *missing: str, why: str | None = None) -> Finding:
    """A class that the records say nothing about."""
    message = why or f"not judged: the run did not record {' or '.join(missing)}"
    return Finding(kind, NOT_JUDGED, None, message, missing=missing)


def earliest(criteria: Sequence[Criterion]) -> Criterion | None:
    """The criterion that held first; None when none did."""
    fired = [criterion for criterion in criteria if criterion.step is not None]
    return min(fired, key=lambda criterion: criterion.step or 0, default=None)
