"""Run folders: finding and reading them, and deciding whether to run again.

`load_run` returns a `Run`, whatever is missing in the folder. `find_runs` finds run
folders below others. Curves of a run are thinned by `decimate` and smoothed by
`smooth`. `make_ready`, `drop_checkpoints` and `has_ended` are for sweeps.
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

from nanogpt_bench.config.endings import ASKED_STOPS, LOSS_FAILURES, RunStatus
from nanogpt_bench.config.metrics import SPEED, VAL_LOSS
from nanogpt_bench.config.renamed import with_current_sections
from nanogpt_bench.config.rules import stall_counts
from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.monitors.stall import ARRIVED, STALLS
from nanogpt_bench.runs.environment import at, history_lines
from nanogpt_bench.runs.read import ALERTS_FILE, METRICS_FILE, Records, finite, mapping, records
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, shortened
from nanogpt_bench.system.untrusted import read_json

RUN_FILES = ("config.yaml", METRICS_FILE, "summary.json")
#: the most characters of a run's name, rule or format
LONGEST_RUN_NAME = 200


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
        return _one_line_name(self.summary.get("name") or self.path.name)

    @property
    def rule(self) -> str:
        return _one_line_name(self.summary.get("rule") or self.config.get("rule") or "unknown")

    @property
    def format(self) -> str:
        """The weights' format; `none` for floats, `mixed` where layers differ."""
        return _one_line_name(self.summary.get("format") or _configured_format(self.config))

    @property
    def seed(self) -> int | None:
        seed = self.summary.get("seed", self.config.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `incomplete` without a summary."""
        return str(self.summary.get("status") or RunStatus.INCOMPLETE)

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
        """The number of alerts of each kind.

        They are those of alerts.jsonl or, where that has none, of the summary.
        """
        if self.alerts:
            return Counter(alert.kind for alert in self.alerts)
        summary_counts = self.summary.get("alerts")
        if not isinstance(summary_counts, Mapping):
            return {}
        counts: dict[str, int] = {}
        for kind, value in summary_counts.items():
            number = finite(value)
            if number:
                counts[str(kind)] = int(number)
        return counts

    @property
    def stop(self) -> Mapping[str, Any] | None:
        """Why a run was stopped before its end; None for one that was not."""
        stop = self.summary.get("stop")
        return stop if isinstance(stop, Mapping) else None

    @property
    def last_step(self) -> int | None:
        return self.metrics.last_step

    @property
    def stall_metric(self) -> str | None:
        """The stall metric that this run recorded.

        None for float weights, which don't stall.
        """
        name = self.summary.get("stall_metric")
        if name:
            return str(name) if "/" in str(name) else f"{STALLS[0].namespace}/{name}"
        return next((metric.name for metric in STALLS if metric.name in self.metrics.names), None)

    @property
    def stall_counts(self) -> bool:
        """True if a stall is a failure, see `config.rules.stall_counts`."""
        storage = at(self.config, "model.storage")
        writeback = at(self.config, "optimizer.writeback")
        writeback_end = at(self.config, "optimizer.writeback_end")
        return stall_counts(
            str(storage),
            None if writeback is None else str(writeback),
            None if writeback_end is None else str(writeback_end),
        )

    @property
    def stall(self) -> float | None:
        """The mean stall over the run.

        None where it was not recorded, or is no failure.
        """
        return self.number("stall") if self.stall_counts else None

    def number(self, key: str) -> float | None:
        """The summary's number under `key`; None where it is missing or not finite."""
        return finite(self.summary.get(key))

    def at_end(self, key: str) -> float | None:
        """The summary's number if the run reached its planned end, else None.

        Runs of other lengths don't compare.
        """
        return self.number(key) if self.status == RunStatus.FINISHED else None

    def curve(self, key: str, against: str = "step") -> tuple[list[float], list[float | None]]:
        """The values of `key` over those of `against`.

        None, a gap in the curve, stands for a value that is not finite.
        """
        return self.metrics.curve(key, against)


def _one_line_name(value: object) -> str:
    """Return a name as tables and legends show it.

    It is one line of printable text of at most `LONGEST_RUN_NAME` characters.
    """
    return shortened(printable(one_line(str(value))), LONGEST_RUN_NAME)


def _configured_format(config: Mapping[str, Any]) -> str:
    model = config.get("model")
    if not isinstance(model, Mapping):
        return NO_FORMAT
    names: set[str] = set()
    formats = model.get("formats")
    if isinstance(formats, Mapping):
        names.update(map(str, formats.values()))
    if model.get("format"):
        names.add(str(model["format"]))
    if len(names) > 1:
        return "mixed"
    return names.pop() if names else NO_FORMAT


def is_run_folder(path: Path) -> bool:
    """Return whether `path` is a folder with at least one of `RUN_FILES`."""
    return path.is_dir() and any((path / name).is_file() for name in RUN_FILES)


def load_run(path: Path) -> Run:
    """Return the run in a folder.

    Files that are missing or damaged are left out and named in its `notes`.
    """
    if not is_run_folder(path):
        raise BenchError(
            f"{str(path)!r} is not a run folder; a run folder has {' or '.join(RUN_FILES)}"
        )
    notes: list[str] = []
    config = with_current_sections(mapping(path / "config.yaml", notes))
    environment = mapping(path / "environment.json", notes)
    notes.extend(history_lines(environment))
    metrics = _metrics(path / METRICS_FILE, notes)
    summary = mapping(path / "summary.json", notes)
    alerts = read_alerts(path / ALERTS_FILE, notes)
    return Run(
        path=path,
        config=config,
        environment=environment,
        metrics=metrics,
        summary=summary or _summary_so_far(metrics),
        alerts=alerts,
        notes=tuple(notes),
    )


def _metrics(path: Path, notes: list[str]) -> Records:
    """Return the records of a metrics file whose steps increase; others are noted."""
    metrics, last_step = Records(), -1.0
    for number, record in records(path, notes):
        step = record["step"]
        if step <= last_step:
            notes.append(f"{path.name}: line {number} repeats step {step} and was left out")
        else:
            last_step = step
            metrics.add(record)
    return metrics


def _summary_so_far(metrics: Records) -> dict[str, Any]:
    """Return a summary made from the records of a run that has none."""
    summary: dict[str, Any] = {}
    _, losses = metrics.curve(VAL_LOSS.name)
    if losses:
        finite_losses = [loss for loss in losses if loss is not None]
        summary["first_val_loss"] = losses[0]
        summary["final_val_loss"] = losses[-1]
        summary["best_val_loss"] = min(finite_losses, default=None)
    for name, metric in (("tokens_per_s", SPEED), ("arrived", ARRIVED)):
        values = metrics.values(metric.name)
        if values:
            summary[name] = sum(values) / len(values)
    for metric in STALLS:
        values = metrics.values(metric.name)
        if values:
            summary["stall"] = sum(values) / len(values)
            summary["stall_metric"] = metric.name
    return summary


@dataclass(frozen=True)
class Alert:
    """One line of alerts.jsonl.

    `value` and `threshold` are None where the alert has none.
    """

    step: int
    kind: str
    level: str = "WARN"
    message: str = ""
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class Failure:
    """A failure found in a run: its kind, its first step, and the evidence."""

    kind: str
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def read_alerts(path: Path, notes: list[str]) -> tuple[Alert, ...]:
    """Return the alerts of a run in the order in which they were raised.

    Empty without a file.
    """
    if not path.is_file():
        return ()
    return tuple(_alert(record) for _, record in records(path, notes))


def _alert(record: Mapping[str, Any]) -> Alert:
    return Alert(
        step=int(record["step"]),
        kind=str(record.get("kind") or "unnamed"),
        level=str(record.get("level") or "WARN"),
        message=one_line(str(record.get("message") or "")),
        value=finite(record.get("value")),
        threshold=finite(record.get("threshold")),
    )


def failures_in(summary: Mapping[str, Any]) -> tuple[Failure, ...]:
    """Return the failures that a summary names; entries without a kind are left out."""
    entries = summary.get("failures")
    failures = []
    for entry in entries if isinstance(entries, list | tuple) else ():
        if not isinstance(entry, Mapping) or not entry.get("kind"):
            continue
        step, evidence = finite(entry.get("step")), entry.get("evidence")
        failures.append(
            Failure(
                kind=str(entry["kind"]),
                step=None if step is None else int(step),
                evidence=evidence if isinstance(evidence, Mapping) else {},
            )
        )
    return tuple(failures)


MAX_POINTS = 500


def decimate(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Return the indices of at most `limit` of `count` points.

    They are evenly spread, with the first and the last.

    >>> decimate(5, 3), decimate(2, 3)
    ([0, 2, 4], [0, 1])
    """
    if limit < 2:
        raise ValueError(
            f"limit={limit!r} is not allowed; give 2 or more, since the first and the last point "
            "are kept"
        )
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the exponential moving average over about `window` points.

    It has no bias to 0; None stays None. s_t = sum_i a^(t-i) y_i / sum_i a^(t-i) with
    a = 1 - 2/(window+1), over the points that are not None.

    >>> smooth([2.0, None, 2.0], 10)
    [2.0, None, 2.0]
    """
    decay = 1 - 2 / (window + 1)
    total = weight = 0.0
    averages: list[float | None] = []
    for value in values:
        if value is None:
            averages.append(None)
            continue
        total = decay * total + value
        weight = decay * weight + 1
        averages.append(total / weight)
    return averages


def smoothing_window(count: int) -> int:
    """Return the smoothing window for a training loss of `count` steps.

    It is a fortieth of them, 1 to 50 steps.

    >>> smoothing_window(400)
    10
    """
    return min(50, max(1, count // 40))


#: a file that every sweep's folder has, and the folder in it with the trials of its
#: tuning
SWEEP, TRIALS = "sweep.json", "trials"


def find_runs(paths: Iterable[Path], say: Callable[[str], None] | None = None) -> list[Path]:
    """Return the run folders among `paths` and below them, each once.

    Inside run folders, hidden folders, links and trials of a sweep nothing is searched.
    `say` gets a line about each searched folder: runs found, links not followed,
    folders that could not be read.
    """
    #: by the place without links
    runs: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise BenchError(f"run folder {str(path)!r} does not exist")
        if is_run_folder(path):
            runs.setdefault(path.resolve(), path)
            continue
        search = _search(path)
        if not search.runs:
            raise BenchError(
                f"{str(path)!r} is not a run folder and contains none{search.left_out}; a run "
                f"folder has {' or '.join(RUN_FILES)}"
            )
        for run in search.runs:
            runs.setdefault(run.resolve(), run)
        if say is not None:
            folders = len({run.parent for run in search.runs})
            spread = f" in {folders} folders" if folders > 1 else ""
            count = counted(len(search.runs), "run")
            say(printable(f"{path}: {count} found{spread}{search.left_out}"))
    return list(runs.values())


@dataclass
class _Search:
    """The run folders below a folder, and what was not searched."""

    #: those in a folder by name before those further down
    runs: list[Path] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)
    errors: list[OSError] = field(default_factory=list)

    @property
    def left_out(self) -> str:
        """What was not searched, in words with a space before; "" for nothing."""
        notes = []
        if self.links:
            notes.append(f"{counted(len(self.links), 'link')} not followed")
        if self.errors:
            notes.append(f"{len(self.errors)} folders could not be read")
        return f" ({', '.join(notes)})" if notes else ""


def _search(top: Path) -> _Search:
    search = _Search()
    for place, names, files in os.walk(top, onerror=search.errors.append):
        unsearched = []
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith("."):
                continue
            if path.is_symlink():
                search.links.append(path)
            elif is_run_folder(path):
                search.runs.append(path)
            elif name != TRIALS or SWEEP not in files:
                unsearched.append(name)
        # os.walk goes on in the folders that stay in this list.
        names[:] = unsearched
    return search


#: settings of a sweep's runs that do not have them: no checkpoint at the end, since a
#: run that has finished needs none
SWEEP_DEFAULTS = {"checkpoint.last": False}


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they are after writing them to JSON and reading them."""
    content: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return content


def make_ready(run_dir: Path) -> bool:
    """Remove an unfinished run's folder, unless the run can be resumed.

    Return whether it can: whether there is a checkpoint.
    """
    if run_dir.is_symlink():
        raise BenchError(
            f"{str(run_dir)!r} is a symbolic link; runs are written to real folders only; remove "
            "the link"
        )
    if not run_dir.exists():
        return False
    # not at the top: it imports torch
    from nanogpt_bench.checkpoint.format import steps

    if steps(run_dir):
        # The traceback of the earlier start would be taken for this one's.
        (run_dir / "traceback.txt").unlink(missing_ok=True)
        return True
    shutil.rmtree(run_dir)
    return False


def drop_checkpoints(run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Remove a finished run's checkpoints.

    They stay if `checkpoint.last` or `.best` is set. Those of a failed run stay, since
    they may show why it failed.
    """
    is_asked_for = settings.get("checkpoint.last") or settings.get("checkpoint.best")
    if is_asked_for or summary_of(run_dir).get("status") != RunStatus.FINISHED:
        return
    folder, removed = run_dir / "checkpoints", run_dir / ".checkpoints.removed"
    # After an error the next start tries again.
    with suppress(OSError):
        if folder.is_dir() and not removed.exists():
            # All at once: after a kill amid the removal the run is not resumed from the
            # rest.
            folder.rename(removed)
        if removed.is_dir():
            shutil.rmtree(removed)


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} without one."""
    try:
        content = read_json(run_dir / "summary.json", links=False)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def has_ended(summary: Mapping[str, Any]) -> bool:
    """Return whether a run ended by itself, and not from outside.

    False for one without a summary ({}).

    >>> has_ended({"status": "failed", "failure": {"kind": "nan"}})
    True
    >>> has_ended({"status": "failed", "failure": {"kind": "FileNotFoundError"}})
    False
    >>> has_ended({"status": "stopped", "stop": {"kind": "signal"}}), has_ended({})
    (False, False)
    """
    status = summary.get("status")
    if status == RunStatus.FAILED:
        return at(summary, "failure.kind") in LOSS_FAILURES
    if status == RunStatus.STOPPED:
        return at(summary, "stop.kind") in ASKED_STOPS
    return status == RunStatus.FINISHED
