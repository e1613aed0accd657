"""Finite gradients: a step is taken where the squares of all are finite; parameters
that leave one out are named.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._ranks import local_of
from fp8manifold.optim._native_step import sum_of_squares
from fp8manifold.optim._slot import Slot, describe_parameter

_NAMED: Final = 3
_ADVICE: Final = (
    "Look for NaN in the loss or lower the learning rate; on_nonfinite='raise' stops at the first "
    "such step"
)
_DOT = 2**30  #: Elements of a product: those of a GPU are counted in 31 bits.


def all_finite(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Check gradients by one sum of squares per tensor, and exactly only where the sum
    of those is not finite.

    Raises:
        ValueError: a sparse or complex gradient.
        FloatingPointError: a gradient is not finite and its group has
            ``on_nonfinite="raise"``.
    """
    for slot in slots:
        gradient, shape = slot.parameter.grad, tuple(slot.parameter.shape)
        assert gradient is not None
        if gradient.is_sparse or gradient.is_complex():
            kind = "sparse" if gradient.is_sparse else str(gradient.dtype)
            raise ValueError(
                f"{type(optimizer).__name__} takes dense real gradients only: the gradient of a "
                f"parameter of shape {shape} is {kind}"
            )
    if _squares_sum_up(slots):
        return True
    each = [squares_are_finite(slot) for slot in slots]  # any of them may raise
    return all(each)


def _squares_sum_up(slots: Sequence[Slot]) -> bool:
    """True where the squares of all gradients have a finite sum: then all of them are
    finite.
    """
    gradients = [local_of(slot.parameter.grad) for slot in slots]
    if all(
        type(g) is Tensor and g.dtype is torch.float32 and g.is_cpu and g.is_contiguous()
        for g in gradients
    ):
        total = sum_of_squares([g.data_ptr() for g in gradients], [g.numel() for g in gradients])
        if total is not None:
            return math.isfinite(total)
    sums: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        sums.setdefault(gradient.device, []).append(_sum_of_squares(gradient))
    return all(math.isfinite(torch.stack(each).sum()) for each in sums.values())


def _sum_of_squares(gradient: Tensor) -> Tensor:
    parts = gradient.reshape(-1).split(_DOT)
    wide = (
        part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts
    )
    squares = [torch.dot(part, part).to(torch.float32) for part in wide]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def _squares_hold(gradient: Tensor, factor: float) -> bool:
    """True where every ``(factor g)^2`` is finite in the dtype that is computed in."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    wide = wide * factor
    return bool((wide * wide).isfinite().all())


def squares_are_finite(slot: Slot, factor: float = 1.0) -> bool:
    """True where every ``(factor g)^2`` is finite; not checked for a factor below 1.

    Raises:
        FloatingPointError: one is not and the group has ``on_nonfinite="raise"``.
    """
    if factor < 1 or _squares_hold(local_of(slot.parameter.grad), factor):
        return True
    if slot.group["on_nonfinite"] == "raise":
        raise FloatingPointError(
            f"a gradient of shape {tuple(slot.parameter.shape)} is not finite, or its square is "
            f"not: "
            "on_nonfinite='skip' skips such steps"
        )
    return False


def warn_of_skips(optimizer: Any, culprits: Sequence[Tensor] | None) -> None:
    """Warn, and name the parameters whose gradients caused it: ``culprits``, or if None
    by the present gradients.
    """
    if culprits is None:
        factor = optimizer._gradient_factor
        slots = [
            s
            for s in optimizer._slots()
            if not _squares_hold(local_of(s.parameter.grad), factor(s))
        ]
        culprits = [slot.parameter for slot in slots]
    found = _names_of(optimizer, culprits)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    reason = (
        f"the gradient (or its square) of {', '.join(found[:_NAMED])}{more} is not finite"
        if found
        else "no gradient in this process is the cause"
    )
    warnings.warn(
        f"{type(optimizer).__name__} has skipped {optimizer.skipped_in_row} steps in a row, so "
        f"nothing is trained: {reason}. {_ADVICE}",
        RuntimeWarning,
        stacklevel=2,
    )


def warn_of_pass(optimizer: Any, culprits: Sequence[Tensor], why: str, in_row: int) -> None:
    """Warn that a backward pass has left out steps, the last of ``in_row``: because of
    the gradients of ``culprits``, or for the reason ``why``.
    """
    names = ", ".join(_names_of(optimizer, culprits))
    reason = why or (
        f"the gradient (or its square) of {names} is not finite: its step was skipped, and so was "
        f"that of every parameter with such a gradient in this backward pass"
    )
    if in_row == optimizer.warn_after:
        message = (
            f"{type(optimizer).__name__} has skipped steps in {in_row} backward passes in a row, "
            f"in the last because {reason}. {_ADVICE}"
        )
    else:
        message = f"step_in_backward: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _names_of(optimizer: Any, parameters: Sequence[Tensor]) -> list[str]:
    """Parameters in words, in the optimizer's order."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        describe_parameter(group, i, k)
        for i, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
        if id(parameter) in wanted
    ]
