"""torch's contract, kept by every optimizer of ours: bad gradients, closures, schedulers, groups, hooks, scalers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    RIEMANNIAN,
    ROWS,
    every_class,
    free_weight,
    grid_weight,
    normal,
    ours,
    put_gradients,
    record,
    same_bits,
    stochastic,
    values,
)
from torch import nn

from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW


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


@every_class
def test_a_scheduler_begins_from_the_lr_of_the_moment(kind: Any) -> None:
    """As around torch's optimizers: the lr may have been set by hand before."""
    optimizer = kind([grid_weight()], lr=0.2)
    optimizer.param_groups[0]["lr"] = 0.05
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    assert scheduler.base_lrs == [0.05]


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
