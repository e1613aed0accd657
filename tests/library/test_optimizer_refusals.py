"""What the optimizers don't take, and what they say about it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import geoopt
import pytest
import torch
from optimizer_cases import (
    CLASSES,
    every_class,
    grid_weight,
    normal,
)
from torch import nn

from fp8manifold.optim import RiemannianAdam, RiemannianSGD, StiffnessAdamW


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate", UserWarning)
        with pytest.raises(ValueError, match="twice"):
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
