"""The steps that every optimizer of the registry takes: its options, its noise, its
state, and what leaves it alone.
"""

import copy
import gc
import itertools
import math
import weakref
from types import FunctionType, MethodType, ModuleType

import optimizer_cases as cases
import pytest
import torch
import torch._dynamo
from family_cases import NAMES, OPTIONS, RIEMANNIAN_NAMES, VALID, is_layer, make, moves, zoo
from optimizer_cases import (
    bits_of,
    normal,
    put_gradients,
    same_bits,
    snapshot,
    stored_weight,
    take_steps,
    values,
)
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import fp8manifold as fm
from fp8manifold import optim
from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW, StiffnessWrapper
from fp8manifold.scaling import STORED_GRANULARITIES

by_name = pytest.mark.parametrize("name", NAMES)
combined = pytest.mark.parametrize(("name", "writeback", "moments"), VALID)
sampled = pytest.mark.covering(2)


@by_name
def test_an_observer_sees_the_step_and_changes_nothing(name):
    """Weights before it, asked for and after it, of each that is quantised; the grid's
    are rounded once.
    """
    parameters, others = (
        [p for kind, p in zoo().items() if kind != "fp8 bfloat16, any scale"] for _ in "ab"
    )
    seen, unseen = (make(name, p, writeback="stochastic", seed=5) for p in (parameters, others))
    views = cases.record(seen)
    for t in range(1, 4):
        start, count = values(parameters), len(views)
        take_steps((seen, unseen), (parameters, others), range(t, t + 1), 0.1)
        now = views[count:]
        stepped = {
            id(p): i for i, p in enumerate(parameters) if hasattr(p, "manifold") and p.numel()
        }
        assert sorted(id(view.parameter) for view in now) == sorted(stepped)
        for view in now:
            i = stepped[id(view.parameter)]
            p, manifold = parameters[i], parameters[i].manifold
            assert not any(
                x.requires_grad for x in (view.before, view.target, view.after, view.stiffness)
            )
            assert torch.equal(view.before, start[i].to(view.before.dtype))
            assert torch.equal(view.after.to(p.dtype), cases.value_of(p))
            assert not torch.equal(view.target, view.before)
            if not isinstance(manifold, fm.FP8Manifold):
                continue
            scale = manifold.scale.to(view.target.dtype)
            draw = {"seed": 5, "step": t, "stream": seen.state[p]["stream"]}
            rounded = (
                fm.round_to_grid(view.target / scale, manifold.format, "stochastic", **draw) * scale
            )
            assert torch.equal(view.after, rounded)
    assert same_bits(values(parameters), values(others))
    assert unseen.observer is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writeback", ["nearest", "stochastic", "residual8"])
def test_a_zero_gradient_changes_no_byte_of_codes(name, writeback):
    """Nor of scales and residuals, whatever the scales are, of all granularities; both
    zeros among them.
    """
    weights, before, kept = [], [], []
    for granularity, factors in itertools.product(STORED_GRANULARITIES, (False, True)):
        p = stored_weight(
            "E4M3", (130, 160), granularity=granularity, factors=factors, keep_remainder=False
        )
        p.codes[0, :3] = torch.tensor([0, 0x80, 1], dtype=torch.uint8)
        weights.append(p)
        before += [bits_of(p.codes), bits_of(p.kept_scale)]
    optimizer = make(name, weights, writeback=writeback, weight_decay=0.0, refresh_every=2)
    for step in range(4):
        for p in weights:
            p.grad = torch.zeros(p.shape)
        optimizer.step()
        left = [optimizer.state[p]["residual"] for p in weights if writeback == "residual8"]
        if not step:
            kept = [
                bits_of(x.copy_(normal(*x.shape, seed=1, std=40.0).clamp(-128, 127))) for x in left
            ]
    assert [bits_of(x) for x in left] == kept
    assert [bits_of(x) for p in weights for x in (p.codes, p.kept_scale)] == before


@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_what_a_zero_gradient_leaves_on_a_grid_is_the_same_to_the_bit(name):
    """A point divided by its scale may miss the format's value by a rounding error; no
    draw may move it even then.
    """
    grid = fm.FP8Manifold("E1M6", 0.3).projx(torch.arange(1, 128) / 32 * 0.3)
    off = (grid / torch.tensor(0.3) - fm.round_to_grid(grid / torch.tensor(0.3), "E1M6")).abs()
    x = grid[off.argmax()].expand(1000, 100).clone()
    x[0, :2] = torch.tensor([0.0, -0.0])
    weights = [
        cases.on(fm.FP8Manifold("E1M6", 0.3, "stochastic"), x),
        cases.free_weight(normal(40, 25), "E4M3", 0.3),
    ]
    wrapped = name == "StiffnessWrapper"
    optimizer = (
        StiffnessWrapper(torch.optim.SGD(weights, lr=0.02), exponent=1.0) if wrapped else None
    )
    optimizer = optimizer or make(name, weights, writeback="stochastic", weight_decay=0.0)
    before = values(weights)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.zeros(weight.shape)
        optimizer.step()
    assert same_bits(before, values(weights))


def equal_weights(count):
    return [cases.on(fm.FP8Manifold("E4M3"), torch.full((4000,), 0.8125)) for _ in range(count)]


def step_equally(optimizer, weights, steps):
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight).as_subclass(Tensor)
        optimizer.step()
    return values(weights)


@cases.every_class
def test_a_parameter_keeps_its_stream(kind):
    """Its noise belongs to its place among its like: no neighbour frozen, missing or
    new changes it, nor loading.
    """
    options = {"lr": 0.4 if kind in cases.RIEMANNIAN else 0.02, "writeback": "stochastic"}
    alone = equal_weights(2)
    expected = step_equally(kind(alone, **options), alone, 6)
    weights = equal_weights(2)
    optimizer = kind(weights, **options)
    step_equally(optimizer, weights, 2)
    optimizer.add_param_group({"params": equal_weights(1)})
    step_equally(optimizer, weights, 2)
    resumed = cases.same_parameters(weights)
    fresh = kind(resumed, **options)
    fresh.add_param_group({"params": equal_weights(1)})
    fresh.load_state_dict(cases.through_disk(optimizer.state_dict()))
    assert same_bits(step_equally(fresh, resumed, 2), expected)
    weights = equal_weights(2)
    weights[0].requires_grad_(False)
    assert same_bits(step_equally(kind(weights, **options), weights[1:], 6), expected[1:])


@sampled
@combined
def test_global_settings_do_not_enter(name, writeback, moments):
    results = []
    other = (
        torch.float32 if name == "FisherNaturalGradient" else torch.float64
    )  # nngeometry has float32 only
    for seed, dtype in ((0, torch.float32), (1, other)):
        torch.manual_seed(seed)
        expected, kinds = torch.get_rng_state(), zoo()
        steps = [
            [normal(*p.shape, seed=100 * t + i).to(p.dtype) for i, p in enumerate(kinds.values())]
            for t in (0, 1)
        ]
        torch.set_default_dtype(dtype)
        try:
            optimizer = make(name, kinds.values(), writeback=writeback, moments=moments)
            for step in steps:
                for p, gradient in zip(kinds.values(), step, strict=True):
                    p.grad = gradient if p.requires_grad else None
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), expected)
        results.append(snapshot(optimizer))
    assert results[0] == results[1]


@by_name
def test_stabilize_projects_when_due(name):
    weight = cases.grid_weight("E4M3", (3, 7), cases.ROWS)
    optimizer = make(
        name,
        [weight],
        lr=0.0,
        **{"stabilize" if name in RIEMANNIAN_NAMES else "stabilize_every": 3},
    )
    views = cases.record(optimizer)
    off = values([weight])[0] * 1.001
    for t in range(4):
        with torch.no_grad():
            weight.copy_(off)
        put_gradients([weight], t)
        optimizer.step()
    assert [torch.equal(v.before, off) for v in views] == [True, True, True, False]
    assert torch.equal(views[3].before, weight.manifold.projx(off))


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_geoopts_stabilize_is_taken_in_groups_too(kind):
    optimizer = kind(
        [{"params": [cases.grid_weight()], "stabilize": 4}, {"params": [cases.grid_weight()]}],
        stabilize=2,
    )
    assert [group["stabilize_every"] for group in optimizer.param_groups] == [4, 2]


@pytest.mark.parametrize("kind", [StiffnessAdamW, RiemannianAdam])
def test_a_reset_starts_the_averages_anew(kind):
    """After it the step is that of a fresh optimizer at the same point (float64, no
    rounding).
    """
    weight = cases.free_weight(normal(30, dtype=torch.float64))
    optimizer = kind([weight], reset_every=4, refresh_every=1)
    take_steps([optimizer], [[weight]], range(4))
    twin = cases.free_weight(values([weight])[0])
    fresh = kind([twin], refresh_every=1)
    for t in range(4, 7):
        take_steps((optimizer, fresh), ([weight], [twin]), range(t, t + 1))
        assert torch.equal(weight, twin)


@by_name
def test_ascending_is_descending_on_the_negated_gradient(name):
    kinds, others = zoo(), zoo()
    up, down = make(name, kinds.values(), maximize=True), make(name, others.values())
    for t in range(4):
        put_gradients(kinds.values(), t, 0.1)
        put_gradients(others.values(), t, -0.1)
        given = {p: bits_of(p.grad) for p in kinds.values() if p.grad is not None}
        up.step()
        down.step()
        assert same_bits(values(kinds.values()), values(others.values()))
        assert all(bits_of(p.grad) == bits for p, bits in given.items()), (
            "the gradient was written to"
        )


@by_name
def test_groups_of_different_options_step_as_optimizers_of_their_own(name):
    """Position in the whole list keys the noise, so the others are there too, held
    still by having no gradient.
    """
    lr = OPTIONS[name]["lr"]
    chosen = [
        {"lr": 0.5 * lr, "writeback": "residual8", "moments": "8bit"},
        {"weight_decay": 0.1, "maximize": True, "seed": 4},
        {"writeback": "nearest", "moments": "bfloat16", "refresh_every": 2},
    ]
    weights, *copies = (
        [stored_weight(shape=s, seed=i) for i, s in enumerate([(3, 7), (2, 9), (4, 5)])]
        for _ in "abcd"
    )
    grouped = make(
        name, [{"params": [w], **options} for w, options in zip(weights, chosen, strict=True)]
    )
    take_steps([grouped], [weights], range(5), 0.1)
    for i, (options, alone) in enumerate(zip(chosen, copies, strict=True)):
        single = make(name, alone, **options)
        for t in range(5):
            put_gradients(alone, t, 0.1)
            for p in {*alone} - {alone[i]}:
                p.grad = None
            single.step()
        assert bits_of(alone[i]) == bits_of(weights[i]), options


def distances(parameters, targets):
    pairs = zip(parameters, targets, strict=True)
    return [
        (cases.value_of(p).double() - target.double()).square().sum().item()
        for p, target in pairs
        if moves(p)
    ]


@sampled
@combined
def test_a_valid_combination_learns(name, writeback, moments):
    """20 steps towards a target: every kind comes nearer, stays on its grid, and no
    gradient is touched.
    """
    kinds = zoo()
    parameters = list(kinds.values())
    targets = [
        normal(*p.shape, seed=100 + i, std=0.1).to(p.dtype) for i, p in enumerate(parameters)
    ]
    still = [p for p in parameters if not moves(p)]
    fixed, start = values(still), distances(parameters, targets)
    optimizer = make(name, parameters, writeback=writeback, moments=moments)
    for _ in range(20):
        for p, target in zip(parameters, targets, strict=True):
            p.grad = cases.value_of(p) - target if p.requires_grad else None
        gradients = [(p.grad, bits_of(p.grad)) for p in parameters if p.grad is not None]
        optimizer.step()
        assert all(bits_of(gradient) == before for gradient, before in gradients)
    left = [b / a for a, b in zip(start, distances(parameters, targets), strict=True)]
    share = dict(zip([kind for kind, p in kinds.items() if moves(p)], left, strict=True))
    # to nearest it may stall, where steps are shorter than half an ULP, which is what
    # the others are for
    assert max(share.values()) <= 1.0 if writeback == "nearest" else max(share.values()) < 0.9, (
        share
    )
    assert sum(share.values()) < 0.8 * len(share)
    assert all(cases.value_of(p).isfinite().all() for p in parameters)
    assert all(
        cases.on_grid(p)
        for p in parameters
        if isinstance(getattr(p, "manifold", None), fm.FP8Manifold)
    )
    assert same_bits(fixed, values(still))
    assert optimizer.skipped_steps == 0


AVERAGES = {
    "RiemannianSGD": ["momentum_buffer"],
    "StiffnessSGD": ["momentum_buffer"],
    "StiffnessLion": ["exp_avg"],
}
WIDTH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


def averages_of(name, p):
    if (name == "FisherNaturalGradient" and is_layer(p)) or (
        name == "StiffnessMuon" and p.dim() > 1
    ):
        return ["momentum_buffer"]
    return AVERAGES.get(name, ["exp_avg", "exp_avg_sq"])


@sampled
@combined
def test_the_state_is_what_moments_and_write_back_say(name, writeback, moments):
    kinds = zoo()
    optimizer = make(name, kinds.values(), writeback=writeback, moments=moments)
    take_steps([optimizer], [kinds.values()], range(2), 0.1)
    for kind, p in kinds.items():
        if not moves(p):
            assert not optimizer.state.get(p), kind
            continue
        state = dict(optimizer.state[p])
        large = {
            k: v for k, v in state.items() if isinstance(v, Tensor) and k not in ("step", "grid")
        }
        bounds = [large.pop(k) for k in ("avg_bound", "sq_bound", "avg_largest") if k in large]
        metric = [large.pop(k) for k in list(large) if k.startswith(("inverse_", "fisher_"))]
        stored = "float32" if name in RIEMANNIAN_NAMES and not hasattr(p, "manifold") else moments
        wide = torch.float64 if p.dtype == torch.float64 and stored == "float32" else WIDTH[stored]
        on_a_grid = isinstance(getattr(p, "manifold", None), fm.FP8Manifold)
        residual = (
            {"residual": torch.int8}
            if optim.WRITEBACKS[writeback].residual_bits and on_a_grid
            else {}
        )
        assert {k: v.dtype for k, v in large.items()} == dict.fromkeys(
            averages_of(name, p), wide
        ) | residual, kind
        assert {v.numel() for v in large.values()} == {p.numel()}, kind
        most = max(p.numel() // 32, p.shape[0] if p.dim() else 1)
        assert all(v.dtype == torch.float32 and v.numel() <= most for v in bounds)
        assert len(bounds) == (len(averages_of(name, p)) if stored == "8bit" else 0), kind
        assert bool(metric) == (name == "FisherNaturalGradient" and is_layer(p)), kind
        assert len(repr({k: v for k, v in state.items() if not isinstance(v, Tensor)})) < 400, kind


def memory(x, seen):
    """The sizes of what an object holds, by address, but not through types, modules and
    functions.
    """
    if id(x) in seen or isinstance(x, type | nn.Module | ModuleType | FunctionType | MethodType):
        return {}
    seen[id(x)] = x
    if isinstance(x, Tensor) and not isinstance(x, fm.FP8Tensor):
        storage = x.detach().as_subclass(Tensor).untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    inner = [x.codes, x.scale, x.counter] if isinstance(x, fm.FP8Tensor) else gc.get_referents(x)
    return {address: size for y in inner for address, size in memory(y, seen).items()}


@combined
def test_nothing_else_is_held(name, writeback, moments):
    """An optimizer keeps its parameters and their state, a few bytes a row besides, and
    no gradient.
    """
    parameters = [stored_weight("E4M3", (16, 256), seed=1), nn.Parameter(normal(64, 32, seed=2))]
    optimizer = make(name, parameters, writeback=writeback, moments=moments)
    take_steps([optimizer], [parameters], range(2), 0.1)
    gradients = [weakref.ref(p.grad) for p in parameters]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None, None]
    held, known = memory(optimizer, {}), memory([parameters, dict(optimizer.state)], {})
    extra = sum(size for address, size in held.items() if address not in known)
    layer = parameters[0].shape[0] ** 2 + parameters[0].shape[1] ** 2
    assert extra <= 16 * 24 + 256 + (16 * layer if name == "FisherNaturalGradient" else 0)


X = torch.linspace(-1, 1, 24).view(3, 8)


def trained(name, what):
    """Codes and values after three steps, with ``what`` of ``nothing``, ``step`` or
    ``all`` compiled.
    """
    torch.manual_seed(0)
    model = fm.quantize_model(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "E4M3", storage="fp8"
    )
    wrapped = name == "StiffnessWrapper"
    optimizer = (
        StiffnessWrapper(torch.optim.SGD(model.parameters(), lr=1e-2), exponent=1.0)
        if wrapped
        else None
    )
    optimizer = optimizer or make(name, model.parameters())
    take = torch.compile(optimizer.step, backend="eager") if what == "step" else optimizer.step

    def train_step(x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        take()

    whole = torch.compile(train_step, backend="eager") if what == "all" else train_step
    for _ in range(3):
        whole(X)
    return [p.codes if isinstance(p, fm.FP8Parameter) else p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # a loss after the break
@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_a_compiled_step_is_the_step(name):
    """A step or a whole training step that a user compiles: the optimizer runs eager
    there, to the same bits.
    """
    expected = trained(name, "nothing")
    for what in ("step", "all"):
        torch._dynamo.reset()
        assert all(torch.equal(a, b) for a, b in zip(trained(name, what), expected, strict=True)), (
            what
        )


@sampled
@combined
def test_a_step_is_left_out_as_a_whole(name, writeback, moments):
    kinds, others = zoo(), zoo()
    optimizer, untroubled = (
        make(name, z.values(), writeback=writeback, moments=moments) for z in (kinds, others)
    )
    for o in (optimizer, untroubled):
        o.step()  # without gradients: takes what the parameters kept of their first rounding
    bad = {
        "fp8 channel": math.nan,
        "bfloat16": math.inf,
        "grid": -math.inf,
        "float32": 3e19,
        "float64": 1e160,
    }
    for t in range(2):
        for count, (kind, value) in enumerate(bad.items(), 1):
            put_gradients(kinds.values(), t, 0.1)
            kinds[kind].grad.view(-1)[0] = value
            before = snapshot(optimizer)
            optimizer.step()
            assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (
                count + t * len(bad),
                count,
            )
            before["state"] |= {"skipped_steps": optimizer.skipped_steps, "skipped_in_row": count}
            assert snapshot(optimizer) == before, kind
        take_steps((optimizer, untroubled), (kinds.values(), others.values()), range(t, t + 1), 0.1)
        assert same_bits(values(kinds.values()), values(others.values()))


@by_name
def test_what_the_first_rounding_left_survives_a_step_left_out(name):
    """The rest moves from the parameter into the state, which is saved; no code
    changes.
    """
    kept = stored_weight("E4M3", (3, 7), seed=1, keep_remainder=True)
    remainder, codes = kept.remainder.clone(), kept.codes.clone()
    optimizer = make(name, [kept], writeback="residual8")
    cases.step_from(optimizer, kept, torch.full((3, 7), math.nan))
    assert torch.equal(kept.codes, codes)
    assert optimizer.skipped_steps == 1
    state = optimizer.state_dict()["state"].get(0, {})
    assert "step" not in state
    assert torch.equal(
        kept.remainder if kept.remainder is not None else state["residual"], remainder
    )


@by_name
def test_one_group_that_raises_is_enough(name):
    """FloatingPointError names the shape, and nothing changes; a bad gradient of a
    group that skips never raises.
    """
    kinds = zoo()
    raising = {"params": [kinds["fp8 channel"]], "on_nonfinite": "raise"}
    for first in (True, False):
        groups = [{"params": [p for k, p in kinds.items() if k != "fp8 channel"]}, dict(raising)]
        optimizer = make(name, groups[:: 1 if first else -1])
        put_gradients(kinds.values(), 0, 0.1)
        kinds["fp8 tensor"].grad[0, 0] = math.nan
        optimizer.step()
        kinds["fp8 channel"].grad[4, 32] = math.nan
        before = snapshot(optimizer)
        with pytest.raises(FloatingPointError, match=r"\(5, 33\)"):
            optimizer.step()
        assert snapshot(optimizer) == before
        assert optimizer.skipped_steps == 1


@by_name
def test_a_large_sum_of_ordinary_gradients_is_not_skipped(name):
    """Each square is finite, their sum is not; in steady steps too."""
    weight, plain = cases.grid_weight("E4M3", (3, 7)), nn.Parameter(torch.zeros(100))
    for parameters in ([weight, plain], [stored_weight("E4M3", (3, 7)), plain]):
        optimizer = make(name, parameters)
        for _ in range(4):
            parameters[0].grad, plain.grad = torch.ones(3, 7), torch.full((100,), 1.5e19)
            assert not torch.dot(plain.grad, plain.grad).isfinite()
            optimizer.step()
        assert (optimizer.skipped_steps, optimizer.state[plain]["step"]) == (0, 4)
        assert (plain.isfinite() & (plain != 0)).all()


@pytest.mark.parametrize("name", RIEMANNIAN_NAMES)
def test_a_code_gradient_whose_square_overflows_does_not_stick(name):
    """E5M2 near its end, where S = 8192: S g overflows in its square though g does not;
    the weight moves again.
    """
    p = cases.on(fm.FP8Manifold("E5M2"), torch.full((4,), 40_000.0))
    optimizer = make(name, [p], lr=0.5, **({"momentum": 0.0} if name == "RiemannianSGD" else {}))
    for t in range(60):
        cases.step_from(optimizer, p, torch.full((4,), 3e17 if t == 3 else 1e-4))
    assert all(
        x.isfinite().all() for x in (p, *optimizer.state[p].values()) if isinstance(x, Tensor)
    )
    assert optimizer.skipped_steps <= 1


@by_name
def test_a_run_that_diverges_stays_finite(name):
    """Steps far too long in formats of few and of many binades: codes of numbers, at
    scales that hold them.
    """
    for fmt in ("E7M0", "E4M3", "E5M2", "E1M6", "E4M3FNUZ", "P3109_8P3", "E2M1"):
        p = fm.FP8Parameter(normal(6, 7, std=0.1), fmt, headroom=1.0)
        q = cases.on(fm.FP8Manifold(fmt, p.scale.clone(), "stochastic"), normal(6, 7, std=0.1))
        optimizer = make(name, [p, q], lr=1e5 * OPTIONS[name]["lr"], refresh_every=2)
        for t in range(6):
            put_gradients([p, q], t, 10.0 ** (3 * t - 3))
            optimizer.step()
            assert all(x.isfinite().all() for x in values([p, q])), (fmt, t)
            assert not (p.codes > 2 * p.format.sign_bit - 1).any()
        assert all(
            x.isfinite().all()
            for w in (p, q)
            for x in optimizer.state[w].values()
            if isinstance(x, Tensor)
        )


torch.backends.__allow_nonbracketed_mutation_flag = (
    True  # the harness takes that from every test of the process
)
double = torch.float64


def plain(p):
    return p.detach().as_subclass(Tensor).clone()


#: ours, on ordinary parameters alone, and the one of torch's that it then is
SAME = {
    "StiffnessAdamW": "AdamW",
    "StiffnessSGD": "SGD",
    "RiemannianAdam": "Adam",
    "RiemannianSGD": "SGD",
}
THEIRS = {info.name: info for info in optim_db}


def translated(name, kwargs):
    """torch's options in our words; None where ours means another thing by them."""
    decoupled = name == "StiffnessSGD" and kwargs.get("weight_decay")
    if decoupled or (kwargs.get("amsgrad") and name != "RiemannianAdam"):
        return None
    options = {
        "lr": 1e-3,
        **({"momentum": 0.0} if name == "StiffnessSGD" else {}),
        **copy.deepcopy(kwargs),
    }
    if SAME[name] == "AdamW":
        options = {"weight_decay": 1e-2, "betas": (0.9, 0.999), **options}
    return options


@pytest.mark.parametrize("name", [*SAME, "StiffnessSGD, free", "StiffnessAdamW, free"])
def test_where_nothing_is_rounded_steps_are_torchs(name):
    """In float64, over every configuration that torch tests its own optimizer with:
    ordinary and unrounded weights.
    """
    name, _, free = name.partition(", ")
    theirs, compared = THEIRS[SAME[name]], 0
    for given in theirs.optim_inputs_func("cpu", double):
        if (options := translated(name, given.kwargs)) is None:
            continue
        start = [normal(3, 4, dtype=double), normal(5, seed=1, dtype=double)]
        pair = [[nn.Parameter(x.clone()) for x in start] for _ in "ab"]
        if free:
            scales = (cases.ROWS.double() * 1.7, 0.3)
            pair[1] = [
                cases.free_weight(x.clone(), "E5M2", scale)
                for x, scale in zip(start, scales, strict=True)
            ]
            pair[0] = [nn.Parameter(plain(p)) for p in pair[1]]
        made = [
            theirs.optim_cls(pair[0], **copy.deepcopy(given.kwargs)),
            getattr(fm.optim, name)(pair[1], **options),
        ]
        for t in range(10):
            for parameters, optimizer in zip(pair, made, strict=True):
                for i, p in enumerate(parameters):
                    p.grad = normal(*p.shape, seed=10 * t + i, dtype=double)
                optimizer.step()
        for p, q in zip(*pair, strict=True):
            torch.testing.assert_close(
                plain(q), plain(p), rtol=1e-9, atol=1e-12, msg=f"{name}, {given.desc}"
            )
        compared += 1
    assert compared >= 4


#: with a decay of 0.005 a step
DECAYING = {
    "StiffnessAdamW": (optim.StiffnessAdamW, {}),
    "StiffnessSGD": (optim.StiffnessSGD, {"momentum": 0.9}),
    "StiffnessLion": (optim.StiffnessLion, {}),
    "StiffnessMuon": (optim.StiffnessMuon, {"ns_steps": 1}),
    "StiffnessMuon, adam": (optim.StiffnessMuon, {"direction": "adam"}),
    "StiffnessWrapper": (
        lambda p, **o: optim.StiffnessWrapper(torch.optim.SGD(p, **o), 0.5, writeback="stochastic"),
        {"lr": 0.1},
    ),
    "torch's AdamW": (torch.optim.AdamW, {}),
    "torch's SGD": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize(
    ("fmt", "factors"), [("E4M3", False), ("E5M2", False), ("E2M5", False), ("E4M3", True)]
)
@pytest.mark.parametrize("name", DECAYING)
def test_decay_is_what_was_asked_for(fmt, factors, name):
    """40,000 weights without gradients, 200 steps beside floats: the rate to four
    standard errors, or to 0.2%.
    """
    kind, options = DECAYING[name]
    stored = cases.with_factors(fm.FP8Parameter(normal(200, 200, std=0.05), fmt, seed=0), factors)
    exact = nn.Parameter(stored.dequantize())
    start = exact.detach().clone()
    for p in (stored, exact):
        p.grad = torch.zeros(200, 200)
        optimizer = kind([p], **{"lr": 0.05, "weight_decay": 0.1, **options})
        for _ in range(200):
            optimizer.step()
    outward = start.sign() / start.abs().mean()
    left = float((exact.detach() * outward).mean())
    error = (stored.dequantize() - exact.detach()).double() * outward
    deviation = float(error.std()) / 200
    assert 0.3 < left < 0.7
    rate = math.log1p(float(error.mean()) / left) / math.log(left)
    assert abs(rate) <= max(4 * deviation / left / -math.log(left), 0.002)


@by_name
def test_loss_scaling_over_stored_and_ordinary_weights(name):
    """Unscaled and clipped gradients step as such; an overflow is left out by the
    scaler, a NaN by the optimizer.
    """
    pair = [
        [stored_weight(seed=1, granularity="tensor"), nn.Parameter(normal(7, seed=2))] for _ in "ab"
    ]
    scaled, plain = (make(name, parameters) for parameters in pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)

    def backward(parameters, optimizer, t, factor=1.0):
        optimizer.zero_grad()
        loss = ((parameters[0] @ parameters[1]) * normal(3, seed=t)).sum() * factor
        (scaler.scale(loss) if optimizer is scaled else loss).backward()

    for t in range(4):
        for parameters, optimizer in zip(pair, (scaled, plain), strict=True):
            backward(parameters, optimizer, t)
            if optimizer is scaled:
                scaler.unscale_(scaled)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(scaled)
        scaler.update()
        plain.step()
        assert same_bits(values(pair[0]), values(pair[1]))
    for bad in (math.inf, math.nan):
        backward(pair[0], scaled, 9, bad)
        before = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        assert snapshot(scaled) == before
    assert scaler.get_scale() == 2.0**12
