"""Scales of stored weights: blocks, when scales change, and how values follow.

A change of a scale is one unbiased rounding, of weight and residual together.
"""

import copy
import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manifold_cases import deterministic
from optimizer_cases import normal, step_from
from tensor_cases import FORMATS, every_format, every_granularity, parameter
from torch import Tensor

import fp8manifold as fm
from fp8manifold import storage_scale, widened_scale
from fp8manifold._numerics.codec import decode_signed, joined_codes
from fp8manifold.optim import RiemannianAdam, StiffnessAdamW, StiffnessLion, StiffnessMuon

formats, exponents = st.sampled_from(FORMATS), st.integers(-40, 40)
mantissas = st.floats(1.0, 1.9921875, width=32)


@deterministic
@given(
    st.integers(0, 2**31), formats, st.sampled_from([(32,), (3, 64), (2, 2, 96), (0, 32), (2, 0)])
)
def test_a_block_has_the_scale_it_would_have_alone(seed, name, shape) -> None:
    w = normal(*shape, seed=seed, std=0.1) * torch.exp2(
        normal(*shape, seed=seed + 1, std=3).round()
    )
    scale = storage_scale(w, name, "block")
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    assert scale.dtype == torch.float32
    assert scale.flatten().tolist() == [
        storage_scale(block, name, "tensor").item() for block in w.reshape(-1, 32)
    ]


@deterministic
@given(formats, exponents, mantissas, st.sampled_from([None, 1.0, 2.0, 16.0]))
def test_a_saturating_scale_gets_its_headroom_back(name, power, mantissa, headroom) -> None:
    fmt = fm.FloatFormat.from_string(name)
    scale = torch.tensor([2.0**power])
    amax = scale * fmt.max * mantissa
    new = widened_scale(amax, scale, fmt, headroom)
    assert torch.equal(new, storage_scale(amax, fmt, "tensor", headroom=headroom).view(1))
    assert (new * fmt.max * (1 + 1e-6) >= amax * (headroom or 1)).all()
    # Without headroom the largest may sit at the very end, and the scale widens again.
    if headroom != 1.0:
        assert torch.equal(widened_scale(amax, new, fmt, headroom), new)


AMAXES = {
    "nearly the end": lambda placed, end: end * 0.999,
    "as it was": lambda placed, end: placed,
    "nearly an eighth": lambda placed, end: placed / 7.9,
}


@pytest.mark.parametrize("amax_of", AMAXES.values(), ids=AMAXES)
@deterministic
@given(name=formats, power=exponents, mantissa=mantissas)
def test_between_the_ends_nothing_changes(name, power, mantissa, amax_of) -> None:
    fmt = fm.FloatFormat.from_string(name)
    placed = torch.tensor([2.0**power * mantissa])
    scale = storage_scale(placed, fmt, "tensor").view(1)
    assert torch.equal(widened_scale(amax_of(placed, scale * fmt.max), scale, fmt), scale)


@deterministic
@given(formats, exponents, mantissas)
def test_far_from_the_end_a_scale_narrows(name, power, mantissa) -> None:
    fmt = fm.FloatFormat.from_string(name)
    placed = torch.tensor([2.0**power * mantissa])
    scale = storage_scale(placed, fmt, "tensor").view(1)
    narrow = widened_scale(placed / 32, scale, fmt)
    assert torch.equal(narrow, storage_scale(placed / 32, fmt, "tensor").view(1))
    assert (narrow <= scale / 16).all()


def test_scales_without_weights_stay() -> None:
    scale = torch.tensor([0.25, 8.0, 2.0])
    assert torch.equal(widened_scale(torch.tensor([0.0, math.nan, 448.0]), scale, "E4M3"), scale)


@every_granularity
@every_format
def test_the_largest_magnitude_under_each_scale(name, granularity) -> None:
    p = parameter(name, (3, 64), granularity=granularity)
    magnitude = p.dequantize().abs()
    expected = {"tensor": magnitude.amax(), "channel": magnitude.amax(1, keepdim=True)}
    assert torch.equal(p.largest(), expected.get(granularity, magnitude.view(3, 2, 32).amax(-1)))
    if p.format.nan_code is not None:
        assert fm.FP8Tensor(torch.tensor([1.0, math.nan]), name, scale=1.0).largest().item() == 1.0


@every_granularity
@every_format
def test_narrower_is_exact(name, granularity) -> None:
    p = parameter(name, granularity=granularity, headroom=2.0**6)
    values, room = p.dequantize(), p.scale * p.format.max / p.largest()
    p.rescale_(p.scale / torch.exp2(room.log2().floor()).clamp(max=2.0**6))
    assert torch.equal(p.dequantize(), values)
    assert int(p.counter) == 1


@every_format
def test_wider_is_exact_wherever_the_grid_holds_the_value(name) -> None:
    p = parameter(name, (16, 512), headroom=1.0)
    values, wider = p.dequantize(), p.scale * 2
    on_grid = fm.round_to_grid(values / wider, name) * wider == values
    p.rescale_(wider)
    assert torch.equal(p.scale, wider)
    assert torch.equal(p.dequantize()[on_grid], values[on_grid])
    assert ((p.dequantize() - values).abs() < fm.ulp(values / wider, name) * wider).all()


def test_what_is_lost_is_rounded_without_bias() -> None:
    """Subnormals of the wider grid: the mean stays, to four standard errors."""
    values = torch.full((100_000,), 3 * 2.0**-9)
    p = fm.FP8Tensor(values, "E4M3", scale=1.0, rounding="nearest", seed=5)
    p.rescale_(8.0)  # one ULP is 8 * 2^-9: three eighths of them round up
    assert p.unique().tolist() == [0.0, 2.0**-6]
    standard_error = 2.0**-6 * math.sqrt(3 / 8 * 5 / 8 / 100_000)
    assert abs(p.double().mean().item() - values[0].item()) < 4 * standard_error


def test_a_change_is_logged(caplog) -> None:
    p = parameter()
    new = p.scale.clone()
    new[1] *= 4
    with caplog.at_level(logging.INFO, "fp8manifold"):
        p.rescale_(new)
        p.adapt_scale_()
    assert [r.getMessage() for r in caplog.records] == [
        "E4M3 of shape (4, 64): 1 of 4 scales changed, by 2^+0 to 2^+2"
    ]


@every_granularity
def test_only_scales_that_are_due_change(granularity) -> None:
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


OPTIMIZERS = {
    "adamw": lambda p: StiffnessAdamW([p], 1e-2, writeback="residual8", moments="8bit"),
    "muon": lambda p: StiffnessMuon([p], 1e-2, writeback="residual8"),
    "lion": lambda p: StiffnessLion([p], 1e-3, writeback="residual8"),
    "riemannian": lambda p: RiemannianAdam([p], 0.3, writeback="residual8"),
}


def weight(fmt="E4M3", granularity="channel", **options) -> fm.FP8Parameter:
    return fm.FP8Parameter(
        normal(64, 64, seed=1, std=0.1), fmt, granularity=granularity, seed=3, headroom=4, **options
    )


def sum_of(p: fm.FP8Tensor, residual: Tensor) -> Tensor:
    """Return weight plus residual, in float64."""
    joined = joined_codes(p.codes.to(torch.int32), residual.to(torch.int32), p.format, 8)
    return decode_signed(joined, p.format, 8)[0].double() * p.expanded_scale().double()


def step(p, optimizer, seed) -> None:
    step_from(optimizer, p, normal(64, 64, seed=seed, std=0.1))


def step_of_chart(p: fm.FP8Tensor) -> Tensor:
    return fm.ulp(p.dequantize() / p.expanded_scale(), p.format) * p.expanded_scale()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block", "square"])
@pytest.mark.parametrize("factor", [2.0, 4.0, 0.5])
@pytest.mark.parametrize("fmt", ["E4M3", "E2M5", "E5M2"])
def test_weight_and_residual_keep_their_sum(fmt, factor, granularity) -> None:
    p = weight(fmt, granularity)
    optimizer = OPTIMIZERS["adamw"](p)
    for seed in range(3):
        step(p, optimizer, seed)
    old_sum, draws = sum_of(p, optimizer.state[p]["residual"]), int(p.counter)
    p.rescale_(p.scale * factor)
    new_sum = sum_of(p, optimizer.state[p]["residual"])
    assert bool(((new_sum - old_sum).abs() <= step_of_chart(p) / 128).all())
    assert abs(float((new_sum - old_sum).mean())) < float(step_of_chart(p).mean()) / 256 / 16
    assert int(p.counter) == draws + 1
    assert int(optimizer.state[p]["residual"].abs().max()) > 64


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["itself", "detached", "adapted", "loaded", "moved"])
def test_the_residual_is_found(name, way) -> None:
    """Whichever tensor of the weight is rescaled, and in a loaded state before its step."""
    p = weight(scale=2.0**-2 if way == "adapted" else None)
    optimizer = OPTIMIZERS[name](p)
    for seed in range(3):
        step(p, optimizer, seed)
    if way == "loaded":
        p, saved = copy.deepcopy(p), optimizer.state_dict()
        optimizer = OPTIMIZERS[name](p)
        optimizer.load_state_dict(saved)
    if way == "moved":
        layer = torch.nn.Module()
        layer.weight, p.grad = p, None
        layer.to("cpu")
    scales, old_sum = p.scale.clone(), sum_of(p, optimizer.state[p]["residual"])
    if way == "adapted":
        assert p.adapt_scale_(headroom=1.0)
    else:
        (p.detach() if way == "detached" else p).rescale_(p.scale * 2)
    new_sum = sum_of(p, optimizer.state[p]["residual"])
    assert not torch.equal(p.scale, scales)
    assert bool(((new_sum - old_sum).abs() <= step_of_chart(p) / 128).all())
    step(p, optimizer, 9)


def test_a_scale_that_stays_moves_nothing() -> None:
    p = weight()
    optimizer = OPTIMIZERS["adamw"](p)
    step(p, optimizer, 0)
    codes, residual = p.codes.clone(), optimizer.state[p]["residual"].clone()
    scale = p.scale.clone()
    scale[5] *= 2
    p.rescale_(scale)
    same_rows = [i for i in range(64) if i != 5]
    assert torch.equal(p.codes[same_rows], codes[same_rows])
    assert torch.equal(optimizer.state[p]["residual"][same_rows], residual[same_rows])
    assert not torch.equal(p.codes[5], codes[5])


def test_the_reference_is_computed_anew() -> None:
    """All spacings have grown, and S_ref with them: in the next step, not the next refresh."""
    p = weight("E2M5", scale=2.0**-4)
    optimizer = StiffnessAdamW([p], 0.0, weight_decay=0.0, stiffness=1.0)
    step(p, optimizer, 0)
    reference = optimizer.state[p]["reference"]
    p.rescale_(p.scale * 4)
    assert "reference" not in optimizer.state[p]
    step(p, optimizer, 1)
    assert optimizer.state[p]["reference"] > 2 * reference


def test_a_scale_that_the_sum_does_not_fit_is_refused() -> None:
    """The largest weight is the format's, and more than that with its residual."""
    p = fm.FP8Parameter(torch.full((4, 4), 224.0), "E4M3", granularity="tensor", scale=1.0)
    optimizer = StiffnessAdamW([p], 2.0, weight_decay=0.0, writeback="residual8")
    step_from(optimizer, p, -torch.ones(4, 4))
    assert p.tolist() == [[224.0] * 4] * 4
    old_sum = sum_of(p, optimizer.state[p]["residual"])
    with pytest.raises(ValueError, match="scale is too small: a stored value of 226"):
        p.rescale_(0.5)
    assert torch.equal(sum_of(p, optimizer.state[p]["residual"]), old_sum)
    assert p.adapt_scale_(64.0) is False
    p.rescale_(1.0)
    assert torch.equal(sum_of(p, optimizer.state[p]["residual"]), old_sum)


@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_without_a_residual_nothing_is_other_than_it_was(writeback) -> None:
    """Such a weight draws as one that nobody steps, also once its optimizer is gone."""
    p, alone = weight(), weight()
    optimizer = StiffnessAdamW([p], 1e-2, writeback=writeback)
    step(p, optimizer, 0)
    alone.adopt(p)
    if writeback == "residual8":
        del optimizer
    for weights in (p, alone):
        weights.rescale_(weights.scale * 2)
    assert torch.equal(p.codes, alone.codes)
    assert torch.equal(p.counter, alone.counter)
