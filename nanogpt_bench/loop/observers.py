"""The observers of a run: its monitors, its records and alerts, the trend.

`build_observers` puts them in the order in which they are called: those that measure
come first, then the trend. They add to a step's record (`complete_record`) before the
last ones write or judge it (`take_record`).
"""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import yaml
from torch import nn

from nanogpt_bench.config import metrics
from nanogpt_bench.config.endings import FailureClass
from nanogpt_bench.config.metrics import MONITORS, TREND
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import to_yaml
from nanogpt_bench.failures import SOURCE_METRICS, Finding, RunEvidence, holds_now, judge_run
from nanogpt_bench.failures.table import CLASSES, ENDINGS
from nanogpt_bench.loop.anomalies import AnomalyObserver
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import MODULES
from nanogpt_bench.monitors.capture import UpdateMonitor, UpdateObserver, Watched
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.monitors.shadow import ShadowObserver
from nanogpt_bench.monitors.stall import UPDATE_LOST, Stall
from nanogpt_bench.runs.load import Alert, Run
from nanogpt_bench.runs.read import ALERTS_FILE, METRICS_FILE, Records, records
from nanogpt_bench.setup.memory import plain_tensors
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import NO_LINKS


class LineFile:
    """A file that grows by whole lines, created with the first one.

    A resumed run cuts it back first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Add lines and flush them."""
        if self._file is None:
            descriptor = self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8")
        try:
            self._file.writelines(line + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            # An error of writing does not name the file.
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _open(self, flags: int) -> int:
        """Open the file for writing, but no symbolic link.

        The folder may come from somebody else.
        """
        try:
            return os.open(self._path, flags | NO_LINKS, 0o666)
        except OSError:
            if self._path.is_symlink():
                raise BenchError(
                    f"{str(self._path)!r} is a symbolic link; lines are added to real files only"
                ) from None
            raise

    def length(self) -> int:
        """Return the bytes written so far, once they are on the disk.

        A checkpoint must not count on lost ones.
        """
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._path.stat().st_size

    def cut(self, length: int) -> None:
        """Drop everything after the first `length` bytes."""
        self.close()
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < length:
            raise BenchError(
                f"{str(self._path)!r} has {size} bytes, but had {length} at the checkpoint: lines "
                "are lost"
            )
        if size > length:
            with os.fdopen(self._open(os.O_WRONLY), "wb") as file:
                file.truncate(length)
        if size and not length:
            self._path.unlink()

    def close(self) -> None:
        """Close the file, if it was ever opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonlObserver(Observer):
    """Appends every step's record to a file and flushes it.

    A value that is not finite is written as null.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def close(self) -> None:
        self._lines.close()

    def state(self) -> dict[str, Any]:
        return {"bytes": self._lines.length()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])

    def take_record(self, step: Step) -> None:
        record: dict[str, Any] = {"step": step.number}
        for name, value in step.record.items():
            is_finite = value is not None and math.isfinite(value)
            record[name] = value if is_finite else None
        self._lines.append([json.dumps(record, allow_nan=False)])


#: names of the metrics by which failures are judged
_JUDGED = frozenset((*SOURCE_METRICS, *(row.figure for row in CLASSES)))
#: beginnings of the names of the judged metrics that are measured by layer
_JUDGED_BY_LAYER = tuple(
    f"{row.figure}/" for row in CLASSES if row.layers or row.figure == UPDATE_LOST.name
)
#: a long run is judged again once it has grown by this share, so that judging takes a
#: constant share of its time
_GROWTH = 0.05


class AlertObserver(Observer):
    """Judges a run's records after measurements and validations.

    Each kind of alert is raised once.
    """

    def __init__(
        self, config: Config, run_dir: Path, tell: Callable[[Alert], None] = lambda alert: None
    ) -> None:
        self._interval = config.monitor.interval
        self._tell = tell
        self._run_dir = run_dir
        self._lines = LineFile(run_dir / ALERTS_FILE)
        self._records = Records()
        run = Run(run_dir, yaml.safe_load(to_yaml(config)), metrics=self._records)
        self._evidence = RunEvidence(run)
        self._standstill = Standstill()
        #: number of the step after which the run was last judged
        self._judged_step = 0
        #: alerts raised, by kind
        self.counts: Counter[str] = Counter()

    def take_record(self, step: Step) -> None:
        self._records.add({"step": step.number, **_judged_metrics(step.record)})
        for event in self._standstill.see(step):
            self._raise(Alert(step.number, event.kind, message=event.message))
        if self._is_due(step):
            self._judged_step = step.number
            for finding in judge_run(self._evidence, running=not step.last):
                if finding.found:
                    self._raise(_failure_alert(finding, step))

    def _is_due(self, step: Step) -> bool:
        """Return whether the run is judged after this step.

        It is at the last step, at the first one that is not finite, and after
        measurements and validations, less often in a long run.
        """
        if step.last or (step.anomaly is not None and FailureClass.NAN not in self.counts):
            return True
        is_measured = step.number % self._interval == 0 or metrics.VAL_LOSS.name in step.record
        return is_measured and step.number >= self._judged_step * (1 + _GROWTH)

    def state(self) -> dict[str, Any]:
        return {
            "bytes": self._lines.length(),
            "counts": dict(self.counts),
            "judged": self._judged_step,
            "standstill": self._standstill.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])
        self.counts = Counter(state["counts"])
        self._standstill.load_state(state["standstill"])
        self._judged_step = state.get("judged", 0)
        for _, record in records(self._run_dir / METRICS_FILE, []):
            self._records.add(_judged_metrics(record))

    def _raise(self, alert: Alert) -> None:
        if alert.kind in self.counts:
            return
        self.counts[alert.kind] += 1
        self._lines.append([json.dumps(asdict(alert), allow_nan=False)])
        # Alerts are rare.
        self._lines.close()
        self._tell(alert)


def _judged_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    judged = {}
    for name, value in record.items():
        if name in _JUDGED or name.startswith(_JUDGED_BY_LAYER):
            judged[name] = value
    return judged


def _failure_alert(finding: Finding, step: Step) -> Alert:
    """Return the alert of a new failure; that of `nan` has the place where it began."""
    message = finding.message
    if finding.kind is FailureClass.NAN and step.anomaly:
        message += f"; first seen in {step.anomaly.where}"
    criterion = finding.first_criterion
    assert criterion is not None
    value = criterion.value
    return Alert(
        step.number,
        str(finding.kind),
        message=message,
        value=value if value is not None and math.isfinite(value) else None,
        threshold=criterion.bound,
    )


_FLAG_NAMES = tuple(flag.name for flag in metrics.FLAGS)


@dataclass
class _Snapshot:
    """The state at a validation."""

    number: int
    #: the optimizer's count of steps, summed over parameters; None where it does not
    #: count
    steps: float | None
    #: hash of the weights
    weights: int


class Standing(NamedTuple):
    """A standstill: `no_step` or `no_change`, and a sentence."""

    kind: str
    message: str


class Standstill:
    """Notices at a validation that weights or optimizer have stood still.

    It compares with the validation before.

    >>> from nanogpt_bench.monitors.points import Step
    >>> layer = nn.Linear(2, 1)
    >>> adamw = torch.optim.AdamW(layer.parameters())
    >>> standstill = Standstill()
    >>> for number in (0, 4):
    ...     step = Step(number, layer, adamw, record={"val/loss": 1.0})
    ...     events = list(standstill.see(step))
    >>> events[0].message
    'no weight changed from step 0 to step 4, in 1 step'
    """

    def __init__(self) -> None:
        self._last: _Snapshot | None = None
        #: steps since the last validation whose loss and gradient were finite
        self._finite_steps = 0

    def see(self, step: Step) -> Iterator[Standing]:
        """Take in a step whose record is complete; yield each standstill."""
        if step.number > 0 and not any(step.record.get(flag) for flag in _FLAG_NAMES):
            self._finite_steps += 1
        if metrics.VAL_LOSS.name not in step.record:
            return
        last = self._last
        new = _Snapshot(step.number, _step_count(step.optimizer), _hash_weights(step.model))
        if last is not None and self._finite_steps:
            steps = counted(self._finite_steps, "step")
            period = f"from step {last.number} to step {new.number}, in {steps}"
            if new.steps is not None and new.steps == last.steps:
                yield Standing("no_step", f"the optimizer took no step {period}")
            if new.weights == last.weights:
                yield Standing("no_change", f"no weight changed {period}")
        self._last = new
        self._finite_steps = 0

    def state(self) -> dict[str, Any]:
        # Keys stay as earlier checkpoints have them.
        last = None if self._last is None else asdict(self._last)
        return {"last": last, "due": self._finite_steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        self._last = None if last is None else _Snapshot(**last)
        self._finite_steps = state["due"]


def _step_count(optimizer: torch.optim.Optimizer) -> float | None:
    counts = []
    for state in optimizer.state.values():
        if isinstance(state, Mapping) and "step" in state:
            counts.append(float(state["step"]))
    return sum(counts) if counts else None


@torch.no_grad()
def _hash_weights(model: nn.Module) -> int:
    """Return a hash of the bits of all trained weights that this process has."""
    checksum = 0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        for part in plain_tensors(parameter):
            # Only the bytes of a dense tensor are in order; a weight has any strides.
            dense = torch.empty(part.numel(), dtype=part.dtype)
            dense.copy_(part.detach().reshape(-1))
            checksum = zlib.crc32(dense.view(torch.uint8).numpy().data, checksum)
    return checksum


#: weight of a new loss in the smoothed one, which is an average over about twenty steps
SMOOTHING_WEIGHT = 0.05


class Smoothed:
    """An exponential average that starts from its first value, not from zero.

    >>> average = Smoothed()
    >>> average.add(2.0), average.add(4.0) > 3.0
    (2.0, True)
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value and return the average."""
        self._sum += SMOOTHING_WEIGHT * (value - self._sum)
        self._weight += SMOOTHING_WEIGHT * (1 - self._weight)
        return self._sum / self._weight

    def state(self) -> dict[str, Any]:
        """Return the sum and the weight it is divided by."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._sum = state["sum"]
        self._weight = state["weight"]


def baseline_curve(baseline: str | None) -> Mapping[int, float]:
    """Return the smoothed training loss of `alerts.baseline`, a run folder, by step.

    It is empty without a baseline.
    """
    if baseline is None:
        return {}
    from nanogpt_bench.runs.load import is_run_folder, load_run

    curve: dict[int, float] = {}
    folder = Path(baseline)
    if is_run_folder(folder):
        average = Smoothed()
        steps, losses = load_run(folder).curve(metrics.TRAIN_LOSS.name)
        for step, loss in zip(steps, losses, strict=True):
            if loss is not None:
                curve[int(step)] = average.add(loss)
    if not curve:
        raise BenchError(
            f"alerts.baseline: {baseline!r} is not a run folder with {metrics.TRAIN_LOSS.name} in "
            "its metrics.jsonl"
        )
    return curve


class TrendObserver(Observer):
    """Adds `train/loss_smoothed` to every record and `train/excess` to validations'.

    It judges how a run goes.
    """

    def __init__(self, baseline: Mapping[int, float]) -> None:
        self._baseline = baseline
        self._average = Smoothed()
        self._smoothed_loss = math.nan
        self._best_smoothed_loss = math.inf
        self._best_val_loss = math.inf
        #: at validations, the smoothed training loss over its reference, minus 1
        self.excess: list[float] = []
        #: at validations, the validation loss over its lowest, minus 1
        self.flatness: list[float] = []

    @property
    def diverging(self) -> bool:
        """True once the training loss was too high at enough validations in a row."""
        return holds_now(ENDINGS[FailureClass.DIVERGENCE], self.excess)

    @property
    def flat(self) -> bool:
        """True once the validation loss did not fall at enough validations in a row."""
        return holds_now(ENDINGS[FailureClass.PLATEAU], self.flatness)

    def state(self) -> dict[str, Any]:
        return {
            "average": self._average.state(),
            "smoothed": self._smoothed_loss,
            "best": [self._best_smoothed_loss, self._best_val_loss],
            "excess": self.excess,
            "flatness": self.flatness,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._average.load_state(state["average"])
        self._smoothed_loss = state["smoothed"]
        self._best_smoothed_loss, self._best_val_loss = state["best"]
        self.excess = list(state["excess"])
        self.flatness = list(state["flatness"])

    def complete_record(self, step: Step) -> None:
        loss = step.record.get(metrics.TRAIN_LOSS.name)
        if loss is not None and math.isfinite(loss):
            self._smoothed_loss = self._average.add(loss)
            step.record[metrics.SMOOTHED_LOSS.name] = self._smoothed_loss
        if metrics.VAL_LOSS.name in step.record:
            self._see_validation(step)

    def _see_validation(self, step: Step) -> None:
        val_loss = step.record[metrics.VAL_LOSS.name]
        if val_loss is None or not math.isfinite(val_loss):
            val_loss = math.inf
        # The validation before the first step has nothing to be compared with.
        if step.number:
            is_finite = val_loss != math.inf
            flatness = share_above(val_loss, self._best_val_loss) if is_finite else math.inf
            self.flatness.append(flatness)
        self._best_val_loss = min(val_loss, self._best_val_loss)
        if not math.isfinite(self._smoothed_loss):
            return
        self._best_smoothed_loss = min(self._best_smoothed_loss, self._smoothed_loss)
        # The baseline may be shorter, and has no loss at this step then.
        reference: float | None = self._best_smoothed_loss
        if self._baseline:
            reference = self._baseline.get(step.number)
        if reference is not None:
            excess = share_above(self._smoothed_loss, reference)
            self.excess.append(excess)
            step.record[metrics.EXCESS.name] = excess


def share_above(loss: float, reference: float) -> float:
    """Return a loss over a reference, minus 1.

    It is inf or 0 if the reference is 0, as for a text of one character.

    >>> share_above(3.0, 2.0), share_above(1.0, 0.0), share_above(0.0, 0.0)
    (0.5, inf, 0.0)
    """
    if reference > 0:
        return loss / reference - 1
    return math.inf if loss > reference else 0.0


@dataclass
class Observers:
    """A run's observers: some by name, and all in the order of their calls."""

    trend: TrendObserver | None
    stall: Stall | None
    shadow: ShadowObserver | None
    alerts: AlertObserver | None
    all: list[Observer]


def build_observers(
    config: Config,
    trainer: Trainer,
    run_dir: Path | None,
    *,
    baseline: Mapping[int, float],
    tell: Callable[[Alert], None],
) -> Observers:
    """Return the observers of a resolved configuration.

    Files in `run_dir` are opened, if it is not None.
    """
    watched = Watched.from_model(config, trainer.model, trainer.device, trainer.look)
    shadow = MODULES["shadow"].build(watched) if config.shadow.enabled else None
    monitors = _build_monitors(config, watched)
    update_monitors = [monitor for monitor in monitors if isinstance(monitor, UpdateMonitor)]
    updates = None
    if update_monitors and watched.quantized:
        updates = UpdateObserver(watched, update_monitors)
    floor = MODULES["floor"].build(watched)
    trend = TrendObserver(baseline) if TREND in config.monitor.watch else None
    jsonl = None
    alerts = None
    if run_dir is not None:
        jsonl = JsonlObserver(run_dir / METRICS_FILE)
        if config.alerts.enabled:
            alerts = AlertObserver(config, run_dir, tell)
    anomaly = AnomalyObserver(run_dir, trainer) if config.alerts.save_on_anomaly else None
    ordered: list[Observer | None] = [
        shadow,
        watched.capture,
        updates,
        *monitors,
        floor,
        watched.turns,
        trend,
        jsonl,
        alerts,
        anomaly,
    ]
    return Observers(
        trend=trend,
        stall=_find_stall(monitors),
        shadow=shadow,
        alerts=alerts,
        all=[observer for observer in ordered if observer is not None],
    )


def _build_monitors(config: Config, watched: Watched) -> list[Observer]:
    monitors = []
    for name in MONITORS:
        if name in config.monitor.watch:
            monitor = MODULES[name].build(watched)
            if monitor is not None:
                monitors.append(monitor)
    return monitors


def _find_stall(monitors: Iterable[Observer]) -> Stall | None:
    for monitor in monitors:
        if isinstance(monitor, Stall):
            return monitor
    return None
