"""Whether a step may be taken: only if the square of every gradient is finite.

One bad gradient leaves out the step of all parameters. The check is in two stages, so that
a good step costs one number::

    all_finite   the sum of all squares is finite -> all gradients are
                 it is not -> look at each gradient: a sum of finite squares may overflow

The squares count, not the gradients, because second moments are made of them.

A planned step on a CPU does the first stage itself (`Plan._are_gradients_finite`). On a GPU
that decides on steady steps by itself (`_plan.py`) kernels do the same check.
`warn_of_skips` and `warn_of_pass` name the parameters at fault in either case.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold._native import library
from fp8manifold._ranks import has_own_memory, local_of
from fp8manifold.optim._native_step import sum_of_squares
from fp8manifold.optim._slot import Slot, describe_parameter

_MOST_NAMES: Final = 3
"""Parameters that a warning names."""
_ADVICE: Final = (
    "Look for NaN in the loss or lower the learning rate; on_nonfinite='raise' stops at the first "
    "such step"
)
_DOT = 2**30
"""Elements of a product: those of a GPU are counted in 31 bits."""
_HALVES: Final = (torch.float16, torch.bfloat16)


def all_finite(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Return True if the squares of all gradients are finite.

    Raises:
        ValueError: a sparse or complex gradient, or one that holds other tensors.
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
        if type(gradient) is not Tensor:
            # raises for what can't be read
            plain_gradient(slot.parameter)
    if _sum_is_finite(slots):
        return True
    # each is looked at, as any of them may raise
    verdicts = [squares_are_finite(slot) for slot in slots]
    return all(verdicts)


def plain_gradient(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient in memory of its own, this process's part of it.

    Other classes of tensors have none. A sum of gradients (`step_in_backward`) and a result
    that a collective will give are read into a new tensor.

    Raises:
        ValueError: what is read is no ordinary tensor either.
    """
    gradient = parameter.grad
    if type(gradient) is Tensor:
        return gradient
    part: Tensor = local_of(gradient)
    if has_own_memory(part):
        return part.as_subclass(Tensor)
    values = part.clone()
    if has_own_memory(values):
        return values.as_subclass(Tensor)
    raise ValueError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is a "
        f"{type(part).__name__}, which holds other tensors: give an ordinary tensor"
    )


def _sum_is_finite(slots: Sequence[Slot]) -> bool:
    """Return True if the squares of all gradients have a finite sum.

    All of them are finite then.
    """
    gradients = [plain_gradient(slot.parameter) for slot in slots]
    kernels = library() if all(map(_is_summed_in_place, gradients)) else None
    if kernels is not None:
        addresses = np.array([gradient.data_ptr() for gradient in gradients], dtype=np.uint64)
        sizes = np.array([gradient.numel() for gradient in gradients], dtype=np.int64)
        return math.isfinite(sum_of_squares(addresses, sizes, kernels))
    sums: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        sums.setdefault(gradient.device, []).append(_sum_of_squares(gradient))
    return all(math.isfinite(torch.stack(of_device).sum()) for of_device in sums.values())


def _is_summed_in_place(g: Tensor) -> bool:
    """Return True if C code sums the squares of a gradient where they are."""
    return type(g) is Tensor and g.dtype is torch.float32 and g.is_cpu and g.is_contiguous()


def _sum_of_squares(gradient: Tensor) -> Tensor:
    squares = []
    for part in gradient.reshape(-1).split(_DOT):
        wide = part.float() if part.dtype in _HALVES else part
        squares.append(torch.dot(wide, wide).to(torch.float32))
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def _has_finite_squares(gradient: Tensor, factor: float) -> bool:
    """Return True if every ``(factor g)^2`` is finite in the dtype that is computed in."""
    wide = gradient.float() if gradient.dtype in _HALVES else gradient
    wide = wide * factor
    return bool((wide * wide).isfinite().all())


def squares_are_finite(slot: Slot, factor: float = 1.0) -> bool:
    """Return True if every ``(factor g)^2`` is finite; a factor below 1 is not checked.

    With such a one no square exceeds that of the gradient, which is checked before.

    Raises:
        FloatingPointError: one is not and the group has ``on_nonfinite="raise"``.
    """
    if factor < 1 or _has_finite_squares(plain_gradient(slot.parameter), factor):
        return True
    if slot.group["on_nonfinite"] == "raise":
        raise FloatingPointError(
            f"a gradient of shape {tuple(slot.parameter.shape)} is not finite, or its square is "
            f"not: "
            "on_nonfinite='skip' skips such steps"
        )
    return False


def warn_of_skips(optimizer: Any, culprits: Sequence[Tensor] | None) -> None:
    """Warn of skipped steps, and name the parameters whose gradients caused the last one.

    Args:
        optimizer: that has skipped them.
        culprits: these parameters; None finds them by the present gradients.
    """
    if culprits is None:
        factor = optimizer._gradient_factor
        culprits = [
            slot.parameter
            for slot in optimizer._slots()
            if not _has_finite_squares(local_of(slot.parameter.grad), factor(slot))
        ]
    names = _names_of(optimizer, culprits)
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        listed = ", ".join(names[:_MOST_NAMES])
        reason = f"the gradient (or its square) of {listed}{more} is not finite"
    else:
        reason = "no gradient in this process is the cause"
    warnings.warn(
        f"{type(optimizer).__name__} has skipped {optimizer.skipped_in_row} steps in a row, so "
        f"nothing is trained: {reason}. {_ADVICE}",
        RuntimeWarning,
        stacklevel=2,
    )


def warn_of_pass(optimizer: Any, culprits: Sequence[Tensor], why: str, in_row: int) -> None:
    """Warn that a backward pass has left out steps.

    Args:
        optimizer: that has left them out.
        culprits: the parameters whose gradients caused it.
        why: another reason, or "".
        in_row: how many passes in a row have left out steps, this one included.
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
    """Describe parameters, in the optimizer's order."""
    wanted = {id(parameter) for parameter in parameters}
    names = []
    for i, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            if id(parameter) in wanted:
                names.append(describe_parameter(group, i, k))
    return names
