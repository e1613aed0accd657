"""Options of groups: tensors that schedulers write in place, and options that a loaded state has otherwise."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from optimizer_cases import normal, through_disk
from torch import nn

import fp8manifold as fm
from fp8manifold.optim import RiemannianAdam, StiffnessAdamW, StiffnessMuon, StiffnessSGD


def two() -> list[nn.Parameter]:
    return [nn.Parameter(normal(4, 4, seed=i)) for i in range(2)]


def in_groups(kind: Any, lr: Any) -> Any:
    return kind([{"params": [p]} for p in two()], lr=lr)


MAKES: dict[str, Any] = {
    "default": lambda lr: in_groups(StiffnessAdamW, lr),
    "sgd": lambda lr: in_groups(StiffnessSGD, lr),
    "riemannian": lambda lr: in_groups(RiemannianAdam, lr),
    "given": lambda lr: StiffnessAdamW([{"params": [p], "lr": lr} for p in two()], lr=1e-3),
    "muon": lambda lr: StiffnessMuon.for_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), lr),
}


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize("way", ["made", "loaded", "added"])
@pytest.mark.parametrize("name", MAKES)
def test_a_scheduler_divides_each_learning_rate_once(name: str, way: str) -> None:
    optimizer = MAKES[name](torch.tensor(0.5))
    if way == "added":
        named = {"param_names": ["late"]} if "param_names" in optimizer.param_groups[0] else {}
        optimizer.add_param_group({"params": [nn.Parameter(normal(4))], "direction": "adam", **named})
    if way == "loaded":  # as states were written whose groups shared a tensor
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["lr"] = saved["param_groups"][0]["lr"]
        optimizer.load_state_dict(through_disk(saved))
    before = [float(group["lr"]) for group in optimizer.param_groups]
    assert len(before) > 1
    schedule = plateau(optimizer)
    for _ in range(3):
        schedule.step(1.0)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [lr / 4 for lr in before]


def test_the_tensor_of_a_single_group_stays_the_users() -> None:
    lr = torch.tensor(0.5)
    optimizer = StiffnessAdamW(two(), lr=lr)
    lr.fill_(0.25)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25


def stepped(**options: Any) -> Any:
    p = fm.FP8Parameter(normal(32, 32, std=0.1), "E4M3", seed=1)
    optimizer = StiffnessAdamW([p], 1e-2, **options)
    p.grad = normal(32, 32, seed=2)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ({"draws": "dither"}, {"draws": "independent"}),
        ({"moments": "8bit"}, {"moments": "float32"}),
        ({"writeback": "residual8"}, {"writeback": "stochastic"}),
        ({"writeback": "nearest", "seed": 3}, {"writeback": "stochastic", "seed": 4}),
        ({"stiffness": 0.0}, {"stiffness": 1.0}),
        ({"clip": 8.0, "damping": 0.25}, {"clip": 16.0, "damping": 0.5}),
    ],
    ids=str,
)
def test_what_a_loaded_state_has_otherwise_is_said_once(saved: dict[str, Any], given: dict[str, Any]) -> None:
    first, second = stepped(**saved), stepped(**given)
    text = ", ".join(f"{name}={saved[name]!r} in place of {given[name]!r}" for name in sorted(saved))
    start = "^StiffnessAdamW goes on with options of the loaded state, .* made with: "
    line = start + re.escape(text) + r"( \(optim.adopted_state|$)"
    with pytest.warns(UserWarning, match=line) as told:
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert {name: second.param_groups[0][name] for name in saved} == saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())


def test_what_schedules_change_and_schedules_themselves_are_not_said() -> None:
    first = stepped(stiffness=lambda t: 1 / (1 + t), betas=(0.8, 0.9), weight_decay=0.1)
    first.param_groups[0]["lr"] = 1e-4
    second = stepped(stiffness=lambda t: 1 / (2 + t))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
