"""What every optimizer of the registry keeps to: one rounding a step, its own noise, torch's contract, its options."""

import itertools
import math
from typing import Any

import pytest
import torch
from family_cases import NAMES, OPTIONS, RIEMANNIAN_NAMES, VALID, make, zoo
from optimizer_cases import (
    RIEMANNIAN,
    ROWS,
    bits_of,
    every_class,
    free_weight,
    grid_weight,
    mixed_parameters,
    normal,
    on,
    put_gradients,
    record,
    same_bits,
    same_parameters,
    snapshot,
    stochastic,
    stored_weight,
    through_disk,
    value_of,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW, StiffnessWrapper, anneal
from fp8manifold.scaling import STORED_GRANULARITIES

by_name = pytest.mark.parametrize("name", NAMES)

# ------------------------------------------------------------------------------------------ one rounding a step


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "writeback", "moments"), [*VALID, *((n, None, "float32") for n in RIEMANNIAN_NAMES)])
def test_after_is_the_target_rounded_once(name: str, writeback: str | None, moments: str) -> None:
    """Recomputed from what the observer sees, with the draws of (seed, step, stream)."""
    parameters = mixed_parameters()
    optimizer = make(name, parameters, writeback=writeback, moments=moments, seed=5)
    group = optimizer.param_groups[0]
    views = record(optimizer)
    for t in range(1, 6):
        put_gradients(parameters, t, 0.1)
        start = values(parameters)
        optimizer.step()
        stepped = {id(p): i for i, p in enumerate(parameters) if hasattr(p, "manifold") and p.numel()}
        assert {id(view.parameter) for view in views} == set(stepped)
        assert len(views) == len(stepped)
        for view in views:
            i = stepped[id(view.parameter)]
            parameter, manifold = parameters[i], parameters[i].manifold
            assert not any(x.requires_grad for x in (view.before, view.target, view.after, view.stiffness))
            assert not torch.equal(view.target, view.before)
            if not isinstance(manifold, fm.FP8Manifold):
                assert torch.equal(view.after, manifold.projx(view.target))
                continue
            rounding = writeback or manifold.rounding
            scale = manifold.scale.to(view.target.dtype)
            if rounding.startswith("residual"):  # after is what code and residual stand for together
                asked, after, stored = (x.double() / scale for x in (view.target, view.after, value_of(parameter)))
                spacing = torch.maximum(fm.ulp(asked, manifold.format), fm.ulp(after, manifold.format))
                assert ((after - asked).abs() < spacing / 2 ** int(rounding[-1])).all()
                left = fm.to_chart(after, manifold.format) - fm.to_chart(stored, manifold.format)
                assert (left.abs() <= 0.5).all()
                continue
            assert torch.equal(view.before, start[i].to(view.before.dtype))
            assert torch.equal(view.after.to(parameter.dtype), value_of(parameter))
            stream = optimizer.state[parameter]["stream"]
            draw = {} if rounding == "nearest" else {"seed": 5, "step": t, "stream": stream}
            draw |= {"draws": group["draws"] or "independent"} if draw else {}
            how = "stochastic" if draw else "nearest"
            assert torch.equal(view.after, fm.round_to_grid(view.target / scale, manifold.format, how, **draw) * scale)
        views.clear()


def hair_off_the_grid() -> Tensor:
    """A point of E1M6 at scale 0.3 that divided by the scale is a hair beside its value of the format."""
    grid = fm.FP8Manifold("E1M6", 0.3).projx(torch.arange(1, 128) / 32 * 0.3)
    units = grid / torch.tensor(0.3)
    off = (units - fm.round_to_grid(units, "E1M6")).abs()
    return grid[off.argmax()]


@pytest.mark.parametrize("writeback", ["stochastic", "residual8"])
@pytest.mark.parametrize("name", [*NAMES, "StiffnessWrapper"])
def test_what_a_zero_gradient_leaves_is_the_same_to_the_bit(name: str, writeback: str) -> None:
    """R_x(0) = x, on a scale that is no power of two, without decay: of a million draws none may move a weight."""
    x = hair_off_the_grid().expand(1000, 250).clone()
    x[0, :2] = torch.tensor([0.0, -0.0])
    weights = [on(fm.FP8Manifold("E1M6", 0.3, "stochastic"), x), free_weight(normal(40, 25), "E4M3", 0.3)]
    if name == "StiffnessWrapper":
        optimizer: Any = StiffnessWrapper(torch.optim.SGD(weights, lr=0.02), exponent=1.0)
    else:
        optimizer = make(name, weights, writeback=writeback, weight_decay=0.0)
    before = values(weights)
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.zeros(weight.shape)
        optimizer.step()
    assert same_bits(before, values(weights))


@pytest.mark.parametrize("writeback", ["nearest", "stochastic", "residual8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_changes_no_byte_of_codes(name: str, writeback: str) -> None:
    """Nor of scales and residuals, whatever the scales are, of all granularities; both zeros among them."""
    weights, before, kept = [], [], []
    for granularity, factors in itertools.product(STORED_GRANULARITIES, (False, True)):
        p = stored_weight("E4M3", (130, 160), granularity=granularity, factors=factors, keep_remainder=False)
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
            kept = [bits_of(x.copy_(normal(*x.shape, seed=1, std=40.0).clamp(-128, 127))) for x in left]
    assert [bits_of(x) for x in left] == kept
    assert [bits_of(x) for p in weights for x in (p.codes, p.kept_scale)] == before


# -------------------------------------------------------------------------------------------------------- noise
def equal_weights(count: int, n: int = 4000) -> list[nn.Parameter]:
    return [on(fm.FP8Manifold("E4M3"), torch.full((n,), 0.8125)) for _ in range(count)]


def step_equally(optimizer: Any, weights: list[nn.Parameter], steps: int = 1) -> list[Tensor]:
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight).as_subclass(Tensor)
        optimizer.step()
    return values(weights)


@every_class
def test_a_parameter_keeps_its_stream(kind: Any) -> None:
    """Its noise belongs to its place among its like: no neighbour frozen, missing or new changes it, nor loading."""
    options = {"lr": 0.4 if kind in RIEMANNIAN else 0.02}
    alone = equal_weights(2)
    expected = step_equally(stochastic(kind, alone, **options), alone, 6)

    weights = equal_weights(2)
    optimizer = stochastic(kind, weights, **options)
    step_equally(optimizer, weights, 2)
    optimizer.add_param_group({"params": equal_weights(1)})
    step_equally(optimizer, weights, 2)
    resumed = same_parameters(weights)
    fresh = stochastic(kind, resumed, **options)
    fresh.add_param_group({"params": equal_weights(1)})
    fresh.load_state_dict(through_disk(optimizer.state_dict()))
    assert same_bits(step_equally(fresh, resumed, 2), expected)

    weights = equal_weights(2)
    weights[0].requires_grad_(False)
    optimizer = stochastic(kind, weights, **options)
    for _ in range(6):
        weights[1].grad = torch.ones_like(weights[1]).as_subclass(Tensor)
        optimizer.step()
    assert same_bits(values(weights[1:]), expected[1:])


# ------------------------------------------------------------------------------------------------------- resume
def test_a_schedule_is_not_saved_and_survives_loading() -> None:
    weight = grid_weight()
    optimizer = StiffnessAdamW([weight], stiffness=anneal(1.0, 0.0, 10))
    put_gradients([weight], 0)
    optimizer.step()
    state = through_disk(optimizer.state_dict())
    assert state["param_groups"][0]["stiffness"] is None
    fresh = StiffnessAdamW([weight], stiffness=anneal(1.0, 0.0, 10))
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["stiffness"](5) == 0.5
    with pytest.raises(ValueError, match="stiffness"):
        StiffnessAdamW([weight], stiffness=1.0).load_state_dict(state)


# -------------------------------------------------------------------------------------------- gradients that fail
@by_name
def test_a_large_sum_of_ordinary_gradients_is_not_skipped(name: str) -> None:
    """Each square is finite, their sum is not."""
    weight, plain = grid_weight("E4M3", (3, 7)), nn.Parameter(torch.zeros(100))
    optimizer = make(name, [weight, plain])
    weight.grad, plain.grad = torch.ones(3, 7), torch.full((100,), 1.5e19)
    assert not torch.dot(plain.grad, plain.grad).isfinite()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert plain.isfinite().all()
    assert (plain != 0).all()


# ------------------------------------------------------------------------------------------------ torch's contract


@by_name
def test_a_scheduler_begins_from_the_lr_of_the_moment(name: str) -> None:
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = make(name, [grid_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    assert scheduler.base_lrs == [0.05]


# ------------------------------------------------------------------------------- stabilize, reset, and observation
@by_name
def test_stabilize_projects_when_due(name: str) -> None:
    """A weight that something else has pushed off its grid is back on it; without a step of its own it stays."""
    weight = grid_weight("E4M3", (3, 7), ROWS)
    optimizer = make(name, [weight], lr=0.0, **{"stabilize" if name in RIEMANNIAN_NAMES else "stabilize_every": 3})
    views = record(optimizer)
    off = values([weight])[0] * 1.001
    for t in range(4):
        with torch.no_grad():
            weight.copy_(off)
        put_gradients([weight], t)
        optimizer.step()
    assert [torch.equal(v.before, off) for v in views] == [True, True, True, False]
    assert torch.equal(views[3].before, weight.manifold.projx(off))


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_geoopts_stabilize_is_taken_in_groups_too(kind: Any) -> None:
    groups = kind([{"params": [grid_weight()], "stabilize": 4}, {"params": [grid_weight()]}], stabilize=2).param_groups
    assert [g["stabilize_every"] for g in groups] == [4, 2]


@pytest.mark.parametrize("kind", [StiffnessAdamW, RiemannianAdam])
def test_a_reset_starts_the_averages_anew(kind: Any) -> None:
    """After it the step is that of a fresh optimizer at the same point (float64, no rounding)."""
    weight = free_weight(normal(30, dtype=torch.float64))
    optimizer = kind([weight], reset_every=4, refresh_every=1)
    for t in range(4):
        put_gradients([weight], t)
        optimizer.step()
    twin = free_weight(values([weight])[0])
    fresh = kind([twin], refresh_every=1)
    for t in range(4, 7):
        put_gradients([weight], t)
        put_gradients([twin], t)
        optimizer.step()
        fresh.step()
        assert torch.equal(weight, twin)


@by_name
def test_observing_changes_nothing(name: str) -> None:
    parameters, others = [grid_weight("E4M3", (3, 7), ROWS)], [grid_weight("E4M3", (3, 7), ROWS)]
    seen, unseen = (make(name, p, writeback="stochastic") for p in (parameters, others))
    record(seen)
    for t in range(5):
        put_gradients(parameters, t)
        put_gradients(others, t)
        seen.step()
        unseen.step()
    assert same_bits(values(parameters), values(others))
    assert unseen.observer is None


# ------------------------------------------------------------------------------------- groups, ascent, loss scaling
@by_name
def test_ascending_is_descending_on_the_negated_gradient(name: str) -> None:
    kinds, others = zoo(), zoo()
    up, down = make(name, kinds.values(), maximize=True), make(name, others.values())
    for t in range(4):
        put_gradients(kinds.values(), t, 0.1)
        put_gradients(others.values(), t, 0.1)
        for p in others.values():
            p.grad = None if p.grad is None else -p.grad
        given = {p: bits_of(p.grad) for p in kinds.values() if p.grad is not None}
        up.step()
        down.step()
        assert same_bits(values(kinds.values()), values(others.values()))
        assert all(bits_of(p.grad) == bits for p, bits in given.items()), "the gradient was written to"


@by_name
def test_groups_of_different_options_step_as_optimizers_of_their_own(name: str) -> None:
    """Position in the whole list keys the noise, so the others are there too, held still by having no gradient."""
    lr = OPTIONS[name]["lr"]
    chosen: list[dict[str, Any]] = [
        {"lr": 0.5 * lr, "writeback": "residual8", "moments": "8bit"},
        {"weight_decay": 0.1, "maximize": True, "seed": 4},
        {"writeback": "nearest", "moments": "bfloat16", "refresh_every": 2},
    ]
    shapes = [(3, 7), (2, 9), (4, 5)]
    weights = [stored_weight(shape=s, seed=i) for i, s in enumerate(shapes)]
    grouped = make(name, [{"params": [w], **options} for w, options in zip(weights, chosen, strict=True)])
    for t in range(5):
        put_gradients(weights, t, 0.1)
        grouped.step()
    for i, options in enumerate(chosen):
        alone = [stored_weight(shape=s, seed=j) for j, s in enumerate(shapes)]
        single = make(name, alone, **options)
        for t in range(5):
            put_gradients(alone, t, 0.1)
            for j, p in enumerate(alone):
                p.grad = p.grad if j == i else None
            single.step()
        assert bits_of(alone[i]) == bits_of(weights[i]), options


@by_name
def test_loss_scaling_over_stored_and_ordinary_weights(name: str) -> None:
    """Unscaled and clipped gradients step as such; an overflow is left out by the scaler, a NaN by the optimizer."""
    pair = [[stored_weight(seed=1, granularity="tensor"), nn.Parameter(normal(7, seed=2))] for _ in "ab"]
    scaled, plain = (make(name, parameters) for parameters in pair)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=100)

    def loss(parameters: list[Any], t: int) -> Tensor:
        return ((parameters[0] @ parameters[1]) * normal(3, seed=t)).sum()

    for t in range(4):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], t)).backward()
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(pair[0], 0.5)
        scaler.step(scaled)
        scaler.update()
        plain.zero_grad()
        loss(pair[1], t).backward()
        torch.nn.utils.clip_grad_norm_(pair[1], 0.5)
        plain.step()
        assert same_bits(values(pair[0]), values(pair[1]))
    for bad in (math.inf, math.nan):
        scaled.zero_grad()
        scaler.scale(loss(pair[0], 9) * bad).backward()
        before = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        assert snapshot(scaled) == before
    assert scaler.get_scale() == 2.0**12


@pytest.mark.parametrize("name", RIEMANNIAN_NAMES)
def test_a_code_gradient_whose_square_overflows_does_not_stick(name: str) -> None:
    """E5M2 near its end, where S = 8192: S g overflows in its square though g does not; the weight moves again."""
    p = on(fm.FP8Manifold("E5M2"), torch.full((4,), 40_000.0))
    optimizer = make(name, [p], lr=0.5, momentum=0.0) if name == "RiemannianSGD" else make(name, [p], lr=0.5)
    for t in range(60):
        p.grad = torch.full((4,), 3e17 if t == 3 else 1e-4)
        optimizer.step()
    state = [x for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    assert all(x.isfinite().all() for x in state)
    assert p.isfinite().all()
    assert optimizer.skipped_steps <= 1


@by_name
def test_a_run_that_diverges_stays_finite(name: str) -> None:
    """Steps far too long in formats of few and of many binades: codes of numbers, at scales that hold them."""
    for fmt in ("E7M0", "E4M3", "E5M2", "E1M6", "E4M3FNUZ", "P3109_8P3", "E2M1"):
        p = fm.FP8Parameter(normal(6, 7, std=0.1), fmt, headroom=1.0)
        q = on(fm.FP8Manifold(fmt, p.scale.clone(), "stochastic"), normal(6, 7, std=0.1))
        optimizer = make(name, [p, q], lr=1e5 * OPTIONS[name]["lr"], refresh_every=2)
        for t in range(6):
            put_gradients([p, q], t, 10.0 ** (3 * t - 3))
            optimizer.step()
            assert all(x.isfinite().all() for x in values([p, q])), (fmt, t)
            assert not (p.codes > 2 * p.format.sign_bit - 1).any()
        assert all(x.isfinite().all() for w in (p, q) for x in optimizer.state[w].values() if isinstance(x, Tensor))
