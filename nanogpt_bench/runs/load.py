"""Run folders: found below others, read whole, tried again or not; and curves of a run, thinned and smoothed."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import SPEED, VAL_LOSS
from nanogpt_bench.config.rules import stall_counts
from nanogpt_bench.monitors.stall import ARRIVED, STALLS
from nanogpt_bench.runs.environment import at, history_lines
from nanogpt_bench.runs.read import Records, finite, mapping, records
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, shortened
from nanogpt_bench.system.untrusted import read_json

RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json")
#: of a run's name, rule or format
LONGEST_NAME = 200


@dataclass(frozen=True)
class Run:
    """One run folder as read; `notes` name what was missing or cut off."""

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
        """The classes of failure that the summary names."""
        return failures_in(self.summary)

    @property
    def alert_counts(self) -> Mapping[str, int]:
        """The number of alerts of each kind: by alerts.jsonl, by the summary where there is no such file."""
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
        """True if the stall is of lost updates or of a master copy's codes; under other rules it means nothing."""
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
    """Return whether `path` is a folder with at least one of the files that every run writes."""
    return path.is_dir() and any((path / name).is_file() for name in RUN_FILES)


def load_run(path: Path) -> Run:
    """Read one run folder; what is missing or damaged is left out and named in `notes`."""
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
    found, last = Records(), -1.0
    for number, record in records(path, notes):
        if record["step"] <= last:
            notes.append(f"{path.name}: line {number} repeats step {record['step']} and was left out")
        else:
            last = record["step"]
            found.add(record)
    return found


def _summary_so_far(metrics: Records) -> dict[str, Any]:
    """The summary of a run that left none, from its records."""
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
    """A class of failure found in a run, the first step at which its criterion held, and the figures behind it."""

    kind: str
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def read_alerts(path: Path, notes: list[str]) -> tuple[Alert, ...]:
    """Return the alerts of a run in the order they fired; none without a file."""
    listed = records(path, notes) if path.is_file() else ()
    return tuple(
        Alert(
            step=int(record["step"]),
            kind=str(record.get("kind") or "unnamed"),
            level=str(record.get("level") or "WARN"),
            message=" ".join(str(record.get("message") or "").split()),
            value=finite(record.get("value")),
            threshold=finite(record.get("threshold")),
        )
        for _, record in listed
    )


def failures_in(summary: Mapping[str, Any]) -> tuple[Failure, ...]:
    """Return the failures that a summary names, without those of no kind."""
    listed = summary.get("failures")
    found = []
    for entry in listed if isinstance(listed, list | tuple) else ():
        if isinstance(entry, Mapping) and entry.get("kind"):
            step, evidence = finite(entry.get("step")), entry.get("evidence")
            known = evidence if isinstance(evidence, Mapping) else {}
            found.append(Failure(str(entry["kind"]), None if step is None else int(step), known))
    return tuple(found)


MAX_POINTS = 500


def decimate(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Indices of at most `limit` of `count` points, evenly spread, the first and the last among them.

    >>> decimate(5, 3), decimate(2, 3)
    ([0, 2, 4], [0, 1])
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


#: what a sweep's folder holds, and where below it the trials of its tuning lie
SWEEP, TRIALS = "sweep.json", "trials"


def find_runs(paths: Iterable[Path], say: Callable[[str], None] | None = None) -> list[Path]:
    """Return the run folders among `paths`, each once; a folder that is none stands for all run folders below it.

    Run folders, hidden folders and links are not searched. `say` receives how many there are below a folder, how many
    links were not followed, and how many folders could not be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise BenchError(f"run folder {str(path)!r} does not exist")
        if is_run_folder(path):
            found.setdefault(path.resolve(), path)
            continue
        below, left_out = _runs_below(path)
        if not below:
            files = ", ".join(RUN_FILES)
            raise BenchError(f"{str(path)!r} is not a run folder and holds none{left_out}: expected {files}")
        for run in below:
            found.setdefault(run.resolve(), run)
        if say is not None:
            places = len({run.parent for run in below})
            where = f" in {places} folders" if places > 1 else ""
            say(printable(f"{path}: {counted(len(below), 'run')} found{where}{left_out}"))
    return list(found.values())


def _runs_below(top: Path) -> tuple[list[Path], str]:
    """The run folders below one, those of a folder by name, then those further down; and what was not searched."""
    found: list[Path] = []
    linked: list[Path] = []
    closed: list[OSError] = []
    for place, names, files in os.walk(top, onerror=closed.append):
        below = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        linked += [path for path in below if path.is_symlink()]
        found += [path for path in below if not path.is_symlink() and is_run_folder(path)]
        left = {*linked, *found} | ({Path(place, TRIALS)} if SWEEP in files else set())  # trials are no rows
        names[:] = [path.name for path in below if path not in left]
    notes = [f"{counted(len(linked), 'link')} not followed"] if linked else []
    notes += [f"{len(closed)} folders could not be read"] if closed else []
    return found, f" ({', '.join(notes)})" if notes else ""


#: settings of a run among many, whose checkpoints go once it has finished
PASSING = {"checkpoint.last": False}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON gives them back."""
    content: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return content


def make_ready(run_dir: Path) -> bool:
    """Return whether an unfinished run goes on from a checkpoint; without one, remove what it left."""
    if run_dir.is_symlink():
        raise BenchError(f"{str(run_dir)!r} is a symbolic link, which is no place for a run; remove it")
    if not run_dir.exists():
        return False
    from nanogpt_bench.checkpoint.format import steps  # brings torch along

    if steps(run_dir):
        (run_dir / "traceback.txt").unlink(missing_ok=True)  # of the end of the earlier start
        return True
    shutil.rmtree(run_dir)
    return False


def drop_checkpoints(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Remove a finished run's checkpoints, unless `checkpoint.last` or `.best` keeps them; a failed run's show why."""
    folder, gone = run_dir / "checkpoints", run_dir / ".checkpoints.removed"
    asked = settings.get("checkpoint.last") or settings.get("checkpoint.best")
    if asked or summary_of(run_dir).get("status") != "finished":
        return
    with suppress(OSError):  # the next start tries again
        if folder.is_dir() and not gone.exists():
            folder.rename(gone)  # at once: what a kill leaves of them is not resumed
        if gone.is_dir():
            shutil.rmtree(gone)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} while there is none."""
    try:
        content = read_json(run_dir / "summary.json", links=False)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


#: kinds of `failure` that the same settings bring about again; others (a crash, too little memory) come from outside
OF_TRAINING = ("nan", "divergence")
#: kinds of `stop` that the settings ask for; others (a signal, a full disk, a kill) come from outside
AS_ASKED = ("plateau", "time")


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Return whether the training itself ended a run; one ended from outside, or without a summary ({}), has not.

    >>> nan, gone = ({"status": "failed", "failure": {"kind": kind}} for kind in ("nan", "FileNotFoundError"))
    >>> has_ended(nan), has_ended(gone), has_ended({"status": "stopped", "stop": {"kind": "signal"}}), has_ended({})
    (True, False, False, False)
    """
    status, failure, stop = (summary.get(key) for key in ("status", "failure", "stop"))
    if status == "failed":
        return at(failure, "kind") in OF_TRAINING
    return status == "finished" or (status == "stopped" and at(stop, "kind") in AS_ASKED)
