"""What every optimizer of ours promises: torch's contract, one rounding a step, bit-exact resume, no bad step taken."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import geoopt
import pytest
import torch
from optimizer_cases import (
    CLASSES,
    OURS,
    ROWS,
    WRAPPED,
    bits_of,
    free_weight,
    grid_weight,
    mixed_parameters,
    normal,
    on,
    on_grid,
    pull_to,
    put_gradients,
    record,
    same_bits,
    same_parameters,
    snapshot,
    through_disk,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW, anneal

ours = pytest.mark.parametrize("make", OURS.values(), ids=OURS)
everyone = pytest.mark.parametrize("make", [*OURS.values(), *WRAPPED.values()], ids=[*OURS, *WRAPPED])
every_class = pytest.mark.parametrize("kind", CLASSES)


def float_lr(kind: Any) -> dict[str, float]:
    return {} if kind is StiffnessAdamW else {"float_lr": 1e-3}


# ------------------------------------------------------------------------------------------ one rounding a step
@everyone
def test_grids_are_kept_and_gradients_untouched(make: Any) -> None:
    parameters = mixed_parameters()
    grids = [p for p in parameters if isinstance(getattr(p, "manifold", None), fm.FP8Manifold)]
    start = values(parameters)
    optimizer = make(parameters)
    for t in range(12):
        put_gradients(parameters, t)
        gradients = [p.grad for p in parameters]
        before = [g.clone() for g in gradients if g is not None]
        optimizer.step()
        assert all(on_grid(p) for p in grids)
        assert all(p.grad is g for p, g in zip(parameters, gradients, strict=True))
        assert same_bits(before, [g for g in gradients if g is not None])
    moved = [not torch.equal(a, b) for a, b in zip(start, values(parameters), strict=True)]
    assert moved == [p.requires_grad and p.numel() > 0 for p in parameters]


@ours
def test_after_is_the_target_rounded_once(make: Any) -> None:
    """Recomputed from what the observer sees, with the draws of (seed, step, position)."""
    parameters = mixed_parameters()
    optimizer = make(parameters)
    views = record(optimizer)
    expected_steps = 0
    for t in range(1, 6):
        put_gradients(parameters, t)
        start = values(parameters)
        optimizer.step()
        stepped = [i for i, p in enumerate(parameters) if hasattr(p, "manifold") and p.numel()]
        expected_steps += len(stepped)
        assert len(views) == expected_steps
        for i, view in zip(stepped, views[-len(stepped) :], strict=True):
            parameter, manifold = parameters[i], parameters[i].manifold
            assert view.parameter is parameter
            assert torch.equal(view.before, start[i])
            assert torch.equal(view.after.to(parameter.dtype), parameter.detach().as_subclass(Tensor))
            assert not any(x.requires_grad for x in (view.before, view.target, view.after, view.stiffness))
            assert not torch.equal(view.target, view.before)
            if not isinstance(manifold, fm.FP8Manifold):
                assert torch.equal(view.after, manifold.projx(view.target))
                continue
            scale = manifold.scale.to(view.target.dtype)
            rounding = optimizer.param_groups[0]["writeback"] or manifold.rounding
            draw = {"seed": 5, "step": t, "stream": i} if rounding == "stochastic" else {}
            rounded = fm.round_to_grid(view.target / scale, manifold.format, rounding, **draw) * scale
            assert torch.equal(view.after, rounded)


@everyone
def test_what_a_zero_gradient_leaves_is_the_same_to_the_bit(make: Any) -> None:
    """R_x(0) = x, on a scale that is no power of two, without decay."""
    weight = grid_weight("E2M5", (40_000,), 0.3, "stochastic", std=0.5)
    optimizer = make([weight])
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = values([weight])
    for _ in range(10):
        weight.grad = torch.zeros(40_000)
        optimizer.step()
    assert same_bits(before, values([weight]))


def test_stochastic_write_back_is_unbiased_over_many_steps() -> None:
    """E4M3, 20,000 equal weights, 60 steps of a 40th of an ULP, down through a power of two: the mean follows."""
    weight = on(fm.FP8Manifold("E4M3"), torch.full((20_000,), 1.125))
    optimizer = StiffnessAdamW([weight], lr=0.125 / 40, stiffness=0.0, eps=0.0)
    for t in range(1, 61):
        weight.grad = torch.ones(20_000)
        optimizer.step()
        if t % 20 == 0:
            x = weight.detach().double()
            sigma = x.std().item() / math.sqrt(20_000)
            assert abs(x.mean().item() - (1.125 - t * 0.125 / 40)) < 4 * sigma
    assert len(weight.detach().unique()) > 2
    again = on(fm.FP8Manifold("E4M3"), torch.full((20_000,), 1.125))
    nearest = StiffnessAdamW([again], lr=0.125 / 40, stiffness=0.0, eps=0.0, writeback="nearest")
    for _ in range(60):
        again.grad = torch.ones(20_000)
        nearest.step()
    assert (again == 1.125).all()  # stalled: what the other rule is for


@pytest.mark.parametrize("kind", [RiemannianAdam, RiemannianSGD])
def test_stochastic_riemannian_steps_are_unbiased(kind: Any) -> None:
    weight = on(fm.FP8Manifold("E4M3", rounding="stochastic"), torch.full((100_000,), -1.5))
    optimizer = kind([weight], 0.3)
    views = record(optimizer)
    weight.grad = torch.ones(100_000)
    optimizer.step()
    x = views[0].after.double()
    assert views[0].target.unique().numel() == 1
    assert abs(x.mean() - views[0].target[0].double()) < 4 * x.std() / math.sqrt(100_000)


# -------------------------------------------------------------------------------------------------------- noise
@everyone
def test_global_random_state_is_neither_read_nor_written(make: Any) -> None:
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = torch.get_rng_state()
        parameters = mixed_parameters()
        optimizer = make(parameters)
        for t in range(4):
            put_gradients(parameters, t)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), expected)
        results.append(values(parameters))
    assert same_bits(*results)


def stochastic(kind: Any, parameters: Any, **options: Any) -> Any:
    return kind(parameters, writeback="stochastic", **options)


def equal_weights(count: int, n: int = 4000) -> list[nn.Parameter]:
    return [on(fm.FP8Manifold("E4M3"), torch.full((n,), 0.8125)) for _ in range(count)]


def step_equally(optimizer: Any, weights: list[nn.Parameter], steps: int = 1) -> list[Tensor]:
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight).as_subclass(Tensor)
        optimizer.step()
    return values(weights)


@every_class
def test_equal_parameters_get_different_noise(kind: Any) -> None:
    """Each from the others, from another seed's, and from the step before."""
    lr = {"lr": {StiffnessAdamW: 0.02, RiemannianAdam: 0.4, RiemannianSGD: 4.0}[kind]}
    weights = equal_weights(3)
    optimizer = stochastic(kind, weights, **lr)
    views = record(optimizer)
    step_equally(optimizer, weights, 2)
    other = equal_weights(1)
    seeded = step_equally(stochastic(kind, other, seed=1, **lr), other)
    moves = [(v.after != v.before) for v in views[:3]] + [seeded[0] != 0.8125]
    for a, b in itertools.combinations(moves, 2):
        assert 0.02 < a.float().mean() < 0.98
        correlation = torch.corrcoef(torch.stack([a, b]).float())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(4000)
    # the same weights again at step two: those that stayed draw anew
    stayed = views[0].after == views[0].before
    assert (views[3].after != views[3].before)[stayed].any()


@every_class
def test_a_parameter_keeps_its_stream(kind: Any) -> None:
    """Its noise belongs to its position: frozen, missing or new neighbours don't change it, nor does loading."""
    options = {"lr": 0.02} if kind is StiffnessAdamW else {"lr": 0.4}
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
@everyone
def test_resume_is_exact_after_every_step(make: Any) -> None:
    """20 steps, the optimizer saved, dropped and made anew after each, against one that runs through."""
    straight, relay = mixed_parameters(), mixed_parameters()
    whole, runner = make(straight), make(relay)
    for t in range(20):
        for parameters, optimizer in ((straight, whole), (relay, runner)):
            put_gradients(parameters, t)
            if t == 9 and not hasattr(optimizer, "optimizer"):
                parameters[1].grad[0, 0] = math.nan  # a step left out in between
            optimizer.step()
        assert same_bits(values(straight), values(relay)), f"step {t}"
        assert snapshot(whole) == snapshot(runner), f"step {t}"
        state = through_disk(runner.state_dict())
        relay = same_parameters(relay)
        runner = make(relay)
        runner.load_state_dict(state)
    assert getattr(runner, "skipped_steps", 0) == (0 if hasattr(runner, "optimizer") else 1)


@ours
def test_averages_of_bfloat16_parameters_are_float32_and_stay_so(make: Any) -> None:
    parameters = [nn.Parameter(normal(64).bfloat16())]
    optimizer = make(parameters)
    put_gradients(parameters, 0)
    optimizer.step()
    averages = {k: v for k, v in optimizer.state[parameters[0]].items() if isinstance(v, Tensor)}
    assert {v.dtype for v in averages.values()} == {torch.float32}
    fresh = make(same_parameters(parameters))
    fresh.load_state_dict(through_disk(optimizer.state_dict()))
    loaded = fresh.state[fresh.param_groups[0]["params"][0]]
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in averages.items())
    assert parameters[0].dtype == torch.bfloat16


@every_class
def test_loading_does_not_share_tensors_with_what_was_loaded(kind: Any) -> None:
    weight = grid_weight()
    optimizer = kind([weight], **({"momentum": 0.9} if kind is RiemannianSGD else {}))
    put_gradients([weight], 0)
    optimizer.step()
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    fresh = kind(same_parameters([weight]), **({"momentum": 0.9} if kind is RiemannianSGD else {}))
    fresh.load_state_dict(state)
    put_gradients(fresh.param_groups[0]["params"], 1)
    fresh.step()
    for name, value in kept["state"][0].items():
        assert bits_of(torch.as_tensor(value)) == bits_of(torch.as_tensor(state["state"][0][name]))


@every_class
def test_the_state_of_another_optimizer_is_refused(kind: Any) -> None:
    weight = grid_weight()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match=kind.__name__):
        kind([weight]).load_state_dict(foreign.state_dict())
    two = kind([grid_weight(), grid_weight()])
    with pytest.raises(ValueError, match="size"):
        kind([weight]).load_state_dict(two.state_dict())


def test_a_schedule_is_not_saved_and_survives_loading() -> None:
    weight = grid_weight()
    optimizer = StiffnessAdamW([weight], stiffness=anneal(1.0, 0.0, 10))
    put_gradients([weight], 0)
    optimizer.step()
    state = through_disk(optimizer.state_dict())
    assert "stiffness" not in state["param_groups"][0]
    fresh = StiffnessAdamW([weight], stiffness=anneal(1.0, 0.0, 10))
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["stiffness"](5) == 0.5
    with pytest.raises(ValueError, match="stiffness"):
        StiffnessAdamW([weight], stiffness=1.0).load_state_dict(state)


# -------------------------------------------------------------------------------------------- gradients that fail
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "square overflows": 1e30}


@ours
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_nothing_changes_when_a_gradient_is_not_finite(make: Any, bad: float) -> None:
    """In any one parameter, at the first step and later; the step is counted and the next one is as if it had not been."""
    parameters, untroubled = mixed_parameters(), mixed_parameters()
    optimizer, reference = make(parameters), make(untroubled)
    skipped = 0
    for t in range(3):
        for i, p in enumerate(parameters):
            if not p.requires_grad or not p.numel():
                continue
            put_gradients(parameters, t)
            p.grad.view(-1)[-1] = 1e200 if bad == 1e30 and p.dtype == torch.float64 else bad
            before = snapshot(optimizer)
            optimizer.step()
            skipped += 1
            after = snapshot(optimizer)
            assert after["state"].pop("skipped_steps") == optimizer.skipped_steps == skipped, i
            before["state"].pop("skipped_steps")
            assert after == before, i
        for ps, o in ((parameters, optimizer), (untroubled, reference)):
            put_gradients(ps, t)
            o.step()
        assert same_bits(values(parameters), values(untroubled))


@every_class
def test_raise_on_nonfinite(kind: Any) -> None:
    weight = grid_weight()
    optimizer = kind([weight], on_nonfinite="raise")
    put_gradients([weight], 0)
    weight.grad[0, 0] = math.nan
    before = snapshot(optimizer)
    with pytest.raises(FloatingPointError, match=r"\(3, 7\)"):
        optimizer.step()
    assert snapshot(optimizer) == before
    assert optimizer.skipped_steps == 0


@ours
def test_a_large_sum_of_ordinary_gradients_is_not_skipped(make: Any) -> None:
    """Each square is finite, their sum is not."""
    weight, plain = grid_weight("E4M3", (3, 7)), nn.Parameter(torch.zeros(100))
    optimizer = make([weight, plain])
    weight.grad, plain.grad = torch.ones(3, 7), torch.full((100,), 1.5e19)
    assert not torch.dot(plain.grad, plain.grad).isfinite()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert plain.isfinite().all()
    assert (plain != 0).all()


# ------------------------------------------------------------------------------------------------ torch's contract
@everyone
def test_closure(make: Any) -> None:
    parameters, others = [grid_weight(std=0.5)], [grid_weight(std=0.5)]
    optimizer, plain = make(parameters), make(others)
    enabled = []

    def closure() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (parameters[0] - 1.0).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        pull_to(others, [torch.ones(3, 7)])
        others[0].grad *= 2
        plain.step()
        assert loss.item() > 0
    assert enabled == [True] * 3
    assert same_bits(values(parameters), values(others))


SCHEDULES: dict[str, Any] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, 0.01),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.4, total_steps=10, cycle_momentum=False),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "warmup": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}


@every_class
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_learning_rate_schedulers(kind: Any, tensor: bool, schedule: Any) -> None:
    """The lr is what the same scheduler gives torch's SGD, and the steps are those of that lr set by hand."""
    lr = torch.tensor(0.2) if tensor else 0.2
    weights, others = [grid_weight("E4M3", (3, 7), ROWS)], [grid_weight("E4M3", (3, 7), ROWS)]
    optimizer, by_hand = stochastic(kind, weights, lr=lr), stochastic(kind, others, lr=0.2)
    dummy = nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([dummy], lr=torch.tensor(0.2) if tensor else 0.2)
    schedulers = [schedule(optimizer), schedule(reference)]
    seen = set()
    for t in range(9):
        current = float(reference.param_groups[0]["lr"])
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(current, rel=1e-6)
        seen.add(round(current, 6))
        by_hand.param_groups[0]["lr"] = float(optimizer.param_groups[0]["lr"])
        put_gradients(weights, t)
        put_gradients(others, t)
        dummy.grad = torch.ones(1)
        for o in (optimizer, by_hand, reference):
            o.step()
        assert same_bits(values(weights), values(others))
        for scheduler in schedulers:
            scheduler.step()
    assert len(seen) >= 4


@every_class
def test_a_scheduler_begins_from_the_lr_of_the_moment(kind: Any) -> None:
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = kind([grid_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    assert scheduler.base_lrs == [0.05]


@every_class
def test_groups_have_options_of_their_own(kind: Any) -> None:
    lr = 0.01 if kind is StiffnessAdamW else 0.5
    weights, others = [grid_weight(seed=s) for s in (0, 1)], [grid_weight(seed=s) for s in (0, 1)]
    grouped = kind(
        [{"params": weights[0], "lr": 2 * lr, "writeback": "nearest"}, {"params": [weights[1]], "weight_decay": 0.1}],
        lr=lr,
        writeback="stochastic",
    )
    singles = [
        kind(others[:1], lr=2 * lr, writeback="nearest"),
        kind([{"params": grid_weight()}, {"params": others[1:]}], lr=lr, weight_decay=0.1, writeback="stochastic"),
    ]
    for t in range(5):
        put_gradients(weights, t)
        put_gradients(others, t)
        for o in (grouped, *singles):
            o.step()
    assert same_bits(values(weights), values(others))


@everyone
def test_a_group_added_later_is_stepped(make: Any) -> None:
    first, second = grid_weight(seed=0), grid_weight(seed=1)
    optimizer = make([first])
    optimizer.add_param_group({"params": [second]})
    before = values([first, second])
    put_gradients([first, second], 0)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values([first, second]), strict=True))
    assert len(optimizer.param_groups) == 2


@everyone
def test_hooks_zero_grad_and_repr(make: Any) -> None:
    weight = grid_weight()
    optimizer = make([weight])
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: called.append("post"))
    put_gradients([weight], 0)
    optimizer.step()
    assert called == ["pre", "post"]
    handle.remove()
    optimizer.step()
    assert called == ["pre", "post", "pre"]
    assert type(optimizer).__name__ in repr(optimizer)
    optimizer.zero_grad(set_to_none=False)
    assert (weight.grad == 0).all()
    optimizer.zero_grad()
    assert weight.grad is None
    before = values([weight])
    optimizer.step()
    assert same_bits(before, values([weight]))


@every_class
def test_state_dict_hooks(kind: Any) -> None:
    called: list[str] = []
    optimizer = kind([grid_weight()])
    optimizer.register_state_dict_post_hook(lambda *_: called.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: called.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["saved", "loading", "loaded"]


@every_class
def test_a_deep_copy_goes_on_alike(kind: Any) -> None:
    weights = [grid_weight("E4M3", (3, 7), ROWS, "stochastic")]
    optimizer = kind(weights)
    put_gradients(weights, 0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    others = twin.param_groups[0]["params"]
    assert others[0] is not weights[0]
    put_gradients(weights, 1)
    put_gradients(others, 1)
    optimizer.step()
    twin.step()
    assert same_bits(values(weights), values(others))


@everyone
def test_grad_scaler(make: Any) -> None:
    """A power of two of scale changes nothing; an overflow leaves the step out."""
    weights, others = [grid_weight("E4M3", (3, 7), ROWS)], [grid_weight("E4M3", (3, 7), ROWS)]
    scaled, plain = make(weights), make(others)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for t in range(4):
        x = normal(3, 7, seed=t)
        scaled.zero_grad()
        scaler.scale((weights[0] * x).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        others[0].grad = x.clone()
        plain.step()
    assert same_bits(values(weights), values(others))
    scaler.scale((weights[0] * math.inf).sum()).backward()
    scaler.step(scaled)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert same_bits(values(weights), values(others))


@every_class
def test_named_parameters_are_taken(kind: Any) -> None:
    model = fm.quantize_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "E4M3", "grid")
    optimizer = kind(model.named_parameters(), **float_lr(kind))
    assert sorted(optimizer.param_groups[0]["param_names"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


@everyone
def test_empty_single_and_frozen_parameters(make: Any) -> None:
    """Nothing to do is no error; a scalar is a tensor like any other."""
    empty = on(fm.FP8Manifold("E4M3"), torch.empty(0, 4))
    single = grid_weight("E4M3", (), std=0.02)
    frozen = grid_weight(seed=2).requires_grad_(False)
    never = grid_weight(seed=3)
    parameters = [empty, single, frozen, never]
    optimizer = make(parameters)
    before = values(parameters)
    for t in range(8):
        empty.grad, single.grad = torch.empty(0, 4), torch.tensor(1.0 + t)
        optimizer.step()
    after = values(parameters)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True, True]
    assert single.shape == ()


# ------------------------------------------------------------------------------------------------------ refusals
@every_class
def test_an_empty_list_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        kind([])


@every_class
def test_a_parameter_twice_is_refused(kind: Any) -> None:
    weight = grid_weight()
    with pytest.raises(ValueError, match="more than one parameter group"):
        kind([{"params": [weight]}, {"params": [weight]}])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        kind([weight, weight])


@every_class
@pytest.mark.parametrize(("params", "error"), [(torch.ones(2), TypeError), ([1.0], TypeError), (3, TypeError)])
def test_lists_of_other_things_are_refused(kind: Any, params: Any, error: Any) -> None:
    with pytest.raises(error):
        kind(params)
    optimizer = kind([grid_weight()])
    with pytest.raises(error):
        optimizer.add_param_group({"params": {grid_weight()}})
    with pytest.raises(error):
        optimizer.add_param_group([grid_weight()])
    assert len(optimizer.param_groups) == 1


@every_class
def test_a_bad_group_is_not_added(kind: Any) -> None:
    optimizer = kind([grid_weight()])
    for options in ({"lr": -1.0}, {"writeback": "nearly"}, {"on_nonfinite": "hide"}, {"fused": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            optimizer.add_param_group({"params": [grid_weight()], **options})
        assert len(optimizer.param_groups) == 1
    fine = grid_weight()
    optimizer.add_param_group({"params": [fine], "foreach": False})
    assert optimizer.param_groups[1]["params"] == [fine]


@every_class
def test_sparse_and_complex_gradients_are_refused(kind: Any) -> None:
    plain = nn.Parameter(torch.ones(3, 2))
    optimizer = kind([plain])
    plain.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ValueError, match="dense real gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="complex64"):
        kind([nn.Parameter(torch.ones(3, dtype=torch.complex64))])


@every_class
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_flags_that_would_be_ignored_are_refused(kind: Any, flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag}=True is not supported by {kind.__name__}"):
        kind([grid_weight()], **{flag: True})
    with pytest.raises(ValueError, match=f"{flag}=True"):
        kind([{"params": [grid_weight()], flag: True}])
    kind([grid_weight()], **{flag: False})


@every_class
def test_unknown_keywords_are_refused_with_the_nearest(kind: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'foreech'; did you mean 'foreach'"):
        kind([grid_weight()], foreech=True)
    with pytest.raises(TypeError, match="'learning_rate'"):
        kind([grid_weight()], learning_rate=0.1)


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *[
        (kind, options, error, message)
        for kind in CLASSES
        for options, error, message in [
            ({"lr": -0.1}, ValueError, r"lr=-0\.1"),
            ({"lr": math.nan}, ValueError, "lr=nan"),
            ({"lr": math.inf}, ValueError, "lr=inf"),
            ({"lr": "0.1"}, TypeError, "lr='0.1'"),
            ({"lr": torch.tensor([0.1, 0.2])}, ValueError, r"lr has shape \(2,\)"),
            ({"weight_decay": -1.0}, ValueError, r"weight_decay=-1\.0"),
            ({"weight_decay": math.inf}, ValueError, "weight_decay=inf"),
            ({"damping": -0.5}, ValueError, r"damping=-0\.5"),
            ({"damping": 1.5}, ValueError, r"damping=1\.5"),
            ({"clip": 0.5}, ValueError, r"clip=0\.5"),
            ({"clip": math.nan}, ValueError, "clip=nan"),
            ({"refresh_every": 0}, ValueError, "refresh_every=0"),
            ({"refresh_every": 1.5}, TypeError, r"refresh_every=1\.5"),
            ({"seed": -1}, ValueError, "seed=-1"),
            ({"seed": 0.5}, TypeError, r"seed=0\.5"),
            ({"stabilize_every": 0}, ValueError, "stabilize_every=0"),
            ({"reset_every": -3}, ValueError, "reset_every=-3"),
            ({"writeback": "stochastik"}, ValueError, "writeback='stochastik'.*did you mean 'stochastic'"),
            ({"on_nonfinite": "skipp"}, ValueError, "on_nonfinite='skipp'.*did you mean 'skip'"),
        ]
    ],
    *[
        (kind, options, error, message)
        for kind in (StiffnessAdamW, RiemannianAdam)
        for options, error, message in [
            ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1\.0"),
            ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]=-0\.1"),
            ({"betas": (0.9,)}, TypeError, r"betas=\(0\.9,\)"),
            ({"betas": 0.9}, TypeError, r"betas=0\.9"),
            ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
            ({"eps": math.inf}, ValueError, "eps=inf"),
        ]
    ],
    (StiffnessAdamW, {"stiffness": 9.0}, ValueError, r"stiffness=9\.0"),
    (StiffnessAdamW, {"stiffness": "1"}, TypeError, "stiffness='1'"),
    (StiffnessAdamW, {"stiffness": lambda step: math.nan}, ValueError, "stiffness=nan"),
    (StiffnessAdamW, {"metric": "ulps"}, ValueError, "metric='ulps'.*did you mean 'ulp'"),
    (StiffnessAdamW, {"metric": 1}, TypeError, "metric"),
    (StiffnessAdamW, {"writeback": None}, ValueError, "writeback=None"),
    (RiemannianAdam, {"float_lr": -1.0}, ValueError, r"float_lr=-1\.0"),
    (RiemannianSGD, {"float_lr": math.inf}, ValueError, "float_lr=inf"),
    (RiemannianSGD, {"momentum": -0.9}, ValueError, r"momentum=-0\.9"),
    (RiemannianSGD, {"dampening": "x"}, TypeError, "dampening='x'"),
    (RiemannianSGD, {"nesterov": True}, ValueError, "nesterov=True needs momentum"),
    (RiemannianSGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, r"dampening=0\.1"),
]


@pytest.mark.parametrize(("kind", "options", "error", "message"), REFUSED)
def test_an_option_out_of_range_is_refused(kind: Any, options: dict[str, Any], error: Any, message: str) -> None:
    """Named with its value, in the constructor and in a group."""
    with pytest.raises(error, match=message):
        kind([grid_weight()], **options)
    with pytest.raises(error, match=message):
        kind([{"params": [grid_weight()], **options}])


def test_stiffness_adamw_refuses_foreign_manifolds() -> None:
    point = geoopt.ManifoldParameter(geoopt.Sphere().projx(normal(4)), manifold=geoopt.Sphere())
    with pytest.raises(ValueError, match="RiemannianAdam"):
        StiffnessAdamW([point])


# ------------------------------------------------------------------------------- stabilize, reset, and observation
@every_class
def test_stabilize_projects_when_due(kind: Any) -> None:
    """A weight that something else has pushed off its grid is back on it; without a step of its own it stays."""
    options = {"stabilize": 3} if kind is not StiffnessAdamW else {"stabilize_every": 3}
    weight = grid_weight("E4M3", (3, 7), ROWS)
    optimizer = kind([weight], lr=0.0, **options)
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
    with pytest.raises(ValueError, match="stabilize"):
        kind([{"params": [grid_weight()], "stabilize": 0}])


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


@every_class
def test_observing_changes_nothing(kind: Any) -> None:
    parameters, others = [grid_weight("E4M3", (3, 7), ROWS)], [grid_weight("E4M3", (3, 7), ROWS)]
    seen, unseen = stochastic(kind, parameters), stochastic(kind, others)
    record(seen)
    for t in range(5):
        put_gradients(parameters, t)
        put_gradients(others, t)
        seen.step()
        unseen.step()
    assert same_bits(values(parameters), values(others))
    assert unseen.observer is None
