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
    RIEMANNIAN,
    every_class,
    frozen,
    grid_weight,
    normal,
    on,
    put_gradients,
    same_bits,
    snapshot,
    stored_weight,
)
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import (
    Madam,
    RiemannianAdam,
    RiemannianSGD,
    StiffnessAdamW,
    StiffnessLion,
    StiffnessSGD,
    StiffnessWrapper,
)


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
    with pytest.raises(
        ValueError,
        match=r"dense real gradients only: that of a parameter of shape \(\d+, .* is (sparse|torch\.complex)",
    ):
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
            ({"moments": "8bits"}, ValueError, "moments='8bits'.*did you mean '8bit'"),
            ({"moments": 8}, ValueError, "moments=8"),
            ({"compile": 1}, TypeError, "compile=1"),
            ({"compile": "yes"}, TypeError, "compile='yes'"),
            ({"maximize": 1}, TypeError, "maximize=1"),
            ({"lr": True}, TypeError, "lr=True"),
            ({"lr": None} if kind not in RIEMANNIAN else {"lr": []}, TypeError, "lr="),
        ]
    ],
    *[
        (kind, options, error, message)
        for kind in (StiffnessAdamW, RiemannianAdam, Madam)
        for options, error, message in [
            ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\]=1\.0"),
            ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]=-0\.1"),
            ({"betas": (0.9,)}, TypeError, r"betas=\(0\.9,\)"),
            ({"betas": 0.9}, TypeError, r"betas=0\.9"),
            ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
            ({"eps": math.inf}, ValueError, "eps=inf"),
        ]
    ],
    *[
        (kind, options, error, message)
        for kind in (StiffnessSGD, RiemannianSGD)
        for options, error, message in [
            ({"momentum": math.inf}, ValueError, "momentum=inf"),
            ({"dampening": math.nan, "momentum": 0.9}, ValueError, "dampening=nan"),
            ({"momentum": 0.0, "moments": "8bit"}, ValueError, "moments='8bit' needs momentum > 0"),
            ({"momentum": 0.0, "writeback": "momentum"}, ValueError, "writeback='momentum' needs 0 < momentum < 1"),
            ({"momentum": 1.0, "writeback": "momentum"}, ValueError, "writeback='momentum' needs 0 < momentum < 1"),
            ({"momentum": 0.9, "nesterov": True, "writeback": "momentum"}, ValueError, "nesterov=True"),
        ]
    ],
    (StiffnessAdamW, {"betas": (0.0, 0.9), "writeback": "momentum"}, ValueError, r"needs betas\[0\] > 0"),
    (RiemannianAdam, {"betas": (0.0, 0.9), "writeback": "momentum"}, ValueError, r"needs betas\[0\] > 0"),
    (RiemannianAdam, {"amsgrad": True, "moments": "8bit"}, ValueError, "amsgrad=True does not go with moments='8bit'"),
    (StiffnessLion, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1\.0"),
    (StiffnessLion, {"stiffness": math.nan}, ValueError, "stiffness=nan"),
    (StiffnessSGD, {"stiffness": -9}, ValueError, "stiffness=-9"),
    (Madam, {"float_lr": -1.0}, ValueError, r"float_lr=-1\.0"),
    (Madam, {"max_direction": 0.0}, ValueError, r"max_direction=0\.0"),
    (Madam, {"escape": 0}, ValueError, "escape=0"),
    (Madam, {"escape": "1"}, TypeError, "escape='1'"),
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


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in RIEMANNIAN])
def test_foreign_manifolds_are_refused(kind: Any) -> None:
    point = geoopt.ManifoldParameter(geoopt.Sphere().projx(normal(4)), manifold=geoopt.Sphere())
    with pytest.raises(ValueError, match="RiemannianAdam"):
        kind([point])
    optimizer = kind([stored_weight()])
    with pytest.raises(ValueError, match="RiemannianAdam"):
        optimizer.add_param_group({"params": [point]})
    assert len(optimizer.param_groups) == 1


@every_class
def test_parameters_without_values_or_of_odd_types_are_refused(kind: Any) -> None:
    """On the meta device, in a raw 8-bit float, of integers: in the constructor, next to a weight that is fine."""
    for bad, message in (
        (nn.Parameter(torch.ones(3, device="meta")), "meta"),
        (on(fm.FP8Manifold("E4M3"), torch.ones(3, device="meta")), "meta"),
        (nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
        (nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            kind([stored_weight(), bad])


@every_class
def test_a_manifold_on_another_device_than_its_weight_is_refused(kind: Any) -> None:
    elsewhere = geoopt.ManifoldParameter(torch.zeros(3, 4), manifold=fm.FP8Manifold("E4M3", 2.0**-5).to("meta"))
    with pytest.raises(ValueError, match="is on cpu and its manifold on meta"):
        kind([stored_weight(), elsewhere])


# ------------------------------------------------------------------------------------------- options that went astray
@every_class
@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1, torch.tensor(math.nan)], ids=str)
def test_a_learning_rate_that_went_astray_is_refused_by_the_step(kind: Any, lr: Any) -> None:
    """Set by a scheduler or by hand after construction: named, and nothing has changed."""
    weight = stored_weight()
    optimizer = kind([weight])
    for t in range(2):
        put_gradients([weight], t)
        optimizer.step()
        optimizer.param_groups[0]["lr"], good = lr, optimizer.param_groups[0]["lr"]
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match="lr="):
            optimizer.step()
        assert snapshot(optimizer) == before
        optimizer.param_groups[0]["lr"] = good


@every_class
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_decay": math.nan}, ValueError, "weight_decay=nan"),
        ({"writeback": "residual"}, ValueError, "writeback='residual'"),
        ({"writeback": "residual4"}, ValueError, "residual of 8 bits, but writeback='residual4' keeps one of 4 bits"),
        ({"writeback": "residual2"}, ValueError, "residual of 8 bits, but writeback='residual2' keeps one of 2 bits"),
        ({"moments": "8bit"}, ValueError, "moments='8bit'"),
        ({"moments": "bfloat16"}, ValueError, "moments='bfloat16'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"clip": math.nan}, ValueError, "clip=nan"),
        ({"maximize": "no"}, TypeError, "maximize='no'"),
        ({"refresh_every": 0}, ValueError, "refresh_every=0"),
        ({"on_nonfinite": "maybe"}, ValueError, "on_nonfinite='maybe'"),
    ],
    ids=str,
)
def test_options_set_between_steps_are_checked(kind: Any, change: dict[str, Any], error: Any, message: str) -> None:
    """Out of range, or against what the state holds: named, nothing has changed, and the old ones still do."""
    weight, plain = stored_weight(), nn.Parameter(normal(5))
    optimizer = kind(
        [{"params": [plain]}, {"params": [weight]}],
        writeback="residual8",
        **{"momentum": 0.9} if kind in (StiffnessSGD, RiemannianSGD) else {},
        **{"float_lr": 0.01} if kind in RIEMANNIAN else {},
    )
    put_gradients([plain, weight], 0)
    optimizer.step()
    group = optimizer.param_groups[1]
    kept = {name: group[name] for name in change}
    group.update(change)
    put_gradients([plain, weight], 1)
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert snapshot(optimizer) == before
    group.update(kept)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


@every_class
def test_options_set_between_steps_are_taken(kind: Any) -> None:
    """From the next step on they are as if they had been given from the start of a new optimizer."""
    weights = [stored_weight("E4M3", (4, 9)), stored_weight("E4M3", (4, 9))]
    changes = {"weight_decay": 0.2, "seed": 9, "damping": 0.5, "clip": 1.5, "maximize": True, "writeback": "nearest"}
    running, stopped = (kind([w], refresh_every=1) for w in weights)
    for optimizer, w in zip((running, stopped), weights, strict=True):
        put_gradients([w], 0)
        optimizer.step()
    running.param_groups[0].update(changes)
    fresh = kind([weights[1]], refresh_every=1)
    fresh.load_state_dict(stopped.state_dict())
    fresh.param_groups[0].update(changes)
    for t in range(1, 4):
        for optimizer, w in zip((running, fresh), weights, strict=True):
            put_gradients([w], t)
            optimizer.step()
        assert same_bits([weights[0]], [weights[1]])


# ------------------------------------------------------------------------------------------------------ foreign states
def trained(kind: Any, weight: Any, **options: Any) -> Any:
    optimizer = kind([weight], **{"momentum": 0.9} if kind in (StiffnessSGD, RiemannianSGD) else {}, **options)
    put_gradients([weight], 0)
    optimizer.step()
    return optimizer


#: What a state was saved with and what it is loaded for, and the words that say so.
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "shape": (lambda: stored_weight(shape=(4, 64)), lambda: stored_weight(shape=(64, 4)), r"\(4, 64\).*\(64, 4\)"),
    "format": (lambda: stored_weight("E4M3"), lambda: stored_weight("E5M2"), "E4M3.*E5M2"),
    "layout": (lambda: stored_weight("E4M3"), lambda: stored_weight("E4M3FNUZ"), "E4M3, .*E4M3FNUZ, "),
    "grid format": (lambda: grid_weight("E4M3"), lambda: grid_weight("E3M4"), "E4M3.*E3M4"),
    "granularity": (
        lambda: stored_weight(shape=(4, 64), granularity="block"),
        lambda: stored_weight(shape=(4, 64), granularity="tensor"),
        "a block of 32.*a tensor",
    ),
}


@every_class
@pytest.mark.parametrize(("saved", "ours", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_made_for_another_parameter_is_refused(kind: Any, saved: Any, ours: Any, message: str) -> None:
    """In one line that names both, with the optimizer left as it was."""
    state = trained(kind, saved(), moments="8bit", writeback="residual8").state_dict()
    optimizer = trained(kind, ours(), moments="8bit", writeback="residual8")
    before, kept = snapshot(optimizer), frozen(state)
    with pytest.raises(ValueError, match=message) as raised:
        optimizer.load_state_dict(state)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    assert snapshot(optimizer) == before
    assert frozen(state) == kept


@every_class
def test_a_state_of_an_ordinary_parameter_is_not_one_of_a_weight(kind: Any) -> None:
    pairs = [(stored_weight(), nn.Parameter(normal(3, 7))), (nn.Parameter(normal(3, 7)), stored_weight())]
    for saved, ours in pairs:
        optimizer = kind([ours])
        with pytest.raises(ValueError, match="ordinary parameter"):
            optimizer.load_state_dict(trained(kind, saved).state_dict())
        assert not optimizer.state


@every_class
def test_what_is_no_state_of_ours_is_refused(kind: Any) -> None:
    """In one line: another optimizer's, torch's, a wrapper's, none at all, and one with options out of range."""
    optimizer = trained(kind, stored_weight())
    before = snapshot(optimizer)
    theirs = torch.optim.AdamW([nn.Parameter(normal(3, 7))])
    wrapped = StiffnessWrapper(torch.optim.SGD([grid_weight()], lr=0.1))
    other = trained(RiemannianSGD if kind is not RiemannianSGD else Madam, stored_weight())
    good = optimizer.state_dict()
    bad_group = good | {"param_groups": [{**good["param_groups"][0], "lr": -1.0}]}
    two = {**good, "param_groups": good["param_groups"] * 2}
    for state, error, message in (
        (theirs.state_dict(), ValueError, kind.__name__),
        (wrapped.state_dict(), ValueError, kind.__name__),
        (other.state_dict(), ValueError, f"{type(other).__name__}, not of {kind.__name__}"),
        (bad_group, ValueError, r"lr=-1\.0"),
        (two, ValueError, "size"),
        ({}, ValueError, "param_groups"),
        (None, TypeError, "NoneType"),
        ([1], TypeError, "list"),
    ):
        with pytest.raises(error, match=message) as raised:
            optimizer.load_state_dict(state)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300
        assert snapshot(optimizer) == before
