"""Options that optimizers share: what is checked of them, and what of a group its steps depend on."""

import difflib
import math
from typing import Any, Final

from torch import Tensor

from fp8manifold._checks import check_number

__all__ = ["UNSUPPORTED_FLAGS", "check_betas", "check_finite", "check_lr", "options_of", "reject_flags"]

UNSUPPORTED_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, inf)."""
    check_number(name, value, 0.0, math.inf, open_high=True)


def check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise ValueError for a flag of torch's that would be ignored, TypeError for any other keyword."""
    for name, value in flags.items():
        if name not in UNSUPPORTED_FLAGS:
            nearest = difflib.get_close_matches(name, UNSUPPORTED_FLAGS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


def options_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """What a group's steps depend on, but for the learning rate, which changes all the time."""
    return tuple([value for name, value in group.items() if name not in ("params", "lr", "initial_lr")])


def check_lr(group: dict[str, Any]) -> None:
    """A schedule may have set it since the group was made."""
    lr = group["lr"]
    check_finite("lr", lr.item() if isinstance(lr, Tensor) else lr)
