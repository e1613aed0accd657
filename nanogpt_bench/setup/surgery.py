"""From `model.formats` to quantised layers; the model's own code knows nothing of it."""

from __future__ import annotations

from typing import Any

import geoopt
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.schema import MANIFOLDS, Config
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.model.causal import is_linear, rows_of_outputs
from nanogpt_bench.model.layers import quantized_layers
from nanogpt_bench.setup.constraints import constrain
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.words import counted

#: layers left in float that are named
_NAMED = 4


def quantize(model: nn.Module, config: Resolved) -> nn.Module:
    """Replace the linear layers that `model.formats` names, and constrain the weights that are to be.

    A run in float without a constraint returns the model as it is.

    Raises:
        BenchError: weights that can't be quantised or constrained.
    """
    settings = config.model
    if config.layers and not quantized_layers(model):  # of a pretrained model they may have been read so
        model = _in_formats(model, config)
    constrain(model, settings)
    return model


def _in_formats(model: nn.Module, config: Resolved) -> nn.Module:
    continuous = config.model.storage == "continuous"
    weights = _float_weights(model) if continuous else {}
    try:
        model = fm.quantize_model(model, **quantization(config))
    except (ValueError, TypeError) as error:
        raise BenchError(f"model.formats: {one_line(error)}") from None
    if continuous:
        _put_back(model, weights)
    return model


def quantization(config: Resolved) -> dict[str, Any]:
    """Return the arguments of `fm.quantize_model` that a resolved configuration means."""
    settings: Any = config.model
    return {
        "formats": dict(config.layers),
        "storage": "grid" if settings.storage == "continuous" else settings.storage,
        "seed": config.seed,
        "tied": settings.tied or "refuse",
        "defer_weight_gradients": True,  # see nanogpt_bench.training.clipping
        **_grid_options(config),
    }


def read_as_codes(config: Config) -> dict[str, Any] | None:
    """Return `quantization` where a pretrained model can be read into it; None where its floats are needed first.

    What quantises activations has scales that depend on all tokens, which hides whether a model looks ahead.
    """
    if not isinstance(config, Resolved) or config.model.storage != "fp8" or not config.layers:
        return None
    if any(spec.activation is not None for spec in config.layers.values()):
        return None
    return quantization(config)


def _grid_options(config: Config) -> dict[str, Any]:
    """Return what is asked for where there is no master copy."""
    settings, writeback = config.model, config.optimizer.writeback
    if settings.storage not in MANIFOLDS:
        return {}
    rule = fm.optim.WRITEBACKS[writeback or "stochastic"]
    options: dict[str, Any] = {"rounding": rule.rounding}
    if config.optimizer.draws is not None:
        options["draws"] = config.optimizer.draws  # for optimizers that have none of their own
    for name in ("headroom", "embeddings"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    if settings.storage == "fp8" and rule.residual_bits:
        options["keep_remainder"] = True  # the residual starts from what rounding the initial weights leaves
    return options


def _float_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of linear layers as rows of outputs, as quantised layers have them."""
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    return {name: rows_of_outputs(module).detach().clone() for name, module in linear.items()}


def _put_back(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give quantised layers their float weights again, on the continuous manifold of their format and scale."""
    for name, layer in quantized_layers(model).items():
        assert layer.weight_format is not None, "a layer whose weights are quantised"
        manifold = fm.StiffnessManifold(layer.weight_format, layer.weight_scale())
        layer.manifold = manifold
        layer.weight = geoopt.ManifoldParameter(weights[name], manifold=manifold)


def left_in_float(model: nn.Module) -> str:
    """Say what share of a model's weights is not quantised, and in which layers most of it is.

    >>> left_in_float(fm.quantize_model(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), "E4M3"))
    'left in float: 69% of the weights, 36 of 52; most in 0 (32)'
    """
    report = fm.quantization_report(model)
    left = report.parameters - report.quantized_parameters
    largest = sorted(report.left, key=lambda layer: -layer.parameters)
    names = [f"{layer.name} ({layer.parameters:,})" for layer in largest[:_NAMED]]
    more = f" and {counted(len(largest) - _NAMED, 'layer')} more" if len(largest) > _NAMED else ""
    where = f"; most in {', '.join(names)}{more}" if names else ""
    return f"left in float: {left / report.parameters:.0%} of the weights, {left:,} of {report.parameters:,}{where}"
