"""Gradient accumulation in the backward pass: into a momentum, or into a sum in bfloat16."""

import warnings
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._numerics.checks import check_choice
from fp8manifold.optim._agreement import described
from fp8manifold.optim._in_backward.stand_ins import GradientSum, SpentGradient
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import LARGEST
from fp8manifold.optim._state import new_stream, twins

__all__ = ["KINDS", "Accumulation"]

KINDS: Final = ("bfloat16", "momentum")
_MOMENTUM: Final = ("momentum_buffer", LARGEST)


class Accumulation:
    """The accumulated gradients of an optimizer's parameters between two calls of ``optimizer.step()``.

    Args:
        optimizer: the optimizer; its ``step()`` steps all parameters.
        kind: ``bfloat16`` accumulates every gradient in ``grad``.  ``momentum`` adds the gradients of Muon's matrices
            to their momentum, and accumulates those of Adam's parameters in ``grad``.
    """

    def __init__(self, optimizer: Any, kind: str) -> None:
        check_choice("accumulate", kind, KINDS)
        self.optimizer, self.kind = optimizer, kind
        self._twins: dict[Tensor, int] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether a momentum contains gradients of a step that has not ended.  Unlike a sum it can't be dropped."""
        return any("micro_batches" in state for state in self.optimizer.state.values())

    def check(self) -> None:
        """Raise ValueError for ``momentum`` without a parameter whose momentum is linear in the gradient."""
        if self.kind != "momentum":
            return
        taken = [self.optimizer.takes_in(group) for group in self.optimizer.param_groups]
        if not any(taken):
            raise ValueError(
                "accumulate='momentum' needs moments that are linear in the gradient, and "
                f"{type(self.optimizer).__name__} has none here, only matrices of StiffnessMuon do; give "
                "accumulate='bfloat16', a sum of two bytes a weight"
            )

    def take(self, group: dict[str, Any], parameter: Tensor, place: tuple[int, int]) -> None:
        """Accumulate the parameter's gradient, and free it.

        Raises:
            RuntimeError: ``zero_grad()`` was called after a part of the sum had gone into the momentum.
        """
        if self.kind == "momentum" and self.optimizer.takes_in(group):
            self._into_momentum(group, parameter, place)
        else:
            words = (group["seed"], self._steps(parameter) + 1, self._stream(parameter))
            parameter.grad = GradientSum(parameter, words)

    def finish(self) -> None:
        """Step every parameter that has accumulated a gradient, and free the sums."""
        members = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        for group, p in members:
            if "micro_batches" in self.optimizer.state.get(p, {}):
                p.grad = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                state, kept = self.optimizer.state[p], {}
                if group["moments"] == "8bit":  # the momentum is complete: the step must not round it again
                    kept = {name: x.clone() for name, x in state.items() if name in _MOMENTUM}
                self.optimizer.step_alone(group, p)
                for name, x in kept.items():
                    state[name].copy_(x)
                del state["micro_batches"]
                p.grad = SpentGradient(p)
        self._step_sums([self.optimizer._slot(group, p) for group, p in members if isinstance(p.grad, GradientSum)])
        self._twins = {}

    def _step_sums(self, slots: list[Slot]) -> None:
        """Step by the sums in ``grad``.  Where one is not finite, skip every step and keep all sums."""
        if not slots:
            return
        if not self.optimizer._may_step(slots):
            self.optimizer._count_skipped()
            return
        self.optimizer.skipped_in_row = 0
        for group, p in [(slot.group, slot.parameter) for slot in slots]:
            assert isinstance(p.grad, GradientSum)
            p.grad = p.grad.value()
            self.optimizer.step_alone(group, p)
            p.grad = SpentGradient(p)

    def _into_momentum(self, group: dict[str, Any], parameter: Tensor, place: tuple[int, int]) -> None:
        held = parameter.grad
        if isinstance(held, SpentGradient):
            parameter.grad, held.arrived = held.arrived, None
        elif "micro_batches" in self.optimizer.state.get(parameter, {}):
            raise RuntimeError(
                "zero_grad() was called before the step, but what came before is in the momentum already, under "
                "accumulate='momentum': call optimizer.step() first"
            )
        if not self.optimizer.take_in(group, parameter):
            warnings.warn(
                f"step_in_backward: the gradient (or its square) of {described(group, *place)} is not finite in one of "
                "the backward passes of a step, and was left out of its momentum",
                RuntimeWarning,
                stacklevel=2,
            )
        parameter.grad = SpentGradient(parameter, accumulates=True)

    def _steps(self, parameter: Tensor) -> int:
        return int(self.optimizer.state.get(parameter, {}).get("step", 0))

    def _stream(self, parameter: Tensor) -> int:
        """The parameter's stream of draws; before its first step, the stream that the step would assign."""
        state = self.optimizer.state.get(parameter, {})
        if "stream" in state:
            return int(state["stream"])
        if parameter not in self._twins:
            everyone = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._twins = twins(everyone)
        alone, begun = len(self._twins) == 1, self.optimizer.streams_begun
        return new_stream(parameter, self._twins[parameter], self.optimizer.state, begun, draws=True, alone=alone)
