"""Steps on a card whose verdict the host has not heard: what becomes of them once it does.

The card decides by itself whether a step is taken and which scales double, so weights, codes, scales and averages are
what they are on the CPU as soon as anything reads them there.  What the host has counted is put right before anybody
can see it: at the start of the next step of the parameter, and wherever ``state``, ``skipped_steps``,
``skipped_in_row`` or ``widened_scales`` is read, thus by ``state_dict``, copies and pickling.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._triton.launch import Said
from fp8manifold.optim._slot import Slot
from fp8manifold.tensor import FP8Tensor

__all__ = ["Count", "Pending", "pending_of", "settle"]

_LOG: Final = logging.getLogger("fp8manifold")


class Count:
    """A number of an optimizer's that is read when the verdict on its steps is known."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the attribute's name."""
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> int:
        """The number; of the class 0, as of a new optimizer."""
        if optimizer is None:
            return 0
        optimizer._settle()
        number: int = optimizer.__dict__.get(self._name, 0)
        return number

    def __set__(self, optimizer: Any, number: int) -> None:
        """Set it, with all that is to be added to what it was added."""
        optimizer._settle()
        optimizer.__dict__[self._name] = number


@dataclass(eq=False)
class Pending:
    """A step that has been launched; it holds no gradient."""

    said: Said
    parameters: list[Tensor]
    #: their counts of steps, which have been advanced
    steps: list[Tensor]
    #: whether it is a parameter's own step, in a backward pass
    alone: bool

    def has(self, parameter: Tensor) -> bool:
        """Whether it is a step of a parameter."""
        return any(each is parameter for each in self.parameters)


def pending_of(slots: Sequence[Slot], said: Said, *, alone: bool) -> Pending:
    """A step that has been launched, with the counts to put right if it was not taken.

    Args:
        slots: what has been launched, in the order of ``said``.
        said: what kernels say of it.
        alone: whether it is one parameter's, in a backward pass.
    """
    return Pending(said, [slot.parameter for slot in slots], [slot.state["step"] for slot in slots], alone)


def settle(optimizer: Any, pending: Pending) -> None:
    """Wait for a step's verdict, and count it: as taken, with the scales that it has doubled, or as left out.

    Warns:
        RuntimeWarning: of a step that was left out, as ``step`` and :func:`step_in_backward` do.
    """
    refused, words = pending.said.read()
    if refused:
        torch._foreach_add_(pending.steps, -1)
        culprits = [p for p, (*_, bad) in zip(pending.parameters, words, strict=True) if bad]
        optimizer._count_skipped(culprits, alone=pending.alone)
        return
    if not pending.alone:
        optimizer.skipped_in_row = 0
    for parameter, (_, doubled, _) in zip(pending.parameters, words, strict=True):
        if doubled and isinstance(parameter, FP8Tensor):
            optimizer.widened_scales += doubled
            scales = parameter.kept_scale.numel()
            _LOG.info(
                "%s of shape %s saturates: %d of %d scales changed, by 2^%+d to 2^+1",
                *(parameter.format.name, tuple(parameter.shape), doubled, scales, int(doubled == scales)),
            )
