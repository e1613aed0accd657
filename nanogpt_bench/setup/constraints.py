"""Weights on geoopt's manifolds, `model.constraint`: which, what goes with them, and how they are put there."""

from __future__ import annotations

from typing import Any

# isort: split
import geoopt
import torch
from torch import nn

from nanogpt_bench.config.schema import MANIFOLDS, OPTIONS, RIEMANNIAN, Config, ModelConfig, OptimizerConfig
from nanogpt_bench.config.settings import Resolved
from nanogpt_bench.model.gpt import linear_sizes
from nanogpt_bench.system.errors import BenchError

#: the layers that are constrained
ATTENTION = ("attn.qkv", "attn.proj")
#: of `optimizer.constrained_lr`, where nobody gives one: an angle under Adam, a factor of the gradient under SGD
_RATES = {"riemannian_adam": 1e-2, "riemannian_sgd": 1e-1}


def fill_constraint(config: Config) -> None:
    """Fill in what a constraint calls for: layers and their rate, and optimizer and storage where no rule says them."""
    model, optimizer = config.model, config.optimizer
    if model.constraint is None:
        return
    if config.rule is None:
        optimizer.name = optimizer.name or RIEMANNIAN[0]
        model.storage = model.storage or ("master" if model.formats else "float32")


def fill_rates(config: Config) -> None:
    """Fill in the rate of constrained weights and, where no weight is stepped by ULPs, one rate and no decay."""
    model, optimizer = config.model, config.optimizer
    if model.constraint is None or optimizer.name not in RIEMANNIAN:
        return
    optimizer.constrained_lr = optimizer.constrained_lr or _RATES[optimizer.name]
    if model.storage not in MANIFOLDS:
        rate = optimizer.lr or optimizer.float_lr or OPTIONS[optimizer.name]["float_lr"]
        optimizer.lr, optimizer.float_lr = optimizer.lr or rate, optimizer.float_lr or rate
        optimizer.weight_decay = optimizer.weight_decay or 0.0


def check_constrained_layers(config: Resolved) -> None:
    """Refuse weights that are to lie on a grid as well.

    Raises:
        BenchError: names the layer, and what to give for it.
    """
    model = config.model
    for name in constrained_layers(model) if model.constraint and model.storage in MANIFOLDS else ():
        spec = config.layers.get(name)
        if spec is not None and spec.weight is not None:
            raise BenchError(
                f"model.constraint: the weight of {name!r} has format {spec.weight.format.name} under model.storage "
                f"{model.storage!r}, whose values are not on the manifold; add --model.formats.attn none, or give "
                "--model.storage master, whose copy is on it"
            )


def constrained_layers(model: ModelConfig) -> list[str]:
    """Return the names of the layers that a constraint is for, in the model's order."""
    return [name for name in linear_sizes(model.n_layer or 0, model.n_embd or 0) if name.endswith(ATTENTION)]


@torch.no_grad()
def constrain(model: nn.Module, settings: ModelConfig) -> None:
    """Put the weights that a resolved configuration constrains onto their manifold, the nearest point of it.

    Raises:
        BenchError: a weight without a nearest point, such as one with a row of zeros on the sphere.
    """
    if settings.constraint is None:
        return
    for name in constrained_layers(settings):
        layer: Any = model.get_submodule(name)
        manifold = geoopt.Sphere() if settings.constraint == "sphere" else geoopt.EuclideanStiefel()
        point = manifold.projx(layer.weight.detach().double()).to(layer.weight.dtype)
        if not bool(point.isfinite().all()):
            raise BenchError(f"model.constraint: the weight of {name!r} has a row of zeros, or is not finite")
        layer.weight = geoopt.ManifoldParameter(point, manifold=manifold)


def rate_of(weight: geoopt.ManifoldParameter, settings: OptimizerConfig) -> float:
    """Return the rate by which geoopt's step turns each row or column of a weight by `optimizer.constrained_lr`.

    Under Adam a step is as long as its rate: the row's on the sphere, the whole matrix' on the Stiefel manifold, where
    it is shared out among orthonormal vectors.
    """
    rate = settings.constrained_lr or 0.0
    one = settings.name != "riemannian_adam" or isinstance(weight.manifold, geoopt.Sphere)
    return rate if one else rate * min(weight.shape) ** 0.5
