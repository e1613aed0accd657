"""The protocol of a tracker, and the guard that keeps one that fails from stopping a training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from nanogpt_bench.observers.alerts import Alert
from nanogpt_bench.setup.layers import plain
from nanogpt_bench.system.errors import one_line
from nanogpt_bench.training.points import Observer, Step

_LOG = logging.getLogger("nanogpt_bench")


@dataclass(frozen=True)
class Distribution:
    """A histogram of finite values: `counts` between `edges`, of which there is one more."""

    counts: list[int]
    edges: list[float]
    total: float
    squares: float


def distribution(values: Tensor) -> Distribution | None:
    """Return the histogram of a tensor's finite values over 64 bins of one width; None where there are none."""
    found = values.detach().flatten().float()
    found = found[found.isfinite()].double().cpu()
    if not found.numel():
        return None
    counts, edges = np.histogram(found.numpy(), 64)
    return Distribution(counts.tolist(), edges.tolist(), float(found.sum()), float(found.square().sum()))


class Tracker(Protocol):
    """A place that figures are sent to. Any of its methods may raise: it is then dropped."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the run folder keeps of it: its name and how the run is found there."""

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Take the figures of one step, in one call; steps increase."""

    def distributions(self, step: int, found: Mapping[str, Distribution]) -> None:
        """Take the distributions of one step, before its figures."""

    def alert(self, alert: Alert) -> None:
        """Take an alert."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Take the summary, None where the run broke off, and send what is waiting."""


class Trackers(Observer):
    """All trackers of a run; one that raises is reported once and dropped."""

    def __init__(
        self, trackers: Sequence[Tracker], dropped: Mapping[str, str] | None = None, interval: int | None = None
    ) -> None:
        #: steps between two records of the distributions of weights and gradients; None: none are made
        self._interval = interval
        self._found: dict[str, Distribution] = {}
        self._live = {tracker.facts["name"]: tracker for tracker in trackers}
        self._facts = {name: tracker.facts for name, tracker in self._live.items()}
        #: what went wrong, by the name of the tracker that was dropped
        self.dropped: dict[str, str] = dict(dropped or {})

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of every tracker, those dropped among them; for summary.json."""
        names = [*self._facts, *(name for name in self.dropped if name not in self._facts)]
        return {name: {**self._facts.get(name, {}), "dropped": self.dropped.get(name)} for name in names}

    def before_step(self, step: Step) -> None:
        gradients = ((name, p.grad) for name, p in step.model.named_parameters() if p.grad is not None)
        self._note("gradients", step, gradients)

    def after_step(self, step: Step) -> None:
        self._note("weights", step, step.model.named_parameters())

    def _note(self, kind: str, step: Step, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._live and self._interval is not None and step.due(self._interval):
            found = {f"{kind}/{name}": distribution(plain(tensor)) for name, tensor in tensors}
            self._found |= {name: spread for name, spread in found.items() if spread is not None}

    def written(self, step: Step) -> None:
        if self._found:
            found, self._found = self._found, {}
            self._each(lambda tracker: tracker.distributions(step.number, found))
        record = {key: value for key, value in step.record.items() if value is not None and math.isfinite(value)}
        self._each(lambda tracker: tracker.log(step.number, record))

    def alert(self, alert: Alert) -> None:
        """Pass an alert on."""
        self._each(lambda tracker: tracker.alert(alert))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close every tracker."""
        self._each(lambda tracker: tracker.finish(summary))
        self._live = {}

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._live.items()):
            try:
                act(tracker)
            except Exception as error:  # whatever it is, the training goes on
                del self._live[name]
                self.dropped[name] = report_failure(name, error)


def report_failure(name: str, error: Exception) -> str:
    """Say once that a tracker is dropped, and return why."""
    why = f"{type(error).__name__}: {one_line(error)}"
    _LOG.warning("tracker %s is dropped, the training goes on: %s", name, why)
    return why
