"""On ordinary parameters our optimizers are torch's: over every configuration that torch tests its own with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import normal
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import fp8manifold as fm

torch.backends.__allow_nonbracketed_mutation_flag = True  # the harness takes that from every test of the process
THEIRS = {info.name: info for info in optim_db}
#: Ours, on ordinary parameters alone, and the one of torch's that it then is.
SAME = {
    "StiffnessAdamW": "AdamW",
    "StiffnessSGD": "SGD",
    "RiemannianAdam": "Adam",
    "RiemannianSGD": "SGD",
    "Madam": "AdamW",
}


def translated(name: str, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """torch's options in our words; None where ours means another thing by them."""
    decoupled = name == "StiffnessSGD" and kwargs.get("weight_decay")
    if decoupled or (kwargs.get("amsgrad") and name != "RiemannianAdam"):
        return None
    options = {"lr": 1e-3, **copy.deepcopy(kwargs)}
    if name == "StiffnessSGD":
        options.setdefault("momentum", 0.0)
    if SAME[name] == "AdamW":
        options.setdefault("weight_decay", 1e-2)
        options.setdefault("betas", (0.9, 0.999))
    if name == "Madam":
        options["float_lr"] = float(options["lr"])
    return options


@pytest.mark.parametrize("name", SAME)
def test_ordinary_parameters_take_torchs_steps(name: str) -> None:
    """In float64, over every configuration that torch tests its own optimizer with."""
    theirs, compared = THEIRS[SAME[name]], 0
    for given in theirs.optim_inputs_func("cpu", torch.float64):
        if (options := translated(name, given.kwargs)) is None:
            continue
        pair = [
            [nn.Parameter(normal(4, 3, dtype=torch.float64)), nn.Parameter(normal(5, seed=1, dtype=torch.float64))]
            for _ in "ab"
        ]
        made = [theirs.optim_cls(pair[0], **copy.deepcopy(given.kwargs)), getattr(fm.optim, name)(pair[1], **options)]
        for t in range(10):
            for parameters, optimizer in zip(pair, made, strict=True):
                for i, p in enumerate(parameters):
                    p.grad = normal(*p.shape, seed=10 * t + i, dtype=torch.float64)
                optimizer.step()
        for p, q in zip(*pair, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12, msg=f"{name}, {given.desc}")
        compared += 1
    assert compared >= 4
