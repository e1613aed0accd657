"""
A format of your own
====================

A format is four facts: exponent bits, mantissa bits, bias and layout. Here are a format
of eight bits that spends no codes on infinities and NaN, and one of seven bits.
``FloatFormat`` derives the rest, and everything that takes a format takes these. The
network learns y = sin(2 pi x).

Expected output::

    E3M4FINITE_B4: 256 finite codes, largest 15.5, smallest step 0.00781
    E2M4: 128 finite codes, largest 7.75, smallest step 0.06250
    E4M3            rounding error of the weights 2.33%   loss after training 0.0098
    E3M4FINITE_B4   rounding error of the weights 1.18%   loss after training 0.0042
    E2M4            rounding error of the weights 1.22%   loss after training 0.0054
"""

import math

import torch
from torch import nn

import fp8manifold as fm

STEPS = 400
CUSTOM_FORMATS = (
    fm.FloatFormat(3, 4, bias=4, layout="finite"),
    fm.FloatFormat.from_string("E2M4"),
)


def network() -> nn.Sequential:
    """Return the network, with the same initial weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )


def rounding_error(before: nn.Sequential, after: nn.Sequential) -> float:
    """Return the rounding error of the hidden layer's weights, relative to their norm."""
    exact = before[2].weight.detach()
    stored = after[2].weight.dequantize()
    return ((stored - exact).norm() / exact.norm()).item()


def train(model: nn.Module) -> float:
    """Fit the sine and return the mean squared error."""
    x = torch.linspace(-1, 1, 128)[:, None]
    y = torch.sin(2 * math.pi * x)
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return (model(x) - y).square().mean().item()


if __name__ == "__main__":
    for fmt in CUSTOM_FORMATS:
        facts = f"{fmt.finite_codes} finite codes, largest {fmt.max:g}"
        print(f"{fmt}: {facts}, smallest step {fmt.ulp_min:.5f}")
    for fmt in (fm.FloatFormat.from_string("E4M3"), *CUSTOM_FORMATS):
        model = fm.quantize_model(network(), fmt, storage="codes")
        error = rounding_error(network(), model)
        loss = train(model)
        print(
            f"{fmt.name:<15} rounding error of the weights {error:.2%}   "
            f"loss after training {loss:.4f}"
        )
