"""Models whose Fisher metric can be written out in full, and what brute force makes of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8manifold.optim._fisher.nngeometry import NEEDED, Layer, call_model, likelihood, measure, sample_labels
from nanogpt_bench.model.gpt import GPTShape, build_model

EVERY = pytest.mark.parametrize("representation", NEEDED)


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
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    stretches = stretches or [torch.ones_like(module.weight) for _, module in found]
    return [Layer(name, module, t, {}) for (name, module), t in zip(found, stretches, strict=True)]


def stretches_of(model: nn.Module, *, product: bool = False) -> list[Tensor]:
    """Powers of two, as stiffness ratios are; ``product`` makes them an outer product."""
    fields = []
    for i, layer in enumerate(layers_of(model)):
        exponents = (normal(*layer.module.weight.shape, seed=i) * 1.5).round()
        fields.append(torch.exp2(exponents[:, :1] + exponents[:1] if product else exponents))
    return fields


def measured(
    representation: str,
    model: nn.Module,
    layers: list[Layer],
    batches: list[Tensor],
    *,
    samples: int = 1,
    logits: Any = call_model,
    **options: float,
) -> list[dict[str, Any]]:
    def loss(index: int) -> Tensor:
        return likelihood(logits(model, batches[index // samples]), seed=7, step=2, stream=index)

    options = {"damping": 0.1, "decay": 0.0, **options}
    return measure(model, layers, loss, len(batches) * samples, representation=representation, **options)


def rows_of(model: nn.Module, layer: nn.Linear, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of a layer that is called once, with the labels that the measurement draws."""
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, inputs: Any, output: Tensor) -> None:
        seen["x"] = inputs[0].detach().flatten(0, -2)
        output.register_hook(lambda g: seen.update(y=g.flatten(0, -2)))

    hook = layer.register_forward_hook(keep)
    F.cross_entropy(model(batch).flatten(0, -2), labels_of(model, batch), reduction="sum").backward()
    hook.remove()
    return seen["x"], seen["y"]


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
