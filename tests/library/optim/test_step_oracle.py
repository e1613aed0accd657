"""Steps against their scalar definition, bit for bit.

Of every optimizer, write-back and kind of average, over formats, shapes and options.
"""

import math

import numpy as np
import pytest
import torch
from family_cases import NAMES, VALID
from optimizer_cases import manifold_parameter, normal, step_from
from scalar_grid import exp2, f32
from scalar_grid import log2_of_mantissa as slow_log2
from step_oracle import Slow
from torch import Tensor

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold._numerics.stiffness import exp2_exact, log2_of_mantissa
from fp8manifold.optim import anneal
from fp8manifold.optim._spec import MOMENTS

SCALES = torch.tensor([[2.0**-5], [2.0**-3], [2.0**-9]])
FACTORS = torch.tensor([[1.2345679], [1.0], [1.9999999]])
STEPS = 4
#: Scales that are powers of two, and others.
scaled = pytest.mark.parametrize("factor", [1.0, FACTORS], ids=["powers of two", "factors"])

pytestmark = pytest.mark.usefixtures("each_path")

#: Large enough that most weights move and some cross binades, zero and the ends.
OPTIONS = {
    "StiffnessAdamW": {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.0, "stiffness": 1.0},
    "StiffnessSGD": {"lr": 0.3, "momentum": 0.9, "dampening": 0.3, "stiffness": 2.0},
    "StiffnessLion": {"lr": 0.02, "betas": (0.9, 0.99), "stiffness": 1.0},
    "RiemannianAdam": {"lr": 1.7, "betas": (0.9, 0.999)},
    "RiemannianSGD": {"lr": 60.0, "momentum": 0.9, "dampening": 0.3},
}


def first_codes(fmt, count):
    """Return codes: zeros, near the ends, subnormals, powers of two, and random ones.

    Powers of two come with their inner neighbours. None is the largest code: an optimizer
    would widen its scale first.
    """
    m, top = 1 << fmt.mantissa_bits, fmt.max_code - 1
    if fmt.exponent_bits == 7:
        # A few dozen binades around one: more would leave all others below the bounds.
        top = 80
    powers = [m, m - 1, 2 * m, 2 * m - 1, 3 * m, 3 * m - 1]
    edge = [code for code in [0, 1, top, top, *powers] if code <= top]
    random = torch.randint(
        48 * (top == 80), top + 1, (count,), generator=torch.Generator().manual_seed(3)
    ).tolist()
    signs = [(i % 2) * fmt.sign_bit * (code > 0) for i, code in enumerate(random)]
    mixed = [code + sign for code, sign in zip(random, signs, strict=True)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(11))
    return torch.tensor((edge + mixed)[:count], dtype=torch.uint8)[order]


def stored(name, shape=(3, 14), scale=SCALES, **options):
    fmt = fm.FloatFormat.from_string(name)
    codes = first_codes(fmt, math.prod(shape)).view(shape)
    scale = scale.clone() if isinstance(scale, Tensor) else scale
    return fm.FP8Parameter.from_codes(
        codes, scale, fmt, requires_grad=True, **{"seed": 0, **options}
    )


def gradient(p, step):
    g = normal(*p.shape, seed=100 + step) * torch.exp2(
        normal(*p.shape, seed=200 + step).mul(3).round()
    )
    g.view(-1)[step::7] = 0.0
    return g


def slow_of(kind, p, options, **slow_options):
    entries = torch.arange(p.scale.numel()).view(p.scale.shape)
    entries = entries.repeat_interleave(p.block_size, -1) if p.block_size else entries
    groups = entries.expand(p.shape).reshape(-1).tolist()
    scales = [p.scale.view(-1).tolist()[g] for g in groups]
    facts = (kind, p.format, tuple(p.shape), scales, p.codes.view(-1).tolist(), options)
    return Slow(*facts, groups=groups, one_scale=not p.scale.dim(), **slow_options)


def bit_list(x):
    if isinstance(x, Tensor):
        x = x.detach().reshape(-1)
        if x.dtype == torch.uint8:
            return x.tolist()
        x = x.float().numpy()
    values = np.asarray(x)
    return values.view(np.uint32).tolist() if values.dtype == np.float32 else values.tolist()


def assert_same(p, optimizer, slow, context):
    state = optimizer.state[p]
    assert p.codes.view(-1).tolist() == slow.stored, context
    assert p.expanded_scale().expand(p.shape).reshape(-1).tolist() == slow.scales, context
    for name in slow.names:
        assert bit_list(state[name]) == bit_list(slow.averages[name]), f"{context}: {name}"
        if slow.options["moments"] == "8bit":
            bound = state["sq_bound" if name == "exp_avg_sq" else "avg_bound"]
            assert bit_list(bound) == bit_list(slow.bounds[name]), f"{context}: bound of {name}"
    if slow.extra == 8:
        assert state["residual"].view(-1).tolist() == slow.residual, context


def follow(kind, p, options, steps=STEPS, moved=0.2, **slow_options):
    """Step both, and compare after every step.

    At least the share `moved` of the weights or residuals has to move.
    """
    optimizer = getattr(optim, kind)([p], **options)
    slow = slow_of(kind, p, options, **slow_options)
    old_codes = p.codes.clone()
    for t in range(steps):
        step_from(optimizer, p, gradient(p, t))
        slow.stream = optimizer.state[p]["stream"]
        slow.step(p.grad.view(-1).tolist())
        assert_same(p, optimizer, slow, f"step {t + 1}")
    changed = (p.codes != old_codes) | (optimizer.state[p].get("residual", torch.zeros(())) != 0)
    assert changed.float().mean().item() >= moved


@scaled
@pytest.mark.parametrize(
    ("kind", "writeback", "moments"), [case for case in VALID if case[0] in OPTIONS]
)
def test_every_combination(kind, writeback, moments, factor):
    options = OPTIONS[kind] | {
        "writeback": writeback,
        "moments": moments,
        "seed": 9,
        "weight_decay": 0.05,
    }
    follow(kind, stored("E4M3", scale=SCALES * factor), options)


def test_every_optimizer_of_the_registry_has_a_row_here():
    """But those whose step is one of a whole matrix, which have tests of their own."""
    of_matrices = {"FisherNaturalGradient", "StiffnessMuon", "StiffnessAdafactor"}
    assert OPTIONS.keys() == set(NAMES) - of_matrices


FORMATS = (
    "E5M2",
    "E3M4",
    "E1M6",
    "E7M0",
    "E4M3FNUZ",
    "E5M2FNUZ",
    "P3109_8P3",
    "E2M3",
    "E2M1",
    "E4M3_B40",
)
VARIED = {
    "adamw stochastic 8bit": ("StiffnessAdamW", {"writeback": "stochastic", "moments": "8bit"}),
    "adamw residual8": ("StiffnessAdamW", {"writeback": "residual8"}),
    "adamw momentum bfloat16": ("StiffnessAdamW", {"writeback": "momentum", "moments": "bfloat16"}),
    "sgd residual8": ("StiffnessSGD", {"writeback": "residual8"}),
    "lion residual8": ("StiffnessLion", {"writeback": "residual8"}),
    "lion nearest": ("StiffnessLion", {"writeback": "nearest"}),
    "riemannian residual8": ("RiemannianAdam", {"writeback": "residual8"}),
    "riemannian momentum": ("RiemannianSGD", {"writeback": "momentum"}),
    "euclidean retraction": (
        "RiemannianAdam",
        {"retraction": "euclidean", "writeback": "stochastic", "weight_decay": 0.05},
    ),
    "euclidean retraction residual8 8bit": (
        "RiemannianAdam",
        {"retraction": "euclidean", "writeback": "residual8", "moments": "8bit"},
    ),
    "euclidean retraction sgd momentum": (
        "RiemannianSGD",
        {"retraction": "euclidean", "writeback": "momentum"},
    ),
}
varied = pytest.mark.parametrize(("kind", "options"), VARIED.values(), ids=VARIED)


def unit(name):
    """Scales that give the format weights of about one."""
    fmt = fm.FloatFormat.from_string(name)
    middle = fmt.decode_code((fmt.max_code + (1 << fmt.mantissa_bits)) // 2)
    return SCALES * 2.0 ** (5 - math.frexp(middle)[1])


@pytest.mark.covering(1)
@varied
@scaled
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, factor, kind, options):
    follow(
        kind, stored(name, scale=unit(name) * factor), OPTIONS[kind] | options, steps=3, moved=0.02
    )


GRANULARITIES = {
    "one scale": ((3, 14), 2.0**-4, {}, 14),
    "one row": ((1, 40), SCALES[:1], {}, 40),
    "a vector": ((37,), 2.0**-4, {}, 37),
    "a number": ((), 2.0**-4, {}, 1),
    "three axes": ((3, 2, 32), SCALES[:, :, None], {}, 64),
    "blocks of 32": ((2, 64), torch.tensor([[1.0, 2.0], [8.0, 0.5]]) / 16, {"block_size": 32}, 32),
    "blocks of averages shorter than a row": ((2, 320), SCALES[:2], {}, 160),
    "one scale, no power of two": ((3, 14), 0.3, {}, 14),
    "three axes, no powers of two": ((3, 2, 32), (SCALES * FACTORS)[:, :, None], {}, 64),
    "blocks of 32, no powers of two": (
        (2, 64),
        torch.tensor([[0.07, 0.125], [0.6, 0.03]]),
        {"block_size": 32},
        32,
    ),
}


@pytest.mark.covering(1)
@varied
@pytest.mark.parametrize(
    ("shape", "scale", "scaling", "block"), GRANULARITIES.values(), ids=GRANULARITIES
)
def test_shapes(shape, scale, scaling, block, kind, options):
    follow(
        kind,
        stored("E4M3", shape, scale, **scaling),
        OPTIONS[kind] | options,
        steps=2,
        moved=0,
        block=block,
    )


VARIANTS = {
    "k = 0": ("StiffnessAdamW", {"stiffness": 0.0}),
    "k = 1/2": ("StiffnessAdamW", {"stiffness": 0.5, "writeback": "momentum"}),
    "k = 2": ("StiffnessAdamW", {"stiffness": 2.0, "writeback": "residual8"}),
    "k = 1, residual8": ("StiffnessAdamW", {"stiffness": 1.0, "writeback": "residual8"}),
    "riemannian residual8, 8bit": ("RiemannianAdam", {"writeback": "residual8", "moments": "8bit"}),
    "k = 0.37": ("StiffnessAdamW", {"stiffness": 0.37}),
    "k = -1": ("StiffnessLion", {"stiffness": -1.0}),
    "annealed": ("StiffnessAdamW", {"stiffness": anneal(1.0, 0.0, 3), "writeback": "momentum"}),
    "annealed sgd": ("StiffnessSGD", {"stiffness": anneal(2.0, 0.5, 2)}),
    "k = 0, sgd": ("StiffnessSGD", {"stiffness": 0.0, "momentum": 0.0}),
    "unbounded": ("StiffnessAdamW", {"damping": 0.0, "clip": math.inf}),
    "unbounded power": ("StiffnessAdamW", {"damping": 0.0, "clip": math.inf, "stiffness": 1.5}),
    "tight": ("StiffnessAdamW", {"damping": 0.7, "clip": 1.3}),
    "tight power": ("StiffnessAdamW", {"damping": 0.7, "clip": 1.3, "stiffness": 0.9}),
    "maximize": ("StiffnessAdamW", {"maximize": True, "weight_decay": 0.3}),
    "nesterov": ("StiffnessSGD", {"nesterov": True, "dampening": 0.0, "maximize": True}),
    "dampening below 0, 8 bits": ("StiffnessSGD", {"dampening": -1.5, "moments": "8bit"}),
    "dampening above 1, 8 bits": ("StiffnessSGD", {"dampening": 1.7, "moments": "8bit"}),
    "without momentum": ("StiffnessSGD", {"momentum": 0.0, "writeback": "residual8"}),
    "refreshed": ("StiffnessAdamW", {"refresh_every": 1, "lr": 0.002}),
    "beta1 = 0": ("StiffnessAdamW", {"betas": (0.0, 0.5)}),
    "eps": ("StiffnessAdamW", {"eps": 0.3}),
    "eps = 0": ("StiffnessAdamW", {"eps": 0.0, "betas": (0.9, 0.5)}),
    "eps below float32": ("RiemannianAdam", {"eps": 1e-44}),
    "amsgrad": ("RiemannianAdam", {"amsgrad": True, "betas": (0.9, 0.5), "writeback": "momentum"}),
    "riemannian, unbounded": ("RiemannianAdam", {"damping": 0.0, "clip": math.inf}),
    "riemannian, tight": ("RiemannianAdam", {"damping": 0.7, "clip": 1.3, "writeback": "momentum"}),
    "riemannian, too far": ("RiemannianSGD", {"lr": 1e30, "writeback": "momentum"}),
    "riemannian, far": ("RiemannianAdam", {"lr": 40.0, "weight_decay": 0.3, "maximize": True}),
    "riemannian, eps": ("RiemannianAdam", {"eps": 0.3, "refresh_every": 2}),
    "riemannian nesterov": ("RiemannianSGD", {"nesterov": True, "dampening": 0.0}),
    "riemannian without momentum": ("RiemannianSGD", {"momentum": 0.0, "writeback": "nearest"}),
}


@pytest.mark.parametrize(("kind", "options"), VARIANTS.values(), ids=VARIANTS)
@scaled
def test_options(kind, options, factor):
    follow(kind, stored("E4M3", scale=SCALES * factor), OPTIONS[kind] | options, moved=0.02)


@pytest.mark.parametrize("stiffness", [0.0, 1.0, 0.37])
@pytest.mark.parametrize("writeback", ["nearest", "stochastic", "residual8"])
@pytest.mark.parametrize("moments", MOMENTS)
@scaled
def test_what_native_code_does_in_one_loop(factor, moments, writeback, stiffness):
    options = {"moments": moments, "writeback": writeback, "stiffness": stiffness}
    follow(
        "StiffnessAdamW",
        stored("E4M3", scale=SCALES * factor),
        OPTIONS["StiffnessAdamW"] | options,
        moved=0.02,
    )


@varied
@scaled
def test_scales_are_widened_where_a_weight_is_at_an_end(factor, kind, options):
    """With one unbiased rounding, after the step; the other scales stay."""
    p = stored("E4M3", scale=SCALES * factor)
    p.codes[1, 3:5] = torch.tensor([126, 254], dtype=torch.uint8)
    old_scale = p.scale.clone()
    follow(kind, p, OPTIONS[kind] | options | {"refresh_every": 2}, moved=0.02)
    assert (p.scale > old_scale).sum() >= 1
    assert (p.scale >= old_scale).all()


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_stream_of_a_parameter_and_the_seed_key_its_draws(kind):
    """The second of two equal weights, whose gradient is the same."""
    p, twin = stored("E4M3"), stored("E4M3")
    options = OPTIONS[kind] | {"seed": 2**64 - 1, "writeback": "residual8", "moments": "bfloat16"}
    optimizer = getattr(optim, kind)([twin, p], **options)
    slow = slow_of(kind, p, options)
    for t in range(2):
        p.grad = twin.grad = gradient(p, t)
        optimizer.step()
        slow.stream = optimizer.state[p]["stream"]
        slow.step(p.grad.view(-1).tolist())
        assert_same(p, optimizer, slow, f"step {t + 1}")
    assert (optimizer.state[p]["residual"] != optimizer.state[twin]["residual"]).any()


def test_the_residual_of_the_float_weights_is_taken_over():
    """In 1/256 of a step of the chart; the parameter does not keep it."""
    w = normal(3, 14, seed=5, std=0.3)
    p = fm.FP8Parameter(w, "E4M3", keep_remainder=True)
    remainder = p.remainder.view(-1).tolist()
    assert len(set(remainder)) > 20
    options = OPTIONS["StiffnessAdamW"] | {"stiffness": 0.0, "writeback": "residual8"}
    follow("StiffnessAdamW", p, options, residual=remainder)
    assert p.remainder is None


def on_manifold(p, storage, scale):
    """Return the weights as floats: on the grid, free on its manifold, or ordinary."""
    fmt = p.format
    if storage == "plain":
        return torch.nn.Parameter(p.dequantize() * 1.01)
    kind = fm.FP8Manifold if storage == "grid" else fm.StiffnessManifold
    manifold = kind(fmt, scale)
    x = fm.decode(p.codes, fmt) * torch.as_tensor(scale)
    x = torch.where(x.isnan(), 0.0, x) * (1.01 if storage == "free" else 1.0)
    return manifold_parameter(manifold, x)


#: A storage and a variant, by name. Ordinary weights have no scale, and no Riemannian step.
FLOATS = {}
for name, variant in VARIED.items():
    for storage in ("grid", "free"):
        FLOATS[f"{storage}, powers of two, {name}"] = (storage, SCALES, *variant)
        FLOATS[f"{storage}, 0.03, {name}"] = (storage, 0.03, *variant)
    if not variant[0].startswith("Riemannian"):
        FLOATS[f"plain, no scale, {name}"] = ("plain", 1.0, *variant)


@pytest.mark.parametrize(("storage", "scale", "kind", "options"), FLOATS.values(), ids=FLOATS)
def test_floats(storage, scale, kind, options):
    weight = on_manifold(stored("E4M3"), storage, scale)
    all_options = OPTIONS[kind] | options
    optimizer = getattr(optim, kind)([weight], **all_options)
    first = weight.detach().as_subclass(Tensor).view(-1).numpy().copy()
    scales = torch.as_tensor(scale).expand(weight.shape).reshape(-1).tolist()
    fmt = fm.FloatFormat.from_string("E4M3")
    slow = Slow(kind, fmt, tuple(weight.shape), scales, list(first), all_options, storage=storage)
    for t in range(STEPS):
        step_from(optimizer, weight, gradient(weight, t))
        slow.stream = optimizer.state[weight]["stream"]
        slow.step(weight.grad.view(-1).tolist())
        now, state = weight.detach().as_subclass(Tensor), optimizer.state[weight]
        assert bit_list(now) == bit_list(slow.stored), f"step {t + 1}"
        for name in slow.names:
            assert bit_list(state[name]) == bit_list(slow.averages[name]), f"step {t + 1}: {name}"
    assert (now.view(-1).numpy() != first).mean() > 0.02


def test_logarithms():
    """The series behind a general exponent where scales are no powers of two."""
    x = torch.cat(
        [normal(3000, seed=1).exp(), torch.tensor([1.0, 1.9999999, 2.0**-126, 1.0000001])]
    )
    assert bit_list(log2_of_mantissa(x)) == bit_list([slow_log2(f32(v)) for v in x.tolist()])


def test_powers_of_two():
    """The polynomial behind a general exponent; beyond float32 the power stops at its ends."""
    x = torch.cat(
        [normal(3000, seed=1, std=60.0), normal(3000, seed=2), torch.arange(-140.0, 140.0, 0.5)]
    )
    with np.errstate(over="ignore"):
        assert bit_list(exp2_exact(x)) == bit_list([exp2(f32(v)) for v in x.tolist()])
