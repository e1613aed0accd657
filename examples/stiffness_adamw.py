"""
StiffnessAdamW in AdamW's place
===============================

A small network learns y = sin(2 pi x): AdamW on float32 weights, and StiffnessAdamW on
layers that live in one byte a weight, with nearest and with stochastic rounding. The
figures are mean squared errors.

Expected output::

    float32, AdamW:                    0.00023
    E4M3, StiffnessAdamW, nearest:     0.29432
    E4M3, StiffnessAdamW, stochastic:  0.00078
"""

import math

import torch
from torch import nn

import fp8manifold as fm

STEPS = 600


def network() -> nn.Sequential:
    """Return a network of two hidden layers, with the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Fit two periods of a sine and return the mean squared error."""
    x = torch.linspace(-1, 1, 256)[:, None]
    y = torch.sin(2 * math.pi * x)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


def main() -> None:
    """Train three ways and print the errors."""
    model = network()
    error = train(model, torch.optim.AdamW(model.parameters(), lr=4e-3))
    print(f"{'float32, AdamW:':<35}{error:.5f}")
    for writeback in ("nearest", "stochastic"):
        model = fm.quantize_model(network(), "E4M3", storage="codes")
        optimizer = fm.optim.StiffnessAdamW(
            model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, writeback=writeback
        )
        error = train(model, optimizer)
        name = f"E4M3, StiffnessAdamW, {writeback}:"
        print(f"{name:<35}{error:.5f}")


if __name__ == "__main__":
    main()
