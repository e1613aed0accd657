"""From the `optimizer` section to an optimizer with GPT-style parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import Config
from nanogpt_bench.errors import BenchError, one_line
from nanogpt_bench.surgery import quantized_layers


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of a resolved configuration.

    Raises:
        BenchError: an option the optimizer refuses.
    """
    try:
        return _BUILDERS[_kind(config)](model, config)
    except (ValueError, TypeError) as error:
        raise BenchError(f"optimizer: {one_line(error)}") from None


def _kind(config: Config) -> str:
    """Return the optimizer's name; AdamW on the grid is StiffnessAdamW with k = 0."""
    name = config.optimizer.name or ""
    return "stiffness_adamw" if name == "adamw" and config.model.storage == "grid" else name


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings decay, biases and norms don't; shared parameters appear once."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _groups(
        (weight_decay, [parameter for parameter in parameters if parameter.dim() >= 2]),
        (0.0, [parameter for parameter in parameters if parameter.dim() < 2]),
    )


def _groups(*groups: tuple[float, list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": parameters, "weight_decay": decay} for decay, parameters in groups if parameters]


def _common(config: Config) -> dict[str, Any]:
    settings = config.optimizer
    return {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}


def _sgd(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    settings = config.optimizer
    assert settings.lr is not None
    assert settings.momentum is not None
    groups = parameter_groups(model, settings.weight_decay or 0.0)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


def _adamw(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.optimizer.weight_decay or 0.0)
    return torch.optim.AdamW(groups, fused=True, **_common(config))


def _stiffness_adamw(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.optimizer.weight_decay or 0.0)
    options = {"stiffness": _stiffness(config), "writeback": config.optimizer.writeback, "seed": config.seed}
    return fm.optim.StiffnessAdamW(groups, **_common(config), **options)


def _riemannian_adam(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    settings = config.optimizer
    weights = [layer.weight for layer in quantized_layers(model).values()]
    own = {id(weight) for weight in weights}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    # Its decay of quantised weights is a share a step, not one of lr, and that of floats is added to the gradient:
    # so quantised weights shrink as under AdamW at float_lr, and the others don't.
    groups = _groups(((settings.weight_decay or 0.0) * (settings.float_lr or 0.0), weights), (0.0, others))
    options = {"float_lr": settings.float_lr, "writeback": settings.writeback, "seed": config.seed}
    return fm.optim.RiemannianAdam(groups, **_common(config), **options)


_BUILDERS: dict[str, Callable[[nn.Module, Config], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "stiffness_adamw": _stiffness_adamw,
    "riemannian_adam": _riemannian_adam,
}


def _stiffness(config: Config) -> float | Callable[[int], float]:
    """Return k; AdamW on the grid is k = 0."""
    settings = config.optimizer
    if settings.name == "adamw" or settings.stiffness is None:
        return 0.0
    if settings.stiffness_end is None:
        return settings.stiffness
    return fm.optim.anneal(settings.stiffness, settings.stiffness_end, config.train.max_steps)


def stiffness_at(config: Config, step: int) -> float | None:
    """Return the stiffness exponent of `step` (counted from 0), None when the optimizer has none."""
    if config.optimizer.name != "stiffness_adamw":
        return None
    exponent = _stiffness(config)
    return float(exponent(step)) if callable(exponent) else exponent
