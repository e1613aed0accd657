"""What a run folder holds, as series: the only reader of the classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from nanogpt_bench.config.rules import loses_steps
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.config.watching import FailureConfig
from nanogpt_bench.runs.load import Run, load_run
from nanogpt_bench.runs.read import finite
from nanogpt_bench.runs.records import Records
from nanogpt_bench.runs.watched import Alert


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was recorded with a finite value."""

    metric: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

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
        return self.setting("model.formats") != {} or self.setting("model.torchao_float8") is not None

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
    given = {item.name: _like(item.default, section.get(item.name)) for item in fields(FailureConfig)}
    return FailureConfig(**{name: value for name, value in given.items() if value is not None})


def _like(default: Any, value: Any) -> Any:
    """A number as an int where the default is one; None for what is no number."""
    number = finite(value)
    return int(number) if number is not None and isinstance(default, int) else number
