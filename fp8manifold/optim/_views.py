"""Who looks on at steps, and who takes them in the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8manifold._numerics.charts import chart_of
from fp8manifold.optim._backends import run_eager
from fp8manifold.optim._geometry import load_weights
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._step import Outcome

__all__ = ["Hooks", "StepView", "observed_step", "viewed"]


@dataclass(frozen=True)
class StepView:
    """What an observer sees of one quantised parameter in one step; the tensors are detached and not to be changed."""

    parameter: Tensor
    """The parameter itself, after the step."""
    before: Tensor
    """Its values before the step; as those below of its shape, in float32 (float64 for float64 parameters)."""
    target: Tensor
    """The value requested, before the write-back rounds it."""
    after: Tensor
    """The value after the write-back."""
    stiffness: Tensor
    """One step of the metric at ``before``: an ULP, where that is ``ulp``."""


def observed_step(parameter: Tensor, slot: Slot, numbers: Tensor) -> StepView:
    """Take the step eagerly and show it: the values it started from, asked for and left.

    With an ULP residual these are the values that the residual stands for, not those of the codes alone.
    """
    numbers = numbers.to(slot.tensors["weight"].device)
    return viewed(parameter, slot, numbers, lambda: run_eager(slot, numbers, observed=True))


def viewed(parameter: Tensor, slot: Slot, numbers: Tensor, take: Callable[[], list[Outcome]]) -> StepView:
    """Show the step that ``take`` takes of a slot, part by part."""
    shape, scale = slot.tensors["weight"].shape, slot.arrays["scale"]
    numbers = numbers.to(scale.device)
    before = load_weights(slot.spec, slot.arrays, numbers.dtype).x * scale
    outcomes = take()
    target = torch.cat([outcome.target for outcome in outcomes]) * scale
    x = torch.cat([outcome.before.x for outcome in outcomes])
    assert slot.spec.fmt is not None
    stiffness = chart_of(slot.spec.fmt, slot.spec.metric).stiffness(x) * scale
    after = load_weights(slot.spec, slot.arrays, numbers.dtype).x * scale
    return StepView(parameter, *(x.reshape(shape) for x in (before, target, after, stiffness)))


class Hooks(Protocol):
    """What takes the steps in the backward pass, where something does."""

    def watch(self, group: dict[str, Any]) -> None:
        """Take the steps of a group's parameters from now on."""

    def loaded(self, groups: list[dict[str, Any]]) -> None:
        """Go on with the groups of a state that was loaded."""

    def check_whole(self) -> None:
        """Raise in the middle of a step."""

    def finish(self) -> None:
        """What is left for :meth:`ManifoldOptimizer.step`."""
