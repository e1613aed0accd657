"""Schedules of a step's options: plain functions of the number of steps taken."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fp8manifold._numerics.checks import check_int, check_number

__all__ = ["Schedule", "anneal", "scheduled"]

Schedule = float | Callable[[int], float]
"""A number, or a function of the number of steps taken so far (0 at the first step)."""


@dataclass(frozen=True)
class _Anneal:
    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


def anneal(start: float, end: float, steps: int) -> Callable[[int], float]:
    """A linear schedule from ``start`` at step 0 to ``end`` at step ``steps`` and after.

    .. math:: k(t) = start + (end - start) \\min(t / steps, 1)

    Args:
        start: the value at step 0.
        end: the value from step ``steps`` on.
        steps: how many steps it takes from one to the other.

    Returns:
        A function of the number of steps taken, for ``stiffness``, ``scale`` or ``exponent`` of an optimizer.

    Raises:
        TypeError: a value of another type.
        ValueError: ``start`` or ``end`` is NaN or Inf, ``steps`` below 1.

    Example:
        >>> k = anneal(1.0, 0.0, 100)
        >>> k(0), k(50), k(1000)
        (1.0, 0.5, 0.0)
    """
    for name, value in (("start", start), ("end", end)):
        check_number(name, value, -math.inf, math.inf, open_low=True, open_high=True)
    check_int("steps", steps, 1, 2**62)
    return _Anneal(start, end, steps)


def scheduled(name: str, value: Schedule, step: int, low: float, high: float) -> float:
    """The value at a step, checked."""
    current = value(step) if callable(value) else value
    check_number(name, current, low, high)
    return current
