"""Scales that somebody else than the step changes, and what is kept in units of them: residual, remainder, S_ref."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import each
from optimizer_cases import normal, step_from
from torch import Tensor

import fp8manifold as fm
from fp8manifold._numerics.codec import decode_signed, joined_codes
from fp8manifold.optim import RiemannianAdam, StiffnessAdamW, StiffnessLion, StiffnessMuon

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: StiffnessAdamW([p], 1e-2, writeback="residual8", moments="8bit"),
    "muon": lambda p: StiffnessMuon([p], 1e-2, writeback="residual8"),
    "lion": lambda p: StiffnessLion([p], 1e-3, writeback="residual8"),
    "riemannian": lambda p: RiemannianAdam([p], 0.3, writeback="residual8"),
}
GRANULARITIES = each("granularity", ["tensor", "channel", "block", "square"])


def weight(fmt: str = "E4M3", granularity: Any = "channel", **options: Any) -> fm.FP8Parameter:
    return fm.FP8Parameter(normal(64, 64, seed=1, std=0.1), fmt, granularity=granularity, seed=3, headroom=4, **options)


def whole(p: fm.FP8Tensor, left: Tensor) -> Tensor:
    joined = joined_codes(p.codes.to(torch.int32), left.to(torch.int32), p.format, 8)
    return decode_signed(joined, p.format, 8)[0].double() * p.expanded_scale().double()


def step(p: fm.FP8Parameter, optimizer: Any, seed: int) -> None:
    step_from(optimizer, p, normal(64, 64, seed=seed, std=0.1))


def step_of_chart(p: fm.FP8Tensor) -> Tensor:
    return fm.ulp(p.dequantize() / p.expanded_scale(), p.format) * p.expanded_scale()


@GRANULARITIES
@each("factor", [2.0, 4.0, 0.5])
@each("fmt", ["E4M3", "E2M5", "E5M2"])
def test_weight_and_residual_keep_their_sum(fmt: str, factor: float, granularity: str) -> None:
    p = weight(fmt, granularity)
    optimizer = OPTIMIZERS["adamw"](p)
    for seed in range(3):
        step(p, optimizer, seed)
    before = whole(p, optimizer.state[p]["residual"])
    draws = int(p.counter)
    p.rescale_(p.scale * factor)
    after = whole(p, optimizer.state[p]["residual"])
    assert bool(((after - before).abs() <= step_of_chart(p) / 128).all())
    assert abs(float((after - before).mean())) < float(step_of_chart(p).mean()) / 256 / 16
    assert int(p.counter) == draws + 1
    assert int(optimizer.state[p]["residual"].abs().max()) > 64


@each("name", OPTIMIZERS)
@each("way", ["itself", "detached", "adapted", "loaded", "moved"])
def test_the_residual_is_found(name: str, way: str) -> None:
    """By whatever name the weight is rescaled, and in a state that was loaded and has not stepped."""
    p = weight(scale=2.0**-2 if way == "adapted" else None)
    optimizer = OPTIMIZERS[name](p)
    for seed in range(3):
        step(p, optimizer, seed)
    if way == "loaded":
        other = copy.deepcopy(p)
        saved = optimizer.state_dict()
        optimizer = OPTIMIZERS[name](other)
        optimizer.load_state_dict(saved)
        p = other
    if way == "moved":
        layer = torch.nn.Module()
        layer.weight, p.grad = p, None
        layer.to("cpu")
    scales = p.scale.clone()
    before = whole(p, optimizer.state[p]["residual"])
    if way == "adapted":
        assert p.adapt_scale_(headroom=1.0)
    else:
        same: Any = p.detach() if way == "detached" else p
        same.rescale_(p.scale * 2)
    after = whole(p, optimizer.state[p]["residual"])
    assert not torch.equal(p.scale, scales)
    assert bool(((after - before).abs() <= step_of_chart(p) / 128).all())
    step(p, optimizer, 9)


def test_a_scale_that_stays_moves_nothing() -> None:
    p = weight()
    optimizer = OPTIMIZERS["adamw"](p)
    step(p, optimizer, 0)
    codes, residual = p.codes.clone(), optimizer.state[p]["residual"].clone()
    scale = p.scale.clone()
    scale[5] *= 2
    p.rescale_(scale)
    others = [i for i in range(64) if i != 5]
    assert torch.equal(p.codes[others], codes[others])
    assert torch.equal(optimizer.state[p]["residual"][others], residual[others])
    assert not torch.equal(p.codes[5], codes[5])


def test_the_reference_is_computed_anew() -> None:
    """All spacings have doubled, and S_ref with them, in the next step and not at the next refresh."""
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
    before = whole(p, optimizer.state[p]["residual"])
    with pytest.raises(ValueError, match="scale is too small: a stored value of 226"):
        p.rescale_(0.5)
    assert torch.equal(whole(p, optimizer.state[p]["residual"]), before)
    assert p.adapt_scale_(64.0) is False
    p.rescale_(1.0)
    assert torch.equal(whole(p, optimizer.state[p]["residual"]), before)


@each("writeback", ["stochastic", "residual8"])
def test_without_a_residual_nothing_is_other_than_it_was(writeback: str) -> None:
    """One that a stochastic optimizer steps, and one whose optimizer is gone, draw as one that nobody steps."""
    p, alone = weight(), weight()
    optimizer = StiffnessAdamW([p], 1e-2, writeback=writeback)
    step(p, optimizer, 0)
    alone.adopt(p)
    if writeback == "residual8":
        del optimizer
    for one in (p, alone):
        one.rescale_(one.scale * 2)
    assert torch.equal(p.codes, alone.codes)
    assert torch.equal(p.counter, alone.counter)
