"""Whether a step may be taken at all: every gradient, and its square, has to be finite; and who is told if not."""

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8manifold._ranks import local_of
from fp8manifold.optim._native_step import sum_of_squares
from fp8manifold.optim._together import described

__all__ = ["all_finite", "squares_are_finite", "warn_of_skips"]

_SHOWN: Final = 3
_DOT = 2**30
"""Elements of a product: those of a GPU are counted in 31 bits."""
_BETWEEN: Final = ("fp8manifold", "torch", "contextlib")


def all_finite(optimizer: torch.optim.Optimizer, pairs: list[tuple[dict[str, Any], Tensor]]) -> bool:
    """One sum of squares a tensor, and an exact check only where the sum of those is not finite.

    Raises:
        ValueError: a sparse or complex gradient.
        FloatingPointError: a gradient is not finite and its group has ``on_nonfinite="raise"``.
    """
    for _, parameter in pairs:
        assert parameter.grad is not None
        if parameter.grad.is_sparse or parameter.grad.is_complex():
            kind = "sparse" if parameter.grad.is_sparse else str(parameter.grad.dtype)
            raise ValueError(
                f"{type(optimizer).__name__} takes dense real gradients only: that of a parameter of shape "
                f"{tuple(parameter.shape)} is {kind}"
            )
    if _squares_sum_up([parameter for _, parameter in pairs]):
        return True
    each = [squares_are_finite(group, parameter) for group, parameter in pairs]  # any of them may raise
    return all(each)


def _squares_sum_up(parameters: Sequence[Tensor]) -> bool:
    """Whether the squares of all gradients have a finite sum: then all of them are finite."""
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    native = [g for g in gradients if type(g) is Tensor and g.dtype is torch.float32 and g.is_cpu and g.is_contiguous()]
    if len(native) == len(gradients) and (total := sum_of_squares(native)) is not None:
        return math.isfinite(total)
    sums: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        sums.setdefault(gradient.device, []).append(_sum_of_squares(gradient))
    return all(math.isfinite(torch.stack(each).sum()) for each in sums.values())


def _sum_of_squares(gradient: Tensor) -> Tensor:
    parts = gradient.reshape(-1).split(_DOT)
    wide = (part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts)
    squares = [torch.dot(part, part).to(torch.float32) for part in wide]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def _squares_hold(gradient: Tensor, factor: float = 1.0) -> bool:
    """Whether every ``(factor g)^2`` is finite in the dtype that is computed in."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    wide = wide * factor
    return bool((wide * wide).isfinite().all())


def squares_are_finite(group: dict[str, Any], parameter: Tensor, factor: float = 1.0) -> bool:
    """Whether every ``(factor g)^2`` is finite; only looked at where ``factor`` is at least 1.

    Raises:
        FloatingPointError: one is not and the group has ``on_nonfinite="raise"``.
    """
    assert parameter.grad is not None
    if factor < 1:
        return True
    if _squares_hold(local_of(parameter.grad), factor):
        return True
    if group["on_nonfinite"] == "raise":
        raise FloatingPointError(
            f"a gradient of shape {tuple(parameter.shape)} is not finite, or its square is not: on_nonfinite='skip' "
            "leaves such steps out"
        )
    return False


def warn_of_skips(optimizer: Any, factor: Callable[[dict[str, Any], Tensor], float]) -> None:
    """Name the parameters because of which a step is left out.

    Args:
        optimizer: with ``skipped_in_row``.
        factor: function of group and parameter to what its gradient is multiplied by before it is squared.

    Warns:
        RuntimeWarning: always.
    """
    found = _culprits(optimizer, factor)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    reason = (
        f"the gradient (or its square) of {', '.join(found[:_SHOWN])}{more} is not finite"
        if found
        else "the cause is not in the gradients here"
    )
    warnings.warn(
        f"{type(optimizer).__name__} has left out {optimizer.skipped_in_row} steps in a row, nothing is trained: "
        f"{reason}. Look for NaN in the loss or lower the learning rate; on_nonfinite='raise' stops at the first such "
        "step",
        RuntimeWarning,
        stacklevel=_level_of_the_caller(),
    )


def _level_of_the_caller() -> int:
    """How far up the first frame is that is neither this package's nor torch's, counted from :func:`warn_of_skips`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level


def _culprits(optimizer: Optimizer, factor: Callable[[dict[str, Any], Tensor], float]) -> list[str]:
    return [
        described(group, i, k)
        for i, group in enumerate(optimizer.param_groups)
        for k, parameter in enumerate(group["params"])
        if parameter.grad is not None and not _squares_hold(local_of(parameter.grad), factor(group, parameter))
    ]
