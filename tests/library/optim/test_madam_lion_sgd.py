"""Madam and Lion: what a step is, and torch's optimizers where nothing is rounded."""

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import ROWS, free_weight, normal
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import fp8manifold as fm

torch.backends.__allow_nonbracketed_mutation_flag = True  # the harness takes that from every test of the process
double = torch.float64


def plain(p: Tensor) -> Tensor:
    return p.detach().as_subclass(Tensor).clone()


#: ours, on ordinary parameters alone, and the one of torch's that it then is
SAME = {"StiffnessAdamW": "AdamW", "StiffnessSGD": "SGD", "RiemannianAdam": "Adam", "RiemannianSGD": "SGD"}
SAME["Madam"] = "AdamW"
THEIRS = {info.name: info for info in optim_db}


def translated(name: str, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """torch's options in our words; None where ours means another thing by them."""
    decoupled = name == "StiffnessSGD" and kwargs.get("weight_decay")
    if decoupled or (kwargs.get("amsgrad") and name != "RiemannianAdam"):
        return None
    options = {"lr": 1e-3, **({"momentum": 0.0} if name == "StiffnessSGD" else {}), **copy.deepcopy(kwargs)}
    if SAME[name] == "AdamW":
        options = {"weight_decay": 1e-2, "betas": (0.9, 0.999), **options}
    return options | ({"float_lr": float(options["lr"])} if name == "Madam" else {})


@pytest.mark.parametrize("name", [*SAME, "StiffnessSGD, free", "StiffnessAdamW, free"])
def test_where_nothing_is_rounded_steps_are_torchs(name: str) -> None:
    """In float64, over every configuration that torch tests its own optimizer with: ordinary and unrounded weights."""
    name, _, free = name.partition(", ")
    theirs, compared = THEIRS[SAME[name]], 0
    for given in theirs.optim_inputs_func("cpu", double):
        if (options := translated(name, given.kwargs)) is None:
            continue
        start = [normal(3, 4, dtype=double), normal(5, seed=1, dtype=double)]
        pair: Any = [[nn.Parameter(x.clone()) for x in start] for _ in "ab"]
        if free:
            scales = (ROWS.double() * 1.7, 0.3)
            pair[1] = [free_weight(x.clone(), "E5M2", scale) for x, scale in zip(start, scales, strict=True)]
            pair[0] = [nn.Parameter(plain(p)) for p in pair[1]]
        made = [theirs.optim_cls(pair[0], **copy.deepcopy(given.kwargs)), getattr(fm.optim, name)(pair[1], **options)]
        for t in range(10):
            for parameters, optimizer in zip(pair, made, strict=True):
                for i, p in enumerate(parameters):
                    p.grad = normal(*p.shape, seed=10 * t + i, dtype=double)
                optimizer.step()
        for p, q in zip(*pair, strict=True):
            torch.testing.assert_close(plain(q), plain(p), rtol=1e-9, atol=1e-12, msg=f"{name}, {given.desc}")
        compared += 1
    assert compared >= 4
