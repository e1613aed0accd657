"""Tests of kernels alone: `test_triton_interpreted.py` runs them interpreted, a GPU runs them.

"Compared by the plugin": `triton_twins` has kernels step what native code steps here.
"""

import contextlib
import copy
import math
from fractions import Fraction
from itertools import pairwise, product
from unittest import mock

import numpy as np
import pytest
import torch
from optimizer_cases import (
    free_weight,
    frozen,
    grid_weight,
    normal,
    parameters_of,
    same_bits,
    snapshot,
    step_from,
    stored_weight,
    take_steps,
    with_factors,
)
from paths import as_on_a_card
from scalar_grid import Codes
from test_native import FORMATS, any_floats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_twins import CARD, different, twin

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._encoded.storage import dequantize_codes
from fp8manifold._interface import GpuReport
from fp8manifold._native import _arrays
from fp8manifold._triton import launch
from fp8manifold._triton.whole import array_on_gpu
from fp8manifold.formats import as_format
from fp8manifold.optim import _backends, _graphed, _optimizer, _plan, _triton_step
from fp8manifold.optim._triton_step import run_triton
from fp8manifold.random_bits import draw_key, round_keys, signed_word

SHAPES = (
    ((16, 256), "channel"),
    ((5, 77), "channel"),
    ((1000,), "tensor"),
    ((7, 64), "block"),
    ((2, 1301), "channel"),
)
#: Write-backs and averages.
WAYS = tuple(product(("nearest", "stochastic", "residual8"), ("float32", "bfloat16", "8bit")))


def gradient(shape, kind, seed):
    """Return ordinary gradients, or others of a kind.

    1 has many binades, 2 has many zeros, which are -0, 3 is subnormal, and 4 has
    squares of about 1e-36.
    """
    x = normal(*shape, seed=seed)
    if kind == 1:
        return x * torch.exp2(normal(*shape, seed=seed + 1).mul(40).clamp(-140, 30).round())
    if kind == 2:
        return -torch.where(normal(*shape, seed=seed + 1) < 0, 0.0, x)
    return x * {0: 1.0, 3: 1e-42, 4: 1e-18}[kind]


def weights(name, seed, draws):
    """Return weights of every shape over many binades, half of them with scales of any kind.

    Both zeros, both ends and a NaN are among the codes.
    """
    fmt, parameters = as_format(name), []
    for i, (shape, granularity) in enumerate(SHAPES):
        w = normal(*shape, seed=seed) * torch.exp2(
            normal(*shape, seed=seed + 1).mul(5).clamp(-12, 3).round()
        )
        p = fm.FP8Parameter(
            w, fmt, granularity=granularity, seed=seed, keep_remainder=False, draws=draws
        )
        special = [
            0,
            fmt.max_code,
            fmt.max_code | fmt.sign_bit,
            1,
            1 | fmt.sign_bit,
            *fmt.nan_codes[:1],
        ]
        special += [fmt.sign_bit] if fmt.has_negative_zero else []
        p.codes.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.uint8)
        parameters.append(with_factors(p, (seed + i) % 2 == 1))
    return parameters


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("draws", ["independent", "dither"])
def test_steps_of_every_shape(name, way, draws):
    """Long rows, rows that no block divides, scales of blocks; compared by the plugin."""
    parameters = weights(name, way, draws)
    options = {
        "writeback": WAYS[way][0],
        "moments": WAYS[way][1],
        "stiffness": (0.0, 1.0, 0.3)[way % 3],
    }
    optimizer = optim.StiffnessAdamW(
        parameters, lr=0.02, weight_decay=0.1 * (way % 2), refresh_every=1000, **options
    )
    for step in range(2):
        for i, p in enumerate(parameters):
            p.grad = gradient(p.shape, (step + i + way) % 5, 7 * i + step)
        optimizer.step()


@pytest.mark.parametrize("retraction", ["exponential", "euclidean"])
@pytest.mark.parametrize("name", ["E4M3", "E7M0"])
@pytest.mark.parametrize("kind", ["RiemannianAdam", "RiemannianSGD"])
def test_steps_by_either_retraction(kind, name, retraction):
    """Compared by the plugin."""
    parameters = weights(name, 3, "independent")
    options = {"retraction": retraction, "weight_decay": 0.05}
    optimizer = getattr(optim, kind)(parameters, lr=1.7, **options)
    for step in range(2):
        for i, p in enumerate(parameters):
            p.grad = gradient(p.shape, (step + i) % 5, 7 * i + step)
        optimizer.step()


@pytest.mark.parametrize("moments", ["8bit", "bfloat16"])
def test_momentum_of_matrices(moments):
    """Rows in blocks and others, zeros, subnormals, all binades; compared by the plugin."""
    shapes = ((16, 256), (5, 77), (3, 600), (2, 1301))
    parameters = [fm.FP8Parameter(normal(*shape, seed=1), "E2M5", seed=2) for shape in shapes]
    optimizer = optim.StiffnessMuon(parameters, lr=0.02, moments=moments)
    for step in range(3):
        for i, p in enumerate(parameters):
            p.grad = gradient(p.shape, (step + i) % 5, 7 * i + step)
        optimizer.step()


#: Options of an Adafactor step.
ADAFACTOR = {
    "stochastic": {},
    "one byte, decay": {"momentum": 0.9, "moments": "8bit", "weight_decay": 0.1},
    "injected": {"momentum": 0.9, "writeback": "momentum", "maximize": True},
    "residual, long steps": {"writeback": "residual8", "lr": 0.5, "matrix_shape": "flatten"},
}


def adafactor_weights():
    """Return matrices, batches of them, vectors and a number, of every storage and dtype."""
    return [
        stored_weight("E4M3", (33, 70), seed=1, granularity="channel", factors=True),
        stored_weight("E2M5", (3, 5, 64), seed=2, granularity="block"),
        stored_weight("E5M2", (600,), seed=3),
        stored_weight("E4M3FNUZ", (2, 2, 3, 3), seed=5, granularity="channel"),
        torch.nn.Parameter(normal(2, 1301, std=0.1, seed=6)),
        torch.nn.Parameter(normal(3, 4, 32, std=0.1, seed=7)),
        torch.nn.Parameter(normal(std=0.1, seed=8)),
        torch.nn.Parameter(normal(4, 9, std=0.1, seed=9).bfloat16()),
        grid_weight("E4M3", (6, 20), 2.0**-5),
        free_weight(normal(60, seed=12, std=0.1), "E5M2", 2.0**-3),
    ]


def steps_of_adafactor(parameters, steps, **options):
    """Take steps without a plan, which would not go by the backends that the plugin compares."""
    optimizer = optim.StiffnessAdafactor(parameters, **{"lr": 0.05, **options})
    optimizer.is_planned = False
    take_steps([optimizer], [parameters], range(steps), 0.1)


@pytest.mark.parametrize("options", ADAFACTOR.values(), ids=ADAFACTOR)
def test_steps_of_adafactor(options):
    """Statistics too, also of weights that are NaN; compared by the plugin."""
    parameters = adafactor_weights()
    parameters[0].codes[2, 3] = 0x7F
    parameters[4].detach()[1, 1300] = torch.nan
    steps_of_adafactor(parameters, 2, **options)


def test_statistics_of_runs_of_runs_and_of_squares():
    """More than 32 tiles in a row, and more than 32 runs of rows; compared by the plugin."""
    squares = stored_weight("E4M3", (130, 72), seed=4).codes
    scales = torch.tensor([[0.01], [0.03]])
    parameters = [
        fm.FP8Parameter.from_codes(
            squares, scales, "E4M3", block_size=(128, 128), requires_grad=True, seed=4
        ),
        torch.nn.Parameter(normal(1, 17000, std=0.1, seed=6)),
        torch.nn.Parameter(normal(1030, 2, std=0.1, seed=7)),
    ]
    steps_of_adafactor(parameters, 1)


@pytest.mark.parametrize("size", [1.5e19, 1e-25])
def test_statistics_at_the_ends_of_float32(size):
    """Sums that overflow, squares that are 0; compared by the plugin."""
    parameters = [torch.nn.Parameter(torch.ones(3, 40)), torch.nn.Parameter(torch.ones(600))]
    optimizer = optim.StiffnessAdafactor(parameters, lr=0.1)
    optimizer.is_planned = False
    for step in range(2):
        for p in parameters:
            p.grad = torch.full(p.shape, size)
            p.grad.view(-1)[step] = 0.0
        optimizer.step()


def test_no_bit_of_statistics_depends_on_what_a_program_takes(monkeypatch):
    """Compared by the plugin, with native code that knows no programs."""
    for columns, rows, totals in (((1, 64), (1, 8), 1), ((2, 256), (16, 64), 4)):
        for name, runs in (("COLUMN", columns), ("ROW", rows), ("TOTAL", totals)):
            monkeypatch.setattr(launch, f"_{name}_RUNS", runs)
        shapes = ((70, 3), (2, 600))
        weights = [torch.nn.Parameter(normal(*shape, std=0.1, seed=1)) for shape in shapes]
        steps_of_adafactor(weights, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("writeback", ["nearest", "stochastic"])
def test_ordinary_and_free_parameters_of_every_dtype(dtype, writeback):
    """Halves are rounded once; compared by the plugin."""
    parameters = [
        torch.nn.Parameter(normal(9, 5, seed=1).to(dtype)),
        torch.nn.Parameter(normal(seed=2).to(dtype)),
    ]
    parameters.append(free_weight(normal(6, seed=12, std=0.1).to(dtype), "E5M2", 2.0**-3))
    take_steps(
        [optim.StiffnessAdamW(parameters, lr=0.02, writeback=writeback, moments="8bit")],
        [parameters],
        range(3),
    )
    assert all(p.isfinite().all() for p in parameters)


def test_a_refused_step_changes_nothing(monkeypatch):
    old_tensors, new_tensors = [], []

    def run(slots):
        for slot in slots:
            copied = twin(slot)
            verdict = run_triton([copied], decides=True)
            assert verdict is not None
            # The first row says that all steps are refused, the second that this step's
            # gradient is the reason.
            refused, of_step = verdict.values
            assert refused == [1, 0, 0, 0]
            assert GpuReport(*of_step)._asdict() == {
                "is_saturated": 0,
                "doubled": 0,
                "is_nonfinite": 1,
                "has_zero_row": 0,
            }
            old_tensors.append(slot.tensors)
            new_tensors.append(copied.tensors)

    monkeypatch.setattr(_backends, "run_native", run)
    parameter = fm.FP8Parameter(normal(3, 64), "E4M3", seed=1)
    parameter.grad = torch.ones(3, 64)
    optimizer = optim.StiffnessAdamW([parameter], 1e-2, moments="8bit", writeback="residual8")
    # The host would skip the step before the kernel sees the gradient.
    monkeypatch.setattr(_optimizer, "all_finite", lambda *_: True)
    parameter.grad[2, 63] = 2.0**64
    optimizer.step()
    assert not any(
        different(new_tensors[0][name], tensor) for name, tensor in old_tensors[0].items()
    )


#: Floats of arrays, in 30 runs of 100, and scales of the runs.
ARRAY = any_floats(3000, 3)
ARRAY_SCALE = torch.exp2(normal(30, seed=5).mul(3).round())
ARRAY_SCALES = {"runs": ARRAY_SCALE, "one": ARRAY_SCALE[:1], "of any kind": ARRAY_SCALE * 1.3}
#: The first element of an array in the stream of its draws: their count passes 2^32 in it.
ARRAY_START = 2**32 - 9000
ARRAY_KEY = draw_key("dither", 2**63, 7, 2**40)

every_format = pytest.mark.parametrize("name", FORMATS)
with_and_without_draws = pytest.mark.parametrize("draws", [True, False], ids=["draws", "nearest"])


def keys_on_gpu():
    first, second, third = round_keys(ARRAY_KEY.words, 0)
    return signed_word(first + ARRAY_START), second, third, ARRAY_KEY.phase


def array_codes(fmt):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 2 * fmt.sign_bit, (3000,), dtype=torch.uint8, generator=generator)


@with_and_without_draws
@every_format
def test_encoded_arrays_are_those_of_native_code(name, draws):
    fmt = as_format(name)
    keys, key, start = (keys_on_gpu(), ARRAY_KEY, ARRAY_START) if draws else (None, None, 0)
    codes = array_on_gpu("encode", ARRAY.to(CARD), fmt, torch.uint8, None, keys)
    assert not different(codes, _arrays.encode_by_kernel(ARRAY, fmt, key, start))


@pytest.mark.parametrize("rescale", [True, False], ids=["values", "units"])
@pytest.mark.parametrize(
    "scale", [None, ARRAY_SCALE, ARRAY_SCALE[:1] * 0.3], ids=["no scale", "runs", "one"]
)
@with_and_without_draws
@every_format
def test_rounded_arrays_are_those_of_native_code(name, draws, scale, rescale):
    fmt = as_format(name)
    keys, key, start = (keys_on_gpu(), ARRAY_KEY, ARRAY_START) if draws else (None, None, 0)
    on_card = None if scale is None else scale.to(CARD)
    rounded = array_on_gpu(
        "round", ARRAY.to(CARD), fmt, torch.float32, on_card, keys, rescale=rescale
    )
    expected = _arrays.round_by_kernel(ARRAY, fmt, key, start, scale, rescale=rescale)
    assert not different(rounded, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_format
def test_arrays_are_encoded_at_their_scales(name, dtype):
    fmt, floats = as_format(name), ARRAY.to(dtype)
    encoded = array_on_gpu("encode", floats.to(CARD), fmt, torch.uint8, ARRAY_SCALE.to(CARD))
    units = floats.float().view(30, 100) / ARRAY_SCALE.view(-1, 1)
    assert not different(encoded, _arrays.encode_by_kernel(units, fmt).view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", ARRAY_SCALES.values(), ids=ARRAY_SCALES)
@every_format
def test_decoded_arrays_are_those_of_native_code(name, scale, dtype):
    fmt = as_format(name)
    codes = array_codes(fmt)
    values = array_on_gpu("decode", codes.to(CARD), fmt, dtype, scale.to(CARD))
    expected = dequantize_codes(codes.view(30, 100), scale.view(-1, 1), fmt, dtype, None)
    assert not different(values, expected.view(-1))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_against_their_definition(name):
    fmt, scalar = as_format(name), Codes(as_format(name))
    codes = torch.arange(2 * fmt.sign_bit, dtype=torch.int32).to(torch.uint8)
    values = array_on_gpu("decode", codes.to(CARD), fmt, torch.float32)
    expected = torch.tensor(
        [fmt.decode_code(code) for code in codes.tolist()], dtype=torch.float64
    ).float()
    assert not different(values, expected)
    finite = sorted({x for x in expected.tolist() if math.isfinite(x) and x >= 0})
    between = []
    for a, b in pairwise(map(Fraction, finite)):
        for part in (Fraction(1, 4), Fraction(1, 2), Fraction(2, 3)):
            between.append(float(np.float32(float(a + (b - a) * part))))
    x = torch.tensor([*between, finite[-1] * 2] if finite[-1] < 1e38 else between)
    wanted = torch.tensor(
        [scalar.code(scalar.round(v, None), False) for v in x.tolist()], dtype=torch.int32
    )
    codes = array_on_gpu("encode", x.to(CARD), fmt, torch.uint8)
    assert codes.int().tolist() == wanted.tolist()


@pytest.fixture
def on_a_card(monkeypatch):
    """Let steps go the way that they go on a GPU; without one kernels are interpreted."""
    as_on_a_card(monkeypatch)


def on_both(parameters, kind=optim.StiffnessAdamW, lr=1e-9, **options):
    """An optimizer of copies on the card, and one of copies on the CPU."""
    devices = (CARD, torch.device("cpu"))
    copies = [
        [torch.nn.Parameter(copy.deepcopy(p).detach().to(device)) for p in parameters]
        for device in devices
    ]
    return [kind(weights, lr, **options) for weights in copies]


def by_turns(monkeypatch, optimizers):
    """Each of both, while steps go the way of its device."""
    for optimizer in optimizers:
        monkeypatch.setattr(_plan, "on_gpu", lambda device, gpu=optimizer is optimizers[0]: gpu)
        yield optimizer


def assert_the_same(on_card, native):
    assert same_bits([p.cpu() for p in parameters_of(on_card)], parameters_of(native))


def pair(fmt="E4M3", factors=False, granularity="channel", kind=optim.StiffnessAdamW, **options):
    second = (3, 64) if granularity == "block" else (3, 37)  # rows that share bytes of a residual
    options_of_codes = {"granularity": granularity, "headroom": 1.0}
    weights = [
        fm.FP8Parameter(normal(*shape, seed=s), fmt, seed=s, **options_of_codes)
        for s, shape in ((1, (4, 64)), (2, second))
    ]
    weights = [*(with_factors(p, factors) for p in weights), torch.nn.Parameter(normal(7, seed=3))]
    betas = {"betas": (0.9, 0.95)} if kind is optim.StiffnessAdamW else {}
    return on_both(weights, kind, lr=1.0, **betas | {"weight_decay": 0.0} | options)


def put(optimizer, step, bad=None):
    for i, p in enumerate(parameters_of(optimizer)):
        gradient = normal(*p.shape, seed=10 * step + i) - 3.0
        if bad is not None and i == 1:
            gradient.view(-1)[-1] = bad
        p.grad = gradient.to(p.device)


#: Options of the weights by write-back, so that scales of every kind double once.
WIDENED = {
    "stochastic": {"factors": True},
    "residual8": {"granularity": "block", "factors": True},
    "nearest": {"granularity": "tensor"},
    "momentum": {"fmt": "E4M3IEEE"},
}


@pytest.mark.parametrize("writeback", WIDENED)
def test_steady_steps_widen_and_are_refused_as_native_ones(writeback, on_a_card, monkeypatch):
    """With gradients that are not finite, or whose squares are not.

    Weights and scales are the same after every step, before the host has read the verdict,
    and everything else at the end.
    """
    moments = "bfloat16" if writeback == "momentum" else "8bit"
    on_card, native = pair(**WIDENED[writeback], writeback=writeback, moments=moments)
    assert_refused_and_widened_alike(on_card, native, monkeypatch)


#: Options of planned Adafactor steps, and of their weights.
PLANNED_ADAFACTOR = {
    "stochastic": {"factors": True},
    "residual in blocks": {"granularity": "block", "writeback": "residual8"},
    "one byte, one scale": {"granularity": "tensor", "momentum": 0.5, "moments": "8bit"},
    "injected": {"writeback": "momentum", "momentum": 0.5},
}


@pytest.mark.parametrize("options", PLANNED_ADAFACTOR.values(), ids=PLANNED_ADAFACTOR)
def test_planned_steps_of_adafactor_are_refused_and_widen_as_native_ones(
    options, on_a_card, monkeypatch
):
    """A refused step leaves averages as they were."""
    on_card, native = pair(kind=optim.StiffnessAdafactor, **options)
    assert_refused_and_widened_alike(on_card, native, monkeypatch)


def assert_refused_and_widened_alike(on_card, native, monkeypatch):
    for step, bad in enumerate((None, None, math.nan, None, 2.0**64, math.inf, None)):
        for optimizer in by_turns(monkeypatch, (on_card, native)):
            put(optimizer, step, bad)
            optimizer.step()
        assert len(on_card._pending_verdicts) == (step > 0), step
        assert_the_same(on_card, native)
    assert on_card.widened_scales == native.widened_scales > 0
    assert on_card.skipped_steps == native.skipped_steps == 3
    assert on_card.skipped_in_row == 0
    assert frozen(on_card.state_dict()) == frozen(native.state_dict())


#: Options of a Muon step: of the weights, and of the optimizer.
MUONS_STEPS = {
    "float32 momentum": ({}, {}),
    "8-bit momentum": ({}, {"moments": "8bit"}),
    "residual in blocks": (
        {"granularity": "block"},
        {"moments": "bfloat16", "writeback": "residual8"},
    ),
    "one scale": ({"granularity": "tensor"}, {"moments": "8bit", "nesterov": False}),
}


@pytest.mark.parametrize("case", MUONS_STEPS)
def test_planned_steps_of_matrices_have_the_bits_of_unplanned_ones(case, on_a_card):
    """Two shapes, batches of experts, and Adam's vector; some gradients are not finite.

    A rate of 0.5 makes scales double.
    """
    weight_options, options = MUONS_STEPS[case]
    weight_options = {"headroom": 1.0, "keep_remainder": False} | weight_options
    shapes = ((4, 64), (4, 64), (64, 32), (2, 8, 64), (64,))
    weights = []
    for seed, shape in enumerate(shapes):
        weights.append(fm.FP8Parameter(normal(*shape, seed=seed), "E4M3", seed=9, **weight_options))
    optimizers = []
    for _ in range(2):
        copies = [copy.deepcopy(p).to(CARD) for p in weights]
        groups = [
            {"params": copies[:3]},
            {"params": copies[3:4], "matrix_shape": "batch"},
            {"params": copies[4:], "direction": "adam"},
        ]
        optimizers.append(optim.StiffnessMuon(groups, 0.5, ns_dtype=torch.float32, **options))
    planned, unplanned = optimizers
    unplanned.is_planned = False
    for step, bad in enumerate((None, None, math.nan, None, 2.0**64, None)):
        for optimizer in optimizers:
            put(optimizer, step, bad)
            optimizer.step()
        assert bool(planned._pending_verdicts) == (step > 0), step
        assert not unplanned._pending_verdicts, step
        assert same_bits(parameters_of(planned), parameters_of(unplanned)), step
    assert planned.skipped_steps == unplanned.skipped_steps == 2
    assert planned.widened_scales == unplanned.widened_scales > 0
    assert frozen(planned.state_dict()) == frozen(unplanned.state_dict())


#: Options of Muon steps that are more than kernels with a product between them.
MUONS_OTHER_STEPS = {
    "stiffness": {"stiffness": 1.0},
    "error into the momentum": {"writeback": "momentum", "moments": "bfloat16"},
    "floats": {},
}


@pytest.mark.parametrize("case", MUONS_OTHER_STEPS)
def test_other_steps_of_matrices_have_no_plan_on_a_card(case, on_a_card):
    """F stands on both sides of a factor; an error needs a ratio; torch averages floats."""
    if case == "floats":
        weights = [torch.nn.Parameter(normal(8, 64, seed=1))]
    else:
        weights = [fm.FP8Parameter(normal(8, 64, seed=1), "E4M3", seed=9, keep_remainder=False)]
    optimizers = []
    for _ in range(2):
        copies = [copy.deepcopy(p).to(CARD) for p in weights]
        options = MUONS_OTHER_STEPS[case]
        optimizers.append(optim.StiffnessMuon(copies, 0.02, ns_dtype=torch.float32, **options))
    maybe_planned, unplanned = optimizers
    unplanned.is_planned = False
    for step in range(4):
        for optimizer in optimizers:
            put(optimizer, step)
            optimizer.step()
        assert not maybe_planned._pending_verdicts, step
        assert same_bits(parameters_of(maybe_planned), parameters_of(unplanned)), step
    assert frozen(maybe_planned.state_dict()) == frozen(unplanned.state_dict())


@pytest.mark.parametrize("granularity", ["channel", "block", "tensor"])
@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
def test_weights_of_zeros_begin_as_on_the_cpu(writeback, granularity, on_a_card, monkeypatch):
    """Steps wait for the card while some scale has weights of 0 alone, and no longer.

    `unheard` counts the verdicts that are pending after each step.
    """
    w = normal(6, 64, seed=1)
    w[: 6 if granularity == "tensor" else 3] = 0.0
    p = fm.FP8Parameter(w, "E2M5", granularity=granularity, seed=1)
    optimizers = on_both([p], lr=1e-3, writeback=writeback, moments="8bit", refresh_every=4)
    unheard = []
    for step in range(8):
        gradient = normal(6, 64, seed=step)
        gradient[:3] *= step > 1
        gradient[3:] *= granularity != "tensor" or step > 1
        for optimizer in by_turns(monkeypatch, optimizers):
            (p,) = parameters_of(optimizer)
            step_from(optimizer, p, gradient.to(p.device))
        unheard.append(len(optimizers[0]._pending_verdicts))
        assert_the_same(*optimizers)
    assert unheard == [0, 0, 0, 1, 0, 1, 1, 1]
    assert optimizers[0].fitted_scales == optimizers[1].fitted_scales > 0
    assert frozen(optimizers[0].state_dict()) == frozen(optimizers[1].state_dict())


@pytest.mark.parametrize("columns", [8, 100])
def test_rows_of_zeros_that_share_a_tile_begin_as_on_the_cpu(columns, on_a_card, monkeypatch):
    """A tile spans several rows whose length 16 does not divide, each with its scale."""
    w = normal(64, columns, seed=1)
    w[:3] = 0.0
    p = fm.FP8Parameter(w, "E2M5", granularity="channel", seed=1)
    optimizers = on_both([p], lr=1e-3)
    unheard = []
    for step in range(6):
        gradient = normal(64, columns, seed=step)
        gradient[:3] *= step > 2
        for optimizer in by_turns(monkeypatch, optimizers):
            (p,) = parameters_of(optimizer)
            step_from(optimizer, p, gradient.to(p.device))
        unheard.append(len(optimizers[0]._pending_verdicts))
        assert_the_same(*optimizers)
    assert unheard == [0, 0, 0, 0, 1, 1]
    assert optimizers[0].fitted_scales == optimizers[1].fitted_scales == 3


def test_scales_of_codes_without_a_number_double_as_they_do_on_the_host(
    on_a_card, monkeypatch, caplog
):
    """With NaN, long rows, rows at their end and not, and the widest scale of all."""
    caplog.set_level("INFO", "fp8manifold")
    messages = []
    p = fm.FP8Parameter(
        normal(6, 1301, seed=4), "E5M2", seed=4, scale=2.0**-10, keep_remainder=False
    )
    p.codes[0, 7], p.codes[2, 0], p.codes[3, 1300], p.codes[4, 3] = 0x7F, 0x7B, 0xFB, 0x7B
    p.scale[1:4] = torch.tensor([[1.3 / 1024], [2.0**-10], [2.0**112]])
    p.codes[5, 9], p.scale[5] = 0x7B, 1.5 * 2.0**111  # below the widest, and beyond it when doubled
    optimizers = on_both([p], writeback="residual8", weight_decay=0.0)
    for step in range(2):
        for optimizer in by_turns(monkeypatch, optimizers):
            (p,) = parameters_of(optimizer)
            p.grad = torch.ones(p.shape, device=p.device)
            p.grad[4, 3] = 0.0
            if step:
                p.codes[1, 5] = 0x7B
            optimizer.step()
            # Reading the count waits for the verdict, which logs.
            messages.append(
                [r.getMessage() for r in caplog.records] if optimizer.widened_scales >= 0 else []
            )
            caplog.clear()
        assert_the_same(*optimizers)
        assert p.scale[2::2].flatten().tolist() == [2.0**-9, 2.0**-10], step
    assert frozen(optimizers[0].state_dict()) == frozen(optimizers[1].state_dict())
    assert messages[2] == messages[3] != []


@pytest.mark.parametrize(
    ("fmt", "granularity", "writeback"),
    [
        *[
            ("E2M5", "channel", "stochastic"),
            ("E4M3", "block", "residual8"),
            ("E5M2", "channel", "residual8"),
        ],
        *[("E4M3FNUZ", "block", "stochastic"), ("E3M4", "tensor", "stochastic")],
    ],
)
def test_full_scales_of_matrices_double_in_one_launch(fmt, granularity, writeback, monkeypatch):
    """In steps of Muon without a plan; the host doubles one by one."""
    largest, doubled_scales, run_triton_itself = (
        as_format(fmt).max_code,
        [],
        _triton_step.run_triton,
    )

    def run(slots):
        launched = run_triton_itself(slots)
        doubled_scales.extend(slot.doubled for slot in slots if slot.spec.storage == "codes")
        return launched

    monkeypatch.setattr(_backends, "run_triton", run)
    shapes = ((4, 64), (6, 32)) if granularity == "block" else ((4, 64), (3, 37))
    options = {"granularity": granularity, "keep_remainder": False, "seed": 7}
    parameters = [fm.FP8Parameter(normal(*shape, seed=7), fmt, **options) for shape in shapes]
    optimizers = on_both(
        parameters, optim.StiffnessMuon, writeback=writeback, moments="8bit", weight_decay=0.0
    )
    for step in range(3):
        for optimizer in optimizers:
            is_on_card = optimizer is optimizers[0]
            monkeypatch.setattr(
                _backends, "is_native", lambda slot, on_card=is_on_card: not on_card
            )
            monkeypatch.setattr(_backends, "is_triton", lambda slot, on_card=is_on_card: on_card)
            for p in parameters_of(optimizer):
                p.grad = torch.ones(p.shape, device=p.device)
                p.codes[step, 5 + step] = largest
                p.codes[2, 3] = largest | as_format(fmt).sign_bit
            optimizer.step()
        assert_the_same(*optimizers)
    assert optimizers[0].widened_scales == optimizers[1].widened_scales > 0
    assert frozen(optimizers[0].state_dict()) == frozen(optimizers[1].state_dict())
    assert [bool(doubled) for doubled in doubled_scales] == [granularity != "tensor"] * 6


def test_a_refused_step_raises_where_it_is_asked_to(on_a_card):
    optimizer, _ = pair(on_nonfinite="raise")
    put(optimizer, 0)
    optimizer.step()
    put(optimizer, 1, math.nan)
    old_state = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match="is not finite"):
        optimizer.step()
    assert snapshot(optimizer) == old_state


def _tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """The operators and launches of a function, in their order.

    At its end all that operators wrote to is as it was: nothing has happened until a
    replay.
    """

    def __init__(self):
        super().__init__()
        self._noted = []
        self._before = []
        self._kernels = mock.patch.object(
            launch, "run_calls", lambda *args: self._noted.append(lambda: _RUN(*args))
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = {id(x): x for x in _tensors((args, kwargs))}
        # What this operator writes to, as it was.
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(x, x.clone()) for x in _tensors(value)]
        result = func(*args, **kwargs)
        # Results in memory of their own, into which a replay copies its results.
        places = {x.untyped_storage().data_ptr() for x in inputs.values() if type(x) is Tensor}
        outputs = [
            (i, x)
            for i, x in enumerate(_tensors(result))
            if id(x) not in inputs
            and (type(x) is not Tensor or x.untyped_storage().data_ptr() not in places)
        ]

        def again():
            new = _tensors(func(*args, **kwargs))
            for i, x in outputs:
                x.copy_(new[i])

        self._noted.append(again)
        return result

    def begin(self):
        self._kernels.start()
        self.__enter__()

    def end(self):
        self.__exit__(None, None, None)
        self._kernels.stop()
        with torch.no_grad():
            for x, old_value in reversed(self._before):
                x.copy_(old_value)

    @torch.no_grad()
    def replay(self):
        overwritten = [x for x, _ in self._before]
        versions = [x._version for x in overwritten]
        for again in self._noted:
            again()
        torch._C._autograd._unsafe_set_version_counter(
            overwritten, versions
        )  # a card's replay tells torch nothing


_RUN = launch.run_calls


class Tapes(_graphed._Graphs):
    """Recordings of a card, on tapes."""

    def __init__(self):
        self._tapes = []

    def begin(self):
        self._tapes.append(Tape())
        self._tapes[-1].begin()

    def end(self):
        self._tapes[-1].end()

    def replay(self, index):
        self._tapes[index].replay()


class Stream:
    """Stands for a stream where there is no card."""

    def wait_stream(self, stream):
        pass


@pytest.fixture
def graphs(on_a_card, monkeypatch):
    """A card's graphs, or tapes in their place."""
    if CARD.type == "cpu":
        monkeypatch.setattr(_graphed, "_Graphs", Tapes)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def inputs_of_step(rows=4, seed=0):
    return normal(rows, 64, seed=seed).to(CARD)


def training_step(optimizer, *, clears_last=False):
    """Return a function that clears gradients, first or last, and runs both passes.

    Its second result is computed after the optimizer's step.
    """
    weights = parameters_of(optimizer)

    def take(x, factor):
        if not clears_last:
            optimizer.zero_grad()
        loss = sum(((p * x[:, : p.shape[-1]].mean(0) * factor - 1) ** 2).sum() for p in weights)
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        if clears_last:
            optimizer.zero_grad()
        return loss, loss * 2

    return take


def schedule(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.3 / (1 + step % 5)
        group["weight_decay"] = 0.1 * (step >= 13)


@pytest.mark.parametrize(
    "options",
    [
        {"moments": "8bit"},
        {"writeback": "residual8", "draws": "dither"},
        # uphill, where weights grow in proportion to their size
        {"kind": optim.StiffnessAdafactor, "factors": True, "maximize": True},
    ],
    ids=["8bit", "residual8 dither", "adafactor"],
)
def test_replays_have_the_bits_of_calls(options, graphs):
    """Under a schedule, a refresh, doubled scales, a refused step and another shape."""
    plain, graphed = (pair(refresh_every=6, **options)[0] for _ in range(2))
    clears_last, weights = "draws" in options, parameters_of(plain)
    step = _graphed.GraphedStep(training_step(graphed, clears_last=clears_last), graphed)
    take_plainly = training_step(plain, clears_last=clears_last)
    for i in range(16):
        x = inputs_of_step(3 if i == 10 else 4, seed=i) * (2.0 + i)
        x[1, 3] = math.inf if i == 8 else 1.0
        results, expected = step(x, 1.5), take_plainly(x, 1.5)
        assert not any(map(different, results, expected)), i
        for index, (a, b) in enumerate(zip(weights, parameters_of(graphed), strict=True)):
            tensors = {
                name: x
                for name, x in plain.state[a].items()
                if isinstance(x, Tensor) and name != "grid"
            }
            assert not any(different(graphed.state[b][name], x) for name, x in tensors.items()), (
                i,
                index,
            )
            assert a.grad is b.grad is None if clears_last else not different(b.grad, a.grad), (
                i,
                index,
            )
            assert not different(getattr(b, "codes", b), getattr(a, "codes", a)), (i, index)
            assert not different(getattr(b, "scale", b), getattr(a, "scale", a)), (i, index)
        schedule(graphed, i)
        schedule(plain, i)
    assert (graphed.skipped_steps, graphed.widened_scales) == (
        plain.skipped_steps,
        plain.widened_scales,
    )
    assert plain.skipped_steps == 1
    assert plain.widened_scales > 0
    assert (step.recorded, step.replayed) == (1, 12)


def twice(optimizer, take):
    return lambda *inputs: (take(*inputs), optimizer.step())


def scheduled(optimizer, take):
    return lambda *inputs: (take(*inputs), schedule(optimizer, 2))


def without_step(optimizer, take):
    return lambda *inputs: optimizer.zero_grad()


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (without_step, r"calls the optimizer's step\(\) 0 times"),
        (twice, r"calls the optimizer's step\(\) 2 times"),
        (scheduled, "train_step changes options of the optimizer"),
    ],
)
def test_what_no_graph_can_do_again_is_refused(wrapped, message, graphs):
    optimizer = pair()[0]
    take = training_step(optimizer)
    step = _graphed.GraphedStep(wrapped(optimizer, take), optimizer)
    for i in range(_graphed._WARMUP):
        step(inputs_of_step(seed=i), 1.5)
        optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(ValueError, match=message):
        step(inputs_of_step(), 1.5)
    assert optimizer._recorder is None
    take(inputs_of_step(), 1.5)


def test_weights_that_moved_are_recorded_again(graphs):
    plain, graphed = (pair()[0] for _ in range(2))
    step, take_plainly = _graphed.GraphedStep(training_step(graphed), graphed), training_step(plain)
    for i in range(8):
        x = inputs_of_step(seed=i)
        assert not any(map(different, step(x, 1.5), take_plainly(x, 1.5))), i
        if i == 5:
            for optimizer in (plain, graphed):
                weight = parameters_of(optimizer)[2]
                weight.data = weight.data + 1.0
    assert step.recorded == 2
