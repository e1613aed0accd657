"""Write-backs.

At the ends of the range; "momentum", which makes up for rounding; and parameters in 16
bits, which are rounded stochastically.
"""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from family_cases import NAMES
from optimizer_cases import free_weight, muon_groups, normal, step_from, take_steps
from paths import PATHS, on_path
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import WRITEBACKS, StiffnessSGD, _backends, _native_step
from fp8manifold.optim._writeback import to_half


@pytest.mark.parametrize("writeback", WRITEBACKS)
def test_what_is_out_of_range_saturates_and_comes_back(writeback):
    p = fm.FP8Parameter(torch.tensor([400.0, -400.0, 1.0]), "E4M3", scale=1.0)
    options = {"momentum": 0.5, "stiffness": 0.0, "refresh_every": 10**6}
    optimizer = StiffnessSGD([p], lr=1.0, writeback=writeback, **options)
    step_from(optimizer, p, torch.tensor([-1e9, 1e9, 0.0]))
    assert p.tolist() == [448.0, -448.0, 1.0]
    residual = optimizer.state[p].get("residual", torch.zeros(3))
    assert (residual * torch.tensor([1, -1, 0]) <= 0).all()  # nothing beyond the ends
    optimizer.state[p]["momentum_buffer"].zero_()
    step_from(optimizer, p, torch.tensor([64.0, -64.0, 0.0]))
    assert p.tolist() == [384.0, -384.0, 1.0]


FIXED = {"k = 0": {"stiffness": 0.0}, "dampening": {"stiffness": 0.0, "dampening": 0.5}}


@pytest.mark.parametrize("options", FIXED.values(), ids=FIXED)
def test_weight_and_momentum_together_move_as_if_nothing_were_rounded(options):
    """Codes of E4M3 follow float64 over 200 steps, to the rounding of float32."""
    lr, beta = 0.01, 0.9
    w = normal(40, 25, seed=1)
    p = fm.FP8Parameter(w, "E4M3")
    exact, m = p.dequantize().double(), torch.zeros(40, 25, dtype=torch.float64)
    optimizer = StiffnessSGD([p], lr=lr, momentum=beta, writeback="momentum", **options)
    for t in range(200):
        g = normal(40, 25, seed=10 + t)
        step_from(optimizer, p, g)
        m = beta * m + g.double() * (1.0 if t == 0 else 1 - options.get("dampening", 0.0))
        exact = exact - lr * m
        rate = lr * beta / (1 - beta)
        momentum = optimizer.state[p]["momentum_buffer"].double()
        ahead = p.dequantize().double() - rate * momentum
        torch.testing.assert_close(ahead, exact - rate * m, rtol=0, atol=2e-5)
    assert (p.dequantize().double() - exact).abs().max() > 0.01


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
both_halves = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)


def rounded_by_definition(x, dtype, draw):
    """Round one float to a half, away from zero with the odds of its distance."""
    if not math.isfinite(x):
        return x
    patterns = torch.arange(0x7FFF, dtype=torch.int16).view(dtype).double()
    values = patterns[patterns.isfinite()].numpy()
    i = int(np.searchsorted(values, abs(x), side="right")) - 1
    if i + 1 == len(values) or abs(x) == values[i]:
        return math.copysign(values[i], x)
    below, above = Fraction(float(values[i])), Fraction(float(values[i + 1]))
    bits = 16 if dtype is torch.bfloat16 else 24
    away = Fraction(draw >> (24 - bits), 2**bits) < (Fraction(abs(x)) - below) / (above - below)
    return math.copysign(float(above if away else below), x)


@both_halves
@pytest.mark.parametrize("word", ["drawn", 0, (1 << 24) - 1])
def test_rounding_is_that_of_the_definition(dtype, word):
    """Over all binades: values, their neighbours, subnormals, at the end and beyond it."""
    largest = torch.finfo(dtype).max
    special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        largest,
        -largest,
        largest * (1 + 2.0**-12),
        65519.0,
        65520.0,
        3.4e38,
        -3.4e38,
    ]
    special += [1e6, math.inf, -math.inf, math.nan, 2.0**-149, 2.0**-24, 2.0**-25, 1 + 2.0**-23]
    wide = normal(300) * torch.exp2(
        torch.randint(-150, 128, (300,), generator=torch.Generator().manual_seed(1)).float()
    )
    x = torch.cat(
        [
            wide,
            normal(200, seed=2) * torch.exp2(torch.linspace(-30, 17, 200)),
            torch.tensor(special),
        ]
    )
    words = torch.randint(
        0, 1 << 24, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(3)
    )
    if word != "drawn":
        words.fill_(word)
    is_number = ~x.isnan()
    rounded = to_half(x, dtype, words)
    pairs = zip(x.tolist(), words.tolist(), strict=True)
    expected = torch.tensor([rounded_by_definition(v, dtype, draw) for v, draw in pairs])
    assert torch.equal(rounded.isnan(), x.isnan())
    bits, expected_bits = (y.to(dtype).view(torch.int16) for y in (rounded, expected))
    assert torch.equal(bits[is_number], expected_bits[is_number])
    assert torch.equal(rounded.isinf(), x.isinf())


@both_halves
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FisherNaturalGradient"])
def test_steps_below_half_a_spacing_arrive_on_average(name, dtype):
    """To nearest all of them are lost in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.rand(256, 256, generator=generator) / 4 + 0.6).to(dtype)
    moved, expected = moved_in_sum(name, weights), moved_in_sum(name, weights.float())
    error = (torch.finfo(dtype).eps / 2 * abs(expected)) ** 0.5
    assert abs(moved / expected - 1) < 5 * error / abs(expected)
    assert 5 * error < 0.4 * abs(expected)
    to_nearest = moved_in_sum(name, weights, writeback="nearest")
    assert to_nearest == 0.0 or dtype is torch.float16


RATES = {
    "StiffnessSGD": {"lr": 1e-6, "momentum": 0.9},
    "StiffnessMuon": {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"},
}


def moved_in_sum(name, weights, **options):
    """Return the sum over all weights of how far 12 steps have moved them."""
    parameters = [nn.Parameter(weights.clone()), nn.Parameter(weights[0].clone())]
    groups = muon_groups(parameters) if name == "StiffnessMuon" else parameters
    options = RATES.get(name, {"lr": 1e-5}) | options
    optimizer = getattr(optim, name)(groups, weight_decay=0.0, **options)
    for _ in range(12):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    average = optimizer.state[parameters[0]].get("exp_avg", torch.zeros(1))
    assert average.dtype is torch.float32
    return float((parameters[0].double() - weights.double()).sum())


def test_one_step_by_the_definition():
    """SGD in float32 scalars, then the draws of seed, step, stream and position."""
    p = nn.Parameter(normal(3, 40).bfloat16())
    start, gradient = p.detach().float(), normal(3, 40, seed=1).bfloat16()
    optimizer = optim.StiffnessSGD([p], lr=1e-3, momentum=0.9, seed=5)
    step_from(optimizer, p, gradient)
    draws = fm.random_bits(120, seed=5, step=1, stream=optimizer.state[p]["stream"]).tolist()
    targets = (start.numpy() - gradient.float().numpy() * np.float32(1e-3)).reshape(-1).tolist()
    expected = [
        rounded_by_definition(x, torch.bfloat16, draw)
        for x, draw in zip(targets, draws, strict=True)
    ]
    assert p.detach().float().reshape(-1).tolist() == expected


@both_halves
@pytest.mark.parametrize("writeback", ["stochastic", "nearest"])
def test_native_steps_have_the_bits_of_eager_ones(dtype, writeback, monkeypatch):
    native_slots = []
    run_native = _backends.run_native

    def counted(slots):
        native_slots.append(len(slots))
        return run_native(slots)

    monkeypatch.setattr(_backends, "run_native", counted)
    results = []
    for path in PATHS:
        weights = normal(300, 257).to(dtype)
        parameters = [
            nn.Parameter(weights.clone()),
            free_weight(weights.clone()),
            nn.Parameter(weights[0].clone()),
        ]
        optimizer = on_path(path, optim.StiffnessAdamW(parameters, lr=1e-3, writeback=writeback))
        take_steps([optimizer], [parameters], range(3))
        results.append([p.detach().view(torch.int16) for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert native_slots == [3] * 3


@both_halves
@pytest.mark.parametrize(
    ("writeback", "scale", "share"),
    [(None, 0.25, 0.25), ("stochastic", 0.25, 0.25), ("nearest", 0.25, 0), (None, 1, 1)],
)
def test_the_wrapper_rounds_what_it_scales(dtype, writeback, scale, share):
    """A step of one spacing scaled by a quarter arrives in a quarter of the weights.

    "nearest" loses it.
    """
    p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    sgd = torch.optim.SGD([p], lr=torch.finfo(dtype).eps)
    optimizer = optim.StiffnessWrapper(sgd, scale=scale, writeback=writeback)
    step_from(optimizer, p, -torch.ones_like(p))
    tolerance = 0.03 if share == 0.25 else 1e-9
    assert abs(float((p > 1).double().mean()) - share) < tolerance


def test_few_gradients_are_in_float32_at_a_time(monkeypatch):
    """As many as the bound allows, a larger one alone, and the bits of all at once."""
    results, run = [], _native_step.NativeStep.run
    for bound in (2**20, 64):
        sizes = []
        monkeypatch.setattr(_native_step, "_COPIED_AT_ONCE", bound)

        def counted(step, keys, numbers, sizes=sizes):
            sizes.append(len(keys))
            return run(step, keys, numbers)

        monkeypatch.setattr(_native_step.NativeStep, "run", counted)
        weights = [nn.Parameter(normal(size, seed=size).bfloat16()) for size in (100, 16, 16, 8)]
        weights.append(nn.Parameter(normal(40, seed=5)))  # of float32, nothing of which is copied
        optimizer = optim.StiffnessAdamW(weights, 0.1, seed=1)
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()
        results.append((sizes, weights))
    (whole_sizes, first), (part_sizes, second) = results
    assert whole_sizes == [5]
    assert part_sizes == [1, 2, 2]
    assert all(map(torch.equal, first, second))


def test_the_remainder_of_a_frozen_weight_stays_with_it_until_its_first_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    model = fm.quantize_model(model, "E4M3", keep_remainder=True)
    model[0].requires_grad_(False)
    optimizer = optim.StiffnessAdamW(
        model.parameters(), 1e-3, weight_decay=0.0, writeback="residual8"
    )
    model(normal(4, 64)).square().mean().backward()
    optimizer.step()
    assert model[0].weight not in optimizer.state
    assert "0.weight_remainder" in model.state_dict()
    assert set(optim.adamw_state(optimizer.state_dict())["state"]) == {2, 3}
    remainder = model[0].weight.remainder.clone()
    model[0].requires_grad_(True)
    step_from(optimizer, model[0].weight, torch.zeros(64, 64))
    assert torch.equal(optimizer.state[model[0].weight]["residual"], remainder)


def test_a_copied_weight_finds_its_residual_in_the_copied_optimizer():
    """So weight plus residual stays where a scale is changed before the copy has stepped."""
    weight = fm.FP8Parameter(normal(2, 320), "E4M3", seed=0)
    optimizer = optim.StiffnessAdamW([weight], lr=1e-3, writeback="residual8")
    step_from(optimizer, weight, torch.ones(2, 320))
    for p, stepper in ((weight, optimizer), copy.deepcopy((weight, optimizer))):
        p.rescale_(p.scale * 2**9)
        assert "reference" not in stepper.state[p]
