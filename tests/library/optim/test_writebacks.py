"""From what was asked for to what is stored: unbiased, without stalling, nothing lost that is kept beside the codes."""

import math
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import free_weight, normal, step_from
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import WRITEBACKS, StiffnessAdamW, StiffnessSGD

PARTS = 256
"""Of an ULP, in which a residual is counted."""
double = torch.float64


def constant(value: float, count: int, fmt: str = "E4M3") -> fm.FP8Parameter:
    return fm.FP8Parameter(torch.full((count,), value), fmt, scale=1.0)


def held(p: fm.FP8Parameter, state: dict[str, Any]) -> Tensor:
    """The value of code and residual in float64: a position on the chart between two codes."""
    if "residual" not in state:
        return p.dequantize().double()
    scale = p.expanded_scale().double()
    position = fm.to_chart(p.dequantize().double() / scale, p.format) + state["residual"].double() / PARTS
    return fm.from_chart(position, p.format) * scale


def ulp_of(p: fm.FP8Parameter) -> Tensor:
    scale = p.expanded_scale().double()
    return fm.ulp(p.dequantize().double() / scale, p.format) * scale


def move(kind: str, p: Any, options: dict[str, Any], gradient: Tensor, steps: int = 1) -> Any:
    optimizer = getattr(optim, kind)([p], **options)
    for _ in range(steps):
        step_from(optimizer, p, gradient.clone())
    return optimizer


#: weight, and what a step asks for: within a binade, inwards over a power of two, subnormal, over zero, over two codes
ASKED = [(1.25, 1.29), (1.0, 0.97), (-1.0, -1.03), (16.0, 19.3)]
ASKED += [(3 * 2.0**-9, 2.3 * 2.0**-9), (2.0**-9, -0.4 * 2.0**-9)]


def test_what_is_out_of_range_saturates_and_comes_back() -> None:
    for writeback in WRITEBACKS:
        p = fm.FP8Parameter(torch.tensor([400.0, -400.0, 1.0]), "E4M3", scale=1.0)
        options = {"lr": 1.0, "momentum": 0.5, "stiffness": 0.0, "writeback": writeback, "refresh_every": 10**6}
        optimizer = move("StiffnessSGD", p, options, torch.tensor([-1e9, 1e9, 0.0]))
        assert p.tolist() == [448.0, -448.0, 1.0]
        assert held(p, optimizer.state[p]).abs().max() <= 448
        optimizer.state[p]["momentum_buffer"].zero_()
        step_from(optimizer, p, torch.tensor([64.0, -64.0, 0.0]))
        assert p.tolist() == [384.0, -384.0, 1.0]


@pytest.mark.parametrize("draws", ["independent", "dither"])
@each(("start", "asked"), ASKED)
def test_what_arrives_and_what_is_kept_are_what_was_asked_in_the_mean(start: float, asked: float, draws: str) -> None:
    """Code and residual together are one of two neighbours a part of an ULP apart, right in the mean to four sigma."""
    n = 1 << 16
    p = constant(start, n)
    options = {"lr": 1.0, "momentum": 0.0, "stiffness": 0.0, "writeback": "residual8", "draws": draws}
    optimizer = move("StiffnessSGD", p, options, torch.full((n,), start - asked))
    values = held(p, optimizer.state[p])
    low, high = values.min().item(), values.max().item()
    wanted = torch.tensor(start).sub(torch.tensor(start - asked)).double().item()
    assert low <= wanted <= high
    assert high - low <= ulp_of(p).max().item() / PARTS
    sigma = math.sqrt((wanted - low) * (high - wanted) / n)
    assert abs(values.mean().item() - wanted) <= 4 * sigma


@pytest.mark.parametrize("bits", [4, 2])
def test_a_residual_of_several_weights_a_byte_is_refused(bits: int) -> None:
    """As earlier releases kept them, in a state that is loaded and in one that somebody has put there."""
    p = fm.FP8Parameter(torch.ones(3, 5), "E4M3")
    optimizer = move("StiffnessAdamW", p, {"writeback": "residual8"}, torch.ones(3, 5))
    state, codes = optimizer.state_dict(), p.codes.clone()
    state["state"][0] = state["state"][0] | {"residual": torch.zeros(15 * bits // 8 + 1, dtype=torch.uint8)}
    state["param_groups"][0]["writeback"] = f"residual{bits}"
    message = r"residual in torch\.uint8: residuals of 4 and 2 bits can't be read any more; writeback='residual8' has"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    optimizer.state[p]["residual"] = state["state"][0]["residual"]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p.codes, codes)
    with pytest.raises(ValueError, match=f"writeback='residual{bits}'.*residual8"):
        StiffnessAdamW([p], writeback=f"residual{bits}")


def test_residuals_start_from_the_float_weights() -> None:
    """Half a part of an ULP away from them before the first step, but where the last part is already half an ULP."""
    w = normal(64, 33, seed=1, std=0.2)
    p = fm.FP8Parameter(w, "E4M3", keep_remainder=True)
    optimizer = move("StiffnessAdamW", p, {"lr": 0.0, "writeback": "residual8"}, torch.zeros(64, 33))
    away = (held(p, optimizer.state[p]) - w.double()).abs() / ulp_of(p)
    share = (away > 0.5 / PARTS + 1 / 512).double().mean()
    assert away.max() <= 1.5 / PARTS
    assert share < 1.0 / PARTS
    assert ((w.double() - p.dequantize().double()).abs() / ulp_of(p)).mean() > 0.2


def test_a_quadratic_is_followed_like_float32() -> None:
    """AdamW for 300 steps at a falling rate, towards targets off the grid: the weights that code and residual stand for
    are float32's but for the noise of rounding, which the gradients pull back: in the mean below one part of an ULP."""
    w, targets = normal(64, 32, seed=1, std=0.2), normal(64, 32, seed=2, std=0.2)
    p = fm.FP8Parameter(w, "E4M3", granularity="tensor", keep_remainder=True)
    free = free_weight(w, "E4M3", p.scale.item())
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "stiffness": 0.0}
    ours = StiffnessAdamW([p], lr=1.0, writeback="residual8", **options)
    exact = StiffnessAdamW([free], lr=1.0, **options)
    for t in range(300):
        for optimizer in (ours, exact):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - t / 300)
        p.grad = ((held(p, ours.state[p]) if t else w.double()) - targets).float()
        step_from(ours, free, free.detach().as_subclass(Tensor) - targets)
        exact.step()
    away = (held(p, ours.state[p]) - free.detach().as_subclass(Tensor).double()).abs() / ulp_of(p)
    assert away.mean() < 1 / PARTS
    assert away.quantile(0.99) < 4 / PARTS
    nearest = fm.round_to_grid(free.detach().as_subclass(Tensor) / p.scale, "E4M3") * p.scale
    assert (p.dequantize() == nearest).double().mean() > 1 - 1.5 / PARTS


FIXED: dict[str, dict[str, Any]] = {"k = 0": {"stiffness": 0.0}, "dampening": {"stiffness": 0.0, "dampening": 0.5}}


@pytest.mark.parametrize("options", FIXED.values(), ids=FIXED)
def test_weight_and_momentum_together_move_as_if_nothing_were_rounded(options: dict[str, Any]) -> None:
    """Over 200 steps with given gradients: codes of E4M3 against float64, to the rounding of float32."""
    lr, beta = 0.01, 0.9
    w = normal(40, 25, seed=1)
    p = fm.FP8Parameter(w, "E4M3")
    exact, m = p.dequantize().double(), torch.zeros(40, 25, dtype=double)
    optimizer = StiffnessSGD([p], lr=lr, momentum=beta, writeback="momentum", **options)
    for t in range(200):
        g = normal(40, 25, seed=10 + t)
        step_from(optimizer, p, g)
        m = beta * m + g.double() * (1.0 if t == 0 else 1 - options.get("dampening", 0.0))
        exact = exact - lr * m
        ours = p.dequantize().double() - lr * beta / (1 - beta) * optimizer.state[p]["momentum_buffer"].double()
        torch.testing.assert_close(ours, exact - lr * beta / (1 - beta) * m, rtol=0, atol=2e-5)
    assert (p.dequantize().double() - exact).abs().max() > 0.01
