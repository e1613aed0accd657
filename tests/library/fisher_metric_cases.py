"""Models whose Fisher metric can be written out in full, and what brute force makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8manifold._fisher.capture import (
    Draws,
    LayerFisher,
    call_model,
    linear_layers,
    rows_of_batches,
    sample_labels,
)
from fp8manifold._fisher.metric import REPRESENTATIONS, Layer
from nanogpt_bench.model.gpt import GPTShape, build_model

EVERY = pytest.mark.parametrize("representation", REPRESENTATIONS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classifier(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))


def small_gpt(**options: Any) -> nn.Module:
    return build_model(GPTShape(2, 2, 16, 8, vocab_size=31, **options), seed=1)


def tokens(rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(0, 31, (rows, 8), generator=torch.Generator().manual_seed(seed))


def layers_of(model: nn.Module, stretches: Any = None) -> list[Layer]:
    found = linear_layers(model, model.parameters(), 4096)
    stretches = stretches or [None] * len(found)
    return [
        Layer(module, LayerFisher(name, weight), stretch, {})
        for (weight, (name, module)), stretch in zip(found.items(), stretches, strict=True)
    ]


def stretches_of(model: nn.Module, *, product: bool = False) -> list[Tensor]:
    """Powers of two, as stiffness ratios are; ``product`` makes them an outer product."""
    fields = []
    for i, weight in enumerate(linear_layers(model, model.parameters(), 4096)):
        exponents = (normal(*weight.shape, seed=i) * 1.5).round()
        fields.append(torch.exp2(exponents[:, :1] + exponents[:1] if product else exponents))
    return fields


def passes_over(model: nn.Module, layers: list[Layer], batches: list[Tensor], samples: int = 1) -> Any:
    def begin() -> Iterator[Any]:
        return rows_of_batches(model, [x.module for x in layers], batches, call_model, Draws(7, 2, samples))

    return begin


def labels_of(model: nn.Module, batch: Tensor, stream: int = 0) -> Tensor:
    """The labels that the measurement draws."""
    return sample_labels(model(batch).flatten(0, -2).detach(), seed=7, step=2, stream=stream)


def gradients_by_token(model: nn.Module, weight: Tensor, batch: Tensor, labels: Tensor) -> Tensor:
    """Brute force: one backward pass for every token's log-likelihood."""
    chosen = F.log_softmax(model(batch).flatten(0, -2), -1).gather(1, labels[:, None])[:, 0]
    return torch.stack([torch.autograd.grad(value, weight, retain_graph=True)[0] for value in chosen])


def dense_solution(metric: Tensor, stretch: Tensor, gradient: Tensor) -> Tensor:
    """``T M^-1 T g`` for a dense damped metric in chart coordinates."""
    t = stretch.double().flatten()
    solved = torch.linalg.solve(metric.double(), t * gradient.double().flatten())
    return (t * solved).view(gradient.shape)


def mean_eigenvalue(matrix: Tensor) -> float:
    return matrix.double().diagonal().mean().item()
