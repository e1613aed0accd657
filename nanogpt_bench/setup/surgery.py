"""From `model.formats` to quantised layers, and from `model.constraint` to manifolds.

Both change a finished model.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    OptimizerName,
    Storage,
)
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.model.gpt import linear_sizes
from nanogpt_bench.model.weights import quantized_layers, rows_of_outputs
from nanogpt_bench.system.errors import BenchError, counted, refusals

if TYPE_CHECKING:
    import geoopt

#: number of layers left in float that a line names
_NAMED_LAYERS = 4


def quantize(model: nn.Module, config: Resolved) -> nn.Module:
    """Replace the layers that `model.formats` names, and constrain weights."""
    # A pretrained model may have been read into codes.
    if config.layers and not quantized_layers(model):
        model = _in_formats(model, config)
    constrain(model, config.model)
    return model


def _in_formats(model: nn.Module, config: Resolved) -> nn.Module:
    is_continuous = config.model.storage == Storage.CONTINUOUS
    weights: dict[str, torch.Tensor] = {}
    if is_continuous:
        for name in config.layers:
            layer = model.get_submodule(name)
            weights[name] = rows_of_outputs(layer).detach().clone()
    with refusals("model.formats", ValueError, TypeError):
        model = fm.quantize_model(model, **quantization(config))
    if is_continuous:
        import geoopt

        # The float weights come back, on the continuous manifold of format and scale.
        for name, layer in quantized_layers(model).items():
            assert layer.weight_format is not None, "a layer whose weights are quantised"
            layer.manifold = fm.StiffnessManifold(layer.weight_format, layer.weight_scale())
            layer.weight = geoopt.ManifoldParameter(weights[name], manifold=layer.manifold)
    return model


def quantization(config: Resolved) -> dict[str, Any]:
    """Return the arguments of `fm.quantize_model` for a resolved configuration."""
    settings: Any = config.model
    return {
        "formats": dict(config.layers),
        "storage": "grid" if settings.storage == Storage.CONTINUOUS else settings.storage,
        "seed": config.seed,
        "tied": settings.tied or "refuse",
        # See nanogpt_bench.loop.clipping.
        "defer_weight_gradients": True,
        **_grid_options(config),
    }


def _grid_options(config: Config) -> dict[str, Any]:
    """Return the further arguments where there is no master copy."""
    settings = config.model
    if settings.storage not in MANIFOLDS:
        return {}
    rule = fm.optim.WRITEBACKS[config.optimizer.writeback or "stochastic"]
    options: dict[str, Any] = {"rounding": rule.rounding}
    if config.optimizer.draws is not None:
        # The weights keep it, too, for optimizers without an option draws.
        options["draws"] = config.optimizer.draws
    for name in ("headroom", "embeddings"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    if settings.storage == Storage.CODES and rule.residual_bits:
        # The residual starts from the remainder of rounding the initial weights.
        options["keep_remainder"] = True
    return options


def _without_shared_weights(
    model: nn.Module, layers: Iterable[fm.ReportedLayer]
) -> list[fm.ReportedLayer]:
    """Return the layers without those whose parameters an earlier one has, too.

    A tied head is left out, for example.
    """
    counted_weights: set[int] = set()
    distinct_layers = []
    for layer in layers:
        parameters = model.get_submodule(layer.name).parameters(recurse=False)
        weights = {id(parameter) for parameter in parameters if parameter.dim() > 1}
        if weights and weights <= counted_weights:
            continue
        counted_weights |= weights
        distinct_layers.append(layer)
    return distinct_layers


def left_in_float(model: nn.Module) -> str:
    """Say what share of a model's weights is not quantised, and where most of it is.

    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    >>> left_in_float(fm.quantize_model(model, "E4M3"))
    'left in float: 69% of the weights, 36 of 52; most in 0 (32)'

    A weight that two layers share is named once.

    >>> head = nn.Linear(4, 8, bias=False)
    >>> tied = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": head})
    >>> tied["head"].weight = tied["table"].weight
    >>> left_in_float(tied)
    'left in float: 100% of the weights, 32 of 32; most in table (32)'
    """
    report = fm.quantization_report(model)
    in_float = report.parameters - report.quantized_parameters
    line = (
        f"left in float: {in_float / report.parameters:.0%} of the weights, {in_float:,} of "
        f"{report.parameters:,}"
    )
    layers = _without_shared_weights(model, report.left)
    layers.sort(key=lambda layer: -layer.parameters)
    if layers:
        names = [f"{layer.name} ({layer.parameters:,})" for layer in layers[:_NAMED_LAYERS]]
        line += f"; most in {', '.join(names)}"
    if len(layers) > _NAMED_LAYERS:
        line += f" and {counted(len(layers) - _NAMED_LAYERS, 'layer')} more"
    return line


#: the layers that `model.constraint` constrains
CONSTRAINED_LAYERS = ("attn.qkv", "attn.proj")
#: defaults of `optimizer.constrained_lr`: an angle under Adam, a factor of the gradient
#: under SGD
_RATES: dict[str, float] = {
    OptimizerName.RIEMANNIAN_ADAM: 1e-2,
    OptimizerName.RIEMANNIAN_SGD: 1e-1,
}


def fill_constraint(config: Config) -> None:
    """Fill in optimizer and storage under `model.constraint`, without a rule."""
    model, optimizer = config.model, config.optimizer
    if model.constraint is None:
        return
    if config.rule is None:
        optimizer.name = optimizer.name or RIEMANNIAN[0].value
        model.storage = model.storage or ("master" if model.formats else "float32")


def fill_rates(config: Config) -> None:
    """Fill in the rate of constrained weights.

    Where no weight is stepped by ULPs, also one rate for all and no decay.
    """
    model, optimizer = config.model, config.optimizer
    if model.constraint is None or optimizer.name not in RIEMANNIAN:
        return
    optimizer.constrained_lr = optimizer.constrained_lr or _RATES[optimizer.name]
    if model.storage not in MANIFOLDS:
        rate = optimizer.lr or optimizer.float_lr or OPTIONS[optimizer.name]["float_lr"]
        optimizer.lr = optimizer.lr or rate
        optimizer.float_lr = optimizer.float_lr or rate
        optimizer.weight_decay = optimizer.weight_decay or 0.0


def check_constrained_layers(config: Resolved) -> None:
    """Refuse constrained weights that would also have to lie on a grid."""
    model = config.model
    if not model.constraint or model.storage not in MANIFOLDS:
        return
    for name in constrained_layers(model):
        spec = config.layers.get(name)
        if spec is not None and spec.weight is not None:
            raise BenchError(
                f"model.constraint: the weight of {name!r} has format {spec.weight.format.name} "
                f"under model.storage {model.storage!r}, and its values are not on the manifold; "
                "add --model.formats.attn none, or give --model.storage master, whose float32 "
                "copy is on it"
            )


def constrained_layers(model: ModelConfig) -> list[str]:
    """Return the names of the layers that a constraint is for, in the model's order."""
    return [
        name
        for name in linear_sizes(model.n_layer or 0, model.n_embd or 0)
        if name.endswith(CONSTRAINED_LAYERS)
    ]


@torch.no_grad()
def constrain(model: nn.Module, settings: ModelConfig) -> None:
    """Move the weights of `model.constraint` to the nearest point of their manifold.

    `settings` are of a resolved configuration.
    """
    if settings.constraint is None:
        return
    import geoopt

    for name in constrained_layers(settings):
        layer: Any = model.get_submodule(name)
        manifold = geoopt.Sphere() if settings.constraint == "sphere" else geoopt.EuclideanStiefel()
        point = manifold.projx(layer.weight.detach().double()).to(layer.weight.dtype)
        if not bool(point.isfinite().all()):
            raise BenchError(
                f"model.constraint: the weight of {name!r} has a row of zeros, or is not finite"
            )
        layer.weight = geoopt.ManifoldParameter(point, manifold=manifold)


def rate_of(weight: "geoopt.ManifoldParameter", settings: OptimizerConfig) -> float:
    """Return the rate with which geoopt turns vectors by `optimizer.constrained_lr`.

    A vector is a row or column of the weight. Under Adam a step is as long as its rate:
    per row on the sphere, and for the whole matrix on the Stiefel manifold, where it is
    divided among orthonormal vectors.
    """
    import geoopt

    rate = settings.constrained_lr or 0.0
    is_adam = settings.name == OptimizerName.RIEMANNIAN_ADAM
    if is_adam and not isinstance(weight.manifold, geoopt.Sphere):
        return rate * min(weight.shape) ** 0.5
    return rate
