"""From `model.formats` to quantised layers, and from `model.constraint` to constrained
weights, in a finished model.
"""

from collections.abc import Iterable
from typing import Any

import geoopt
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.schema import (
    MANIFOLDS,
    OPTIONS,
    RIEMANNIAN,
    Config,
    ModelConfig,
    OptimizerConfig,
)
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.model.gpt import linear_sizes
from nanogpt_bench.model.weights import quantized_layers, rows_of_outputs
from nanogpt_bench.system.errors import BenchError, counted, refusals

#: how many of the layers left in float are named
_NAMED = 4


def quantize(model: nn.Module, config: Resolved) -> nn.Module:
    """Replace the linear layers that `model.formats` names, and constrain the weights
    of `model.constraint`.
    """
    settings = config.model
    if config.layers and not quantized_layers(
        model
    ):  # a pretrained model may have been read into codes
        model = _in_formats(model, config)
    constrain(model, settings)
    return model


def _in_formats(model: nn.Module, config: Resolved) -> nn.Module:
    continuous = config.model.storage == "continuous"
    named = {name: model.get_submodule(name) for name in config.layers} if continuous else {}
    weights = {name: rows_of_outputs(layer).detach().clone() for name, layer in named.items()}
    with refusals("model.formats", ValueError, TypeError):
        model = fm.quantize_model(model, **quantization(config))
    # The float weights come back, on the continuous manifold of their format and scale.
    for name, layer in quantized_layers(model).items() if continuous else ():
        assert layer.weight_format is not None, "a layer whose weights are quantised"
        layer.manifold = fm.StiffnessManifold(layer.weight_format, layer.weight_scale())
        layer.weight = geoopt.ManifoldParameter(weights[name], manifold=layer.manifold)
    return model


def quantization(config: Resolved) -> dict[str, Any]:
    """Return the arguments of `fm.quantize_model` for a resolved configuration."""
    settings: Any = config.model
    return {
        "formats": dict(config.layers),
        "storage": "grid" if settings.storage == "continuous" else settings.storage,
        "seed": config.seed,
        "tied": settings.tied or "refuse",
        "defer_weight_gradients": True,  # see nanogpt_bench.loop.clipping
        **_grid_options(config),
    }


def _grid_options(config: Config) -> dict[str, Any]:
    """Return the further arguments where there is no master copy."""
    settings, writeback = config.model, config.optimizer.writeback
    if settings.storage not in MANIFOLDS:
        return {}
    rule = fm.optim.WRITEBACKS[writeback or "stochastic"]
    options: dict[str, Any] = {"rounding": rule.rounding}
    if config.optimizer.draws is not None:
        options["draws"] = config.optimizer.draws  # for optimizers without an option draws
    for name in ("headroom", "embeddings"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    if settings.storage == "fp8" and rule.residual_bits:
        options["keep_remainder"] = (
            True  # the residual starts from the remainder of rounding the initial weights
        )
    return options


def _with_own_weights(
    model: nn.Module, layers: Iterable[fm.ReportedLayer]
) -> list[fm.ReportedLayer]:
    """Return the layers without those whose parameters an earlier one has too, such as a tied
    head.
    """
    seen: set[int] = set()
    kept = []
    for layer in layers:
        parameters = model.get_submodule(layer.name).parameters(recurse=False)
        own = {id(parameter) for parameter in parameters if parameter.dim() > 1}
        if own and own <= seen:
            continue
        seen |= own
        kept.append(layer)
    return kept


def left_in_float(model: nn.Module) -> str:
    """Say what share of a model's weights is not quantised, and in which layers most of
    it is.

    >>> left_in_float(fm.quantize_model(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), "E4M3"))
    'left in float: 69% of the weights, 36 of 52; most in 0 (32)'

    A weight that two layers share is named once.

    >>> model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    >>> model["head"].weight = model["table"].weight
    >>> left_in_float(model)
    'left in float: 100% of the weights, 32 of 32; most in table (32)'
    """
    report = fm.quantization_report(model)
    left = report.parameters - report.quantized_parameters
    largest = sorted(_with_own_weights(model, report.left), key=lambda layer: -layer.parameters)
    names = [f"{layer.name} ({layer.parameters:,})" for layer in largest[:_NAMED]]
    more = f" and {counted(len(largest) - _NAMED, 'layer')} more" if len(largest) > _NAMED else ""
    where = f"; most in {', '.join(names)}{more}" if names else ""
    return f"left in float: {left / report.parameters:.0%} of the weights, {left:,} of {report.parameters:,}{where}"


#: the layers that `model.constraint` constrains
ATTENTION = ("attn.qkv", "attn.proj")
#: defaults of `optimizer.constrained_lr`: an angle under Adam, a factor of the gradient
#: under SGD
_RATES = {"riemannian_adam": 1e-2, "riemannian_sgd": 1e-1}


def fill_constraint(config: Config) -> None:
    """Fill in optimizer and storage under `model.constraint`, where no rule names them."""
    model, optimizer = config.model, config.optimizer
    if model.constraint is None:
        return
    if config.rule is None:
        optimizer.name = optimizer.name or RIEMANNIAN[0]
        model.storage = model.storage or ("master" if model.formats else "float32")


def fill_rates(config: Config) -> None:
    """Fill in the rate of constrained weights; where no weight is stepped by ULPs, also
    one rate and no decay.
    """
    model, optimizer = config.model, config.optimizer
    if model.constraint is None or optimizer.name not in RIEMANNIAN:
        return
    optimizer.constrained_lr = optimizer.constrained_lr or _RATES[optimizer.name]
    if model.storage not in MANIFOLDS:
        rate = optimizer.lr or optimizer.float_lr or OPTIONS[optimizer.name]["float_lr"]
        optimizer.lr, optimizer.float_lr = optimizer.lr or rate, optimizer.float_lr or rate
        optimizer.weight_decay = optimizer.weight_decay or 0.0


def check_constrained_layers(config: Resolved) -> None:
    """Refuse constrained weights that would also have to lie on a grid."""
    model = config.model
    for name in (
        constrained_layers(model) if model.constraint and model.storage in MANIFOLDS else ()
    ):
        spec = config.layers.get(name)
        if spec is not None and spec.weight is not None:
            raise BenchError(
                f"model.constraint: the weight of {name!r} has format {spec.weight.format.name} "
                f"under model.storage {model.storage!r}, whose values are not on the manifold; add "
                f"--model.formats.attn none, or give "
                "--model.storage master, whose copy is on it"
            )


def constrained_layers(model: ModelConfig) -> list[str]:
    """Return the names of the layers that a constraint is for, in the model's order."""
    return [
        name
        for name in linear_sizes(model.n_layer or 0, model.n_embd or 0)
        if name.endswith(ATTENTION)
    ]


@torch.no_grad()
def constrain(model: nn.Module, settings: ModelConfig) -> None:
    """Move the weights that a resolved configuration constrains to the nearest point of
    their manifold.
    """
    if settings.constraint is None:
        return
    for name in constrained_layers(settings):
        layer: Any = model.get_submodule(name)
        manifold = geoopt.Sphere() if settings.constraint == "sphere" else geoopt.EuclideanStiefel()
        point = manifold.projx(layer.weight.detach().double()).to(layer.weight.dtype)
        if not bool(point.isfinite().all()):
            raise BenchError(
                f"model.constraint: the weight of {name!r} has a row of zeros, or is not finite"
            )
        layer.weight = geoopt.ManifoldParameter(point, manifold=manifold)


def rate_of(weight: geoopt.ManifoldParameter, settings: OptimizerConfig) -> float:
    """Return the rate with which geoopt's step turns each row or column of a weight by
    `optimizer.constrained_lr`.

    Under Adam a step is as long as its rate: per row on the sphere, and for the whole
    matrix on the Stiefel manifold, where it is divided among orthonormal vectors.
    """
    rate = settings.constrained_lr or 0.0
    one = settings.name != "riemannian_adam" or isinstance(weight.manifold, geoopt.Sphere)
    return rate if one else rate * min(weight.shape) ** 0.5
