"""From `model.formats` to quantised layers; the model's own code knows nothing of it."""

from __future__ import annotations

from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import Config
from nanogpt_bench.errors import BenchError, one_line


def quantize(model: nn.Module, config: Config) -> nn.Module:
    """Replace the linear layers that `model.formats` names; a run in float returns the model as it is.

    Raises:
        BenchError: a pattern matches no linear layer, or names a tied lm_head.
    """
    settings = config.model
    if settings.storage == "float32":
        return model
    grid_only = {} if settings.headroom is None else {"headroom": settings.headroom}
    try:
        return fm.quantize_model(
            model,
            formats=dict(settings.formats),
            storage=settings.storage,
            granularity=settings.granularity,
            rounding=config.optimizer.writeback or "stochastic",
            seed=config.seed,
            **grid_only,
        )
    except (ValueError, TypeError) as error:
        raise BenchError(f"model.formats: {one_line(error)}") from None


def quantized_layers(model: nn.Module) -> dict[str, fm.QuantizedLinear]:
    """Return the layers whose weights are quantised, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, fm.QuantizedLinear)}
    return {name: layer for name, layer in layers.items() if layer.weight_format is not None}
