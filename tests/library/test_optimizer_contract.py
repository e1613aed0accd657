"""torch's contract, kept by every optimizer of ours: bad gradients, closures, schedulers, groups, hooks, scalers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    RIEMANNIAN,
    ROWS,
    every_class,
    grid_weight,
    ours,
    put_gradients,
    record,
    same_bits,
    stochastic,
    values,
)
from torch import nn

from fp8manifold.optim import RiemannianAdam, RiemannianSGD


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
    with pytest.raises(ValueError, match="stabilize"):
        kind([{"params": [grid_weight()], "stabilize": 0}])


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
