"""From what was asked for to what is stored: unbiased, without stalling, nothing lost that is kept beside the codes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._encoded.storage import packed_length, packed_width
from fp8manifold.optim import WRITEBACKS
from fp8manifold.optim._state import pack_residual, unpack_residual

PARTS = {"residual8": 256, "residual4": 16, "residual2": 4}
every_residual = pytest.mark.parametrize("writeback", PARTS)
double = torch.float64


def constant(value: float, count: int, fmt: str = "E4M3") -> fm.FP8Parameter:
    """Many equal weights of scale 1."""
    return fm.FP8Parameter(torch.full((count,), value), fmt, scale=1.0)


def held(p: fm.FP8Parameter, state: dict[str, Any]) -> Tensor:
    """What code and residual stand for, in float64: a position on the chart between two codes."""
    residual, parts = state.get("residual"), 256
    if residual is None:
        return p.dequantize().double()
    if residual.dtype == torch.uint8:
        bits = packed_width(residual.shape, p.shape)
        residual, parts = unpack_residual(residual, p.shape, bits), 1 << bits
    scale = p.expanded_scale().double()
    position = fm.to_chart(p.dequantize().double() / scale, p.format) + residual.double() / parts
    return fm.from_chart(position, p.format) * scale


def ulp_of(p: fm.FP8Parameter) -> Tensor:
    scale = p.expanded_scale().double()
    return fm.ulp(p.dequantize().double() / scale, p.format) * scale


def move(kind: str, p: Any, options: dict[str, Any], gradient: Tensor, steps: int = 1) -> Any:
    optimizer = getattr(optim, kind)([p], compile=False, **options)
    for _ in range(steps):
        p.grad = gradient.clone()
        optimizer.step()
    return optimizer


# -------------------------------------------------------------------------------------------------- stochastic
#: weight, and what a step asks for: within a binade, inwards over a power of two, subnormal, over zero, over two codes
ASKED = [
    (1.25, 1.29),
    (1.0, 0.97),
    (-1.0, -1.03),
    (3 * 2.0**-9, 2.3 * 2.0**-9),
    (2.0**-9, -0.4 * 2.0**-9),
    (16.0, 19.3),
]


@pytest.mark.parametrize("writeback", ["stochastic", "momentum"])
@pytest.mark.parametrize(("start", "asked"), ASKED)
def test_a_step_is_right_in_the_mean(start: float, asked: float, writeback: str) -> None:
    """SGD at k = 0 asks for exactly ``w - lr g``; the mean of 2^18 equal weights is that, to four sigma."""
    n = 1 << 18
    p = constant(start, n)
    options = {"lr": 1.0, "momentum": 0.5, "stiffness": 0.0, "writeback": writeback}
    move("StiffnessSGD", p, options, torch.full((n,), start - asked))
    values = p.dequantize().double()
    low, high = values.min().item(), values.max().item()
    wanted = torch.tensor(start).sub(torch.tensor(start - asked)).double().item()
    assert low <= wanted <= high
    assert len(values.unique()) == 2
    sigma = math.sqrt((wanted - low) * (high - wanted) / n)
    assert abs(values.mean().item() - wanted) < 4 * sigma


# ---------------------------------------------------------------------------------------------------- residuals
@pytest.mark.parametrize("bits", [4, 2])
def test_packed_values_come_back_and_their_size_tells_their_width(bits: int) -> None:
    """Flat and in rows of any length, empty ones too; the first value has the lowest bits, as it always had."""
    for length in range(13):
        for shape in ((length,), (3, length), (1, length, 2)):
            values = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=torch.int8)
            for in_rows in (False, True):
                packed = pack_residual(values, bits, in_rows=in_rows)
                row = math.prod(shape[1:]) if in_rows else values.numel()
                assert packed.dtype == torch.uint8
                assert packed.shape[-1] == packed_length(row, bits)
                assert packed.shape[-1] >= row * bits / 8
                assert packed_width(packed.shape, shape) == (bits if row else 4)  # none are of either
                assert torch.equal(unpack_residual(packed, values.shape, bits), values)
    values = torch.tensor([1, -1, 0, -2], dtype=torch.int8)
    assert pack_residual(values, bits).tolist() == ([0xF1, 0xE0] if bits == 4 else [0b10_00_11_01])


@every_residual
@pytest.mark.parametrize("draws", ["independent", "dither"])
@pytest.mark.parametrize(("start", "asked"), ASKED)
def test_what_arrives_and_what_is_kept_are_what_was_asked_in_the_mean(
    start: float, asked: float, draws: str, writeback: str
) -> None:
    """Code and residual together are one of two neighbours a part of an ULP apart, right in the mean to four sigma."""
    n = 1 << 16
    p = constant(start, n)
    options = {"lr": 1.0, "momentum": 0.0, "stiffness": 0.0, "writeback": writeback, "draws": draws}
    optimizer = move("StiffnessSGD", p, options, torch.full((n,), start - asked))
    values = held(p, optimizer.state[p])
    low, high = values.min().item(), values.max().item()
    wanted = torch.tensor(start).sub(torch.tensor(start - asked)).double().item()
    assert low <= wanted <= high
    assert high - low <= ulp_of(p).max().item() / PARTS[writeback]
    sigma = math.sqrt((wanted - low) * (high - wanted) / n)
    assert abs(values.mean().item() - wanted) <= 4 * sigma


@every_residual
def test_residuals_start_from_the_float_weights(writeback: str) -> None:
    """Half a part of an ULP away from them before the first step, but where the last part is already half an ULP."""
    w = normal(64, 33, seed=1, std=0.2)
    p = fm.FP8Parameter(w, "E4M3", keep_remainder=True)
    optimizer = move("StiffnessAdamW", p, {"lr": 0.0, "writeback": writeback}, torch.zeros(64, 33))
    away = (held(p, optimizer.state[p]) - w.double()).abs() / ulp_of(p)
    share = (away > 0.5 / PARTS[writeback] + 1 / 512).double().mean()
    assert away.max() <= 1.5 / PARTS[writeback]
    assert share < 1.0 / PARTS[writeback]
    assert ((w.double() - p.dequantize().double()).abs() / ulp_of(p)).mean() > 0.2


@every_residual
def test_code_and_residual_are_one_number(writeback: str) -> None:
    """Steps of whole parts are exact, forth and back, over binades, subnormals and zero."""
    parts = PARTS[writeback]
    steps = [1 / parts, 3 / parts, 100 / parts, -1 / parts, 5.0, -104 / parts, -5.0, 1 / parts]
    codes = torch.arange(0, 94, dtype=torch.uint8)  # 100 parts of 2 bits are 25 codes: none reaches the end
    p = fm.FP8Parameter.from_codes(torch.cat([codes, codes + 128]), 1.0, "E4M3", requires_grad=True)
    optimizer = optim.RiemannianSGD([p], lr=1.0, writeback=writeback, damping=0.0, clip=math.inf, compile=False)
    position = fm.to_chart(p.dequantize().double(), "E4M3")
    for step in steps:
        at = held(p, optimizer.state.get(p, {}))
        stiffness = fm.ulp(at, "E4M3")
        p.grad = (-step / stiffness).float()  # in the chart S g, so that the code moves by the step
        optimizer.step()
        position = position + step
        found = fm.to_chart(held(p, optimizer.state[p]), "E4M3")
        assert torch.equal(found, position)


def test_what_is_out_of_range_saturates_and_comes_back() -> None:
    for writeback in WRITEBACKS:
        p = fm.FP8Parameter(torch.tensor([400.0, -400.0, 1.0]), "E4M3", scale=1.0)
        options = {"lr": 1.0, "momentum": 0.5, "stiffness": 0.0, "writeback": writeback, "refresh_every": 10**6}
        optimizer = move("StiffnessSGD", p, options, torch.tensor([-1e9, 1e9, 0.0]))
        assert p.tolist() == [448.0, -448.0, 1.0]
        assert held(p, optimizer.state[p]).abs().max() <= 448
        optimizer.state[p]["momentum_buffer"].zero_()
        p.grad = torch.tensor([64.0, -64.0, 0.0])
        optimizer.step()
        assert p.tolist() == [384.0, -384.0, 1.0]
