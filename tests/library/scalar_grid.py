"""Codes with a residual, and the arithmetic of a step, one value at a time.

Values are NumPy's float32 scalars, so that every operation rounds once.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import fp8manifold as fm
from fp8manifold import reference

# One makes numbers, the other names their type.
f32 = np.float32
F32 = np.float32


def exponent_of(a):
    return math.frexp(a)[1] - 1


def root(x):
    """Return the correctly rounded root: that of float64 has more than twice the bits."""
    return f32(math.sqrt(float(x)))


def exp2(x):
    """Return 2^x by the Taylor polynomial of degree 7 of the fraction, Horner's way."""
    whole = f32(np.rint(x))
    fraction = f32(x - whole)
    value = f32(math.log(2) ** 7 / math.factorial(7))
    for i in range(6, -1, -1):
        value = f32(f32(value * fraction) + f32(math.log(2) ** i / math.factorial(i)))
    return f32(value * f32(2.0 ** min(max(int(whole), -126), 127)))


def log2_of_mantissa(x):
    """Return log2 f of 2^e f, by eight terms of the series of (f - 1) / (f + 1)."""
    f = f32(math.ldexp(math.frexp(float(x))[0], 1))
    t = f32(f32(f - f32(1)) / f32(f + f32(1)))
    square, value = f32(t * t), f32(0)
    for i in range(7, -1, -1):
        value = f32(f32(value * square) + f32(2 / math.log(2) / (2 * i + 1)))
    return f32(value * t)


class Finer(NamedTuple):
    """The fields of a format, with as many mantissa bits as are needed."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    layout: str = "finite"


@dataclass(frozen=True)
class Codes:
    """A format's codes with `extra` more mantissa bits, as signed counts of steps from 0."""

    fmt: fm.FloatFormat
    extra: int = 0

    @property
    def finer(self):
        return Finer(self.fmt.exponent_bits, self.fmt.mantissa_bits + self.extra, self.fmt.bias)

    def step_at(self, count):
        """Return the spacing above a count."""
        return float(reference.ulp(reference.magnitude(abs(count), self.finer), self.finer))

    def value(self, count):
        return math.copysign(reference.magnitude(abs(count), self.finer), count)

    def round(self, x, draw):
        """Return the magnitude of the rounded count: to nearest, or by a draw."""
        rounding = "nearest" if draw is None else "stochastic"
        code = reference.encode(
            math.copysign(min(abs(x), self.fmt.max), x), self.finer, rounding, bits=draw
        )
        return code & (reference.sign_bit(self.finer) - 1)

    def signed(self, code):
        magnitude = code & (self.fmt.sign_bit - 1)
        return -magnitude if code & self.fmt.sign_bit else magnitude

    def code(self, count, negative):
        negative = negative and (count != 0 or self.fmt.has_negative_zero)
        return abs(count) | (self.fmt.sign_bit if negative else 0)


@dataclass(frozen=True)
class Chart:
    """Steps from zero, one an ULP; the exponent that spaces them stays within two ends."""

    mantissa_bits: int
    lowest: int
    highest: int

    def _exponent(self, x):
        exponent = exponent_of(abs(float(x))) if x else self.lowest
        return min(max(exponent, self.lowest), self.highest)

    def stiffness(self, x):
        return f32(math.ldexp(1.0, self._exponent(x) - self.mantissa_bits))

    def forward(self, x):
        below = (self._exponent(x) - self.lowest) << self.mantissa_bits
        return f32(math.copysign(f32(f32(below) + f32(abs(x) / self.stiffness(x))), x))

    def inverse(self, c):
        index = min(
            max(math.floor(abs(float(c)) / 2**self.mantissa_bits) - 1, 0),
            self.highest - self.lowest,
        )
        spacing = f32(math.ldexp(1.0, self.lowest + index - self.mantissa_bits))
        return f32(
            math.copysign(f32(f32(abs(c) - f32(index * 2**self.mantissa_bits)) * spacing), c)
        )

    def shift(self, x, steps):
        """Return the value some steps away.

        Whole steps are counted apart, so that only the fraction is rounded, and the count
        beyond 2^24.
        """
        sign = f32(math.copysign(1.0, x))
        position = f32(abs(x) / self.stiffness(x))
        whole = math.floor(position)
        fraction = f32(f32(position - f32(whole)) + f32(steps * sign))
        moved = math.floor(fraction)
        start = f32(
            f32(((self._exponent(x) - self.lowest) << self.mantissa_bits) + whole) + f32(moved)
        )
        low, high = self.inverse(start), self.inverse(f32(start + f32(1)))
        return f32(f32(low + f32(f32(fraction - f32(moved)) * f32(high - low))) * sign)
