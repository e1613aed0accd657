"""Which observers a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_bench.config import ROUNDED, Config
from nanogpt_bench.observers.alerts import Alert, AlertObserver
from nanogpt_bench.observers.anomaly import AnomalyObserver
from nanogpt_bench.observers.base import Observer
from nanogpt_bench.observers.jsonl import HistogramObserver, JsonlObserver
from nanogpt_bench.observers.stall import StallObserver
from nanogpt_bench.observers.trend import TrendObserver
from nanogpt_bench.surgery import quantized_layers

if TYPE_CHECKING:
    from nanogpt_bench.step import Trainer

#: write-backs that lose an update for good; under the others a loss is made up for, now or by other weights
_LOSING = ("nearest", "residual8", "residual4")


@dataclass
class Observers:
    """A run's observers: those with something to tell the loop by name, and all in the order they are called."""

    trend: TrendObserver
    stall: StallObserver | None
    alerts: AlertObserver | None
    all: list[Observer] = field(default_factory=list)


def build_observers(
    config: Config,
    trainer: Trainer,
    run_dir: Path,
    *,
    baseline: Mapping[int, float],
    tell: Callable[[Alert], None],
) -> Observers:
    """Return the observers of a resolved configuration; files in `run_dir` are opened."""
    trend = TrendObserver(config.alerts, baseline)
    stall = _stall(config, trainer)
    alerts = _alerts(config, run_dir, trend, tell)
    found = Observers(trend, stall, alerts)
    watching = [stall]
    # What adds to a record once it is complete comes before what writes it.
    sinks = [trend, JsonlObserver(run_dir / "metrics.jsonl"), HistogramObserver(run_dir / "histograms.jsonl"), alerts]
    anomaly = AnomalyObserver(run_dir) if config.alerts.save_on_anomaly else None
    found.all = [observer for observer in (*watching, *sinks, anomaly) if observer is not None]
    return found


def _stall(config: Config, trainer: Trainer) -> StallObserver | None:
    storage, monitor = config.model.storage, config.monitor
    if storage not in ("master", *ROUNDED) or not monitor.stall:
        return None
    return StallObserver(quantized_layers(trainer.model), storage, monitor.stall_interval or monitor.interval)


def _alerts(config: Config, run_dir: Path, trend: TrendObserver, tell: Callable[[Alert], None]) -> AlertObserver | None:
    if not config.alerts.enabled:
        return None
    loses = config.model.storage in ROUNDED and config.optimizer.writeback in _LOSING
    return AlertObserver(config.alerts, run_dir / "alerts.jsonl", trend, stall=loses, tell=tell)
