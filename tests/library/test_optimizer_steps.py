"""What a step of any optimizer of ours is: one rounding, its own noise, and the same after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_cases import (
    RIEMANNIAN,
    every_class,
    everyone,
    grid_weight,
    mixed_parameters,
    on,
    ours,
    put_gradients,
    record,
    same_bits,
    same_parameters,
    stochastic,
    through_disk,
    value_of,
    values,
)
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.optim import StiffnessAdamW, anneal

# ------------------------------------------------------------------------------------------ one rounding a step


@ours
def test_after_is_the_target_rounded_once(make: Any) -> None:
    """Recomputed from what the observer sees, with the draws of (seed, step, stream)."""
    parameters = mixed_parameters()
    optimizer = make(parameters)
    group = optimizer.param_groups[0]
    views = record(optimizer)
    for t in range(1, 6):
        put_gradients(parameters, t)
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
            writeback = group["writeback"] or manifold.rounding
            scale = manifold.scale.to(view.target.dtype)
            if writeback.startswith("residual"):  # after is what code and residual stand for together
                asked, after, stored = (x.double() / scale for x in (view.target, view.after, value_of(parameter)))
                spacing = torch.maximum(fm.ulp(asked, manifold.format), fm.ulp(after, manifold.format))
                assert ((after - asked).abs() < spacing / 2 ** int(writeback[-1])).all()
                left = fm.to_chart(after, manifold.format) - fm.to_chart(stored, manifold.format)
                assert (left.abs() <= 0.5).all()
                continue
            assert torch.equal(view.before, start[i].to(view.before.dtype))
            assert torch.equal(view.after.to(parameter.dtype), value_of(parameter))
            stream = optimizer.state[parameter]["stream"]
            draw = {} if writeback == "nearest" else {"seed": 5, "step": t, "stream": stream}
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


@everyone
def test_what_a_zero_gradient_leaves_is_the_same_to_the_bit(make: Any) -> None:
    """R_x(0) = x, on a scale that is no power of two, without decay: of a million draws none may move a weight."""
    x = hair_off_the_grid().expand(250_000).clone()
    x[:2] = torch.tensor([0.0, -0.0])
    weight = on(fm.FP8Manifold("E1M6", 0.3, "stochastic"), x)
    optimizer = make([weight])
    for group in optimizer.param_groups:
        group.update(weight_decay=0.0)
    before = values([weight])
    for _ in range(4):
        weight.grad = torch.zeros_like(x)
        optimizer.step()
    residual = str(optimizer.param_groups[0].get("writeback")).startswith("residual")
    # code and residual together are one signed number, to which the two zeros are one
    assert torch.equal(before[0], weight) if residual else same_bits(before, values([weight]))


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
