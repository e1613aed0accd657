"""Steps left out one after the other are warned of once, with the name of the parameter at fault."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

import fp8manifold as fm
from fp8manifold import optim

KINDS = [
    lambda p: optim.StiffnessAdamW(p, lr=1e-2),
    lambda p: optim.RiemannianAdam(p, lr=0.5, float_lr=1e-2),
    lambda p: optim.StiffnessSGD(p, lr=1e-1),
]


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return fm.quantize_model(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)), "E4M3", "fp8")


def put(model: torch.nn.Module, bad: float | None) -> None:
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.1)
    if bad is not None:
        model[1].weight.grad[1, 3] = bad


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e30])
@pytest.mark.parametrize("make", KINDS)
def test_a_gradient_that_is_never_finite_is_warned_of_once(make: Any, bad: float) -> None:
    model = model_of()
    optimizer = make(model.named_parameters())
    message = r"10 steps in a row.*parameter 2 of group 0 \('1\.weight', shape \(2, 6\)\).*on_nonfinite='raise'"
    for t in range(40):
        put(model, bad)
        if t == 9:
            with pytest.warns(RuntimeWarning, match=message):
                optimizer.step()
        else:  # any other warning is an error
            optimizer.step()
    assert optimizer.skipped_steps == optimizer.skipped_in_row == optimizer.state_dict()["skipped_in_row"] == 40


def test_skips_with_steps_between_are_not() -> None:
    model = model_of()
    optimizer = KINDS[0](model.parameters())
    for t in range(60):
        put(model, math.nan if t % 10 else None)
        optimizer.step()
    assert (optimizer.skipped_steps, optimizer.skipped_in_row) == (54, 9)


def test_the_count_is_saved_and_the_number_is_an_option() -> None:
    """Without names: by position and shape."""
    model = model_of()
    optimizer = KINDS[0]([{"params": [p]} for p in model.parameters()])
    optimizer.warn_after = 3
    for _ in range(2):
        put(model, math.nan)
        optimizer.step()
    resumed = KINDS[0]([{"params": [p]} for p in model.parameters()])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.warn_after = 3
    for each in (optimizer, resumed):
        with pytest.warns(RuntimeWarning, match=r"3 steps in a row.*parameter 0 of group 2 \(shape \(2, 6\)\)"):
            each.step()
    old = {k: v for k, v in optimizer.state_dict().items() if k != "skipped_in_row"}
    resumed.load_state_dict(old)
    assert (resumed.skipped_steps, resumed.skipped_in_row) == (3, 0)


def test_many_are_counted() -> None:
    model = model_of()
    optimizer = KINDS[0](model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            for p in model.parameters():
                p.grad = torch.full(p.shape, math.nan)
            optimizer.step()
    assert "and 1 more is not finite" in str(caught[-1].message)
