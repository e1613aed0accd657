"""A run folder as read: settings, records, summary, alerts, failures found; and its curves as they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import SPEED, VAL_LOSS
from nanogpt_bench.config.rules import stall_counts
from nanogpt_bench.monitors.stall import ARRIVED, STALLS
from nanogpt_bench.runs.environment import at, history_lines
from nanogpt_bench.runs.read import Records, finite, mapping, records
from nanogpt_bench.system.errors import BenchError, one_line, printable, shortened

RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json")
#: of a run's name, rule or format
LONGEST_NAME = 200


@dataclass(frozen=True)
class Run:
    """One run folder as read; `notes` says in words what was missing or cut off."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: Records = field(default_factory=Records)
    summary: Mapping[str, Any] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    notes: tuple[str, ...] = ()
    #: of a results file, which has no records of them: some figures of the monitors, by step
    looks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _one_word(self.summary.get("name") or self.path.name)

    @property
    def rule(self) -> str:
        return _one_word(self.summary.get("rule") or self.config.get("rule") or "unknown")

    @property
    def format(self) -> str:
        """The weights' format, `none` for floats, `mixed` when layers differ."""
        return _one_word(self.summary.get("format") or _configured_format(self.config))

    @property
    def seed(self) -> int | None:
        seed = self.summary.get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed`, or `incomplete` when the run left no summary."""
        return str(self.summary.get("status") or "incomplete")

    @property
    def failure(self) -> Mapping[str, Any] | None:
        failure = self.summary.get("failure")
        return failure if isinstance(failure, Mapping) else None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The ways in which the run was found to have failed, by its summary."""
        return failures_in(self.summary)

    @property
    def alert_counts(self) -> Mapping[str, int]:
        """How often each kind of alert fired: by alerts.jsonl, by the summary where there is no such file."""
        if self.alerts:
            return Counter(alert.kind for alert in self.alerts)
        named = self.summary.get("alerts")
        counts = {str(k): finite(n) for k, n in named.items()} if isinstance(named, Mapping) else {}
        return {kind: int(count) for kind, count in counts.items() if count}

    @property
    def last_step(self) -> int | None:
        return self.metrics.last_step

    @property
    def stall_metric(self) -> str | None:
        """Name of the stall series this run recorded, or None (float weights don't stall on a grid)."""
        named = self.summary.get("stall_metric")
        if named:
            name = str(named)
            return name if "/" in name else f"{STALLS[0].namespace}/{name}"
        return next((metric.name for metric in STALLS if metric.name in self.metrics.names), None)

    @property
    def stall_counts(self) -> bool:
        """Whether the stall is one of lost updates or of a master copy's codes; under other rules it says nothing."""
        storage, writeback = at(self.config, "model.storage"), at(self.config, "optimizer.writeback")
        return stall_counts(str(storage), None if writeback is None else str(writeback))

    @property
    def stall(self) -> float | None:
        """The mean stall over the run; None where it was not recorded, or means nothing."""
        return self.number("stall") if self.stall_counts else None

    def number(self, key: str) -> float | None:
        """The summary's finite number under `key`, None when absent or not finite."""
        return finite(self.summary.get(key))

    def at_end(self, key: str) -> float | None:
        """The summary's number where the run came to its planned end; one that ended early has another length."""
        return self.number(key) if self.status == "finished" else None

    def curve(self, key: str, against: str = "step") -> tuple[list[float], list[float | None]]:
        """The series `key` over `against`; a value that is not finite comes as None, a gap in the curve."""
        return self.metrics.curve(key, against)


def _one_word(value: object) -> str:
    """A name as tables and legends show it: one line of printable text, not longer than fits into one."""
    return shortened(printable(one_line(str(value))), LONGEST_NAME)


def _configured_format(config: Mapping[str, Any]) -> str:
    model = config.get("model")
    if not isinstance(model, Mapping):
        return "none"
    formats = model.get("formats")
    named = set(map(str, formats.values())) if isinstance(formats, Mapping) else set()
    named |= {str(model["format"])} if model.get("format") else set()
    return "mixed" if len(named) > 1 else named.pop() if named else "none"


def is_run_folder(path: Path) -> bool:
    """Whether `path` is a folder with at least one of the files every run writes."""
    return path.is_dir() and any((path / name).is_file() for name in RUN_FILES)


def load_run(path: Path) -> Run:
    """Read one run folder; what is missing or damaged is left out and named in `notes`.

    Raises:
        BenchError: `path` is not a run folder.
    """
    if not is_run_folder(path):
        raise BenchError(f"{str(path)!r} is not a run folder: expected {', '.join(RUN_FILES)}")
    notes: list[str] = []
    config = mapping(path / "config.yaml", notes)
    environment = mapping(path / "environment.json", notes)
    notes.extend(history_lines(environment))
    metrics = _metrics(path / "metrics.jsonl", notes)
    summary = mapping(path / "summary.json", notes)
    alerts = read_alerts(path / ALERTS, notes)
    return Run(path, config, environment, metrics, summary or _summary_so_far(metrics), alerts, tuple(notes))


def _metrics(path: Path, notes: list[str]) -> Records:
    """The whole records of a metrics file, in step order; what is cut off or out of order is noted."""
    kept, last = Records(), -1.0
    for number, record in records(path, notes):
        if record["step"] <= last:
            notes.append(f"{path.name}: line {number} repeats step {record['step']} and was left out")
        else:
            last = record["step"]
            kept.add(record)
    return kept


def _summary_so_far(metrics: Records) -> dict[str, Any]:
    """What can be said of a run that left no summary: derived from the records it did write."""
    so_far: dict[str, Any] = {}
    if losses := metrics.curve(VAL_LOSS.name)[1]:
        known = [loss for loss in losses if loss is not None]
        so_far |= {"first_val_loss": losses[0], "final_val_loss": losses[-1], "best_val_loss": min(known, default=None)}
    for name, metric in (("tokens_per_s", SPEED), ("arrived", ARRIVED)):
        if seen := metrics.values(metric.name):
            so_far[name] = sum(seen) / len(seen)
    for metric in STALLS:
        if seen := metrics.values(metric.name):
            so_far |= {"stall": sum(seen) / len(seen), "stall_metric": metric.name}
    return so_far


ALERTS = "alerts.jsonl"


@dataclass(frozen=True)
class Alert:
    """One line of alerts.jsonl; `value` and `threshold` are None where the alert has none."""

    step: int
    kind: str
    level: str = "WARN"
    message: str = ""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Failure:
    """A way in which the run failed, the first step at which its criterion held, and the figures behind it."""

    kind: str
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def read_alerts(path: Path, notes: list[str]) -> tuple[Alert, ...]:
    """The alerts of a run in the order they fired; no file means none."""
    if not path.is_file():
        return ()
    return tuple(_alert(record) for _, record in records(path, notes))


def _alert(record: Mapping[str, Any]) -> Alert:
    return Alert(
        step=int(record["step"]),
        kind=str(record.get("kind") or "unnamed"),
        level=str(record.get("level") or "WARN"),
        message=" ".join(str(record.get("message") or "").split()),
        value=finite(record.get("value")),
        threshold=finite(record.get("threshold")),
    )


def failures_in(summary: Mapping[str, Any]) -> tuple[Failure, ...]:
    """The failures a summary names; what has no kind is left out."""
    listed = summary.get("failures")
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return ()
    return tuple(_failure(entry) for entry in listed if isinstance(entry, Mapping) and entry.get("kind"))


def _failure(entry: Mapping[str, Any]) -> Failure:
    step, evidence = finite(entry.get("step")), entry.get("evidence")
    return Failure(
        kind=str(entry["kind"]),
        step=None if step is None else int(step),
        evidence=evidence if isinstance(evidence, Mapping) else {},
    )


MAX_POINTS = 500


def decimate(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Indices of at most `limit` of `count` points, evenly spread, the first and the last among them.

    >>> decimate(5, 3), decimate(2, 3)
    ([0, 2, 4], [0, 1])

    Raises:
        ValueError: `limit` is below 2.
    """
    if limit < 2:
        raise ValueError(f"limit = {limit!r}: expected at least 2, the first and the last point")
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Exponential moving average over about `window` points, unbiased from the first; None stays None.

    s_t = sum_i a^(t-i) y_i / sum_i a^(t-i) with a = 1 - 2/(window+1), over the points that are known.

    >>> smooth([2.0, None, 2.0], 10)
    [2.0, None, 2.0]
    """
    keep = 1 - 2 / (window + 1)
    total = weight = 0.0
    averaged: list[float | None] = []
    for value in values:
        if value is None:
            averaged.append(None)
            continue
        total, weight = keep * total + value, keep * weight + 1
        averaged.append(total / weight)
    return averaged


def smoothing_window(count: int) -> int:
    """The window for a training loss of `count` steps: a fortieth of it, 1 to 50 steps.

    >>> smoothing_window(400)
    10
    """
    return min(50, max(1, count // 40))
