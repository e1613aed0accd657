"""Madam and Lion: what a step is, and torch's optimizers where nothing is rounded."""

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import ROWS, free_weight, normal, step_from
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

import fp8manifold as fm
from fp8manifold.optim import Madam, StiffnessLion

torch.backends.__allow_nonbracketed_mutation_flag = True  # the harness takes that from every test of the process
double = torch.float64


def plain(p: Tensor) -> Tensor:
    return p.detach().as_subclass(Tensor).clone()


@pytest.mark.parametrize("fmt", ["E7M0", "E4M3", "E5M2"])
def test_madam_crosses_zero(fmt: str) -> None:
    """Codes from -1 and from zero reach +1/2 and stay near it; a purely multiplicative step never could."""
    p = fm.FP8Parameter(torch.tensor([-1.0, -0.01, 0.0, 0.3, 2.0] * 20), fmt)
    optimizer = Madam([p], lr=0.05)
    for t in range(600):
        optimizer.param_groups[0]["lr"] = 0.05 if t < 400 else 0.02
        step_from(optimizer, p, p.dequantize() - 0.5)
    found = p.dequantize()
    assert (found > 0).all()
    assert abs(found.mean() - 0.5) < 0.1
    assert (found - 0.5).abs().max() <= 0.5


def test_madam_gives_ordinary_parameters_adamw() -> None:
    weight = nn.Parameter(normal(30, seed=1, dtype=double))
    twin = nn.Parameter(weight.detach().clone())
    ours = Madam([weight], lr=0.2, float_lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1)
    torchs = torch.optim.AdamW([twin], lr=3e-3, betas=(0.8, 0.99), weight_decay=0.1)
    for t in range(50):
        if t == 20:
            ours.param_groups[0]["lr"], torchs.param_groups[0]["lr"] = 0.1, 1.5e-3
        weight.grad = normal(30, seed=t, dtype=double)
        step_from(ours, twin, weight.grad.clone())
        torchs.step()
    torch.testing.assert_close(weight, twin, rtol=0, atol=1e-13)


def test_lion_is_the_published_algorithm() -> None:
    """The sign of an interpolation, then the other beta into the average, decoupled decay; on ordinary weights."""
    w = normal(50, seed=1, dtype=double)
    p, m = nn.Parameter(w.clone()), torch.zeros(50, dtype=double)
    optimizer = StiffnessLion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.5)
    for t in range(60):
        g = normal(50, seed=10 + t, dtype=double)
        step_from(optimizer, p, g)
        w = (1 - 0.01 * 0.5) * w - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-13)


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
