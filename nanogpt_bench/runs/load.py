"""Run folders: finding them, reading them, deciding whether to run again; and curves of
a run, thinned and smoothed.
"""

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
#: the most characters of a run's name, rule or format
LONGEST_NAME = 200


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; `notes` name what was missing or cut off."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    metrics: Records = field(default_factory=Records)
    summary: Mapping[str, Any] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    notes: tuple[str, ...] = ()
    #: monitors' measurements by step, of a run from a results file, which has no other
    #: records of them
    looks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return _one_word(self.summary.get("name") or self.path.name)

    @property
    def rule(self) -> str:
        return _one_word(self.summary.get("rule") or self.config.get("rule") or "unknown")

    @property
    def format(self) -> str:
        """The weights' format; `none` for floats, `mixed` where layers differ."""
        return _one_word(self.summary.get("format") or _configured_format(self.config))

    @property
    def seed(self) -> int | None:
        seed = self.summary.get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed`, or `incomplete` if the run has no summary."""
        return str(self.summary.get("status") or "incomplete")

    @property
    def failure(self) -> Mapping[str, Any] | None:
        failure = self.summary.get("failure")
        return failure if isinstance(failure, Mapping) else None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures that the summary names."""
        return failures_in(self.summary)

    @property
    def alert_counts(self) -> Mapping[str, int]:
        """The number of alerts of each kind, from alerts.jsonl or, where that has none,
        from the summary.
        """
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
        """The stall metric that this run recorded; None for float weights, which don't
        stall.
        """
        named = self.summary.get("stall_metric")
        if named:
            name = str(named)
            return name if "/" in name else f"{STALLS[0].namespace}/{name}"
        return next((metric.name for metric in STALLS if metric.name in self.metrics.names), None)

    @property
    def stall_counts(self) -> bool:
        """True if a stall is a failure under this run's rule, see
        `config.rules.stall_counts`.
        """
        storage, writeback = (
            at(self.config, "model.storage"),
            at(self.config, "optimizer.writeback"),
        )
        return stall_counts(str(storage), None if writeback is None else str(writeback))

    @property
    def stall(self) -> float | None:
        """The mean stall over the run; None where it was not recorded, or is no
        failure.
        """
        return self.number("stall") if self.stall_counts else None

    def number(self, key: str) -> float | None:
        """The summary's number under `key`; None where it is missing or not finite."""
        return finite(self.summary.get(key))

    def at_end(self, key: str) -> float | None:
        """The summary's number if the run reached its planned end, else None: runs of
        other lengths don't compare.
        """
        return self.number(key) if self.status == "finished" else None

    def curve(self, key: str, against: str = "step") -> tuple[list[float], list[float | None]]:
        """The values of `key` over those of `against`; None, a gap in the curve, for a
        value that is not finite.
        """
        return self.metrics.curve(key, against)


def _one_word(value: object) -> str:
    """A name as tables and legends show it: one line of printable text of at most
    `LONGEST_NAME` characters.
    """
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
    """Return whether `path` is a folder with at least one of `RUN_FILES`."""
    return path.is_dir() and any((path / name).is_file() for name in RUN_FILES)


def load_run(path: Path) -> Run:
    """Return the run in a folder; files that are missing or damaged are left out and
    named in its `notes`.
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
    return Run(
        path,
        config,
        environment,
        metrics,
        summary or _summary_so_far(metrics),
        alerts,
        tuple(notes),
    )


def _metrics(path: Path, notes: list[str]) -> Records:
    """The whole records of a metrics file whose steps increase; others are noted."""
    found, last = Records(), -1.0
    for number, record in records(path, notes):
        if record["step"] <= last:
            notes.append(
                f"{path.name}: line {number} repeats step {record['step']} and was left out"
            )
        else:
            last = record["step"]
            found.add(record)
    return found


def _summary_so_far(metrics: Records) -> dict[str, Any]:
    """A summary made from the records of a run that has none."""
    so_far: dict[str, Any] = {}
    if losses := metrics.curve(VAL_LOSS.name)[1]:
        known = [loss for loss in losses if loss is not None]
        so_far |= {
            "first_val_loss": losses[0],
            "final_val_loss": losses[-1],
            "best_val_loss": min(known, default=None),
        }
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
    """One line of alerts.jsonl; `value` and `threshold` are None where the alert has
    none.
    """

    step: int
    kind: str
    level: str = "WARN"
    message: str = ""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Failure:
    """A failure of some kind found in a run, the first step at which its criterion
    held, and the evidence.
    """

    kind: str
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def read_alerts(path: Path, notes: list[str]) -> tuple[Alert, ...]:
    """Return the alerts of a run in the order in which they were raised; empty without
    a file.
    """
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
    """Return the failures that a summary names; entries without a kind are left out."""
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
    """Return the indices of at most `limit` of `count` points, evenly spread, with the
    first and the last.

    >>> decimate(5, 3), decimate(2, 3)
    ([0, 2, 4], [0, 1])
    """
    if limit < 2:
        raise ValueError(f"limit = {limit!r}: expected at least 2, the first and the last point")
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the exponential moving average over about `window` points, without a bias
    to 0; None stays None.

    s_t = sum_i a^(t-i) y_i / sum_i a^(t-i) with a = 1 - 2/(window+1), over the points
    that are not None.

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
    """Return the smoothing window for a training loss of `count` steps: a fortieth of
    them, 1 to 50 steps.

    >>> smoothing_window(400)
    10
    """
    return min(50, max(1, count // 40))


#: a file that every sweep's folder has, and the folder in it with the trials of its
#: tuning
SWEEP, TRIALS = "sweep.json", "trials"


def find_runs(paths: Iterable[Path], say: Callable[[str], None] | None = None) -> list[Path]:
    """Return the run folders among `paths`, each once; any other folder stands for all
    run folders below it.

    Inside run folders, hidden folders, links and trials of a sweep nothing is searched.
    `say` gets a line about each searched folder: runs found, links not followed,
    folders that could not be read.
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
            raise BenchError(
                f"{str(path)!r} is not a run folder and holds none{left_out}: expected {files}"
            )
        for run in below:
            found.setdefault(run.resolve(), run)
        if say is not None:
            places = len({run.parent for run in below})
            where = f" in {places} folders" if places > 1 else ""
            say(printable(f"{path}: {counted(len(below), 'run')} found{where}{left_out}"))
    return list(found.values())


def _runs_below(top: Path) -> tuple[list[Path], str]:
    """The run folders below `top`, those in a folder by name before those further down;
    and what was not searched.
    """
    found: list[Path] = []
    linked: list[Path] = []
    closed: list[OSError] = []
    for place, names, files in os.walk(top, onerror=closed.append):
        below = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        linked += [path for path in below if path.is_symlink()]
        found += [path for path in below if not path.is_symlink() and is_run_folder(path)]
        left = {*linked, *found} | ({Path(place, TRIALS)} if SWEEP in files else set())
        names[:] = [path.name for path in below if path not in left]
    notes = [f"{counted(len(linked), 'link')} not followed"] if linked else []
    notes += [f"{len(closed)} folders could not be read"] if closed else []
    return found, f" ({', '.join(notes)})" if notes else ""


#: settings of a sweep's runs, which need no checkpoint once they have finished
PASSING = {"checkpoint.last": False}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are after writing them to JSON and reading them."""
    content: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return content


def make_ready(run_dir: Path) -> bool:
    """Return whether an unfinished run can be resumed from a checkpoint; if not, remove
    its folder.
    """
    if run_dir.is_symlink():
        raise BenchError(
            f"{str(run_dir)!r} is a symbolic link, which is no place for a run; remove it"
        )
    if not run_dir.exists():
        return False
    from nanogpt_bench.checkpoint.format import steps  # not at the top: it imports torch

    if steps(run_dir):
        (run_dir / "traceback.txt").unlink(missing_ok=True)  # from the earlier start
        return True
    shutil.rmtree(run_dir)
    return False


def drop_checkpoints(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Remove a finished run's checkpoints, unless `checkpoint.last` or `.best` is set;
    a failed run's may show why.
    """
    folder, gone = run_dir / "checkpoints", run_dir / ".checkpoints.removed"
    asked = settings.get("checkpoint.last") or settings.get("checkpoint.best")
    if asked or summary_of(run_dir).get("status") != "finished":
        return
    with suppress(OSError):  # the next start tries again
        if folder.is_dir() and not gone.exists():
            folder.rename(
                gone
            )  # all at once: after a kill amid the removal the run is not resumed from the rest
        if gone.is_dir():
            shutil.rmtree(gone)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} without one."""
    try:
        content = read_json(run_dir / "summary.json", links=False)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


#: kinds of `failure` that the same settings cause again; others (a crash, too little
#: memory) come from outside
OF_TRAINING = ("nan", "divergence")
#: kinds of `stop` that settings cause; others (a signal, a full disk) come from outside
AS_ASKED = ("plateau", "time")


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Return whether a run ended by itself, and not from outside; False for one without
    a summary ({}).

    >>> nan, gone = ({"status": "failed", "failure": {"kind": kind}} for kind in ("nan", "FileNotFoundError"))
    >>> has_ended(nan), has_ended(gone), has_ended({"status": "stopped", "stop": {"kind": "signal"}}), has_ended({})
    (True, False, False, False)
    """
    status, failure, stop = (summary.get(key) for key in ("status", "failure", "stop"))
    if status == "failed":
        return at(failure, "kind") in OF_TRAINING
    return status == "finished" or (status == "stopped" and at(stop, "kind") in AS_ASKED)
