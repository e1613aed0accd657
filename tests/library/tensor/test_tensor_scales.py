"""Scales of stored weights: blocks, when they change, and that changing one is a single unbiased rounding."""

import logging
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from optimizer_cases import normal
from tensor_cases import FORMATS, every_format, every_granularity, parameter

import fp8manifold as fm
from fp8manifold import storage_scale, widened_scale

settings = hypothesis_settings(derandomize=True, deadline=None, database=None, max_examples=200)


@settings
@given(st.integers(0, 2**31), st.sampled_from(FORMATS), st.sampled_from([(32,), (3, 64), (2, 2, 96), (0, 32), (2, 0)]))
def test_a_block_has_the_scale_it_would_have_alone(seed: int, name: str, shape: tuple[int, ...]) -> None:
    w = normal(*shape, seed=seed, std=0.1) * torch.exp2(normal(*shape, seed=seed + 1, std=3).round())
    scale = storage_scale(w, name, "block")
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert scale.dtype == torch.float32
    alone = [storage_scale(block, name, "tensor").item() for block in w.reshape(-1, 32)]
    assert scale.flatten().tolist() == alone


exponents = st.integers(-40, 40)
mantissas = st.floats(1.0, 1.9921875, width=32)


@settings
@given(
    st.sampled_from(FORMATS), exponents, st.floats(1.0, 1.9921875, width=32), st.sampled_from([None, 1.0, 2.0, 16.0])
)
def test_a_saturating_scale_gets_its_headroom_back(name: str, power: int, mantissa: float, headroom: Any) -> None:
    fmt = fm.FloatFormat.from_string(name)
    scale = torch.tensor([2.0**power])
    amax = scale * fmt.max * mantissa
    new = widened_scale(amax, scale, fmt, headroom)
    assert torch.equal(new, storage_scale(amax, fmt, "tensor", headroom=headroom).view(1))
    assert (new * fmt.max * (1 + 1e-6) >= amax * (headroom or 1)).all()
    again = widened_scale(amax, new, fmt, headroom)
    assert torch.equal(again, new) or headroom == 1.0  # without headroom the largest may sit at the very end


@settings
@given(st.sampled_from(FORMATS), exponents, mantissas)
def test_between_the_ends_nothing_changes(name: str, power: int, mantissa: float) -> None:
    fmt = fm.FloatFormat.from_string(name)
    placed = torch.tensor([2.0**power * mantissa])
    scale = storage_scale(placed, fmt, "tensor").view(1)
    for amax in (scale * fmt.max * 0.999, placed, placed / 7.9):
        assert torch.equal(widened_scale(amax, scale, fmt), scale)
    narrow = widened_scale(placed / 32, scale, fmt)
    assert torch.equal(narrow, storage_scale(placed / 32, fmt, "tensor").view(1))
    assert (narrow <= scale / 16).all()


def test_scales_without_weights_stay() -> None:
    scale = torch.tensor([0.25, 8.0, 2.0])
    amax = torch.tensor([0.0, math.nan, 448.0])
    assert torch.equal(widened_scale(amax, scale, "E4M3"), scale)


@every_granularity
@every_format
def test_the_largest_magnitude_under_each_scale(name: str, granularity: Any) -> None:
    p = parameter(name, (3, 64), granularity=granularity)
    magnitude = p.dequantize().abs()
    expected = {"tensor": magnitude.amax(), "channel": magnitude.amax(1, keepdim=True)}
    blocks = magnitude.view(3, 2, 32).amax(-1)
    assert torch.equal(p.largest(), expected.get(granularity, blocks))


def test_nan_is_not_the_largest() -> None:
    for name in ("E4M3", "E5M2", "E4M3FNUZ", "P3109_8P3"):
        assert fm.FP8Tensor(torch.tensor([1.0, math.nan]), name, scale=1.0).largest().item() == 1.0


@every_granularity
@every_format
def test_narrower_is_exact(name: str, granularity: Any) -> None:
    p = parameter(name, granularity=granularity, headroom=2.0**6)
    values, room = p.dequantize(), p.scale * p.format.max / p.largest()
    p.rescale_(p.scale / torch.exp2(room.log2().floor()).clamp(max=2.0**6))
    assert torch.equal(p.dequantize(), values)
    assert int(p.counter) == 1


@every_format
def test_wider_is_exact_wherever_the_grid_holds_the_value(name: str) -> None:
    p = parameter(name, (16, 512), headroom=1.0)
    values, wider = p.dequantize(), p.scale * 2
    held = fm.round_to_grid(values / wider, name) * wider == values
    p.rescale_(wider)
    assert torch.equal(p.scale, wider)
    assert torch.equal(p.dequantize()[held], values[held])
    neighbours = fm.ulp(values / wider, name) * wider
    assert ((p.dequantize() - values).abs() < neighbours).all()


def test_what_is_lost_is_rounded_without_bias() -> None:
    """Subnormals of the wider grid: the mean stays, to four standard errors."""
    values = torch.full((100_000,), 3 * 2.0**-9)
    p = fm.FP8Tensor(values, "E4M3", scale=1.0, rounding="nearest", seed=5)
    p.rescale_(8.0)  # one ULP is 8 * 2^-9: three eighths of them round up
    assert p.unique().tolist() == [0.0, 2.0**-6]
    standard_error = 2.0**-6 * math.sqrt(3 / 8 * 5 / 8 / 100_000)
    assert abs(p.double().mean().item() - values[0].item()) < 4 * standard_error


def test_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    p = parameter()
    new = p.scale.clone()
    new[1] *= 4
    with caplog.at_level(logging.INFO, "fp8manifold"):
        p.rescale_(new)
        p.adapt_scale_()
    assert [r.getMessage() for r in caplog.records] == ["E4M3 of shape (4, 64): 1 of 4 scales changed, by 2^+0 to 2^+2"]


@every_granularity
def test_only_scales_that_are_due_change(granularity: Any) -> None:
    p = parameter(granularity=granularity, rounding="nearest")
    scale, values = p.scale.clone(), p.dequantize()
    assert not p.adapt_scale_()
    assert torch.equal(p.scale, scale)
    with torch.no_grad():
        p[1, 5] = (p.expanded_scale().expand(p.shape)[1, 5] * p.format.max).item()
    assert p.adapt_scale_()
    assert not p.adapt_scale_()
    changed = (p.scale != scale).nonzero()
    assert changed.tolist() == {"tensor": [[]], "channel": [[1, 0]], "block": [[1, 0]]}[granularity]
    assert (p.scale[p.scale != scale] == 16 * scale[p.scale != scale]).all()
    values[1, 5] = p[1, 5].item()
    error = (p.dequantize() - values).abs()
    assert (error < fm.ulp(values / p.expanded_scale(), "E4M3") * p.expanded_scale()).all()
