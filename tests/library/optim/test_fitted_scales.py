"""Scales that a step fits anew.

Where all weights under a scale are 0 the step that moves them fits it, and where a scale
has become far too large for its weights it is narrowed.
"""

import logging
from itertools import product

import pytest
import torch
from family_cases import is_valid
from optimizer_cases import frozen, normal, step_from
from paths import PATHS, on_path
from test_step_oracle import OPTIONS, SCALES, follow, scaled, stored

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import WRITEBACKS, StiffnessAdamW
from fp8manifold.random_bits import word_range, words_at

SHAPE = (4, 64)
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
MAKE = {
    "adamw": lambda p, **o: optim.StiffnessAdamW([p], **ADAMW, **o),
    "adamw8": lambda p, **o: optim.StiffnessAdamW([p], **ADAMW, moments="8bit", **o),
    "stiff": lambda p, **o: optim.StiffnessAdamW([p], **ADAMW, stiffness=1.0, **o),
    "muon": lambda p, **o: optim.StiffnessMuon(
        [p], lr=1e-2, weight_decay=0.0, ns_dtype=torch.float32, **o
    ),
    "sgd": lambda p, **o: optim.StiffnessSGD([p], lr=0.3, momentum=0.9, **o),
    "lion": lambda p, **o: optim.StiffnessLion([p], lr=1e-3, weight_decay=0.0, **o),
}
#: The share of the targets' variance that may be left after training, whether it began
#: at zeros or at small random weights.
REMAINING_SHARES = {"E4M3": 0.005, "E2M5": 0.001, "E1M6": 0.003, "E5M2": 0.02}
GRANULARITIES = ("tensor", "channel", "block", "square")


def zeros(fmt="E2M5", shape=SHAPE, **options):
    return fm.FP8Parameter(torch.zeros(shape), fmt, seed=0, **options)


def variance_left(p, optimizer, steps=300):
    """Train a linear regression, and return the share of its variance that is left."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(p.shape, generator=generator) * 0.1
    rates = [group["lr"] for group in optimizer.param_groups]
    for t in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - t / steps)
        x = torch.randn(64, p.shape[1], generator=generator)
        optimizer.zero_grad()
        (x @ (p - targets).T).square().mean().backward()
        optimizer.step()
    return float((p.detach() - targets).square().sum() / targets.square().sum())


@pytest.mark.parametrize("fmt", REMAINING_SHARES)
@pytest.mark.parametrize("kind", MAKE)
def test_a_layer_of_zeros_learns(kind, fmt):
    p = zeros(fmt, (8, 32))
    optimizer = MAKE[kind](p)
    bound = {"lion": 0.2, "stiff": 5 * REMAINING_SHARES[fmt], "sgd": 2 * REMAINING_SHARES[fmt]}.get(
        kind, REMAINING_SHARES[fmt]
    )
    assert variance_left(p, optimizer) < bound
    assert optimizer.fitted_scales >= 8


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", [*MAKE, "residual8", "momentum"])
def test_paths_have_the_same_bits(kind, granularity):
    w = normal(160, 160, seed=2) * 0.02
    w[:130, :130] = 0.0
    w[140] = 0.0
    options = {} if kind in MAKE else {"writeback": kind}
    results = []
    for path in PATHS:
        p = fm.FP8Parameter(w, "E2M5", granularity=granularity, seed=0)
        optimizer = on_path(path, MAKE[kind if kind in MAKE else "adamw"](p, **options))
        for t in range(5):
            p.grad = normal(160, 160, seed=t) * (0.001 if kind == "sgd" else 1.0)
            p.grad[:4] *= t > 1
            optimizer.step()
        results.append((p, optimizer))
    (p, native), (q, eager) = results
    assert torch.equal(p.codes, q.codes)
    assert torch.equal(p.scale, q.scale)
    assert native.fitted_scales == eager.fitted_scales
    assert (native.fitted_scales == 0) == (granularity == "tensor")
    assert frozen(native.state[p]) == frozen(eager.state[q])


@pytest.mark.parametrize(
    ("kind", "writeback"),
    [
        (kind, writeback)
        for kind, writeback in product(
            ("StiffnessAdamW", "StiffnessSGD", "StiffnessLion"), WRITEBACKS
        )
        if is_valid(kind, writeback, "float32")
    ],
)
@pytest.mark.parametrize("scale", ["rows", "one"])
@scaled
def test_fitted_scales_are_those_of_the_definition(kind, writeback, scale, factor):
    one_scale = 2.0**-4 * float(torch.as_tensor(factor).max())
    p = stored("E4M3", scale=one_scale if scale == "one" else SCALES * factor)
    p.codes[1] = 0
    if scale == "one":
        p.codes.zero_()
    p.codes[1, 3] = 0x80
    options = {"lr": 1e-4, "writeback": writeback, "weight_decay": 0.05}
    follow(kind, p, OPTIONS[kind] | options, moved=0.02)


@pytest.mark.parametrize("kind", ["StiffnessAdamW", "StiffnessLion", "RiemannianAdam"])
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@scaled
def test_narrowed_scales_are_those_of_the_definition(kind, writeback, factor):
    p = stored("E4M3", scale=SCALES * factor)
    # Sign and mantissa: subnormals and zeros, far below the scale.
    p.codes[2] = p.codes[2] & 0x87
    old_scale = p.scale.clone()
    options = OPTIONS[kind] | {"lr": 1e-4, "writeback": writeback, "refresh_every": 2}
    follow(kind, p, options, steps=3, moved=0.0)
    assert p.scale[2] <= old_scale[2] / 16
    assert torch.equal(*(torch.frexp(scale).mantissa for scale in (p.scale, old_scale)))


@pytest.mark.parametrize("factor", [1.0, 1.2345679])
def test_narrowing_moves_no_weight_and_does_not_flap(factor, caplog):
    p = fm.FP8Parameter(normal(*SHAPE, seed=3) * 1e-3, "E2M5", scale=factor / 64, seed=0)
    old_values = p.dequantize()
    optimizer = optim.StiffnessAdamW([p], lr=0.0, refresh_every=2)
    with caplog.at_level(logging.INFO, logger="fp8manifold"):
        for _ in range(9):
            step_from(optimizer, p, normal(*SHAPE, seed=4))
    assert torch.equal(p.dequantize(), old_values)
    assert (p.scale <= factor * 2.0**-10).all()
    assert optimizer.fitted_scales == 4
    assert optimizer.widened_scales == 0
    assert caplog.text.count("has shrunk: 4 of 4 scales changed") == 1


def test_rows_without_a_gradient_stay_as_they_are():
    p = fm.FP8Parameter(torch.cat([torch.zeros(1, 64), normal(3, 64, seed=1)]), "E2M5", seed=0)
    optimizer = optim.StiffnessAdamW([p], lr=1e-3)
    for t in range(3):
        p.grad = normal(*SHAPE, seed=t)
        p.grad[0] = 0.0
        optimizer.step()
    assert p.scale[0] == 1
    assert not p.codes[0].any()
    assert optimizer.fitted_scales == 0


@pytest.mark.parametrize("kind", ["adamw8", "muon", "stiff"])
def test_a_run_resumed_among_first_steps_has_the_same_bits(kind):
    def train(p, optimizer, steps):
        for t in steps:
            p.grad = normal(*SHAPE, seed=t)
            p.grad[2] *= t > 3
            if t == 5:
                p.codes[1], p.scale[1] = 0, 1.0
            optimizer.step()

    whole, part = zeros(), zeros()
    uninterrupted, first = MAKE[kind](whole), MAKE[kind](part)
    train(whole, uninterrupted, range(9))
    train(part, first, range(3))
    resumed = fm.FP8Parameter.from_codes(
        part.codes.clone(), part.scale.clone(), "E2M5", seed=0, requires_grad=True
    )
    second = MAKE[kind](resumed)
    second.load_state_dict(first.state_dict())
    train(resumed, second, range(3, 9))
    assert torch.equal(whole.codes, resumed.codes)
    assert torch.equal(whole.scale, resumed.scale)
    assert uninterrupted.fitted_scales == second.fitted_scales > 4


@pytest.mark.parametrize("shape", [(64,), (4, 3, 5, 5), (2, 8, 32)])
def test_every_shape_of_zeros_begins_with_a_scale_of_its_own(shape):
    p = zeros(shape=shape, granularity="row" if len(shape) == 3 else "channel")
    optimizer = optim.StiffnessAdamW([p], lr=1e-3)
    step_from(optimizer, p, normal(*shape, seed=1))
    assert (p.scale <= 2.0**-11).all()
    assert optimizer.fitted_scales == p.scale.numel()
    assert torch.allclose(p.detach(), -1e-3 * p.grad.sign(), rtol=0.1)


def test_an_observer_sees_what_was_stored():
    p = zeros()
    optimizer, views = optim.StiffnessAdamW([p], lr=1e-3), []
    optimizer.observer = views.append
    step_from(optimizer, p, normal(*SHAPE, seed=1))
    assert torch.equal(views[0].after, p.dequantize())
    assert torch.allclose(views[0].target, views[0].after, rtol=0.1)


@pytest.mark.parametrize(
    ("kind", "lr"),
    [(optim.StiffnessAdamW, 0.0), (optim.RiemannianAdam, 0.5)],
    ids=["moves nothing", "counts in spacings"],
)
def test_a_step_that_moves_nothing_or_counts_in_spacings_fits_no_scale(kind, lr):
    """The scale of zeros comes down later where a spacing is the measure of a step."""
    p = zeros()
    optimizer = kind([p], lr=lr)
    step_from(optimizer, p, normal(*SHAPE, seed=1))
    assert optimizer.fitted_scales == 0
    assert (p.scale == 1).all()


@pytest.mark.parametrize(("granularity", "is_renewed"), [("tensor", True), ("channel", False)])
def test_a_scale_that_doubles_is_logged_and_one_for_all_renews_the_reference(
    granularity, is_renewed, caplog
):
    """The spacing of all weights doubles, and S_ref with it.

    Where rows have scales S_ref waits for the next refresh.
    """
    p = fm.FP8Parameter(normal(6, 64), "E2M5", granularity=granularity, headroom=4.0, seed=0)
    optimizer = StiffnessAdamW([p], lr=0.0, stiffness=1.0, weight_decay=0.0)
    step_from(optimizer, p, torch.ones(6, 64))
    first = optimizer.state[p]["reference"]
    p.codes[1, 3] = p.format.max_code
    with caplog.at_level(logging.INFO, logger="fp8manifold"):
        optimizer.step()
    assert optimizer.widened_scales == 1
    assert (optimizer.state[p]["reference"] != first) == is_renewed
    assert f"1 of {p.scale.numel()} scales changed, by 2^+" in caplog.text
    assert "to 2^+1" in caplog.text


def test_a_nan_code_is_not_an_end():
    p = fm.FP8Parameter(normal(6, 64), "E4M3", seed=0)
    p.codes[2, 2] = 0x7F
    optimizer = StiffnessAdamW([p], lr=0.0, weight_decay=0.0)
    step_from(optimizer, p, torch.ones(6, 64))
    assert optimizer.widened_scales == 0
    assert p.codes[2, 2] == 0x7F


def test_words_at_positions_are_those_of_the_range():
    words = (3, 2**40 + 1, 7, 2)
    start = 2**32 - 5
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(start, start + 11)[order]
    expected = word_range(start, 11, words, "cpu")[positions - start]
    assert torch.equal(words_at(positions, words), expected)
    assert words_at(positions.view(1, 11)[:, :0], words).shape == (1, 0)


def test_an_observer_sees_weights_at_their_new_scale():
    weight, values = fm.FP8Parameter(torch.zeros(4, 8), "E4M3", seed=0), []
    optimizer = fm.optim.StiffnessAdamW([weight], 1e-3, weight_decay=0.0)
    optimizer.observer = lambda view: values.append(weight.dequantize().clone())
    weight.grad = torch.ones(4, 8)
    optimizer.step()
    assert torch.equal(values[0], weight.dequantize())
    assert values[0][0, 0].item() == pytest.approx(-1e-3, rel=0.1)


@pytest.mark.parametrize(
    ("fmt", "lr", "fitted"),
    [
        ("E2M5", 1e-2, 4),
        ("E2M5", 1.0, 0),
        ("E2M5", 100.0, 4),
        ("E4M3", 1e-2, 4),
        ("E7M0", 1e-4, 0),
    ],
    ids=["far too wide", "wide by less than 16", "past the end", "of many binades", "of all sizes"],
)
def test_zeros_are_fitted_where_a_scale_of_one_does_not_suit_the_step(fmt, lr, fitted):
    p = zeros(fmt)
    optimizer = StiffnessAdamW([p], lr=lr)
    step_from(optimizer, p, normal(*SHAPE))
    assert optimizer.fitted_scales == fitted
    assert bool((p.scale == 1).all()) is not bool(fitted)
