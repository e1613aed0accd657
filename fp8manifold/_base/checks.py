"""Check arguments, with messages that name the argument, its value and what is allowed."""

import difflib
import importlib
import math
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError, naming the nearest spelling, for a value that is not allowed."""
    if isinstance(value, str) and value in allowed:
        return
    raise ValueError(f"{name}={value!r} is unknown: {_allowed_and_nearest(allowed, value)}")


def _allowed_and_nearest(allowed: Collection[str], value: object) -> str:
    nearest = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
    return f"one of {', '.join(allowed)}; did you mean {nearest!r}?"


def check_number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise TypeError for what is no real number, ValueError for one out of range.

    The ends are allowed unless they are open. NaN is out of every range.
    """
    if type(value) is bool or not issubclass(type(value), Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    above_low = low < value if open_low else low <= value
    below_high = value < high if open_high else value <= high
    if not (above_low and below_high):
        left_bracket = "(" if open_low else "["
        right_bracket = ")" if open_high else "]"
        interval = f"{left_bracket}{low:g}, {high:g}{right_bracket}"
        raise ValueError(f"{name}={value!r} is out of range: {interval}")


def check_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise TypeError for what is no int, ValueError for an int out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} is out of range: {low} to {high}")


def check_keys(name: str, keys: Iterable[object], allowed: Collection[str]) -> None:
    """Raise ValueError, naming the nearest spelling, for a key that is not allowed."""
    for key in keys:
        if key not in allowed:
            raise ValueError(
                f"{name} has an unknown key {key!r}: {_allowed_and_nearest(allowed, key)}"
            )


def import_optional(module: str, extra: str, user: str) -> Any:
    """Return a module of an optional package.

    Args:
        module: the module's full name.
        extra: the extra of this package that installs it.
        user: the function or option that needs it, for the message.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'fp8manifold[{extra}]'") from error
