"""The judge of a run: its records as series, and which criteria of the table `CLASSES`
hold in them, and since when.
"""

from __future__ import annotations

import math
import statistics
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import ABOVE
from nanogpt_bench.config.rules import loses_steps
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.failures.table import (
    ATTENTION,
    CLASSES,
    KINDS,
    OVER_FIRST,
    OVER_LOWEST,
    OVER_MEDIAN,
    REST,
    Limit,
)
from nanogpt_bench.monitors.attention import ENTROPY
from nanogpt_bench.monitors.ranges import CLAMPED, OVERFLOW
from nanogpt_bench.runs.environment import at
from nanogpt_bench.runs.load import Run, load_run, smooth

LOSS: Final = metrics.TRAIN_LOSS.name
#: steps over which a loss is smoothed; steps below which no plateau is judged; its
#: band, as a share of the loss's fall
SMOOTHING, SHORTEST, FLAT = 10, 20, 0.02


@dataclass(frozen=True)
class Series:
    """The values of one metric, and the steps at which they were recorded."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, readings: Sequence[tuple[int, float]]) -> Series:
        """Return the series of pairs of a step and a value."""
        return cls(tuple(step for step, _ in readings), tuple(value for _, value in readings))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


class Evidence:
    """One run's records and settings."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def of(self, row: Limit) -> Series:
        """The series that a criterion judges; empty where too little of it was
        recorded.
        """
        if row.figure in DERIVED:
            return DERIVED[row.figure](self)
        series = worst(self, row.figure) if row.layers else self.series(row.figure)
        return Series() if row.growth and len(series) < 2 else series

    def series(self, metric: str) -> Series:
        """The finite values of a metric."""
        known = [
            (int(at), value)
            for at, value in zip(*self.run.curve(metric), strict=True)
            if value is not None
        ]
        return Series.of(known)

    def layers(self, metric: str) -> list[str]:
        """The layers for which a metric was recorded, as `metric/LAYER`."""
        return [
            key[len(metric) + 1 :] for key in self.run.metrics.names if key.startswith(f"{metric}/")
        ]

    def worst_layer(self, metric: str, *, lowest: bool = False) -> tuple[str | None, float | None]:
        """The layer whose mean over the run is highest (lowest), and that mean; (None,
        None) without layers.
        """
        means = {layer: self.series(f"{metric}/{layer}").mean for layer in self.layers(metric)}
        known = {layer: mean for layer, mean in means.items() if mean is not None}
        if not known:
            return None, None
        layer = min(known, key=known.__getitem__) if lowest else max(known, key=known.__getitem__)
        return layer, known[layer]

    def setting(self, key: str) -> Any:
        """The run's setting at a dotted key; None where its config has none."""
        return at(self.run.config, key)

    @property
    def died(self) -> bool:
        """True if the run failed, so that a series may end in the middle of a failure."""
        return self.run.status == "failed"

    def excuse(self, kind: str) -> str | None:
        """The reason why this run can't have a class of failure; None where it can, or
        the config does not say.
        """
        if kind == "stall":
            storage, writeback = self.setting("model.storage"), self.setting("optimizer.writeback")
            if storage is not None and storage not in ROUNDED:
                return "no step is rounded when it is written back"
            if loses_steps(storage, writeback) is False:
                return "the write-back keeps what rounding loses, or returns it on average"
        if kind == "overflow":
            peers = self.setting("model.torchao_float8"), self.setting("model.peer")
            floats = self.setting("model.formats") == {} and all(peer is None for peer in peers)
            watched = (*OVERFLOW.each, *CLAMPED.each)
            if floats and not any(worst(self, share.name) for share in watched):
                return "nothing is quantised"
        return None


def read(run: Run | Path) -> Evidence:
    """Return a run's evidence."""
    return Evidence(load_run(run) if isinstance(run, Path) else run)


def worst(evidence: Evidence, metric: str) -> Series:
    """The largest value of a metric, over the layers, at every measurement; with turns,
    each layer's latest counts.
    """
    names = (metric, *(f"{metric}/{layer}" for layer in evidence.layers(metric)))
    found = [
        dict(zip(series.steps, series.values, strict=True))
        for series in map(evidence.series, names)
    ]
    steps = sorted(set().union(*found))
    turns = evidence.setting("monitor.turns")
    back = turns if isinstance(turns, int) else 1
    peaks = []
    for index in range(len(steps)):
        latest_steps = steps[max(index + 1 - back, 0) : index + 1]
        latest = (
            next((values[step] for step in reversed(latest_steps) if step in values), None)
            for values in found
        )
        peaks.append(max(value for value in latest if value is not None))
    return Series(tuple(steps), tuple(peaks))


def _over_median(evidence: Evidence) -> Series:
    """Every gradient norm but the first, over the median of all before it; left out
    where the median is 0.
    """
    norms, seen = evidence.series(metrics.GRAD_NORM.name), list[float]()
    ratios: list[tuple[int, float]] = []
    for step, value in zip(norms.steps, norms.values, strict=True):
        half = len(seen) // 2
        median = (seen[half] + seen[~half]) / 2 if seen else 0.0  # `seen` is sorted
        if median > 0:
            ratios.append((step, value / median))
        insort(seen, value)
    return Series.of(ratios)


def _of_uniform(evidence: Evidence) -> Series:
    """Attention's entropy, the mean over the heads, over the entropy of uniform
    attention.
    """
    series, block = evidence.series(ENTROPY.name), evidence.setting("model.block_size")
    if not isinstance(block, int) or block < 2:
        return Series()
    uniform = uniform_entropy(block)
    return Series(series.steps, tuple(value / uniform for value in series.values))


def uniform_entropy(block: int) -> float:
    """Return the mean entropy (nats) of uniform causal attention: the mean of ln i for
    i up to `block`.

    >>> round(uniform_entropy(2), 4)
    0.3466
    """
    return math.lgamma(block + 1) / block


def _not_finite(flag: str, *figures: str) -> Callable[[Evidence], Series]:
    """A series: 1 where a flag is set, or one of `figures` is null because it was not
    finite; 0 elsewhere.
    """

    def flags(evidence: Evidence) -> Series:
        records = evidence.run.metrics
        bad = {row for row, value in records.rows(flag) if value == 1}
        bad |= {row for name in figures for row, value in records.rows(name) if value is None}
        return Series.of(
            [(int(step or 0), float(row in bad)) for row, step in records.rows("step")]
        )

    return flags


def _rise(
    over: Callable[[Sequence[float], float], Sequence[float]],
) -> Callable[[Evidence], Series]:
    """The smoothed training loss minus a base that `over` returns for it and the first
    loss.
    """

    def rises(evidence: Evidence) -> Series:
        series = evidence.series(LOSS)
        if len(series) < 2:
            return Series()
        smoothed = [value for value in smooth(series.values, SMOOTHING) if value is not None]
        base = over(smoothed, series.values[0])
        return Series(
            series.steps, tuple(value - low for value, low in zip(smoothed, base, strict=True))
        )

    return rises


def _excess(evidence: Evidence) -> Series:
    """The excess of the training loss at validations; null means infinite, as over a
    reference of 0.
    """
    known = [
        (int(at), math.inf if value is None else value)
        for at, value in zip(*evidence.run.curve(_EXCESS), strict=True)
    ]
    return Series.of(known)


_EXCESS = metrics.EXCESS.name


def _rest(evidence: Evidence) -> Series:
    """One value, at the step where the training loss came to rest: the share of the run
    until then, 1 if it rose again.

    It is at rest once its windowed mean is within a band above the lowest such mean.
    The band is a share (`FLAT`) of the loss's whole fall, or two standard errors of a
    windowed mean if that is more.
    """
    losses, steps = evidence.series(LOSS).values, evidence.series(LOSS).steps
    if len(losses) < SHORTEST:
        return Series()
    width = max(SMOOTHING, len(losses) // 40)
    means = _centred(losses, width)
    level = min(means)
    scatter = statistics.pstdev(
        [v - m for v, m in zip(losses[width:], means[width:], strict=True)] or [0.0]
    )
    band = max(FLAT * max(losses[0] - level, 0.0), 2 * scatter / width**0.5)
    first = next(index for index, mean in enumerate(means) if mean <= level + band)
    # By chance alone the lowest of many means is about a band below their mean: so two
    # bands are allowed.
    stayed = statistics.fmean(losses[-max(len(losses) // 4, 1) :]) <= level + 2 * band
    # A run that `train.stop_on` ended on a plateau would have stayed there: it counts,
    # however late it came.
    share = (
        0.0
        if at(evidence.run.summary, "stop.kind") == "plateau"
        else steps[first] / max(steps[-1], 1)
    )
    return Series((steps[first],), (share if stayed else 1.0,))


def _centred(values: Sequence[float], width: int) -> list[float]:
    """Means over `width` values around each; fewer at the ends."""
    half, sums = width // 2, [0.0, *accumulate(values)]
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]


#: series that are computed from others, by the name that the table has for them
DERIVED: Final[Mapping[str, Callable[[Evidence], Series]]] = {
    OVER_MEDIAN: _over_median,
    ATTENTION: _of_uniform,
    REST: _rest,
    OVER_FIRST: _rise(lambda losses, first: [first] * len(losses)),
    OVER_LOWEST: _rise(lambda losses, first: list(accumulate(losses, min))),
    _EXCESS: _excess,
    metrics.LOSS_IS_NAN.name: _not_finite(metrics.LOSS_IS_NAN.name, LOSS, metrics.VAL_LOSS.name),
    metrics.GRAD_HAS_NAN.name: _not_finite(metrics.GRAD_HAS_NAN.name, metrics.GRAD_NORM.name),
}
#: metrics that those are computed from, beside the metrics that the table names
SOURCES: Final = ("step", LOSS, metrics.VAL_LOSS.name, metrics.GRAD_NORM.name, ENTROPY.name)


FOUND, CLEAR, NOT_JUDGED = "found", "clear", "not judged"
#: values by name, ready for JSON
Facts = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Criterion:
    """A criterion of the table, judged on a series."""

    row: Limit
    #: the criterion's bound, or more where it grows with the first value
    bound: float
    #: step at which it began to hold; None: it never did
    step: int | None
    #: the value at that step, the first value, the one furthest towards the failure and
    #: its step, and the mean
    value: float | None
    first: float
    extreme: float
    extreme_step: int
    mean: float | None
    looks: int

    def describe(self) -> str:
        """Return in words the value at which it began to hold, and the bound."""
        return f"{self.row.figure} {self.value:.4g} {'>=' if self.row.side == ABOVE else '<='} {self.bound:.4g}"


@dataclass(frozen=True)
class Finding:
    """The judgement of a run's records on one class of failure."""

    kind: str
    #: "found", "clear", or "not judged" where too little was recorded
    state: str
    #: first step at which one of the class's criteria held
    step: int | None
    #: one sentence of facts
    message: str
    evidence: Facts = field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    #: metrics that would have been needed and were not recorded
    missing: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return self.state == FOUND

    @property
    def first_criterion(self) -> Criterion | None:
        """The criterion that began to hold first; None where none did."""
        return _first_to_hold(self.criteria)


@dataclass(frozen=True)
class Event:
    """One line of a run's timeline: a criterion began to hold, the first alert of a
    kind, or the end.
    """

    step: int
    #: class of failure, kind of alert, or status of the run
    kind: str
    #: "criterion", "alert" or "end"
    source: str
    text: str


def holds(row: Limit, series: Series, *, died: bool = False, running: bool = False) -> Criterion:
    """Return whether, and since when, a criterion of the table holds in a series of at
    least one value.

    A series shorter than the criterion's patience has to be beyond its bound
    throughout; in a run that is still `running` it does not hold.
    """
    values = series.values
    first = values[0]
    beyond = [row.beyond(value, first) for value in values]
    needed = row.patience if row.filled or running else min(row.patience, len(values))
    at = _first_run(beyond, needed, broken_off=died and row.broken_off, lasting=row.lasting)
    if at is not None and row.filled:
        at += row.patience - 1
    furthest = (max if row.side == ABOVE else min)(range(len(values)), key=values.__getitem__)
    return Criterion(
        row=row,
        bound=row.limit(first),
        step=None if at is None else series.steps[at],
        value=None if at is None else values[at],
        first=first,
        extreme=values[furthest],
        extreme_step=series.steps[furthest],
        mean=series.mean,
        looks=len(values),
    )


def holds_now(row: Limit, values: Sequence[float]) -> bool:
    """Return whether the last values, as many as the criterion's patience, are beyond
    its bound.
    """
    return len(values) >= row.patience and all(map(row.beyond, values[-row.patience :]))


def _first_run(
    beyond: Sequence[bool], needed: int, *, broken_off: bool, lasting: bool
) -> int | None:
    """The index at which the first long enough run of true values begins; None without
    one.
    """
    begin = 0
    for index, held in enumerate([*beyond, False]):
        if held:
            continue
        at_end = index == len(beyond)
        if index - begin >= (1 if at_end and broken_off else needed) and (at_end or not lasting):
            return begin
        begin = index + 1
    return None


def _first_to_hold(criteria: Iterable[Criterion]) -> Criterion | None:
    first = None
    for criterion in criteria:
        if criterion.step is None:
            continue
        if first is None or first.step is None or criterion.step < first.step:
            first = criterion
    return first


def judge(evidence: Evidence, *, running: bool = False) -> tuple[Finding, ...]:
    """Return a finding for every class of the table, from the records so far."""
    return tuple(_finding(evidence, kind, running) for kind in KINDS)


def _finding(evidence: Evidence, kind: str, running: bool) -> Finding:
    if (excuse := evidence.excuse(kind)) is not None:
        return Finding(kind, CLEAR, None, excuse)
    rows = [row for row in CLASSES if row.kind == kind]
    series = [(row, values) for row in rows if (values := evidence.of(row))]
    if not series:
        missing = tuple(row.figure for row in rows)
        return Finding(
            kind,
            NOT_JUDGED,
            None,
            f"too little was recorded of {' or '.join(missing)}",
            missing=missing,
        )
    criteria = tuple(
        holds(row, values, died=evidence.died, running=running) for row, values in series
    )
    held = [criterion for criterion in criteria if criterion.step is not None]
    if not held:
        return Finding(kind, CLEAR, None, "no criterion held", criteria=criteria)
    first = min(held, key=lambda criterion: criterion.step or 0)
    layer, of_layer = evidence.worst_layer(first.row.figure, lowest=first.row.side != ABOVE)
    message = first.row.says.format(**vars(first)) + (f", most of all in {layer}" if layer else "")
    facts: Facts = {
        "metric": first.row.figure,
        "threshold": first.bound,
        "value": first.value,
        "first": first.first,
    }
    facts |= {
        "extreme": first.extreme,
        "extreme_step": first.extreme_step,
        "mean": first.mean,
        "looks": first.looks,
    }
    facts |= {"worst_layer": layer, "worst_value": of_layer}
    return Finding(
        kind, FOUND, first.step, f"{message}; from step {first.step} on", facts, criteria
    )


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run: a finding for every class of failure, and the order of
    events.
    """

    findings: tuple[Finding, ...]
    timeline: tuple[Event, ...]

    @property
    def found(self) -> tuple[Finding, ...]:
        """The classes that were found, in the order in which they began."""
        return tuple(
            sorted(
                (finding for finding in self.findings if finding.found), key=lambda f: f.step or 0
            )
        )


def classify(run: Run | Path) -> list[Finding]:
    """Return a finding for every class of failure, from a run or its folder, in the
    order of `KINDS`.

    A class whose metrics were not recorded is "not judged", and `missing` names them.
    """
    return list(judge(read(run)))


def diagnose(run: Run | Path) -> Diagnosis:
    """Return the findings of `classify`, and the timeline."""
    evidence = read(run)
    found = judge(evidence)
    return Diagnosis(found, _timeline(evidence.run, found))


def failures_of(run: Run | Path) -> list[dict[str, Any]]:
    """Return the list `failures` of summary.json: the classes found, in the order in
    which they began.
    """
    found = diagnose(run).found
    return [
        {"kind": f.kind, "step": f.step, "evidence": {"message": f.message, **f.evidence}}
        for f in found
    ]


def _timeline(run: Run, judged: Sequence[Finding]) -> tuple[Event, ...]:
    """The first step of every criterion that held, of every kind of alert, and the end,
    in the order of steps.
    """
    held = [(finding.kind, criterion) for finding in judged for criterion in finding.criteria]
    events = [
        Event(c.step, kind, "criterion", c.describe()) for kind, c in held if c.step is not None
    ]
    firsts = {alert.kind: alert for alert in reversed(run.alerts)}
    events += [
        Event(alert.step, alert.kind, "alert", alert.message or alert.kind)
        for alert in firsts.values()
    ]
    if run.last_step is not None:
        text = str((run.failure or {}).get("message") or f"the run ended: {run.status}")
        events.append(Event(run.last_step, run.status, "end", text))
    return tuple(sorted(events, key=lambda event: (event.step, event.source == "end")))
