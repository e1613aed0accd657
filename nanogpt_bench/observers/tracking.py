"""The protocol of a tracker, and the guard that keeps one that fails from stopping a training."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nanogpt_bench.observers.alerts import Alert
from nanogpt_bench.step.points import Observer, Step
from nanogpt_bench.system.errors import one_line

_LOG = logging.getLogger("nanogpt_bench")


class Tracker(Protocol):
    """A place that figures are sent to. Any of its methods may raise: it is then dropped."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the run folder keeps of it: its name and how the run is found there."""

    def log(self, step: int, record: Mapping[str, float]) -> None:
        """Take the figures of one step, in one call; steps increase."""

    def alert(self, alert: Alert) -> None:
        """Take an alert."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Take the summary, None where the run broke off, and send what is waiting."""


class Trackers(Observer):
    """All trackers of a run; one that raises is reported once and dropped."""

    def __init__(self, trackers: Sequence[Tracker], dropped: Mapping[str, str] | None = None) -> None:
        self._live = {tracker.facts["name"]: tracker for tracker in trackers}
        self._facts = {name: tracker.facts for name, tracker in self._live.items()}
        #: what went wrong, by the name of the tracker that was dropped
        self.dropped: dict[str, str] = dict(dropped or {})

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of every tracker, those dropped among them; for summary.json."""
        names = [*self._facts, *(name for name in self.dropped if name not in self._facts)]
        return {name: {**self._facts.get(name, {}), "dropped": self.dropped.get(name)} for name in names}

    def written(self, step: Step) -> None:
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
