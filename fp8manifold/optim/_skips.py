"""The warning of an optimizer whose every step is left out: which parameters' gradients are not finite."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from fp8manifold.optim._finite import squares_hold

__all__ = ["described", "warn_of_skips"]

_SHOWN: Final = 3
_BETWEEN: Final = ("fp8manifold", "torch", "contextlib")


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
        else ("the cause is not in the gradients")
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
        if parameter.grad is not None and not squares_hold(parameter.grad, factor(group, parameter))
    ]


def described(group: dict[str, Any], i: int, k: int) -> str:
    """By name where the groups have names (``model.named_parameters()``), by position and shape always."""
    names = group.get("param_names")
    name = f"{names[k]!r}, " if names else ""
    return f"parameter {k} of group {i} ({name}shape {tuple(group['params'][k].shape)})"
