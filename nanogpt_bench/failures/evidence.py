"""A run folder as series of figures, when a series crosses its threshold for good, and the findings, plain data."""

from __future__ import annotations

import statistics
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import ABOVE
from nanogpt_bench.config.rules import loses_steps
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.config.watching import FailureConfig
from nanogpt_bench.runs.load import Alert, Run, load_run
from nanogpt_bench.runs.read import Records, finite

#: the classes of failure, in the order in which they are listed
KINDS = (
    *("stall", "rounding_noise", "overflow", "outlier_explosion", "attention_collapse"),
    *("zero_gradients", "exploding_gradients", "nan", "plateau", "divergence"),
)
#: figures by name, ready for JSON
Facts = dict[str, float | int | str | None]
FOUND, CLEAR, NOT_JUDGED = "found", "clear", "not judged"


@dataclass(frozen=True)
class Criterion:
    """One condition of a class: a series of figures, the threshold, and the first step at which it was crossed."""

    #: the metric of the record, or what was derived from one
    metric: str
    #: "above" (>=) or "below" (<=): on which side of the threshold the failure lies
    side: str
    threshold: float
    #: first step of those at which it held in a row; None: it never did
    step: int | None
    #: the figure at that step
    value: float | None
    #: the figure furthest towards the failure, and its step
    extreme: float | None
    extreme_step: int | None
    #: figures there were; 0 when the run did not record the metric
    looks: int

    @property
    def fired(self) -> bool:
        return self.step is not None


@dataclass(frozen=True)
class Finding:
    """What the records say about one class of failure."""

    kind: str
    #: "found", "clear" or "not judged", the last when a metric it needs was not recorded
    state: str
    #: first step at which the class's criterion held
    step: int | None
    #: one sentence of facts
    message: str
    evidence: Facts = field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()
    #: metrics that were not recorded and would have been needed
    missing: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        return self.state == FOUND

    def summary_entry(self) -> dict[str, Any]:
        """Return the entry in the list `failures` of summary.json."""
        return {"kind": self.kind, "step": self.step, "evidence": {"message": self.message, **self.evidence}}


@dataclass(frozen=True)
class Event:
    """One line of a run's timeline: a criterion that held from this step on, the first alert of a kind, or the end."""

    step: int
    #: class of failure, kind of alert, or status of the run
    kind: str
    #: "criterion", "alert" or "end"
    source: str
    text: str
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class LeadTime:
    """How long before the failure the blocks' outputs had a kurtosis worth an alert; negative when it came after."""

    alert_step: int
    failure_step: int
    failure_kind: str
    #: failure_step - alert_step
    steps: int
    #: the same by the run's clock; None when it has none
    seconds: float | None


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about how a run failed: the ten classes, the order of events, the warning's lead."""

    findings: tuple[Finding, ...]
    timeline: tuple[Event, ...]
    #: None without a kurtosis alert or without a failure it could have announced
    lead_time: LeadTime | None

    @property
    def found(self) -> tuple[Finding, ...]:
        """The classes that were found, in the order in which they set in."""
        return tuple(sorted((finding for finding in self.findings if finding.found), key=lambda f: f.step or 0))


@dataclass(frozen=True)
class Prediction:
    """A prediction about a run, and what the records say: confirmed, refuted, or None when they don't tell."""

    #: plateau, update_sparsity or zero_gradient_zones
    name: str
    #: the prediction as a sentence, with its threshold
    statement: str
    confirmed: bool | None
    #: the answer as a sentence, with its figures
    text: str
    figures: Facts = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was recorded with a finite value."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def since(self, step: int) -> Series:
        """The part of the series from a step on."""
        late = [(at, value) for at, value in zip(self.steps, self.values, strict=True) if at >= step]
        return Series(self.metric, tuple(at for at, _ in late), tuple(value for _, value in late))

    @property
    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


class Evidence:
    """One run's records, alerts and settings, and the thresholds to judge them by."""

    def __init__(self, run: Run, thresholds: FailureConfig | None = None) -> None:
        self.run = run
        self.limits = thresholds or thresholds_of(run.config)

    @property
    def records(self) -> Records:
        return self.run.metrics

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of everything recorded, in order of first appearance."""
        return self.records.names

    def series(self, metric: str) -> Series:
        """The finite values of a metric; empty when it was not recorded."""
        known = [(int(at), value) for at, value in zip(*self.run.curve(metric), strict=True) if value is not None]
        return Series(metric, tuple(step for step, _ in known), tuple(value for _, value in known))

    def layers(self, metric: str) -> list[str]:
        """The layers for which a metric was recorded, as `metric/LAYER`."""
        return [key[len(metric) + 1 :] for key in self.metrics if key.startswith(f"{metric}/")]

    def worst_layer(self, metric: str, *, lowest: bool = False) -> tuple[str | None, float | None]:
        """The layer whose mean over the run is highest (lowest), and that mean; (None, None) without layers."""
        means = {layer: self.series(f"{metric}/{layer}").mean for layer in self.layers(metric)}
        known = {layer: mean for layer, mean in means.items() if mean is not None}
        if not known:
            return None, None
        layer = min(known, key=known.__getitem__) if lowest else max(known, key=known.__getitem__)
        return layer, known[layer]

    def setting(self, key: str) -> Any:
        """The run's setting at a dotted key, None when its config has none."""
        value: Any = self.run.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def died(self) -> bool:
        """Whether the loop gave the run up, so that a series may break off in the middle of a failure."""
        return self.run.status == "failed"

    def ended_by(self, kind: str) -> int | None:
        """The step at which the loop itself ended the run for this; None when it did not."""
        ends = (self.run.failure, self.run.summary.get("stop"))
        steps = (finite(end.get("step")) for end in ends if isinstance(end, Mapping) and end.get("kind") == kind)
        return next((int(step) for step in steps if step is not None), None)

    @property
    def quantized(self) -> bool:
        """Whether anything has a format, or the config does not say."""
        peers = self.setting("model.torchao_float8"), self.setting("model.peer")
        return self.setting("model.formats") != {} or any(peer is not None for peer in peers)

    @property
    def rounded(self) -> bool | None:
        """Whether a step is rounded when it is written back; None when the config does not say."""
        storage = self.setting("model.storage")
        return None if storage is None else storage in ROUNDED

    @property
    def losing(self) -> bool | None:
        """Whether the write-back loses a small step for good; None when the config does not say."""
        return loses_steps(self.setting("model.storage"), self.setting("optimizer.writeback"))

    def first_alert(self, kind: str) -> Alert | None:
        """The first alert of a kind, None when there was none."""
        return next((alert for alert in self.run.alerts if alert.kind == kind), None)


def read(run: Run | Path, thresholds: FailureConfig | None = None) -> Evidence:
    """Return a run's evidence; thresholds are those of its config where none are given.

    Raises:
        BenchError: the path is no run folder.
    """
    return Evidence(load_run(run) if isinstance(run, Path) else run, thresholds)


def thresholds_of(config: Mapping[str, Any]) -> FailureConfig:
    """Return the section `failure` of a run's config; what it does not hold, or holds no number for, is the default."""
    section = config.get("failure")
    if not isinstance(section, Mapping):
        return FailureConfig()
    given = {name: _like(item.default, section.get(name)) for name, item in FailureConfig.model_fields.items()}
    return FailureConfig.model_construct(**{name: value for name, value in given.items() if value is not None})


def _like(default: Any, value: Any) -> Any:
    """A number as an int where the default is one; None for what is no number."""
    number = finite(value)
    return int(number) if number is not None and isinstance(default, int) else number


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
