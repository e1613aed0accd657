"""A step or a whole training step that a user compiles: the optimizer runs eager there, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim

X = torch.linspace(-1, 1, 24).view(3, 8)
LABELS = torch.arange(3)
Make = Callable[[nn.Module], Any]


OPTIMIZERS: dict[str, Make] = {
    "StiffnessAdamW": lambda m: optim.StiffnessAdamW(m.parameters(), lr=1e-2),
    "StiffnessSGD": lambda m: optim.StiffnessSGD(m.parameters(), lr=1e-2),
    "StiffnessMuon": lambda m: optim.StiffnessMuon.for_model(m, 1e-2),
    "StiffnessLion": lambda m: optim.StiffnessLion(m.parameters(), lr=1e-3),
    "Madam": lambda m: optim.Madam(m.parameters(), lr=1e-2),
    "RiemannianAdam": lambda m: optim.RiemannianAdam(m.parameters(), lr=0.5, float_lr=1e-3),
    "RiemannianSGD": lambda m: optim.RiemannianSGD(m.parameters(), lr=0.5, float_lr=1e-3),
    "StiffnessWrapper": lambda m: optim.StiffnessWrapper(torch.optim.SGD(m.parameters(), lr=1e-2), exponent=1.0),
    "FisherNaturalGradient": lambda m: optim.FisherNaturalGradient(m.parameters(), m, [(X, LABELS)], lr=1e-2),
}


def trained(make: Make, what: str) -> list[Tensor]:
    """Codes and values after three steps, with ``what`` of ``nothing``, ``step`` or ``all`` compiled."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = fm.quantize_model(layers, "E4M3", storage="fp8")
    optimizer = make(model)
    take = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

    def train_step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        take()

    whole = torch.compile(train_step, backend="eager") if what == "all" else train_step
    for _ in range(3):
        whole(X)
    return [p.codes if isinstance(p, fm.FP8Parameter) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_compiled_step_is_the_step(make: Make) -> None:
    expected = trained(make, "nothing")
    for what in ("step", "all"):
        torch._dynamo.reset()
        assert all(torch.equal(a, b) for a, b in zip(trained(make, what), expected, strict=True)), what


def test_every_optimizer_is_among_them() -> None:
    public = {name for name in optim.__all__ if hasattr(getattr(optim, name), "step")}
    assert public == OPTIMIZERS.keys()
