"""The observers of a run: what keeps and judges its records, and tells where the losses are heading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanogpt_bench.config.metrics import MONITORS, TREND
from nanogpt_bench.config.schema import Config
from nanogpt_bench.monitors import MODULES
from nanogpt_bench.monitors.capture import UpdateMonitor, UpdateObserver, Watched
from nanogpt_bench.monitors.points import Observer
from nanogpt_bench.monitors.shadow import ShadowObserver
from nanogpt_bench.monitors.stall import Stall
from nanogpt_bench.observers.alerts import AlertObserver
from nanogpt_bench.observers.jsonl import JsonlObserver
from nanogpt_bench.observers.trend import TrendObserver
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.training.anomalies import AnomalyObserver
from nanogpt_bench.training.trainer import Trainer


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
    updates = update_observer(watched, monitors)
    ordered = [shadow, watched.capture, updates, *monitors, watched.turns, trend, *sinks, anomaly]
    stall = next((monitor for monitor in monitors if isinstance(monitor, Stall)), None)
    return Observers(trend, stall, shadow, alerts, [observer for observer in ordered if observer is not None])


def update_observer(watched: Watched, monitors: Sequence[Observer]) -> UpdateObserver | None:
    """Return what shows updates to the monitors that look at them; None where none does, or nothing is quantised."""
    watching = [monitor for monitor in monitors if isinstance(monitor, UpdateMonitor)]
    storage = watched.config.model.storage or ""
    return (
        UpdateObserver(watched.quantized, storage, watching, watched.turns) if watching and watched.quantized else None
    )
