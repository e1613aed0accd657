"""Weights of one byte go where floats go, on average: over streams without a drift, under decay, and in averages."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import normal, step_from, with_factors
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold import optim

SIDE, SPREAD, SEED = 200, 0.05, 0  # 40,000 weights, and their standard deviation
BOUND = 4
"""Standard errors: of a hundred figures chance takes one beyond in one seed of a hundred; dithered draws are 7 off."""
by_factors = pytest.mark.parametrize("factors", [False, True], ids=["", "factors"])


def weights(fmt: str, factors: bool = False, **options: Any) -> tuple[fm.FP8Parameter, nn.Parameter]:
    stored = fm.FP8Parameter(normal(SIDE, SIDE, seed=SEED, std=SPREAD), fmt, seed=SEED, **options)
    return with_factors(stored, factors), nn.Parameter(stored.dequantize())


def less(stored: fm.FP8Parameter, exact: Tensor) -> Tensor:
    return stored.dequantize() - exact.detach()


def outward(start: Tensor, error: Tensor) -> tuple[float, float]:
    """An error as movement away from 0, of the mean magnitude; and its standard error."""
    error, size = error.double() * start.sign(), float(start.abs().mean())
    return float(error.mean()) / size, float(error.std()) / math.sqrt(error.numel()) / size


def is_right(found: tuple[float, float], within: float = 0.0) -> bool:
    error, deviation = found
    return abs(error) <= max(BOUND * deviation, within)


Asked = Callable[[int, Tensor], Tensor]
SGD: dict[str, Any] = {"lr": 1.0, "momentum": 0.0}
#: the optimizer, its options, and what a step asks for by its number and by noise, in ULPs of the start
STREAMS: dict[str, tuple[Any, dict[str, Any], Asked]] = {
    "normal, 0.05": (optim.StiffnessSGD, SGD, lambda step, noise: 0.05 * noise),
    "normal, 0.3": (optim.StiffnessSGD, SGD, lambda step, noise: 0.3 * noise),
    "alternating": (optim.StiffnessSGD, SGD, lambda step, noise: torch.full_like(noise, 0.3 - 0.6 * (step % 2))),
    "period 5": (optim.StiffnessSGD, SGD, lambda step, noise: torch.full_like(noise, -0.075 if step % 5 else 0.3)),
    "adamw": (optim.StiffnessAdamW, {"lr": SPREAD / 50}, lambda step, noise: noise),
    "lion": (optim.StiffnessLion, {"lr": SPREAD / 50}, lambda step, noise: noise),
    "muon": (optim.StiffnessMuon, {"lr": SPREAD / 5, "weight_decay": 0.0}, lambda step, noise: noise),
}


def pull(name: str, fmt: str, steps: int, factors: bool = False, **draws: str) -> tuple[float, float]:
    kind, options, asked = STREAMS[name]
    pair = weights(fmt, factors)
    start, ulp = pair[0].dequantize(), fm.ulp(pair[0].dequantize() / pair[0].expanded_scale(), fmt)
    optimizers = [kind([p], **options, **draws) for p in pair]
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        moves = asked(step, torch.randn(SIDE, SIDE, generator=generator)) * ulp * pair[0].expanded_scale()
        for p, optimizer in zip(pair, optimizers, strict=True):
            step_from(optimizer, p, -moves)
    return outward(start, less(*pair))


STEPS = 250
#: the format that dithered draws pull most in, for few steps
SHORT = [(name, "E5M2", STEPS // 5 if name == "muon" else STEPS) for name in STREAMS]
LONG = [(name, fmt, 200 if name == "muon" else 1024) for name in STREAMS for fmt in ("E4M3", "E5M2", "E2M5")]
LONG += [("normal, 0.3", "E4M3", 4096)]


@pytest.mark.parametrize(
    ("name", "fmt", "steps"), [*SHORT, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)]
)
@by_factors
def test_streams_without_a_drift_pull_no_weight_to_0(name: str, fmt: str, steps: int, factors: bool) -> None:
    assert is_right(pull(name, fmt, steps, factors))


WRITTEN: dict[str, Any] = {"writeback": "stochastic"}
#: a decay of 0.005 a step
DECAYING: dict[str, tuple[Any, dict[str, Any]]] = {
    "StiffnessAdamW": (optim.StiffnessAdamW, {}),
    "StiffnessSGD": (optim.StiffnessSGD, {"momentum": 0.9}),
    "StiffnessLion": (optim.StiffnessLion, {}),
    "StiffnessMuon": (optim.StiffnessMuon, {"ns_steps": 1}),
    "StiffnessMuon, adam": (optim.StiffnessMuon, {"direction": "adam"}),
    "Madam": (optim.Madam, {"float_lr": 0.05}),
    "StiffnessWrapper": (lambda p, **o: optim.StiffnessWrapper(torch.optim.SGD(p, **o), 0.5, **WRITTEN), {"lr": 0.1}),
    "torch's AdamW": (torch.optim.AdamW, {}),
    "torch's SGD": (torch.optim.SGD, {}),
}


def left(name: str, fmt: str, factors: bool = False, **draws: str) -> tuple[float, float]:
    """The excess of the rate of decay without gradients, over 200 steps; and its standard error."""
    kind, options = DECAYING[name]
    pair = weights(fmt, factors)
    start = pair[0].dequantize()
    for p in pair:
        p.grad = torch.zeros(SIDE, SIDE)
        optimizer = kind([p], **{"lr": 0.05, "weight_decay": 0.1, **options, **draws})
        for _ in range(200):
            optimizer.step()
    error, deviation = outward(start, less(*pair))
    kept = float((pair[1].detach() * start.sign()).mean() / start.abs().mean())
    assert 0.3 < kept < 0.7
    return math.log1p(error / kept) / math.log(kept), -deviation / kept / math.log(kept)


@pytest.mark.parametrize(("fmt", "factors"), [("E4M3", False), ("E5M2", False), ("E2M5", False), ("E4M3", True)])
@pytest.mark.parametrize("name", DECAYING)
def test_decay_is_what_was_asked_for(fmt: str, factors: bool, name: str) -> None:
    assert is_right(left(name, fmt, factors), within=0.002)
