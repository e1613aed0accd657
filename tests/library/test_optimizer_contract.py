"""torch's contract, kept by every optimizer of ours: bad gradients, closures, schedulers, groups, hooks, scalers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from optimizer_cases import (
    RIEMANNIAN,
    ROWS,
    every_class,
    everyone,
    free_weight,
    grid_weight,
    normal,
    on,
    ours,
    pull_to,
    put_gradients,
    record,
    same_bits,
    stochastic,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW


def float_lr(kind: Any) -> dict[str, float]:
    return {"float_lr": 1e-3} if kind in RIEMANNIAN else {}


# -------------------------------------------------------------------------------------------- gradients that fail
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
    lr = 0.5 if kind in RIEMANNIAN else 0.01
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


# ------------------------------------------------------------------------------- stabilize, reset, and observation
@every_class
def test_stabilize_projects_when_due(kind: Any) -> None:
    """A weight that something else has pushed off its grid is back on it; without a step of its own it stays."""
    options = {"stabilize" if kind in RIEMANNIAN else "stabilize_every": 3}
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
