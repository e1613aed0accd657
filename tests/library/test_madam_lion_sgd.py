"""Madam, Lion and SGD: what a step is, where it changes kind, and torch's optimizers where nothing is rounded."""

from __future__ import annotations

import math
from typing import Any

import torch
from optimizer_cases import free_weight, normal
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import Madam, StiffnessLion

double = torch.float64
FLOOR = 2.0**-4


def plain(p: Tensor) -> Tensor:
    return p.detach().as_subclass(Tensor).clone()


def stepped(optimizer: Any, p: Tensor, gradient: Tensor) -> Tensor:
    """The change of a float weight."""
    before = plain(p)
    p.grad = gradient
    optimizer.step()
    return plain(p) - before


# ------------------------------------------------------------------------------------------------------- Madam
def madam_on(x: Tensor, fmt: str = "E4M3", **options: Any) -> tuple[Any, Madam]:
    """Weights that nothing rounds; of one gradient the first direction is its sign."""
    p = free_weight(x, fmt)
    return p, Madam([p], **{"lr": 0.1, "compile": False, **options})


def floor_of(x: Tensor, fmt: str, escape: float = FLOOR) -> float:
    """The share of the mean binade below which steps become additive."""
    binades = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0 ** fm.FloatFormat.from_string(fmt).emin))))
    return escape * binades.mean().item()


def test_madam_multiplies_above_the_floor_and_adds_below() -> None:
    """By exp(-sign(w) lr d) there; by a fixed amount for every weight below, whatever its own size."""
    x = torch.cat([torch.logspace(-6, 2, 400, dtype=double), -torch.logspace(-6, 2, 400, dtype=double), torch.zeros(2)])
    floor = floor_of(x, "E4M3")
    for sign in (1.0, -1.0):
        p, optimizer = madam_on(x)
        moved = stepped(optimizer, p, torch.full_like(x, sign))
        far, near = x.abs() >= floor, x.abs() < floor
        assert far.sum() > 100
        assert near.sum() > 100
        factor = (plain(p) / x)[far]
        torch.testing.assert_close(factor, torch.exp(-0.1 * sign * x.sign())[far], rtol=1e-7, atol=0)
        torch.testing.assert_close(moved[near], torch.full_like(x, -0.1 * sign * floor)[near], rtol=1e-7, atol=0)
        crossed = plain(p).sign() != x.sign()
        assert crossed[x == 0].all()
        assert not crossed[far].any()
        assert crossed[near & (x != 0)].any()


def test_madams_direction_is_bounded_and_normalised() -> None:
    """Gradients of any size move a weight by the same factor; one that jumps by no more than the bound's."""
    x = torch.ones(8, dtype=double)
    p, optimizer = madam_on(x, max_direction=3.0, betas=(0.9, 0.999))
    sizes = torch.logspace(-6, 6, 8, dtype=double)
    moved = stepped(optimizer, p, sizes)
    torch.testing.assert_close(moved, torch.full_like(x, math.expm1(-0.1)), rtol=0.02, atol=0)  # eps is 1e-8
    before = plain(p)
    stepped(optimizer, p, 1e6 * sizes)
    root = math.sqrt((0.999 * 0.001 + 0.001 * 1e12) / (1 - 0.999**2)) / 1e6
    torch.testing.assert_close(
        plain(p) / before, torch.full_like(x, math.exp(-0.1 * min(1 / root, 3.0))), rtol=1e-4, atol=0
    )
    for _ in range(200):
        stepped(optimizer, p, 1e-3 * sizes)
    before = plain(p)
    stepped(optimizer, p, 1e6 * sizes)
    assert (plain(p) / before >= math.exp(-0.3) * (1 - 1e-6)).all()


def test_madam_gives_ordinary_parameters_adamw() -> None:
    """At float_lr, which follows the schedule of lr."""
    weight = nn.Parameter(normal(30, seed=1, dtype=double))
    twin = nn.Parameter(weight.detach().clone())
    ours = Madam([weight], lr=0.2, float_lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1, compile=False)
    torchs = torch.optim.AdamW([twin], lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1)
    for t in range(50):
        if t == 20:
            ours.param_groups[0]["lr"], torchs.param_groups[0]["lr"] = 0.1, 1.5e-3
        weight.grad = normal(30, seed=t, dtype=double)
        twin.grad = weight.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(weight, twin, rtol=0, atol=1e-13)


# -------------------------------------------------------------------------------------------------------- Lion


def test_lion_is_the_published_algorithm() -> None:
    """The sign of an interpolation, then the other beta into the average, decoupled decay; on ordinary weights."""
    w = normal(50, seed=1, dtype=double)
    p, m = nn.Parameter(w.clone()), torch.zeros(50, dtype=double)
    optimizer = StiffnessLion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.5, compile=False)
    for t in range(60):
        g = normal(50, seed=10 + t, dtype=double)
        p.grad = g
        optimizer.step()
        w = (1 - 0.01 * 0.5) * w - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-13)


# --------------------------------------------------------------------------------------------- SGD and AdamW
SGD: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"momentum": 0.5, "maximize": True},
}
