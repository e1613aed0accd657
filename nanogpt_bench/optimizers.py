"""From the `optimizer` section to an optimizer with GPT-style parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import Config
from nanogpt_bench.errors import BenchError, one_line


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of a resolved configuration.

    Raises:
        BenchError: an option the optimizer refuses.
    """
    groups = parameter_groups(model, config.optimizer.weight_decay)
    try:
        return _build(groups, config)
    except (ValueError, TypeError) as error:
        raise BenchError(f"optimizer: {one_line(error)}") from None


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings decay, biases and norms don't; shared parameters appear once."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _build(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    settings = config.optimizer
    assert settings.lr is not None
    betas = (settings.beta1, settings.beta2)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    if settings.name == "adamw" and config.model.storage != "grid":
        return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    if settings.name == "riemannian_adam":
        return fm.optim.RiemannianAdam(
            groups,
            lr=settings.lr,
            betas=betas,
            eps=settings.eps,
            float_lr=settings.float_lr,
            writeback=settings.writeback,
            seed=config.seed,
        )
    return fm.optim.StiffnessAdamW(
        groups,
        lr=settings.lr,
        betas=betas,
        eps=settings.eps,
        stiffness=_stiffness(config),
        writeback=settings.writeback,
        seed=config.seed,
    )


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
