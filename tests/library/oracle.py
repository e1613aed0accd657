"""The definition of a float format and of rounding to it, one value at a time in exact rational arithmetic.

Nothing here comes from the library under test: a format is only its four stored fields. Values are Python
floats, which hold every value of an 8-bit format exactly; every decision is taken on integers and Fractions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from typing import Protocol

ROUNDINGS = ("nearest", "toward_zero", "up", "down", "stochastic")
DETERMINISTIC = ROUNDINGS[:4]
OVERFLOWS = ("saturate", "inf_or_nan")
DRAW_RANGE = 1 << 24


class Format(Protocol):
    @property
    def exponent_bits(self) -> int: ...
    @property
    def mantissa_bits(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def layout(self) -> str: ...


# ---------------------------------------------------------------------------------------------- codes
def sign_bit(fmt: Format) -> int:
    return 1 << (fmt.exponent_bits + fmt.mantissa_bits)


def inf_code(fmt: Format) -> int | None:
    """The code of +Inf: the first of the top exponent (ieee), the last magnitude (p3109e), or none."""
    if fmt.layout == "ieee":
        return (2**fmt.exponent_bits - 1) << fmt.mantissa_bits
    return sign_bit(fmt) - 1 if fmt.layout == "p3109e" else None


def nan_codes(fmt: Format) -> tuple[int, ...]:
    sign = sign_bit(fmt)
    if fmt.layout == "finite":
        return ()
    if fmt.layout in ("fnuz", "p3109e", "p3109f"):
        return (sign,)
    first = sign - 1 if fmt.layout == "fn" else inf_code(fmt) + 1
    magnitudes = range(first, sign)
    return tuple(magnitudes) + tuple(m + sign for m in magnitudes)


@cache
def max_code(fmt: Format) -> int:
    """The largest magnitude code that is a finite number."""
    specials = {*nan_codes(fmt), inf_code(fmt)}
    return max(m for m in range(sign_bit(fmt)) if m not in specials)


@cache
def has_negative_zero(fmt: Format) -> bool:
    return sign_bit(fmt) not in nan_codes(fmt)


@cache
def magnitude(code: int, fmt: Format) -> Fraction:
    """The value of a magnitude code if every code, at the top and past it, were a finite number."""
    field, mantissa = divmod(code, 2**fmt.mantissa_bits)
    if field == 0:
        return mantissa * ulp_of_binade(1 - fmt.bias, fmt)
    return (2**fmt.mantissa_bits + mantissa) * ulp_of_binade(field - fmt.bias, fmt)


def decode(code: int, fmt: Format) -> float:
    if code in nan_codes(fmt):
        return math.nan
    sign = -1.0 if code & sign_bit(fmt) else 1.0
    positive = code & (sign_bit(fmt) - 1)
    return sign * (math.inf if positive == inf_code(fmt) else float(magnitude(positive, fmt)))


def finite_values(fmt: Format) -> list[float]:
    """All finite values in code order: 0 up to max, then -0 (where there is one) down to -max."""
    values = [decode(code, fmt) for code in range(2 * sign_bit(fmt))]
    return [value for value in values if math.isfinite(value)]


# ---------------------------------------------------------------------------------------------- chart
def floor_log2(a: Fraction) -> int:
    guess = a.numerator.bit_length() - a.denominator.bit_length()
    return guess if a >= Fraction(2) ** guess else guess - 1


def ulp_of_binade(exponent: int, fmt: Format) -> Fraction:
    return Fraction(2) ** (exponent - fmt.mantissa_bits)


def binade(a: Fraction, fmt: Format) -> int:
    """e(a) = max(floor(log2 a), emin), with emin for zero."""
    emin = 1 - fmt.bias
    return max(floor_log2(a), emin) if a else emin


def ulp(x: float, fmt: Format) -> Fraction:
    """S(x) = 2^(e(x) - M)."""
    return ulp_of_binade(binade(abs(Fraction(x)), fmt), fmt)


def chart(x: float | Fraction, fmt: Format) -> Fraction:
    """phi(x) = sign(x) * [(e - emin) * 2^M + |x| / 2^(e - M)]."""
    a = abs(Fraction(x))
    e = binade(a, fmt)
    phi = (e - (1 - fmt.bias)) * 2**fmt.mantissa_bits + a / ulp_of_binade(e, fmt)
    return phi if x >= 0 else -phi


def chart_inverse(c: float | Fraction, fmt: Format) -> Fraction:
    """The value between two codes, linear between the values of the codes."""
    low, fraction = divmod(abs(Fraction(c)), 1)
    below, above = magnitude(low, fmt), magnitude(low + 1, fmt)
    value = below + fraction * (above - below)
    return value if c >= 0 else -value


# ------------------------------------------------------------------------------------------- rounding
def rounds_away(code: int, f: Fraction, negative: bool, rounding: str, draw: int | None) -> bool:
    """Whether a magnitude a fraction f of the way from `code` to the next one goes to the next one."""
    match rounding:
        case "nearest":
            return f > Fraction(1, 2) or (f == Fraction(1, 2) and code % 2 == 1)
        case "toward_zero":
            return False
        case "up":
            return f > 0 and not negative
        case "down":
            return f > 0 and negative
        case "stochastic":
            assert draw is not None
            return draw < f * DRAW_RANGE
    raise AssertionError(rounding)


def overflow_value(infinite: bool, negative: bool, fmt: Format, rounding: str, overflow: str) -> float:
    """What a magnitude beyond max becomes, before its sign."""
    inward = rounding == "toward_zero" or rounding == ("up" if negative else "down")
    if overflow == "saturate" or fmt.layout == "finite" or (inward and not infinite):
        return decode(max_code(fmt), fmt)
    return math.nan if inf_code(fmt) is None else math.inf


def round_value(
    x: float, fmt: Format, rounding: str = "nearest", overflow: str = "saturate", draw: int | None = None
) -> float:
    """One value rounded to the grid, as the definition says it."""
    if math.isnan(x):
        return math.nan
    negative = math.copysign(1.0, x) < 0
    rounded = round_magnitude(abs(x), negative, fmt, rounding, overflow, draw)
    if rounded == 0 and not has_negative_zero(fmt):
        return 0.0
    return -rounded if negative else rounded


def round_magnitude(a: float, negative: bool, fmt: Format, rounding: str, overflow: str, draw: int | None) -> float:
    if math.isinf(a):
        return overflow_value(True, negative, fmt, rounding, overflow)
    code, f = divmod(chart(a, fmt), 1)
    code += rounds_away(code, f, negative, rounding, draw)
    if code > max_code(fmt):
        return overflow_value(False, negative, fmt, rounding, overflow)
    return float(magnitude(code, fmt))


def encode(value: float, fmt: Format) -> int:
    """The code of a value that is on the grid (Inf included); NaN has several, see `nan_codes`."""
    sign = sign_bit(fmt) if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign + inf_code(fmt)
    return sign + next(m for m in range(max_code(fmt) + 1) if magnitude(m, fmt) == abs(Fraction(value)))
