"""A budget of Python calls: what a step costs a reader, and a card, before any arithmetic.

On a GPU the calls of a step are most of its time for a small model, and a reader who follows
a step walks through as many functions. The budgets are the figures of the commit that set
them. Whoever lowers a figure lowers its budget; whoever raises one says why in the commit.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import fp8manifold as fm

PACKAGE = Path(fm.__file__).parent
#: Parts of the function that they stand in; before Python 3.12 comprehensions are called.
EXPRESSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


@dataclass(frozen=True)
class Walk:
    """Calls of the package's functions that one step made, and the files that have them."""

    calls: int
    files: int


@dataclass(frozen=True)
class Budget:
    """The most calls of the first step, of the second and of later ones, and files of these."""

    first: int
    second: int
    steady: int
    files: int


BUDGETS = {
    "StiffnessAdamW": Budget(first=722, second=369, steady=49, files=5),
    "StiffnessSGD": Budget(first=684, second=355, steady=50, files=5),
    "StiffnessLion": Budget(first=668, second=339, steady=46, files=5),
    "StiffnessMuon": Budget(first=917, second=459, steady=65, files=6),
    "StiffnessAdafactor": Budget(first=739, second=400, steady=50, files=6),
    "RiemannianAdam": Budget(first=593, second=309, steady=72, files=6),
}


def walk_of(step: Callable[[], object]) -> Walk:
    """Count the calls of the package's own functions while ``step`` runs."""
    calls = 0
    files: set[str] = set()

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event != "call" or frame.f_code.co_name in EXPRESSIONS:
            return
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            calls += 1
            files.add(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Walk(calls, len(files))


def optimizer_over(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the name with 8-bit moments over two layers with biases.

    Each has a seed of its own, as the hash of a seed and a step is made once in a process.
    """
    options = {"moments": "8bit", "seed": list(BUDGETS).index(name)}
    parameters = model.parameters()
    if name == "StiffnessMuon":
        return fm.optim.StiffnessMuon.for_model(model, lr=1e-3, **options)
    if name == "StiffnessSGD":
        return fm.optim.StiffnessSGD(parameters, lr=1e-3, momentum=0.9, **options)
    if name == "StiffnessAdafactor":
        return fm.optim.StiffnessAdafactor(parameters, momentum=0.9, **options)
    if name == "RiemannianAdam":
        return fm.optim.RiemannianAdam(parameters, lr=0.5, float_lr=1e-3, **options)
    return getattr(fm.optim, name)(parameters, lr=1e-3, **options)


def count_steps(name: str) -> Budget:
    """Return what the first steps of an optimizer of the name cost."""
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = fm.quantize_model(layers, "E4M3", storage="codes")
    optimizer = optimizer_over(name, model)
    walks = []
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape)
        walks.append(walk_of(optimizer.step))
    first, second, steady, later = walks
    assert later == steady
    return Budget(first.calls, second.calls, steady.calls, steady.files)


@pytest.fixture(scope="module")
def counted():
    """Return what steps cost in a fresh process.

    Other tests leave parameters that a model no longer has, for which a step looks while one
    is alive.
    """
    command = [sys.executable, "-W", "ignore", __file__]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(process.stdout)
    return {name: Budget(**row) for name, row in rows.items()}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_makes_no_more_calls_than_its_budget(name, counted):
    steps = counted[name]
    budget = BUDGETS[name]
    assert steps.first <= budget.first, steps
    assert steps.second <= budget.second, steps
    assert steps.steady <= budget.steady, steps
    assert steps.files <= budget.files, steps


if __name__ == "__main__":
    print(json.dumps({name: dataclasses.asdict(count_steps(name)) for name in BUDGETS}))
