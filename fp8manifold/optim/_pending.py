"""Pending steps: launched on a GPU, with a verdict that the host has not read yet.

The GPU decides by itself whether a step is taken and which scales double.  Weights, codes, scales and moments are
therefore those of a step on the CPU for whatever reads them there.  The host's counts are corrected before they are
visible: at the start of the parameter's next step, and on every read of ``state``, ``skipped_steps``,
``skipped_in_row`` or ``widened_scales``, thus by ``state_dict``, copies and pickling.
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
    """A descriptor for an optimizer's count: reading it settles the pending steps first."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the attribute's name."""
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> int:
        """The count after all pending steps; 0 on the class, as on a new optimizer."""
        if optimizer is None:
            return 0
        optimizer._settle()
        number: int = optimizer.__dict__.get(self._name, 0)
        return number

    def __set__(self, optimizer: Any, number: int) -> None:
        """Set the count after all pending steps."""
        optimizer._settle()
        optimizer.__dict__[self._name] = number


@dataclass(eq=False)
class Pending:
    """A launched step.  It holds no gradient."""

    said: Said
    parameters: list[Tensor]
    #: the parameters' ``step`` tensors, incremented already
    steps: list[Tensor]
    #: whether it is the step of one parameter, in a backward pass
    alone: bool

    def has(self, parameter: Tensor) -> bool:
        """Whether the step includes a parameter."""
        return any(each is parameter for each in self.parameters)


def pending_of(slots: Sequence[Slot], said: Said, *, alone: bool) -> Pending:
    """The pending step of some slots.

    Args:
        slots: the slots launched, in the order of ``said``.
        said: the kernels' verdicts.
        alone: whether it is the step of one parameter, in a backward pass.
    """
    return Pending(said, [slot.parameter for slot in slots], [slot.state["step"] for slot in slots], alone)


def settle(optimizer: Any, pending: Pending) -> None:
    """Wait for a step's verdict, and count the step as taken, with the scales that doubled, or as skipped.

    Warns:
        RuntimeWarning: a skipped step, as ``step`` and :func:`step_in_backward` warn.
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
