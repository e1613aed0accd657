"""What a finished run reports: summary.json, and the weights' histograms on their grids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.packaged import is_packaged
from nanogpt_bench.observers.resources import peak_bytes
from nanogpt_bench.setup.formats import format_summary
from nanogpt_bench.setup.layers import linear_layers
from nanogpt_bench.setup.memory import bytes_of, held_bytes
from nanogpt_bench.setup.resolve import rule_name
from nanogpt_bench.setup.surgery import quantized_layers

if TYPE_CHECKING:
    from nanogpt_bench.loop.outcome import Outcome
    from nanogpt_bench.observers.build import Observers
    from nanogpt_bench.training.trainer import Trainer


def summarize(name: str, config: Config, trainer: Trainer, outcome: Outcome, watch: Observers) -> dict[str, Any]:
    """Return the content of summary.json; losses in nats a token, or a label, null where there is none."""
    model, loss, stall = trainer.model, outcome.final_val_loss, watch.stall
    weights = _weights(model, config)
    of_weights = None if outcome.held_bytes is None else bytes_of(weights, trainer.optimizer)
    if trainer.in_rows and of_weights is not None:
        of_weights = int(sum(trainer.ranks.each(of_weights)))
    return {
        "name": name,
        "rule": rule_name(config),
        "format": format_summary(config),
        "storage": config.model.storage,
        "seed": config.seed,
        "parameters": count(model.parameters()),
        "quantized_parameters": count(weights),
        "steps": outcome.steps,
        "steps_planned": config.train.max_steps,
        "status": outcome.status,
        "failure": outcome.failure,
        "stop": outcome.stop,
        "rollbacks": outcome.rollbacks,
        "alerts": dict(watch.alerts.counts) if watch.alerts else {},
        "final_val_loss": loss,
        "final_val_loss_se": outcome.final_val_loss_se,
        "best_val_loss": outcome.best_val_loss,
        "first_val_loss": outcome.first_val_loss,
        "bytes_per_parameter": _ratio(outcome.held_bytes, count(model.parameters())),
        "held_bytes": outcome.held_bytes,
        "gradient_peak_bytes": outcome.gradient_peak_bytes,
        "bytes_per_quantized_parameter": _ratio(of_weights, count(weights)),
        "stall": stall.mean if stall else None,
        "stall_metric": stall.metric if stall else None,
        "arrived": stall.arrived if stall else None,
        "tokens_per_s": _ratio(outcome.tokens, outcome.training_seconds),
        "shadow_overhead": watch.shadow.overhead if watch.shadow else None,
        "seconds": outcome.seconds,
        "tokens": outcome.tokens,
        "lr": config.optimizer.lr,
        "bits_per_byte": None if loss is None else trainer.bits_per_byte(loss),
        **outcome.final_figures,
        **_processes(trainer),
    }


def _processes(trainer: Trainer) -> dict[str, Any]:
    """What each of several processes holds and sends; nothing of one. All of them have to ask."""
    ranks = trainer.ranks
    if ranks.size == 1:
        return {}
    held = ranks.each(held_bytes(trainer.model, trainer.optimizer))
    peak = ranks.each(peak_bytes(trainer.device))
    return {
        "processes": {
            "parallel": trainer.config.train.parallel,
            "count": ranks.size,
            "held_bytes": [int(size) for size in held],
            "peak_bytes": [int(size) for size in peak],
            "sent_bytes": trainer.wire.bytes,
        }
    }


def _ratio(amount: float | None, whole: float) -> float | None:
    return amount / whole if amount is not None and whole else None


def _weights(model: nn.Module, config: Config) -> list[Tensor]:
    """The weights that are quantised: by this library, or by the package whose they are."""
    if config.model.storage == "peer":
        return [layer.weight for layer in linear_layers(model).values() if is_packaged(layer.weight)]
    return [layer.weight for layer in _layers(model, config).values()]


def _layers(model: nn.Module, config: Config) -> dict[str, fm.QuantizedLinear]:
    return {} if config.model.storage == "float32" else quantized_layers(model)


def count(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements; a shared parameter counts once, as `Module.parameters` yields it."""
    return sum(parameter.numel() for parameter in parameters)


@torch.no_grad()
def weight_histograms(model: nn.Module, config: Config) -> dict[str, Any]:
    """Return, per quantised layer, how many weights lie on each value of the format, in increasing order."""
    return {name: _whole_histogram(model, name, layer) for name, layer in _layers(model, config).items()}


def _whole_histogram(model: nn.Module, name: str, layer: fm.QuantizedLinear) -> dict[str, Any]:
    """Of a layer that is sharded once all processes have its weight, for as long as that takes."""
    parts = name.split(".")
    above = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
    sharded: Any = next((module for module in above if hasattr(module, "unshard")), None)
    if sharded is None:
        return _histogram(layer)
    sharded.unshard()
    try:
        return _histogram(layer)
    finally:
        sharded.reshard()


def _histogram(layer: fm.QuantizedLinear) -> dict[str, Any]:
    fmt, scale = layer.weight_format, layer.weight_scale()
    assert fmt is not None, "a layer whose weights are quantised"
    counts = torch.bincount(layer.weight_codes().flatten().long(), minlength=2**fmt.bits).tolist()
    by_value: dict[float, int] = {}
    for code, number in enumerate(counts):
        value = fmt.decode_code(code)
        if value == value and abs(value) <= fmt.max:  # neither NaN nor Inf; both zeros are one point
            by_value[value + 0.0] = by_value.get(value + 0.0, 0) + number
    values = sorted(by_value)
    return {
        "format": fmt.name,
        "values": values,
        "counts": [by_value[value] for value in values],
        "scale_min": float(scale.min()),
        "scale_max": float(scale.max()),
    }
