"""Checks of arguments, with messages that name the argument, its value and what is
allowed.
"""

import difflib
import importlib
import math
from collections.abc import Collection, Iterable
from numbers import Real
from typing import Any


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError, naming the nearest spelling, unless ``value`` is one of
    ``allowed``.
    """
    if isinstance(value, str) and value in allowed:
        return
    raise ValueError(f"{name}={value!r} is unknown: {_one_of(allowed, value)}")


def _one_of(allowed: Collection[str], value: object) -> str:
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
    if type(value) is bool or not issubclass(type(value), Real):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}")
    inside = (low < value if open_low else low <= value) and (
        value < high if open_high else value <= high
    )
    if not inside:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name}={value!r} is out of range: {interval}")


def check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} is out of range: {low} to {high}")


def check_keys(name: str, keys: Iterable[object], allowed: Collection[str]) -> None:
    """Raise ValueError, naming the nearest spelling, unless every key is one of
    ``allowed``.
    """
    for key in keys:
        if key not in allowed:
            raise ValueError(f"{name} has an unknown key {key!r}: {_one_of(allowed, key)}")


def import_optional(module: str, extra: str, user: str) -> Any:
    """A module of an optional package, or ImportError with the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'fp8manifold[{extra}]'") from error
