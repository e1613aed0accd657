"""Steps of every optimizer of the registry, over parameters of every kind.

What the options do, whose noise is whose, what the state holds, when a step is left out
as a whole, and that steps over ordinary parameters are torch's.
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
    """It sees weights before the step, its targets, and weights after it.

    There is a view for every quantised parameter; targets of a grid are rounded once.
    """
    parameters, twins = (
        [p for kind, p in zoo().items() if kind != "codes bfloat16, any scale"] for _ in "ab"
    )
    observed, plain = (make(name, p, writeback="stochastic", seed=5) for p in (parameters, twins))
    views = cases.record(observed)
    quantised = {id(p): i for i, p in enumerate(parameters) if hasattr(p, "manifold") and p.numel()}
    for t in range(1, 4):
        start = values(parameters)
        views.clear()
        take_steps((observed, plain), (parameters, twins), range(t, t + 1), 0.1)
        assert sorted(id(view.parameter) for view in views) == sorted(quantised), t
        for view in views:
            p = view.parameter
            check_view(view, start[quantised[id(p)]])
            if isinstance(p.manifold, fm.FP8Manifold):
                scale = p.manifold.scale.to(view.target.dtype)
                draw = {"seed": 5, "step": t, "stream": observed.state[p]["stream"]}
                units = view.target / scale
                rounded = fm.round_to_grid(units, p.manifold.format, "stochastic", **draw) * scale
                assert torch.equal(view.after, rounded), t
    assert same_bits(values(parameters), values(twins))
    assert plain.observer is None


def check_view(view, start):
    tensors = (view.before, view.target, view.after, view.stiffness)
    assert not any(x.requires_grad for x in tensors)
    assert torch.equal(view.before, start.to(view.before.dtype))
    assert torch.equal(view.after.to(view.parameter.dtype), cases.value_of(view.parameter))
    assert not torch.equal(view.target, view.before)


def bits_of_codes(weights):
    """Return the bytes of the codes and of the scale of each weight."""
    return [(bits_of(p.codes), bits_of(p.kept_scale)) for p in weights]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writeback", ["nearest", "stochastic", "residual8"])
def test_a_zero_gradient_changes_no_byte_of_codes(name, writeback):
    """Nor of scales and residuals: in all granularities, with scales of any kind.

    Both zeros and the smallest code are among the codes.
    """
    weights = []
    for granularity, factors in itertools.product(STORED_GRANULARITIES, (False, True)):
        p = stored_weight(
            "E4M3", (130, 160), granularity=granularity, factors=factors, keep_remainder=False
        )
        p.codes[0, :3] = torch.tensor([0, 0x80, 1], dtype=torch.uint8)
        weights.append(p)
    old_bits = bits_of_codes(weights)
    optimizer = make(name, weights, writeback=writeback, weight_decay=0.0, refresh_every=2)
    for step in range(4):
        for p in weights:
            p.grad = torch.zeros(p.shape)
        optimizer.step()
        residuals = [optimizer.state[p]["residual"] for p in weights if writeback == "residual8"]
        if step == 0:
            for x in residuals:
                x.copy_(normal(*x.shape, seed=1, std=40.0).clamp(-128, 127))
            residuals_before = [bits_of(x) for x in residuals]
    assert [bits_of(x) for x in residuals] == residuals_before
    assert bits_of_codes(weights) == old_bits


@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_what_a_zero_gradient_leaves_on_a_grid_is_the_same_to_the_bit(name):
    """A point divided by its scale may miss the format's value by a rounding error.

    No draw may move it even then.
    """
    grid = fm.FP8Manifold("E1M6", 0.3).projx(torch.arange(1, 128) / 32 * 0.3)
    off = (grid / torch.tensor(0.3) - fm.round_to_grid(grid / torch.tensor(0.3), "E1M6")).abs()
    x = grid[off.argmax()].expand(1000, 100).clone()
    x[0, :2] = torch.tensor([0.0, -0.0])
    weights = [
        cases.manifold_parameter(fm.FP8Manifold("E1M6", 0.3, "stochastic"), x),
        cases.free_weight(normal(40, 25), "E4M3", 0.3),
    ]
    wrapped = name == "StiffnessWrapper"
    optimizer = (
        StiffnessWrapper(torch.optim.SGD(weights, lr=0.02), exponent=1.0) if wrapped else None
    )
    optimizer = optimizer or make(name, weights, writeback="stochastic", weight_decay=0.0)
    old_values = values(weights)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.zeros(weight.shape)
        optimizer.step()
    assert same_bits(old_values, values(weights))


def equal_weights(count):
    return [
        cases.manifold_parameter(fm.FP8Manifold("E4M3"), torch.full((4000,), 0.8125))
        for _ in range(count)
    ]


def step_equally(optimizer, weights, steps):
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight).as_subclass(Tensor)
        optimizer.step()
    return values(weights)


@cases.every_class
def test_a_parameter_keeps_its_stream(kind):
    """Its noise belongs to its place among parameters of its kind.

    No neighbour that is frozen, missing or new changes it, nor does loading.
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
    """Neither the generator nor the default dtype changes a step, and no step draws."""
    results = []
    # nngeometry has float32 only.
    second_dtype = torch.float32 if name == "FisherNaturalGradient" else torch.float64
    for seed, dtype in ((0, torch.float32), (1, second_dtype)):
        torch.manual_seed(seed)
        generator_state, kinds = torch.get_rng_state(), zoo()
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
        assert torch.equal(torch.get_rng_state(), generator_state), (seed, dtype)
        results.append(snapshot(optimizer))
    assert results[0] == results[1]


@by_name
def test_stabilize_projects_when_due(name):
    weight = cases.grid_weight("E4M3", (3, 7), cases.ROWS)
    option = "stabilize" if name in RIEMANNIAN_NAMES else "stabilize_every"
    optimizer = make(name, [weight], lr=0.0, **{option: 3})
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
    """Then the step is that of a fresh optimizer at the same point (in float64, unrounded)."""
    weight = cases.free_weight(normal(30, dtype=torch.float64))
    optimizer = kind([weight], reset_every=4, refresh_every=1)
    take_steps([optimizer], [[weight]], range(4))
    twin = cases.free_weight(values([weight])[0])
    fresh = kind([twin], refresh_every=1)
    for t in range(4, 7):
        take_steps((optimizer, fresh), ([weight], [twin]), range(t, t + 1))
        assert torch.equal(weight, twin), t


@by_name
def test_ascending_is_descending_on_the_negated_gradient(name):
    parameters, twins = list(zoo().values()), list(zoo().values())
    up, down = make(name, parameters, maximize=True), make(name, twins)
    for t in range(4):
        put_gradients(parameters, t, 0.1)
        put_gradients(twins, t, -0.1)
        gradients = {p: bits_of(p.grad) for p in parameters if p.grad is not None}
        up.step()
        down.step()
        assert same_bits(values(parameters), values(twins)), t
        assert {p: bits_of(p.grad) for p in gradients} == gradients, t


@by_name
def test_groups_of_different_options_step_as_optimizers_of_their_own(name):
    """The noise is keyed by the position in the whole list.

    So the optimizer of one group has the other parameters too, without gradients.
    """
    lr = OPTIONS[name]["lr"]
    options_of_groups = [
        {"lr": 0.5 * lr, "writeback": "residual8", "moments": "8bit"},
        {"weight_decay": 0.1, "maximize": True, "seed": 4},
        {"writeback": "nearest", "moments": "bfloat16", "refresh_every": 2},
    ]
    weights, *copies = (
        [stored_weight(shape=s, seed=i) for i, s in enumerate([(3, 7), (2, 9), (4, 5)])]
        for _ in "abcd"
    )
    groups = zip(weights, options_of_groups, strict=True)
    grouped = make(name, [{"params": [w], **options} for w, options in groups])
    take_steps([grouped], [weights], range(5), 0.1)
    for i, (options, twins) in enumerate(zip(options_of_groups, copies, strict=True)):
        single = make(name, twins, **options)
        for t in range(5):
            put_gradients(twins, t, 0.1)
            for p in {*twins} - {twins[i]}:
                p.grad = None
            single.step()
        assert bits_of(twins[i]) == bits_of(weights[i]), options


def distances(parameters, targets):
    return [
        (cases.value_of(p).double() - target.double()).square().sum().item()
        for p, target in zip(parameters, targets, strict=True)
        if moves(p)
    ]


@sampled
@combined
def test_a_valid_combination_learns(name, writeback, moments):
    """In 20 steps towards a target every kind of parameter comes nearer to it.

    All stay on their grids, and no gradient is written to.
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
        assert all(bits_of(gradient) == old_bits for gradient, old_bits in gradients)
    shares = [b / a for a, b in zip(start, distances(parameters, targets), strict=True)]
    share_of = dict(zip([kind for kind, p in kinds.items() if moves(p)], shares, strict=True))
    # To nearest a weight may stall, where steps are shorter than half an ULP: the other
    # write-backs are for that.
    largest = max(shares)
    assert largest <= 1.0 if writeback == "nearest" else largest < 0.9, share_of
    assert sum(shares) < 0.8 * len(shares)
    assert all(cases.value_of(p).isfinite().all() for p in parameters)
    assert all(cases.on_grid(p) for p in parameters if is_on_grid(p))
    assert same_bits(fixed, values(still))
    assert optimizer.skipped_steps == 0


def is_on_grid(p):
    return isinstance(getattr(p, "manifold", None), fm.FP8Manifold)


AVERAGES = {
    "StiffnessAdafactor": ["momentum_buffer"],
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
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        numbers = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        elementwise = {k: v for k, v in tensors.items() if k not in ("step", "grid")}
        bounds = [
            elementwise.pop(k) for k in ("avg_bound", "sq_bound", "avg_largest") if k in elementwise
        ]
        metric = [elementwise.pop(k) for k in tensors if k.startswith(("inverse_", "fisher_"))]
        # Adafactor's, of which tests of its own ask more
        for statistic in ("row_var", "col_var", "variance"):
            elementwise.pop(statistic, None)
        is_ordinary = not hasattr(p, "manifold")
        stored = "float32" if name in RIEMANNIAN_NAMES and is_ordinary else moments
        is_wide = p.dtype == torch.float64 and stored == "float32"
        averages = averages_of(name, p)
        expected = dict.fromkeys(averages, torch.float64 if is_wide else WIDTH[stored])
        if optim.WRITEBACKS[writeback].residual_bits and is_on_grid(p):
            expected["residual"] = torch.int8
        assert {k: v.dtype for k, v in elementwise.items()} == expected, kind
        assert {v.numel() for v in elementwise.values()} == {p.numel()}, kind
        largest = max(p.numel() // 32, p.shape[0] if p.dim() else 1)
        assert all(v.dtype == torch.float32 and v.numel() <= largest for v in bounds), kind
        assert len(bounds) == (len(averages) if stored == "8bit" else 0), kind
        assert bool(metric) == (name == "FisherNaturalGradient" and is_layer(p)), kind
        assert len(repr(numbers)) < 400, kind


def memory(x, visited):
    """Return the bytes of storage that an object refers to, by address.

    References of types, modules and functions are not followed.
    """
    if id(x) in visited or isinstance(x, type | nn.Module | ModuleType | FunctionType | MethodType):
        return {}
    visited[id(x)] = x
    if isinstance(x, Tensor) and not isinstance(x, fm.FP8Tensor):
        storage = x.detach().as_subclass(Tensor).untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    parts = [x.codes, x.scale, x.counter] if isinstance(x, fm.FP8Tensor) else gc.get_referents(x)
    sizes = {}
    for part in parts:
        sizes |= memory(part, visited)
    return sizes


@combined
def test_an_optimizer_holds_its_parameters_and_their_state_alone(name, writeback, moments):
    """But for a few bytes a row; and it holds no gradient."""
    parameters = [stored_weight("E4M3", (16, 256), seed=1), nn.Parameter(normal(64, 32, seed=2))]
    optimizer = make(name, parameters, writeback=writeback, moments=moments)
    take_steps([optimizer], [parameters], range(2), 0.1)
    gradients = [weakref.ref(p.grad) for p in parameters]
    optimizer.zero_grad()
    assert [gradient() for gradient in gradients] == [None, None]
    sizes, known = memory(optimizer, {}), memory([parameters, dict(optimizer.state)], {})
    extra = sum(size for address, size in sizes.items() if address not in known)
    # 24 bytes for each of 16 rows and 256 more, and 16 for each element of the two
    # factors of a layer.
    layer = parameters[0].shape[0] ** 2 + parameters[0].shape[1] ** 2
    assert extra <= 16 * 24 + 256 + (16 * layer if name == "FisherNaturalGradient" else 0)


X = torch.linspace(-1, 1, 24).view(3, 8)


def trained(name, compiled):
    """Return codes and values after three steps.

    `compiled` is "nothing", "step", or "all" for a whole training step.
    """
    torch.manual_seed(0)
    model = fm.quantize_model(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "E4M3", storage="codes"
    )
    wrapped = name == "StiffnessWrapper"
    optimizer = (
        StiffnessWrapper(torch.optim.SGD(model.parameters(), lr=1e-2), exponent=1.0)
        if wrapped
        else None
    )
    optimizer = optimizer or make(name, model.parameters())
    take = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def train_step(x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        take()

    whole = torch.compile(train_step, backend="eager") if compiled == "all" else train_step
    for _ in range(3):
        whole(X)
    return [p.codes if isinstance(p, fm.FP8Parameter) else p.detach() for p in model.parameters()]


# Of the loss, after the graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["step", "all"])
@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_a_compiled_step_is_the_step(name, compiled):
    """In code that a user compiles the optimizer runs eager, to the same bits."""
    torch._dynamo.reset()
    assert same_bits(trained(name, compiled), trained(name, "nothing"))


@sampled
@combined
def test_a_step_is_left_out_as_a_whole(name, writeback, moments):
    """One bad gradient leaves all parameters and their state as they were."""
    kinds, twins = zoo(), zoo()
    optimizer, untroubled = (
        make(name, z.values(), writeback=writeback, moments=moments) for z in (kinds, twins)
    )
    # A step without gradients takes what the parameters kept of their first rounding.
    optimizer.step()
    untroubled.step()
    bad = {
        "codes channel": math.nan,
        "bfloat16": math.inf,
        "grid": -math.inf,
        "float32": 3e19,
        "float64": 1e160,
    }
    for t in range(2):
        for count, (kind, value) in enumerate(bad.items(), 1):
            put_gradients(kinds.values(), t, 0.1)
            kinds[kind].grad.view(-1)[0] = value
            old_state = snapshot(optimizer)
            optimizer.step()
            assert optimizer.skipped_steps == count + t * len(bad), (t, count, kind)
            assert optimizer.skipped_in_row == count, (t, count, kind)
            old_state["state"] |= {
                "skipped_steps": optimizer.skipped_steps,
                "skipped_in_row": count,
            }
            assert snapshot(optimizer) == old_state, kind
        take_steps((optimizer, untroubled), (kinds.values(), twins.values()), range(t, t + 1), 0.1)
        assert same_bits(values(kinds.values()), values(twins.values())), t


@by_name
def test_what_the_first_rounding_left_survives_a_step_left_out(name):
    """It moves from the parameter into the state, which is saved; no code changes."""
    weight = stored_weight("E4M3", (3, 7), seed=1, keep_remainder=True)
    remainder, codes = weight.remainder.clone(), weight.codes.clone()
    optimizer = make(name, [weight], writeback="residual8")
    cases.step_from(optimizer, weight, torch.full((3, 7), math.nan))
    assert torch.equal(weight.codes, codes)
    assert optimizer.skipped_steps == 1
    state = optimizer.state_dict()["state"].get(0, {})
    assert "step" not in state
    survivor = state["residual"] if weight.remainder is None else weight.remainder
    assert torch.equal(survivor, remainder)


@pytest.mark.parametrize("place", ["first", "last"])
@by_name
def test_one_group_that_raises_is_enough(name, place):
    """FloatingPointError names the shape, and nothing changes.

    A bad gradient of a group that skips never raises.
    """
    kinds = zoo()
    groups = [{"params": [p for kind, p in kinds.items() if kind != "codes channel"]}]
    raising = {"params": [kinds["codes channel"]], "on_nonfinite": "raise"}
    groups.insert(0 if place == "first" else 1, raising)
    optimizer = make(name, groups)
    put_gradients(kinds.values(), 0, 0.1)
    kinds["codes tensor"].grad[0, 0] = math.nan
    optimizer.step()
    kinds["codes channel"].grad[4, 32] = math.nan
    old_state = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match=r"\(5, 33\)"):
        optimizer.step()
    assert snapshot(optimizer) == old_state
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("make_weight", [cases.grid_weight, stored_weight])
@by_name
def test_a_large_sum_of_ordinary_gradients_is_not_skipped(name, make_weight):
    """The squares are finite, their sum is not; in steady steps too."""
    weight, plain = make_weight("E4M3", (3, 7)), nn.Parameter(torch.zeros(100))
    optimizer = make(name, [weight, plain])
    for _ in range(4):
        weight.grad, plain.grad = torch.ones(3, 7), torch.full((100,), 1.5e19)
        assert not torch.dot(plain.grad, plain.grad).isfinite()
        optimizer.step()
    assert (optimizer.skipped_steps, optimizer.state[plain]["step"]) == (0, 4)
    assert (plain.isfinite() & (plain != 0)).all()


@pytest.mark.parametrize("name", RIEMANNIAN_NAMES)
def test_a_code_gradient_whose_square_overflows_does_not_stick(name):
    """Near the end of E5M2, where S = 8192, the square of S g overflows and g's does not.

    The weight moves again afterwards.
    """
    p = cases.manifold_parameter(fm.FP8Manifold("E5M2"), torch.full((4,), 40_000.0))
    optimizer = make(name, [p], lr=0.5, **({"momentum": 0.0} if name == "RiemannianSGD" else {}))
    for t in range(60):
        cases.step_from(optimizer, p, torch.full((4,), 3e17 if t == 3 else 1e-4))
    assert p.isfinite().all()
    assert_finite_state(optimizer)
    assert optimizer.skipped_steps <= 1


def assert_finite_state(optimizer):
    for entry in optimizer.state.values():
        for name, x in entry.items():
            assert not isinstance(x, Tensor) or x.isfinite().all(), name


@pytest.mark.parametrize("fmt", ["E7M0", "E4M3", "E5M2", "E1M6", "E4M3FNUZ", "P3109_8P3", "E2M1"])
@by_name
def test_a_run_that_diverges_stays_finite(name, fmt):
    """Far too long steps end in codes of numbers, in formats of few and of many binades."""
    p = fm.FP8Parameter(normal(6, 7, std=0.1), fmt, headroom=1.0)
    q = cases.manifold_parameter(
        fm.FP8Manifold(fmt, p.scale.clone(), "stochastic"), normal(6, 7, std=0.1)
    )
    optimizer = make(name, [p, q], lr=1e5 * OPTIONS[name]["lr"], refresh_every=2)
    for t in range(6):
        put_gradients([p, q], t, 10.0 ** (3 * t - 3))
        optimizer.step()
        assert all(x.isfinite().all() for x in values([p, q])), t
        assert not (p.codes > 2 * p.format.sign_bit - 1).any(), t
    assert_finite_state(optimizer)


# torch's harness takes this permission from every test of the process.
torch.backends.__allow_nonbracketed_mutation_flag = True
double = torch.float64


def plain(p):
    return p.detach().as_subclass(Tensor).clone()


#: Over ordinary parameters these optimizers take the steps of torch's.
TORCHS = {
    "StiffnessAdamW": "AdamW",
    "StiffnessSGD": "SGD",
    "RiemannianAdam": "Adam",
    "RiemannianSGD": "SGD",
}
INFO_OF_TORCH = {info.name: info for info in optim_db}


def has_another_meaning(name, kwargs):
    """Return whether torch means another thing by its options than `name` does."""
    is_decoupled = name == "StiffnessSGD" and kwargs.get("weight_decay")
    return is_decoupled or (kwargs.get("amsgrad") and name != "RiemannianAdam")


def translated(name, kwargs):
    """Return options with which `name` does what torch's does with `kwargs`."""
    defaults = {"lr": 1e-3}
    if name == "StiffnessSGD":
        defaults["momentum"] = 0.0
    if TORCHS[name] == "AdamW":
        defaults |= {"weight_decay": 1e-2, "betas": (0.9, 0.999)}
    return defaults | copy.deepcopy(kwargs)


def configurations(name):
    """Yield every configuration that torch tests its optimizer with, and a name for it."""
    for i, inputs in enumerate(INFO_OF_TORCH[TORCHS[name]].optim_inputs_func("cpu", double)):
        if not has_another_meaning(name, inputs.kwargs):
            yield pytest.param(name, inputs.kwargs, id=f"{name}-{i} {inputs.desc}")


def assert_takes_torchs_steps(name, kwargs, ordinary, weights):
    optimizers = (
        INFO_OF_TORCH[TORCHS[name]].optim_cls(ordinary, **copy.deepcopy(kwargs)),
        getattr(fm.optim, name)(weights, **translated(name, kwargs)),
    )
    for t in range(10):
        for parameters, optimizer in zip((ordinary, weights), optimizers, strict=True):
            for i, p in enumerate(parameters):
                p.grad = normal(*p.shape, seed=10 * t + i, dtype=double)
            optimizer.step()
    for p, q in zip(ordinary, weights, strict=True):
        torch.testing.assert_close(plain(q), plain(p), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kwargs"), list(itertools.chain.from_iterable(map(configurations, TORCHS)))
)
def test_steps_of_ordinary_parameters_are_torchs(name, kwargs):
    start = [normal(3, 4, dtype=double), normal(5, seed=1, dtype=double)]
    ordinary, weights = ([nn.Parameter(x.clone()) for x in start] for _ in "ab")
    assert_takes_torchs_steps(name, kwargs, ordinary, weights)


@pytest.mark.parametrize(
    ("name", "kwargs"), [*configurations("StiffnessSGD"), *configurations("StiffnessAdamW")]
)
def test_steps_of_weights_that_are_not_rounded_are_torchs(name, kwargs):
    weights = [
        cases.free_weight(normal(3, 4, dtype=double), "E5M2", cases.ROWS.double() * 1.7),
        cases.free_weight(normal(5, seed=1, dtype=double), "E5M2", 0.3),
    ]
    ordinary = [nn.Parameter(plain(p)) for p in weights]
    assert_takes_torchs_steps(name, kwargs, ordinary, weights)


@pytest.mark.parametrize("name", TORCHS)
def test_at_least_four_configurations_are_compared(name):
    assert len(list(configurations(name))) >= 4


#: Optimizers that decay weights by 0.005 a step.
DECAYING = {
    "StiffnessAdamW": (optim.StiffnessAdamW, {}),
    "StiffnessSGD": (optim.StiffnessSGD, {"momentum": 0.9}),
    "StiffnessLion": (optim.StiffnessLion, {}),
    "StiffnessAdafactor": (optim.StiffnessAdafactor, {}),
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
    """40,000 weights without gradients decay at the rate of floats over 200 steps.

    To four standard errors, or to 0.2%.
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
    remaining = float((exact.detach() * outward).mean())
    error = (stored.dequantize() - exact.detach()).double() * outward
    deviation = float(error.std()) / 200
    assert 0.3 < remaining < 0.7
    excess_rate = math.log1p(float(error.mean()) / remaining) / math.log(remaining)
    assert abs(excess_rate) <= max(4 * deviation / remaining / -math.log(remaining), 0.002)


@by_name
@pytest.mark.parametrize(
    "overflows", [(math.inf,), (math.nan,), (math.inf, math.nan)], ids=["inf", "nan", "both"]
)
def test_loss_scaling_over_stored_and_ordinary_weights(name, overflows):
    """Gradients that were unscaled and clipped step as those that never were scaled.

    An overflow is left out by the scaler.
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
        assert same_bits(values(pair[0]), values(pair[1])), t
    for overflow in overflows:
        backward(pair[0], scaled, 9, overflow)
        old_state = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        assert snapshot(scaled) == old_state
    assert scaler.get_scale() == 2.0 ** (14 - len(overflows))
