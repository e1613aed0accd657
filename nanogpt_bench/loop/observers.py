"""Observers of a run: the trend of its losses, and how all of them are made and ordered."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MONITORS, TREND
from nanogpt_bench.config.schema import Config
from nanogpt_bench.failures.judge import holds_now
from nanogpt_bench.failures.table import ENDINGS
from nanogpt_bench.loop.anomalies import AnomalyObserver
from nanogpt_bench.loop.lines import AlertObserver, JsonlObserver
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.monitors import MODULES
from nanogpt_bench.monitors.capture import UpdateMonitor, UpdateObserver, Watched
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.monitors.shadow import ShadowObserver
from nanogpt_bench.monitors.stall import Stall
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.system.errors import BenchError

#: weight of a new loss in the smoothed one: it remembers about twenty steps
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
        """Take a value in and return the average."""
        self._sum += SMOOTHING * (value - self._sum)
        self._weight += SMOOTHING * (1 - self._weight)
        return self._sum / self._weight

    def state(self) -> dict[str, Any]:
        """Return the sum and the weight it is divided by."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self._sum, self._weight = state["sum"], state["weight"]


def baseline_curve(baseline: str | None) -> Mapping[int, float]:
    """Return the smoothed training loss of `alerts.baseline`, a run folder, by step; empty without a baseline.

    Raises:
        BenchError: the folder holds no training loss.
    """
    if baseline is None:
        return {}
    from nanogpt_bench.runs.load import is_run_folder, load_run

    folder = Path(baseline)
    run = load_run(folder) if is_run_folder(folder) else None
    steps, losses = run.curve(metrics.TRAIN_LOSS.name) if run else ([], [])
    average = Smoothed()
    curve = {int(step): average.add(loss) for step, loss in zip(steps, losses, strict=True) if loss is not None}
    if not curve:
        needed = f"run folder with a {metrics.TRAIN_LOSS.name} in metrics.jsonl"
        raise BenchError(f"alerts.baseline: {baseline!r} is no {needed}")
    return curve


class TrendObserver(Observer):
    """Adds `train/loss_smoothed` to every record, `train/excess` to those of validations, and tells what ends a run."""

    def __init__(self, baseline: Mapping[int, float]) -> None:
        self._baseline = baseline
        self._average, self._smoothed = Smoothed(), math.nan
        self._own_best = self._best_val = math.inf
        #: at validations: smoothed training loss over its reference, and validation loss over its lowest, less one each
        self.excess, self.flatness = list[float](), list[float]()

    @property
    def diverging(self) -> bool:
        """Whether the loss has been too high for long enough."""
        return holds_now(ENDINGS["divergence"], self.excess)

    @property
    def flat(self) -> bool:
        """Whether the validation loss has not fallen for long enough."""
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
        self._follow_val(step.record[metrics.VAL_LOSS.name], first=step.number == 0)
        if math.isfinite(self._smoothed):
            self._follow_train(step)

    def _follow_val(self, loss: float | None, *, first: bool) -> None:
        loss = math.inf if loss is None or not math.isfinite(loss) else loss
        if not first:
            self.flatness.append(math.inf if loss == math.inf else share_above(loss, self._best_val))
        self._best_val = min(loss, self._best_val)

    def _follow_train(self, step: Step) -> None:
        self._own_best = min(self._own_best, self._smoothed)
        reference = self._baseline.get(step.number) if self._baseline else self._own_best
        if reference is not None:  # the baseline may be shorter
            self.excess.append(share_above(self._smoothed, reference))
            step.record[metrics.EXCESS.name] = self.excess[-1]


def share_above(loss: float, reference: float) -> float:
    """Return a loss over a reference, less one; of a reference of 0, which a text of one character has, inf or 0.

    >>> share_above(3.0, 2.0), share_above(1.0, 0.0), share_above(0.0, 0.0)
    (0.5, inf, 0.0)
    """
    if reference > 0:
        return loss / reference - 1
    return math.inf if loss > reference else 0.0


@dataclass
class Observers:
    """A run's observers: those with something to tell the loop by name, and all in the order they are called."""

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
    """Return the observers of a resolved configuration; files in `run_dir` are opened, where there is one."""
    watch = config.monitor.watch
    trend = TrendObserver(baseline) if TREND in watch else None
    alerts = AlertObserver(config, run_dir, tell) if run_dir is not None and config.alerts.enabled else None
    watched = Watched.of(config, trainer.model, trainer.device, trainer.look)
    shadow = MODULES["shadow"].build(watched) if config.shadow.enabled else None
    monitors = [built for name in MONITORS if name in watch and (built := MODULES[name].build(watched)) is not None]
    # What adds to a record once it is complete comes before what writes it.
    sinks: list[Observer | None] = []
    if run_dir is not None:
        sinks = [JsonlObserver(run_dir / "metrics.jsonl"), alerts]
    anomaly = AnomalyObserver(run_dir, trainer) if config.alerts.save_on_anomaly else None
    watching = [monitor for monitor in monitors if isinstance(monitor, UpdateMonitor)]
    updates = UpdateObserver(watched, watching) if watching and watched.quantized else None
    ordered = [shadow, watched.capture, updates, *monitors, watched.turns, trend, *sinks, anomaly]
    stall = next((monitor for monitor in monitors if isinstance(monitor, Stall)), None)
    return Observers(trend, stall, shadow, alerts, [observer for observer in ordered if observer is not None])
