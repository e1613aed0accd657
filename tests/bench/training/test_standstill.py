"""Alerts of steps that were not taken and of weights that did not change, between two validations."""

from typing import Any

import pytest
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.loop.observers import Standstill
from nanogpt_bench.monitors.points import Step


class Run:
    """A layer and an optimizer; `go` takes steps, or only counts them, and validates at the last."""

    def __init__(self, make: Any, fmt: str = "E4M3") -> None:
        self.layer = fm.quantize_model(nn.Linear(8, 8), fmt, storage="fp8")
        self.optimizer, self.seen, self.number = make(self.layer.parameters()), Standstill(), 0
        self.look(0)

    def look(self, number: int, **flags: int) -> list[str]:
        record: Any = {**flags, "val/loss": 1.0}
        return [kind for kind, _ in self.seen.see(Step(number, self.layer, self.optimizer, record=record))]

    def go(self, steps: int = 2, **flags: int) -> list[str]:
        for _ in range(steps):
            self.number += 1
            self.layer(torch.ones(1, 8)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.look(self.number, **flags)


def adamw(parameters: Any) -> Any:
    return fm.optim.StiffnessAdamW(parameters, 0.1)


def test_steps_that_are_not_taken_and_weights_that_stay() -> None:
    run = Run(adamw)
    assert run.go() == []
    run.optimizer.step = lambda: None
    assert run.go() == ["no_step", "no_change"]


def test_a_learning_rate_that_moves_nothing() -> None:
    run = Run(adamw)
    assert run.go() == []
    run.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    assert run.go() == ["no_change"]


def test_an_optimizer_that_counts_no_steps_is_seen_by_its_weights() -> None:
    run = Run(lambda parameters: torch.optim.SGD(parameters, 0.0), "none")
    assert run.go() == ["no_change"]


@pytest.mark.parametrize("flag", ["loss_is_nan", "grad_has_nan"])
def test_steps_that_are_left_out_have_alerts_of_their_own(flag: str) -> None:
    run = Run(adamw)
    run.optimizer.step = lambda: None
    assert run.go(1, **{flag: 1}) == []
    assert run.go(1) == ["no_change"]


def test_a_run_that_goes_on_compares_with_the_look_before() -> None:
    run = Run(adamw)
    assert run.go() == []
    state, run.seen = run.seen.state(), Standstill()
    run.seen.load_state(state)
    run.optimizer.step = lambda: None
    assert run.go() == ["no_step", "no_change"]
