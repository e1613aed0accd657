"""Write-backs: at the ends of the range, errors that the momentum makes up for, and
parameters of 16 bits.
"""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from family_cases import NAMES
from optimizer_cases import free_weight, muon_groups, normal, step_from, take_steps
from paths import PATHS, by
from torch import nn

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import WRITEBACKS, StiffnessSGD, _backends, _native_step
from fp8manifold.optim._writeback import to_half


def test_what_is_out_of_range_saturates_and_comes_back():
    for writeback in WRITEBACKS:
        p = fm.FP8Parameter(torch.tensor([400.0, -400.0, 1.0]), "E4M3", scale=1.0)
        options = {
            "lr": 1.0,
            "momentum": 0.5,
            "stiffness": 0.0,
            "writeback": writeback,
            "refresh_every": 10**6,
        }
        optimizer = StiffnessSGD([p], **options)
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
    """Over 200 steps with given gradients: codes of E4M3 against float64, to the
    rounding of float32.
    """
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
        ours = (
            p.dequantize().double()
            - lr * beta / (1 - beta) * optimizer.state[p]["momentum_buffer"].double()
        )
        torch.testing.assert_close(ours, exact - lr * beta / (1 - beta) * m, rtol=0, atol=2e-5)
    assert (p.dequantize().double() - exact).abs().max() > 0.01


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
both = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)


def slow(x, dtype, draw):
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


@both
def test_rounding_is_that_of_the_definition(dtype):
    """Over all binades, at and beside values and powers of two, in subnormals, at and
    beyond the end.
    """
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
    draws = torch.randint(
        0, 1 << 24, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(3)
    )
    for some in (draws, torch.zeros_like(draws), torch.full_like(draws, (1 << 24) - 1)):
        found = to_half(x, dtype, some)
        expected = torch.tensor(
            [slow(v, dtype, d) for v, d in zip(x.tolist(), some.tolist(), strict=True)]
        )
        assert torch.equal(found.isnan(), x.isnan())
        keep = ~x.isnan()
        assert torch.equal(
            found.view(torch.int16)[keep], expected.to(dtype).view(torch.int16)[keep]
        )
        assert torch.equal(found.isinf(), x.isinf())


@both
@pytest.mark.parametrize("name", [name for name in NAMES if name != "FisherNaturalGradient"])
def test_what_is_asked_for_arrives(name, dtype):
    steps, weights = (
        12,
        (torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) / 4 + 0.6).to(dtype),
    )
    more = {"StiffnessSGD": {"lr": 1e-6, "momentum": 0.9}}.get(name, {"lr": 1e-5})
    more |= {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"} if name == "StiffnessMuon" else {}
    sums, lost = [], []
    for each, options in (
        (weights, {}),
        (weights.float(), {}),
        (weights, {"writeback": "nearest"}),
    ):
        parameters = [nn.Parameter(each.clone()), nn.Parameter(each[0].clone())]
        given = muon_groups(parameters) if name == "StiffnessMuon" else parameters
        optimizer = getattr(optim, name)(given, weight_decay=0.0, **more, **options)
        for _ in range(steps):
            for p in parameters:
                p.grad = torch.ones_like(p)
            optimizer.step()
        (sums if not options else lost).append(
            [float((p.double() - each.double()).sum()) for p in parameters[:1]]
        )
        if each.dtype is dtype:
            assert (
                optimizer.state[parameters[0]].get("exp_avg", torch.zeros(1)).dtype is torch.float32
            )
    (found,), (asked,) = sums
    error = (torch.finfo(dtype).eps / 2 * abs(asked)) ** 0.5
    assert abs(found / asked - 1) < 5 * error / abs(asked)
    assert 5 * error < 0.4 * abs(asked)
    if dtype is torch.bfloat16:
        assert lost == [[0.0]]


def test_one_step_by_the_definition():
    """SGD in float32 scalars, then the draws of seed, step, stream and position."""
    p = nn.Parameter(normal(3, 40).bfloat16())
    start, gradient = p.detach().float(), normal(3, 40, seed=1).bfloat16()
    optimizer = optim.StiffnessSGD([p], lr=1e-3, momentum=0.9, seed=5)
    step_from(optimizer, p, gradient)
    draws = fm.random_bits(120, seed=5, step=1, stream=optimizer.state[p]["stream"]).tolist()
    asked = (start.numpy() - gradient.float().numpy() * np.float32(1e-3)).reshape(-1).tolist()
    expected = [slow(x, torch.bfloat16, d) for x, d in zip(asked, draws, strict=True)]
    assert p.detach().float().reshape(-1).tolist() == expected


@both
def test_native_steps_have_the_bits_of_eager_ones(dtype, monkeypatch):
    taken = []
    run_native = _backends.run_native
    monkeypatch.setattr(
        _backends, "run_native", lambda slots: (taken.append(len(slots)), run_native(slots))
    )
    for writeback in ("stochastic", "nearest"):
        found = []
        for path in PATHS:
            weights = normal(300, 257).to(dtype)
            parameters = [
                nn.Parameter(weights.clone()),
                free_weight(weights.clone()),
                nn.Parameter(weights[0].clone()),
            ]
            options = {"lr": 1e-3, "writeback": writeback}
            take_steps(
                [by(path, optim.StiffnessAdamW(parameters, **options))], [parameters], range(3)
            )
            found.append([p.detach().view(torch.int16) for p in parameters])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert taken == [3] * 6


@both
def test_the_wrapper_rounds_what_it_scales(dtype):
    """A step of one spacing scaled by a quarter arrives in a quarter of the weights;
    ``nearest`` loses it.
    """
    eps = torch.finfo(dtype).eps
    for writeback, scale, share in (
        (None, 0.25, 0.25),
        ("stochastic", 0.25, 0.25),
        ("nearest", 0.25, 0),
        (None, 1, 1),
    ):
        p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
        optimizer = optim.StiffnessWrapper(
            torch.optim.SGD([p], lr=eps), scale=scale, writeback=writeback
        )
        step_from(optimizer, p, -torch.ones_like(p))
        assert abs(float((p > 1).double().mean()) - share) < 0.03 * bool(share % 1) + 1e-9


def test_few_gradients_are_in_float32_at_a_time(monkeypatch):
    """As many as the bound allows, a larger one alone, and the bits of all at once."""
    found, run = [], _native_step.NativeStep.run
    for bound in (2**20, 64):
        sizes = []
        monkeypatch.setattr(_native_step, "_COPIED", bound)

        def counted(step, slots, sizes=sizes):
            sizes.append(len(slots))
            return run(step, slots)

        monkeypatch.setattr(_native_step.NativeStep, "run", counted)
        weights = [nn.Parameter(normal(size, seed=size).bfloat16()) for size in (100, 16, 16, 8)]
        weights.append(nn.Parameter(normal(40, seed=5)))  # of float32, nothing of which is copied
        optimizer = optim.StiffnessAdamW(weights, 0.1, seed=1)
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()
        found.append((sizes, weights))
    (whole, first), (parts, second) = found
    assert (whole, parts) == ([5], [1, 2, 2])
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
    """So that the sum of weight and residual stays when other code changes the scale
    before the copy has stepped.
    """
    weight = fm.FP8Parameter(normal(2, 320), "E4M3", seed=0)
    optimizer = optim.StiffnessAdamW([weight], lr=1e-3, writeback="residual8")
    step_from(optimizer, weight, torch.ones(2, 320))
    for own, its in ((weight, optimizer), copy.deepcopy((weight, optimizer))):
        own.rescale_(own.scale * 2**9)
        assert "reference" not in its.state[own]
