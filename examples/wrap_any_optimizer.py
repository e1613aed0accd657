"""
A stiffness schedule around any optimizer
=========================================

``StiffnessWrapper`` takes an optimizer as it is, scales its update by (S / mean S)^k
and rounds once; S is the spacing of the format at a weight. Here it wraps three of
torch's optimizers over weights on the E4M3 grid: with nearest rounding, with stochastic
rounding, and with stochastic rounding and a k that goes from 1 to 0. The network learns
y = sin(2 pi x). The figures are mean squared errors.

Expected output::

    optimizer           nearest     stochastic  k from 1 to 0
    NAdam                0.3548         0.0416         0.0400
    RMSprop              0.4253         0.0712         0.0932
    Adamax               0.4249         0.1332         0.1376
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fp8manifold as fm

STEPS = 300
WRAPPER_OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {"writeback": "nearest"},
    "stochastic": {"writeback": "stochastic"},
    "k from 1 to 0": {
        "writeback": "stochastic",
        "exponent": fm.optim.anneal(1.0, 0.0, STEPS),
    },
}
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=4e-3),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=2e-3),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=8e-3),
}


def train(make_optimizer: MakeOptimizer, options: dict[str, Any]) -> float:
    """Fit the sine with weights on the grid, and return the mean squared error."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    model = fm.quantize_model(model, "E4M3", storage="grid")
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    wrapper = fm.optim.StiffnessWrapper(optimizer, **options)
    x = torch.linspace(-1, 1, 128)[:, None]
    y = torch.sin(2 * math.pi * x)
    for _ in range(STEPS):
        wrapper.zero_grad()
        (model(x) - y).square().mean().backward()
        wrapper.step()
        schedule.step()
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


if __name__ == "__main__":
    header = "".join(f"{name:>15}" for name in WRAPPER_OPTIONS)
    print(f"{'optimizer':<12}{header}")
    for name, make_optimizer in OPTIMIZERS.items():
        errors = [train(make_optimizer, options) for options in WRAPPER_OPTIONS.values()]
        cells = "".join(f"{error:>15.4f}" for error in errors)
        print(f"{name:<12}{cells}")
