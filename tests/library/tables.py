"""Step functions tabulated from the scalar oracle, for sweeps too long for it.

Rounding is monotone, so between two neighbouring values there is exactly one smallest
float64 that goes to the upper one. Each table holds these thresholds, found by asking
the oracle; test_grid_exact checks the tables against the oracle point by point.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fp8manifold import reference
from fp8manifold.reference import Fields

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


def mirrored(draws, x):
    """Return draws that run from the other end for negative numbers.

    So one draw moves both signs in one direction.
    """
    return np.where(np.signbit(x), reference.DRAWS - 1 - draws, draws)


def with_signed_zeros(rounded, x, fmt):
    zero = (
        np.copysign(0.0, x)
        if reference.sign_bit(fmt) not in reference.nan_codes(fmt)
        else np.zeros_like(x)
    )
    return np.where(rounded == 0, zero, rounded)


@dataclass(frozen=True)
class Steps:
    """values[i] on [thresholds[i-1], thresholds[i])."""

    fmt: Fields
    thresholds: Float64
    values: Float64

    def __call__(self, x):
        rounded = self.values[np.searchsorted(self.thresholds, x, side="right")]
        return with_signed_zeros(np.where(np.isnan(x), np.nan, rounded), x, self.fmt)


def rank(x, fmt, rounding, overflow):
    """Return the rounded value; a NaN from overflow counts as the infinity it stands for."""
    rounded = reference.round_to_grid(x, fmt, rounding, overflow)
    return math.copysign(math.inf, x) if math.isnan(rounded) else rounded


def candidates(low, high):
    """Return every float64 at which a rounding from low to high can begin to give high."""
    middle = low + (high - low) / 2 if math.isfinite(high - low) else high
    points = (low, middle, high)
    return sorted({*points, *(float(np.nextafter(p, np.inf)) for p in points)})


def threshold(low, high, fmt, rounding, overflow):
    """Return the smallest float64 in (low, high] that is rounded to more than low is."""
    rank_of_low = rank(low, fmt, rounding, overflow)
    return next(c for c in candidates(low, high) if rank(c, fmt, rounding, overflow) > rank_of_low)


@cache
def steps(fmt, rounding, overflow):
    top = reference.max_code(fmt)
    magnitudes = [float(reference.magnitude(m, fmt)) for m in range(top + 2)]
    ends = [*magnitudes, math.inf]
    points = [-p for p in reversed(ends[1:])] + ends
    thresholds = []
    values = [reference.round_to_grid(-math.inf, fmt, rounding, overflow)]
    for low, high in itertools.pairwise(points):
        if rank(high, fmt, rounding, overflow) > rank(low, fmt, rounding, overflow):
            thresholds.append(threshold(low, high, fmt, rounding, overflow))
            values.append(reference.round_to_grid(thresholds[-1], fmt, rounding, overflow))
    return Steps(fmt, np.array(thresholds), np.array(values))


@dataclass(frozen=True)
class StochasticSteps:
    """Neighbouring magnitudes and what they become; the last is the first that overflows."""

    fmt: Fields
    magnitudes: Float64
    results: Float64

    def split(self, x):
        """Return the code below |x|, how far |x| is beyond it, and the gap to the next.

        All are exact in float64.
        """
        last = len(self.magnitudes) - 1
        a = np.minimum(np.where(np.isnan(x), 0.0, np.abs(x)), self.magnitudes[last])
        code = np.searchsorted(self.magnitudes, a, side="right") - 1
        below, above = self.magnitudes[code], self.magnitudes[np.minimum(code + 1, last)]
        return code, a - below, above - below

    def __call__(self, x, draws):
        code, excess, gap = self.split(x)
        away = mirrored(draws, x) * gap < excess * reference.DRAWS
        rounded = np.copysign(self.results[code + away], x)
        return with_signed_zeros(np.where(np.isnan(x), np.nan, rounded), x, self.fmt)


@cache
def stochastic_steps(fmt, overflow):
    top = reference.max_code(fmt)
    magnitudes = np.array([float(reference.magnitude(m, fmt)) for m in range(top + 2)])
    results = [reference.round_to_grid(m, fmt, "stochastic", overflow, bits=0) for m in magnitudes]
    return StochasticSteps(fmt, magnitudes, np.array(results))
