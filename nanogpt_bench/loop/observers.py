"""Observers of a run beside its monitors: records and alerts, line by line, and the
trend; the order of all.
"""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from torch import nn

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MONITORS, TREND
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import to_yaml
from nanogpt_bench.failures import SOURCES, Evidence, Finding, holds_now, judge
from nanogpt_bench.failures.table import CLASSES, ENDINGS
from nanogpt_bench.loop.anomalies import AnomalyObserver
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import MODULES
from nanogpt_bench.monitors.capture import UpdateMonitor, UpdateObserver, Watched
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.monitors.shadow import ShadowObserver
from nanogpt_bench.monitors.stall import UPDATE_LOST, Stall
from nanogpt_bench.runs.load import Alert, Run
from nanogpt_bench.runs.read import Records, records
from nanogpt_bench.setup.memory import plain_tensors
from nanogpt_bench.system.errors import BenchError, counted
from nanogpt_bench.system.files import NO_LINKS


class LineFile:
    """A file that grows by whole lines, created with the first one; a resumed run cuts
    it back first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Add lines and flush them."""
        if self._file is None:
            self._file = os.fdopen(
                self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8"
            )
        try:
            self._file.writelines(line + "\n" for line in lines)
            self._file.flush()
        except OSError as error:  # an error of writing does not name the file
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _open(self, flags: int) -> int:
        """Open the file for writing, but no symbolic link: the folder may come from
        somebody else.
        """
        try:
            return os.open(self._path, flags | NO_LINKS, 0o666)
        except OSError:
            if self._path.is_symlink():
                raise BenchError(
                    f"{str(self._path)!r} is a symbolic link; lines are added to a file only"
                ) from None
            raise

    def length(self) -> int:
        """Return the bytes written so far, once they are on the disk: a checkpoint must
        not count on lost ones.
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
                f"{str(self._path)!r} has {size} bytes and had {length} at the checkpoint: lines "
                f"are lost"
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
    """Appends every step's record to a file and flushes it; a value that is not finite
    is written as null.
    """

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def close(self) -> None:
        self._lines.close()

    def state(self) -> dict[str, Any]:
        return {"bytes": self._lines.length()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])

    def written(self, step: Step) -> None:
        known = {
            key: value
            for key, value in step.record.items()
            if value is not None and math.isfinite(value)
        }
        record = {**dict.fromkeys(step.record), **known}
        self._lines.append([json.dumps({"step": step.number, **record}, allow_nan=False)])


#: names of the metrics that failures are judged by, and the beginnings of the names of
#: those measured by layer
_JUDGED = frozenset((*SOURCES, *(row.figure for row in CLASSES)))
_OF_LAYERS = tuple(
    f"{row.figure}/" for row in CLASSES if row.layers or row.figure == UPDATE_LOST.name
)
#: a long run is judged again once it has grown by this share, so that judging takes the
#: same share of its time
_GROWTH = 0.05


class AlertObserver(Observer):
    """Judges a run's records after measurements and validations; each kind of alert is
    raised once.
    """

    def __init__(
        self, config: Config, run_dir: Path, tell: Callable[[Alert], None] = lambda alert: None
    ) -> None:
        self._interval, self._tell, self._run_dir = config.monitor.interval, tell, run_dir
        self._lines, self._records = LineFile(run_dir / "alerts.jsonl"), Records()
        self._evidence = Evidence(
            Run(run_dir, yaml.safe_load(to_yaml(config)), metrics=self._records)
        )
        self._standstill, self._judged = Standstill(), 0
        #: alerts raised, by kind
        self.counts: Counter[str] = Counter()

    def written(self, step: Step) -> None:
        self._records.add({"step": step.number, **_judged_of(step.record)})
        for kind, text in self._standstill.see(step):
            self._raise(Alert(step.number, kind, message=text))
        if self._is_due(step):
            self._judged = step.number
            for finding in judge(self._evidence, running=not step.last):
                if finding.found:
                    self._raise(_alert(finding, step))

    def _is_due(self, step: Step) -> bool:
        """At the last step, a first one that is not finite, a measurement or a
        validation; less often in a long run.
        """
        if step.last or (step.anomaly is not None and "nan" not in self.counts):
            return True
        looked = step.number % self._interval == 0 or metrics.VAL_LOSS.name in step.record
        return looked and step.number >= self._judged * (1 + _GROWTH)

    def state(self) -> dict[str, Any]:
        own = {"bytes": self._lines.length(), "counts": dict(self.counts), "judged": self._judged}
        return own | {"standstill": self._standstill.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])
        self.counts = Counter(state["counts"])
        self._standstill.load_state(state["standstill"])
        self._judged = state.get("judged", 0)
        for _, record in records(self._run_dir / "metrics.jsonl", []):
            self._records.add(_judged_of(record))

    def _raise(self, alert: Alert) -> None:
        if alert.kind in self.counts:
            return
        self.counts[alert.kind] += 1
        self._lines.append([json.dumps(asdict(alert), allow_nan=False)])
        self._lines.close()  # alerts are rare
        self._tell(alert)


def _judged_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in record.items()
        if name in _JUDGED or name.startswith(_OF_LAYERS)
    }


def _alert(finding: Finding, step: Step) -> Alert:
    """The alert of a failure just found; for `nan` with the place where it was first
    seen.
    """
    where = (
        f"; first seen in {step.anomaly.where}" if finding.kind == "nan" and step.anomaly else ""
    )
    first = min((c for c in finding.criteria if c.step is not None), key=lambda c: c.step or 0)
    value = first.value if first.value is not None and math.isfinite(first.value) else None
    return Alert(
        step.number,
        finding.kind,
        message=finding.message + where,
        value=value,
        threshold=first.bound,
    )


_FLAGS = tuple(flag.name for flag in metrics.FLAGS)


@dataclass
class _Snapshot:
    """The state at a validation: the step's number, the optimizer's count of steps, and
    a hash of the weights.
    """

    number: int
    #: the optimizer's count of steps, summed over parameters; None where it does not
    #: count
    steps: float | None
    weights: int


class Standstill:
    """Finds out at every validation whether weights and optimizer have stood still
    since the one before.

    >>> from nanogpt_bench.monitors.points import Step
    >>> layer = nn.Linear(2, 1)
    >>> adamw = torch.optim.AdamW(layer.parameters())
    >>> seen = Standstill()
    >>> found = [list(seen.see(Step(n, layer, adamw, record={"val/loss": 1.0}))) for n in (0, 4)]
    >>> found[1]
    [('no_change', 'no weight changed from step 0 to step 4, in 1 step')]
    """

    def __init__(self) -> None:
        self._last: _Snapshot | None = None
        #: steps since the last validation whose loss and gradient were finite
        self._due = 0

    def see(self, step: Step) -> Iterator[tuple[str, str]]:
        """Take in a step whose record is complete; yield kind and message of each
        standstill.
        """
        if step.number > 0 and not any(step.record.get(flag) for flag in _FLAGS):
            self._due += 1
        if metrics.VAL_LOSS.name not in step.record:
            return
        last, now = self._last, _Snapshot(step.number, _steps(step.optimizer), _hash(step.model))
        if last is not None and self._due:
            between = (
                f"from step {last.number} to step {now.number}, in {counted(self._due, 'step')}"
            )
            if now.steps is not None and now.steps == last.steps:
                yield "no_step", f"the optimizer took no step {between}"
            if now.weights == last.weights:
                yield "no_change", f"no weight changed {between}"
        self._last, self._due = now, 0

    def state(self) -> dict[str, Any]:
        return {"last": None if self._last is None else asdict(self._last), "due": self._due}

    def load_state(self, state: Mapping[str, Any]) -> None:
        last = state["last"]
        self._last, self._due = None if last is None else _Snapshot(**last), state["due"]


def _steps(optimizer: torch.optim.Optimizer) -> float | None:
    states = [
        state
        for state in optimizer.state.values()
        if isinstance(state, Mapping) and "step" in state
    ]
    return sum(float(state["step"]) for state in states) if states else None


@torch.no_grad()
def _hash(model: nn.Module) -> int:
    """A hash of the bits of all trained weights that this process holds."""
    found = 0
    for parameter in model.parameters():
        for part in plain_tensors(parameter) if parameter.requires_grad else ():
            flat = torch.empty(part.numel(), dtype=part.dtype).copy_(
                part.detach().reshape(-1)
            )  # of any strides
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found


#: weight of a new loss in the smoothed one, which is an average over about twenty steps
SMOOTHING = 0.05


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
        self._sum += SMOOTHING * (value - self._sum)
        self._weight += SMOOTHING * (1 - self._weight)
        return self._sum / self._weight

    def state(self) -> dict[str, Any]:
        """Return the sum and the weight it is divided by."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._sum, self._weight = state["sum"], state["weight"]


def baseline_curve(baseline: str | None) -> Mapping[int, float]:
    """Return the smoothed training loss of `alerts.baseline`, a run folder, by step;
    empty without a baseline.
    """
    if baseline is None:
        return {}
    from nanogpt_bench.runs.load import is_run_folder, load_run

    folder = Path(baseline)
    run = load_run(folder) if is_run_folder(folder) else None
    steps, losses = run.curve(metrics.TRAIN_LOSS.name) if run else ([], [])
    average = Smoothed()
    curve = {
        int(step): average.add(loss)
        for step, loss in zip(steps, losses, strict=True)
        if loss is not None
    }
    if not curve:
        needed = f"run folder with a {metrics.TRAIN_LOSS.name} in metrics.jsonl"
        raise BenchError(f"alerts.baseline: {baseline!r} is no {needed}")
    return curve


class TrendObserver(Observer):
    """Adds `train/loss_smoothed` to every record and `train/excess` to those of
    validations; judges how a run goes.
    """

    def __init__(self, baseline: Mapping[int, float]) -> None:
        self._baseline = baseline
        self._average, self._smoothed = Smoothed(), math.nan
        self._own_best = self._best_val = math.inf
        #: at validations: smoothed training loss over its reference, and validation
        #: loss over its lowest, each minus 1
        self.excess, self.flatness = list[float](), list[float]()

    @property
    def diverging(self) -> bool:
        """True once the training loss has been too high at enough validations in a row."""
        return holds_now(ENDINGS["divergence"], self.excess)

    @property
    def flat(self) -> bool:
        """True once the validation loss has not fallen at enough validations in a row."""
        return holds_now(ENDINGS["plateau"], self.flatness)

    def state(self) -> dict[str, Any]:
        return {
            "average": self._average.state(),
            "smoothed": self._smoothed,
            "best": [self._own_best, self._best_val],
            "excess": self.excess,
            "flatness": self.flatness,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._average.load_state(state["average"])
        self._smoothed = state["smoothed"]
        self._own_best, self._best_val = state["best"]
        self.excess, self.flatness = list(state["excess"]), list(state["flatness"])

    def written(self, step: Step) -> None:
        loss = step.record.get(metrics.TRAIN_LOSS.name)
        if loss is not None and math.isfinite(loss):
            self._smoothed = step.record[metrics.SMOOTHED_LOSS.name] = self._average.add(loss)
        if metrics.VAL_LOSS.name not in step.record:
            return
        val = step.record[metrics.VAL_LOSS.name]
        val = math.inf if val is None or not math.isfinite(val) else val
        if step.number:
            self.flatness.append(math.inf if val == math.inf else share_above(val, self._best_val))
        self._best_val = min(val, self._best_val)
        if not math.isfinite(self._smoothed):
            return
        self._own_best = min(self._own_best, self._smoothed)
        reference = self._baseline.get(step.number) if self._baseline else self._own_best
        if reference is not None:  # the baseline may be shorter
            self.excess.append(share_above(self._smoothed, reference))
            step.record[metrics.EXCESS.name] = self.excess[-1]


def share_above(loss: float, reference: float) -> float:
    """Return a loss over a reference, minus 1; inf or 0 if the reference is 0, as for a
    text of one character.

    >>> share_above(3.0, 2.0), share_above(1.0, 0.0), share_above(0.0, 0.0)
    (0.5, inf, 0.0)
    """
    if reference > 0:
        return loss / reference - 1
    return math.inf if loss > reference else 0.0


@dataclass
class Observers:
    """A run's observers: by name those that the loop reads, and all in the order in
    which they are called.
    """

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
    """Return the observers of a resolved configuration; files in `run_dir` are opened,
    where there is one.
    """
    watch = config.monitor.watch
    trend = TrendObserver(baseline) if TREND in watch else None
    alerts = (
        AlertObserver(config, run_dir, tell)
        if run_dir is not None and config.alerts.enabled
        else None
    )
    watched = Watched.from_model(config, trainer.model, trainer.device, trainer.look)
    shadow = MODULES["shadow"].build(watched) if config.shadow.enabled else None
    monitors = [
        built
        for name in MONITORS
        if name in watch and (built := MODULES[name].build(watched)) is not None
    ]
    # Observers that add to a record come before those that write it.
    sinks: list[Observer | None] = []
    if run_dir is not None:
        sinks = [JsonlObserver(run_dir / "metrics.jsonl"), alerts]
    anomaly = AnomalyObserver(run_dir, trainer) if config.alerts.save_on_anomaly else None
    watching = [monitor for monitor in monitors if isinstance(monitor, UpdateMonitor)]
    updates = UpdateObserver(watched, watching) if watching and watched.quantized else None
    ordered = [shadow, watched.capture, updates, *monitors, watched.turns, trend, *sinks, anomaly]
    stall = next((monitor for monitor in monitors if isinstance(monitor, Stall)), None)
    return Observers(
        trend, stall, shadow, alerts, [observer for observer in ordered if observer is not None]
    )
