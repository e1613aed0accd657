"""The judge of a run: which criteria of the table `CLASSES` hold in its records.

`RunEvidence` turns the records into series: a recorded metric, the worst layer of one, or
a series computed from others (`DERIVED`). `judge_criterion` judges one criterion on one series:
it begins to hold at the first of enough values in a row beyond its bound. `judge_run` makes
a `Finding` for every class of failure, found where one of its criteria holds.
`diagnose` adds the order of events.
"""

from __future__ import annotations

import math
import statistics
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

from nanogpt_bench.config import metrics
from nanogpt_bench.config.endings import FailureClass, RunStatus, StopKind
from nanogpt_bench.config.metrics import ABOVE
from nanogpt_bench.config.rules import loses_steps
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.failures.table import (
    ATTENTION_ENTROPY,
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
#: steps over which a loss is smoothed
SMOOTHED_STEPS = 10
#: steps below which no plateau is judged: in fewer, half of the run is a single window
SHORTEST_PLATEAU_RUN = 3 * SMOOTHED_STEPS
#: the band of a plateau, as a share of the loss's fall
FLAT = 0.02
_EXCESS = metrics.EXCESS.name


class Reading(NamedTuple):
    """A value, and the step at which it was recorded."""

    step: int
    value: float


class LayerMean(NamedTuple):
    """The mean of a layer's metric over a run."""

    layer: str
    mean: float


@dataclass(frozen=True)
class Series:
    """The values of one metric, and the steps at which they were recorded."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def from_readings(cls, readings: Sequence[Reading]) -> Series:
        steps = tuple(reading.step for reading in readings)
        return cls(steps, tuple(reading.value for reading in readings))

    def readings(self) -> list[Reading]:
        return [Reading(*pair) for pair in zip(self.steps, self.values, strict=True)]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


class RunEvidence:
    """One run's records and settings."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def series_of(self, row: Limit) -> Series:
        """The series that a criterion judges.

        It is empty where too little of it was recorded.
        """
        if row.figure in DERIVED:
            return DERIVED[row.figure](self)
        series = worst(self, row.figure) if row.layers else self.series(row.figure)
        # A bound that grows with the first value needs a second one.
        return Series() if row.growth and len(series) < 2 else series

    def series(self, metric: str) -> Series:
        """The finite values of a metric."""
        readings = []
        for step, value in zip(*self.run.curve(metric), strict=True):
            if value is not None:
                readings.append(Reading(int(step), value))
        return Series.from_readings(readings)

    def layers(self, metric: str) -> list[str]:
        """The layers for which a metric was recorded, as `metric/LAYER`."""
        prefix = f"{metric}/"
        names = self.run.metrics.names
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def worst_layer(self, metric: str, *, lowest: bool = False) -> LayerMean | None:
        """The layer whose mean over the run is highest, or lowest.

        It is None without layers.
        """
        means = []
        for layer in self.layers(metric):
            mean = self.series(f"{metric}/{layer}").mean
            if mean is not None:
                means.append(LayerMean(layer, mean))
        if not means:
            return None
        select = min if lowest else max
        return select(means, key=lambda layer_mean: layer_mean.mean)

    def setting(self, key: str) -> Any:
        """The run's setting at a dotted key; None where its config has none."""
        return at(self.run.config, key)

    @property
    def died(self) -> bool:
        """True if the run failed: a series may end in the middle of a failure."""
        return self.run.status == RunStatus.FAILED

    def excuse(self, kind: FailureClass) -> str | None:
        """The reason why this run can't have a class of failure.

        It is None where the run can, or the config does not say.
        """
        if kind == FailureClass.STALL:
            return self._excuse_from_stall()
        if kind == FailureClass.OVERFLOW and self._has_no_format():
            return "nothing is quantised"
        return None

    def _excuse_from_stall(self) -> str | None:
        storage = self.setting("model.storage")
        if storage is not None and storage not in ROUNDED:
            return "nothing is rounded when a step is written back"
        writebacks = (self.setting("optimizer.writeback"), self.setting("optimizer.writeback_end"))
        if loses_steps(storage, *writebacks) is False:
            return "what rounding loses is kept, or returned on average"
        return None

    def _has_no_format(self) -> bool:
        if self.setting("model.formats") != {}:
            return False
        if self.setting("model.torchao_float8") is not None:
            return False
        if self.setting("model.peer") is not None:
            return False
        # Operands may be measured against a format.
        watched = (*OVERFLOW.parts, *CLAMPED.parts)
        return not any(worst(self, share.name) for share in watched)


def read_evidence(run: Run | Path) -> RunEvidence:
    """Return a run's evidence."""
    return RunEvidence(load_run(run) if isinstance(run, Path) else run)


def worst(evidence: RunEvidence, metric: str) -> Series:
    """The largest value of a metric over the layers, at every measurement.

    Where `monitor.turns` has each measurement take only some of the layers, the latest
    value of each layer counts.
    """
    names = [metric, *(f"{metric}/{layer}" for layer in evidence.layers(metric))]
    layers = [dict(evidence.series(name).readings()) for name in names]
    steps = sorted(set().union(*layers))
    turns = evidence.setting("monitor.turns")
    span = turns if isinstance(turns, int) else 1
    peaks = []
    for index in range(len(steps)):
        recent_steps = steps[max(index + 1 - span, 0) : index + 1]
        latest_values = []
        for values in layers:
            value = _latest_value(values, recent_steps)
            if value is not None:
                latest_values.append(value)
        peaks.append(max(latest_values))
    return Series(tuple(steps), tuple(peaks))


def _latest_value(values: Mapping[int, float], steps: Sequence[int]) -> float | None:
    for step in reversed(steps):
        if step in values:
            return values[step]
    return None


def _over_median(evidence: RunEvidence) -> Series:
    """Every gradient norm but the first, over the median of all before it.

    It is left out where the median is 0.
    """
    sorted_norms: list[float] = []
    ratios = []
    for step, norm in evidence.series(metrics.GRAD_NORM.name).readings():
        half = len(sorted_norms) // 2
        median = 0.0
        if sorted_norms:
            median = (sorted_norms[half] + sorted_norms[~half]) / 2
        if median > 0:
            ratios.append(Reading(step, norm / median))
        insort(sorted_norms, norm)
    return Series.from_readings(ratios)


def _over_uniform_entropy(evidence: RunEvidence) -> Series:
    """Attention's entropy, the mean over the heads, over that of uniform attention."""
    block = evidence.setting("model.block_size")
    if not isinstance(block, int) or block < 2:
        return Series()
    series = evidence.series(ENTROPY.name)
    uniform = uniform_entropy(block)
    return Series(series.steps, tuple(value / uniform for value in series.values))


def uniform_entropy(block: int) -> float:
    """Return the mean entropy (nats) of uniform causal attention.

    It is the mean of ln i for i up to `block`.

    >>> round(uniform_entropy(2), 4)
    0.3466
    """
    return math.lgamma(block + 1) / block


def _not_finite(flag: str, *figures: str) -> Callable[[RunEvidence], Series]:
    """Return a function that makes a series of 0 and 1.

    It is 1 where a flag is set, or one of `figures` is null because it was not finite.
    """

    def make_series(evidence: RunEvidence) -> Series:
        records = evidence.run.metrics
        bad_rows = {row for row, value in records.rows(flag) if value == 1}
        for figure in figures:
            bad_rows.update(row for row, value in records.rows(figure) if value is None)
        readings = []
        for row, step in records.rows("step"):
            readings.append(Reading(int(step or 0), float(row in bad_rows)))
        return Series.from_readings(readings)

    return make_series


def _rise_over_first(evidence: RunEvidence) -> Series:
    """The smoothed training loss minus the first loss."""
    losses = evidence.series(LOSS)
    if len(losses) < 2:
        return Series()
    smoothed = _smoothed_losses(losses)
    return Series(losses.steps, tuple(value - losses.values[0] for value in smoothed))


def _rise_over_lowest(evidence: RunEvidence) -> Series:
    """The smoothed training loss minus its lowest so far."""
    losses = evidence.series(LOSS)
    if len(losses) < 2:
        return Series()
    smoothed = _smoothed_losses(losses)
    lowest_so_far = accumulate(smoothed, min)
    rises = [value - low for value, low in zip(smoothed, lowest_so_far, strict=True)]
    return Series(losses.steps, tuple(rises))


def _smoothed_losses(losses: Series) -> list[float]:
    return [value for value in smooth(losses.values, SMOOTHED_STEPS) if value is not None]


def _excess(evidence: RunEvidence) -> Series:
    """The excess of the training loss at validations.

    Null means infinite, as over a reference of 0.
    """
    readings = []
    for step, value in zip(*evidence.run.curve(_EXCESS), strict=True):
        readings.append(Reading(int(step), math.inf if value is None else value))
    return Series.from_readings(readings)


def _rest(evidence: RunEvidence) -> Series:
    """One value, at the step where the training loss came to rest.

    It is the share of the run until then, 1 if the loss rose again. The loss is at rest
    once its windowed mean is within a band above the lowest such mean. The band is a
    share (`FLAT`) of the loss's whole fall, or two standard errors of a windowed mean
    if that is more.
    """
    series = evidence.series(LOSS)
    losses = series.values
    # A run that `train.stop_on` ended on a plateau would have stayed there: it counts,
    # however short it was and however late the plateau came.
    ended_on_plateau = at(evidence.run.summary, "stop.kind") == StopKind.PLATEAU
    if not losses or (len(losses) < SHORTEST_PLATEAU_RUN and not ended_on_plateau):
        return Series()
    width = max(SMOOTHED_STEPS, len(losses) // 40)
    means = _windowed_means(losses, width)
    level = min(means)
    residuals = [loss - mean for loss, mean in zip(losses[width:], means[width:], strict=True)]
    scatter = statistics.pstdev(residuals or [0.0])
    band = max(FLAT * max(losses[0] - level, 0.0), 2 * scatter / width**0.5)
    start = next(index for index, mean in enumerate(means) if mean <= level + band)
    # By chance alone the lowest of many means is about a band below their mean: so two
    # bands are allowed.
    last_quarter = losses[-max(len(losses) // 4, 1) :]
    if statistics.fmean(last_quarter) > level + 2 * band:
        # not at rest
        share = 1.0
    elif ended_on_plateau:
        share = 0.0
    else:
        share = series.steps[start] / max(series.steps[-1], 1)
    return Series((series.steps[start],), (share,))


def _windowed_means(values: Sequence[float], width: int) -> list[float]:
    """Return means over `width` values around each; fewer at the ends."""
    half = width // 2
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        low = max(0, index - half)
        high = min(len(values), index + half + 1)
        means.append((sums[high] - sums[low]) / (high - low))
    return means


#: series that are computed from others, by the name that the table has for them
DERIVED: Final[Mapping[str, Callable[[RunEvidence], Series]]] = {
    OVER_MEDIAN: _over_median,
    ATTENTION_ENTROPY: _over_uniform_entropy,
    REST: _rest,
    OVER_FIRST: _rise_over_first,
    OVER_LOWEST: _rise_over_lowest,
    _EXCESS: _excess,
    metrics.LOSS_IS_NAN.name: _not_finite(metrics.LOSS_IS_NAN.name, LOSS, metrics.VAL_LOSS.name),
    metrics.GRAD_HAS_NAN.name: _not_finite(metrics.GRAD_HAS_NAN.name, metrics.GRAD_NORM.name),
}
#: metrics that those are computed from, beside the metrics that the table names
SOURCE_METRICS: Final = ("step", LOSS, metrics.VAL_LOSS.name, metrics.GRAD_NORM.name, ENTROPY.name)


class State(StrEnum):
    """What a judgement says about a class of failure."""

    FOUND = "found"
    CLEAR = "clear"
    #: too little was recorded
    NOT_JUDGED = "not judged"


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
    #: the value at that step
    value: float | None
    #: the first value of the series
    first: float
    #: the value furthest towards the failure, and its step
    extreme: float
    extreme_step: int
    mean: float | None
    #: number of values
    looks: int

    def describe(self) -> str:
        """Return in words the value at which it began to hold, and the bound."""
        sign = ">=" if self.row.side == ABOVE else "<="
        return f"{self.row.figure} {self.value:.4g} {sign} {self.bound:.4g}"


@dataclass(frozen=True)
class Finding:
    """The judgement of a run's records on one class of failure."""

    kind: FailureClass
    state: State
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
        return self.state is State.FOUND

    @property
    def first_criterion(self) -> Criterion | None:
        """The criterion that began to hold first; None where none did."""
        return _first_to_hold(self.criteria)


class EventSource(StrEnum):
    """What an event is."""

    #: a criterion began to hold
    CRITERION = "criterion"
    #: the first alert of a kind
    ALERT = "alert"
    #: the end of the run
    END = "end"


@dataclass(frozen=True)
class RunEvent:
    """One line of a run's timeline."""

    step: int
    #: class of failure, kind of alert, or status of the run
    kind: str
    source: EventSource
    text: str


def judge_criterion(
    row: Limit, series: Series, *, died: bool = False, running: bool = False
) -> Criterion:
    """Return a criterion as judged on a series: whether, and since when, it holds.

    The series has at least one value. If it is shorter than the criterion's patience,
    it has to be beyond its bound throughout. In a run that is still `running` the
    criterion does not hold then.
    """
    values = series.values
    first = values[0]
    beyond = [row.beyond(value, first) for value in values]
    needed = row.patience if row.filled or running else min(row.patience, len(values))
    # Only a run that died can break off in the middle of a failure.
    start = _first_streak(beyond, needed, broken_off=died and row.broken_off, lasting=row.lasting)
    if start is not None and row.filled:
        # from the value on that fills the patience
        start += row.patience - 1
    select = max if row.side == ABOVE else min
    furthest = select(range(len(values)), key=lambda index: values[index])
    return Criterion(
        row=row,
        bound=row.limit(first),
        step=None if start is None else series.steps[start],
        value=None if start is None else values[start],
        first=first,
        extreme=values[furthest],
        extreme_step=series.steps[furthest],
        mean=series.mean,
        looks=len(values),
    )


def holds_now(row: Limit, values: Sequence[float]) -> bool:
    """Return whether a criterion holds at the end of a series.

    The last values, as many as its patience, are then beyond its bound.
    """
    return len(values) >= row.patience and all(map(row.beyond, values[-row.patience :]))


def _first_streak(
    beyond: Sequence[bool], needed: int, *, broken_off: bool, lasting: bool
) -> int | None:
    """Return the index at which the first long enough streak of true values begins.

    With `broken_off` one value is enough at the end. With `lasting` only a streak at the
    end counts. The result is None without such a streak.
    """
    start = 0
    for index, is_beyond in enumerate(beyond):
        if is_beyond:
            continue
        if index - start >= needed and not lasting:
            return start
        start = index + 1
    needed_at_end = 1 if broken_off else needed
    return start if len(beyond) - start >= needed_at_end else None


def _first_to_hold(criteria: Iterable[Criterion]) -> Criterion | None:
    first = None
    for criterion in criteria:
        if criterion.step is None:
            continue
        if first is None or first.step is None or criterion.step < first.step:
            first = criterion
    return first


def judge_run(evidence: RunEvidence, *, running: bool = False) -> tuple[Finding, ...]:
    """Return a finding for every class of the table, from the records so far."""
    return tuple(_finding(evidence, kind, running) for kind in KINDS)


def _finding(evidence: RunEvidence, kind: FailureClass, running: bool) -> Finding:
    excuse = evidence.excuse(kind)
    if excuse is not None:
        return Finding(kind, State.CLEAR, None, excuse)
    rows = [row for row in CLASSES if row.kind == kind]
    criteria = []
    for row in rows:
        series = evidence.series_of(row)
        if series:
            criteria.append(judge_criterion(row, series, died=evidence.died, running=running))
    if not criteria:
        figures = tuple(row.figure for row in rows)
        message = f"too few records of {' or '.join(figures)}"
        return Finding(kind, State.NOT_JUDGED, None, message, missing=figures)
    first = _first_to_hold(criteria)
    if first is None:
        message = "none of its criteria held"
        return Finding(kind, State.CLEAR, None, message, criteria=tuple(criteria))
    lowest = first.row.side != ABOVE
    worst_layer = evidence.worst_layer(first.row.figure, lowest=lowest)
    message = first.row.message.format(**vars(first))
    if worst_layer is not None:
        message += f", most of all in {worst_layer.layer}"
    facts: Facts = {
        "metric": first.row.figure,
        "threshold": first.bound,
        "value": first.value,
        "first": first.first,
        "extreme": first.extreme,
        "extreme_step": first.extreme_step,
        "mean": first.mean,
        "looks": first.looks,
        "worst_layer": None if worst_layer is None else worst_layer.layer,
        "worst_value": None if worst_layer is None else worst_layer.mean,
    }
    return Finding(
        kind=kind,
        state=State.FOUND,
        step=first.step,
        message=f"{message}; from step {first.step} on",
        evidence=facts,
        criteria=tuple(criteria),
    )


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run.

    It has a finding for every class of failure, and the order of events.
    """

    findings: tuple[Finding, ...]
    timeline: tuple[RunEvent, ...]

    @property
    def found(self) -> tuple[Finding, ...]:
        """The classes that were found, in the order in which they began."""
        failures = [finding for finding in self.findings if finding.found]
        return tuple(sorted(failures, key=lambda finding: finding.step or 0))


def classify(run: Run | Path) -> list[Finding]:
    """Return a finding for every class of failure, in the order of `KINDS`.

    It takes a run or its folder. A class whose metrics were not recorded is "not
    judged", and `missing` names them.
    """
    return list(judge_run(read_evidence(run)))


def diagnose(run: Run | Path) -> Diagnosis:
    """Return the findings of `classify`, and the timeline."""
    evidence = read_evidence(run)
    findings = judge_run(evidence)
    return Diagnosis(findings, _timeline(evidence.run, findings))


def failures_of(run: Run | Path) -> list[dict[str, Any]]:
    """Return the list `failures` of summary.json.

    It has the classes found, in the order in which they began.
    """
    failures = []
    for finding in diagnose(run).found:
        evidence = {"message": finding.message, **finding.evidence}
        failures.append({"kind": str(finding.kind), "step": finding.step, "evidence": evidence})
    return failures


def _timeline(run: Run, findings: Sequence[Finding]) -> tuple[RunEvent, ...]:
    """Return the events of a run in the order of steps.

    They are the beginning of every criterion that held, the first alert of every kind,
    and the end.
    """
    events = []
    for finding in findings:
        for criterion in finding.criteria:
            if criterion.step is not None:
                text = criterion.describe()
                events.append(RunEvent(criterion.step, finding.kind, EventSource.CRITERION, text))
    # Reversed, so that the first alert of a kind stays.
    first_alerts = {alert.kind: alert for alert in reversed(run.alerts)}
    for alert in first_alerts.values():
        text = alert.message or alert.kind
        events.append(RunEvent(alert.step, alert.kind, EventSource.ALERT, text))
    if run.last_step is not None:
        text = str((run.failure or {}).get("message") or f"the run ended: {run.status}")
        events.append(RunEvent(run.last_step, run.status, EventSource.END, text))
    return tuple(sorted(events, key=lambda event: (event.step, event.source == EventSource.END)))
