"""Which observers a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.config.rules import loses_steps
from nanogpt_bench.config.schema import ROUNDED, Config
from nanogpt_bench.model.gpt import GPT, Block, GPTShape, build_model
from nanogpt_bench.observers.alerts import Alert, AlertObserver
from nanogpt_bench.observers.anomaly import AnomalyObserver
from nanogpt_bench.observers.bits import Bits
from nanogpt_bench.observers.capture import Capture
from nanogpt_bench.observers.figures import Turns
from nanogpt_bench.observers.geometry import Geometry
from nanogpt_bench.observers.gradients import Gradients
from nanogpt_bench.observers.jsonl import HistogramObserver, JsonlObserver
from nanogpt_bench.observers.ranges import Ranges
from nanogpt_bench.observers.shadow import ShadowObserver
from nanogpt_bench.observers.stall import Stall, Zones
from nanogpt_bench.observers.trend import TrendObserver
from nanogpt_bench.observers.updates import UpdateConsumer, UpdateObserver
from nanogpt_bench.setup.constraints import constrained_weights
from nanogpt_bench.setup.layers import linear_layers
from nanogpt_bench.setup.surgery import quantized_layers
from nanogpt_bench.training.points import Observer
from nanogpt_bench.training.trainer import Trainer

#: monitors that are put together here, as they share what they look at; of every other the module of its name builds it
SHARING = ("stall", "ranges", "bits", "gradients", "geometry", "trend")
ON_THEIR_OWN = tuple(
    name for name, field in MonitorConfig.model_fields.items() if field.annotation is bool and name not in SHARING
)


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
    trend = TrendObserver(config.alerts, baseline) if config.monitor.trend else None
    alerts = None if run_dir is None else _alerts(config, run_dir, trend, tell)
    shadow = _shadow(config, trainer)
    turns = _turns(config, trainer)
    stall, monitors = _monitors(config, trainer, turns)
    alone = [_built(name, config, trainer, turns) for name in ON_THEIR_OWN if getattr(config.monitor, name)]
    # What adds to a record once it is complete comes before what writes it.
    sinks: list[Observer | None] = []
    if run_dir is not None:
        sinks = [JsonlObserver(run_dir / "metrics.jsonl"), HistogramObserver(run_dir / "histograms.jsonl"), alerts]
    anomaly = AnomalyObserver(run_dir, trainer) if config.alerts.save_on_anomaly else None
    ordered = [shadow, *monitors, turns, trend, *alone, *sinks, anomaly]
    return Observers(trend, stall, shadow, alerts, [observer for observer in ordered if observer is not None])


def _monitors(config: Config, trainer: Trainer, turns: Turns) -> tuple[Stall | None, list[Observer]]:
    monitor, storage = config.monitor, config.model.storage or ""
    layers, quantized = linear_layers(trainer.model), quantized_layers(trainer.model)
    constrained = constrained_weights(trainer.model)
    capture = Capture(monitor.interval, turns)
    stall = _stall(config, trainer, turns)
    ranges = Ranges(layers, capture, monitor, turns) if monitor.ranges else None
    bits = Bits(layers, capture, monitor, turns) if monitor.bits else None
    # Steps in the backward pass leave no gradients to look at.
    gradients = Gradients(layers, monitor, turns) if monitor.gradients and not config.train.step_in_backward else None
    geometry = Geometry(quantized, monitor, turns) if monitor.geometry and (quantized or constrained) else None
    zones = Zones(quantized, capture, monitor.interval, turns) if stall is not None else None
    seeing = [consumer for consumer in (stall, ranges, gradients, geometry) if consumer is not None]
    consumers: list[UpdateConsumer] = [*seeing]
    found: list[Observer | None] = [
        capture if ranges or bits or zones else None,
        UpdateObserver(quantized, storage, consumers) if quantized and consumers else None,
        *(stall, ranges, bits, gradients, geometry, zones),
    ]
    return stall, [observer for observer in found if observer is not None]


def _built(name: str, config: Config, trainer: Trainer, turns: Turns) -> Observer:
    built: Observer = import_module(f"nanogpt_bench.observers.{name}").build(config, trainer, turns)
    return built


def _turns(config: Config, trainer: Trainer) -> Turns:
    monitor = config.monitor
    blocks = [name for name, module in trainer.model.named_modules() if isinstance(module, Block)]
    intervals = monitor.interval, monitor.stall_interval or monitor.interval
    return Turns(monitor.turns, [linear_layers(trainer.model), blocks], intervals)


def _stall(config: Config, trainer: Trainer, turns: Turns) -> Stall | None:
    storage, monitor = config.model.storage or "", config.monitor
    if storage not in ("master", *ROUNDED) or not monitor.stall:
        return None
    interval = monitor.stall_interval or monitor.interval
    return Stall(quantized_layers(trainer.model), storage, interval, monitor.interval, turns)


def _shadow(config: Config, trainer: Trainer) -> ShadowObserver | None:
    if not config.shadow.enabled:
        return None
    # Surgery may have untied the head.
    shape: GPTShape = trainer.model.shape
    tied = trainer.model.lm_head.weight is trainer.model.token_embedding.weight
    model: GPT = build_model(replace(shape, tie_weights=tied), 0).to(trainer.device)
    return ShadowObserver(model, config.shadow.interval)


def _alerts(
    config: Config, run_dir: Path, trend: TrendObserver | None, tell: Callable[[Alert], None]
) -> AlertObserver | None:
    if not config.alerts.enabled:
        return None
    stall = loses_steps(config.model.storage, config.optimizer.writeback) is True
    ends = config.train.on_anomaly == "stop" and "nan" in config.train.stop_on
    return AlertObserver(config.alerts, run_dir / "alerts.jsonl", trend, stall=stall, ends=ends, tell=tell)
