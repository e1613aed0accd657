"""The definition of rounding, codes, spacing and chart, in exact rational arithmetic.

One number is taken at a time, slowly. Every fast path of this library is tested against
these functions::

    chart       position = steps from zero to |x|, a Fraction: 56 + 1/2 for 1.0625 in E4M3
    code        floor(position), plus 1 if the rounding moves its fraction on
    overflow    a code past max_code is replaced by max_code, Inf or NaN
    value       magnitude(code) = mantissa * 2^(exponent - M)

They take nothing from a format but its four stored fields. Any object that has these will
do, also one of more than eight bits.
"""

import math
from fractions import Fraction
from functools import cache, lru_cache
from typing import Final, Protocol

from fp8manifold._base.checks import check_choice
from fp8manifold.formats import as_format

__all__ = [
    "decode",
    "encode",
    "from_chart",
    "inf_code",
    "magnitude",
    "max_code",
    "nan_codes",
    "round_to_grid",
    "sign_bit",
    "to_chart",
    "ulp",
]

#: The number of values of a random draw.
DRAWS: Final = 1 << 24


class Fields(Protocol):
    """The facts of a format that the definition needs, as FloatFormat has them."""

    @property
    def exponent_bits(self) -> int: ...
    @property
    def mantissa_bits(self) -> int: ...
    @property
    def bias(self) -> int: ...
    @property
    def layout(self) -> str: ...
    def __hash__(self) -> int: ...


def _fields(fmt: Fields | str) -> Fields:
    return as_format(fmt) if isinstance(fmt, str) else fmt


def sign_bit(fmt: Fields) -> int:
    """Return the code whose only set bit is the sign: half the number of codes.

    Args:
        fmt: the format.

    Raises:
        AttributeError: ``fmt`` has no fields of a format, as a name has none.

    Example:
        >>> sign_bit(as_format("E4M3"))
        128
    """
    return 1 << (fmt.exponent_bits + fmt.mantissa_bits)


def inf_code(fmt: Fields) -> int | None:
    """Return the code of +Inf, or None.

    It is the first of the top exponent (``ieee``), or the last magnitude (``p3109e``).

    Args:
        fmt: the format.

    Raises:
        AttributeError: ``fmt`` has no fields of a format, as a name has none.

    Example:
        >>> inf_code(as_format("E5M2")), inf_code(as_format("E4M3"))
        (124, None)
    """
    if fmt.layout == "ieee":
        return ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    if fmt.layout == "p3109e":
        return sign_bit(fmt) - 1
    return None


@cache
def nan_codes(fmt: Fields) -> tuple[int, ...]:
    """Return the codes of NaN, ascending.

    They are those past Inf (``ieee``), the last magnitude (``fn``), none (``finite``),
    or the code of -0 (``fnuz``, ``p3109e``, ``p3109f``).

    Args:
        fmt: the format.

    Raises:
        AttributeError: ``fmt`` has no fields of a format, as a name has none.

    Example:
        >>> nan_codes(as_format("E4M3")), nan_codes(as_format("E4M3FNUZ"))
        ((127, 255), (128,))
    """
    sign = sign_bit(fmt)
    if fmt.layout == "finite":
        return ()
    if fmt.layout in ("fnuz", "p3109e", "p3109f"):
        return (sign,)
    infinity = inf_code(fmt)
    first = sign - 1 if infinity is None else infinity + 1
    positive = range(first, sign)
    negative = range(first + sign, 2 * sign)
    return (*positive, *negative)


@cache
def max_code(fmt: Fields) -> int:
    """Return the largest code without a sign that is a finite number.

    Args:
        fmt: the format.

    Raises:
        AttributeError: ``fmt`` has no fields of a format, as a name has none.

    Example:
        >>> max_code(as_format("E4M3"))
        126
    """
    special_codes = {*nan_codes(fmt), inf_code(fmt)}
    return max(code for code in range(sign_bit(fmt)) if code not in special_codes)


def magnitude(code: int, fmt: Fields) -> Fraction:
    r"""Return the value of a code without a sign.

    .. math:: 2^{\max(E, 1) - bias} ([E > 0] + m / 2^M)

    Every code, at the top and past it, is read as a finite number.

    Args:
        code: exponent field ``E`` and mantissa field ``m``.
        fmt: the format.

    Raises:
        AttributeError: ``fmt`` has no fields of a format, as a name has none.

    Example:
        >>> magnitude(1, as_format("E4M3")), magnitude(126, as_format("E4M3"))
        (Fraction(1, 512), Fraction(448, 1))
    """
    field, mantissa = divmod(code, (1 << fmt.mantissa_bits))
    if field == 0:
        return mantissa * _spacing(1 - fmt.bias, fmt)
    return ((1 << fmt.mantissa_bits) + mantissa) * _spacing(field - fmt.bias, fmt)


def decode(code: int, fmt: Fields | str) -> float:
    """Return the value of a code, as :func:`fp8manifold.decode` has it.

    Args:
        code: sign, exponent field and mantissa field.
        fmt: a format or its name.

    Raises:
        ValueError: ``code`` out of range, or a name that can't be read.

    Example:
        >>> decode(56, "E4M3"), decode(255, "E4M3")
        (1.0, nan)
    """
    fmt = _fields(fmt)
    negative, unsigned = divmod(code, sign_bit(fmt))
    if negative not in (0, 1):
        raise ValueError(f"code={code} is out of range: 0 to {2 * sign_bit(fmt) - 1}")
    if code in nan_codes(fmt):
        return math.nan
    value = math.inf if unsigned == inf_code(fmt) else float(magnitude(unsigned, fmt))
    return -value if negative else value


def ulp(x: float | Fraction, fmt: Fields | str) -> Fraction:
    r"""Return the spacing of the format at ``x``, as :func:`fp8manifold.ulp` has it.

    .. math:: S(x) = 2^{e(x) - M}, \qquad e(x) = \max(\lfloor \log_2 |x| \rfloor, e_{min})

    Args:
        x: a number. Beyond the range, Inf included, the spacing is that of the top
            binade.
        fmt: a format or its name.

    Raises:
        ValueError: NaN, or a name that can't be read.

    Example:
        >>> ulp(1.9, "E4M3"), ulp(0.0, "E4M3")
        (Fraction(1, 8), Fraction(1, 512))
    """
    fmt = _fields(fmt)
    return _spacing(_exponent(_size_in_range(x, fmt), fmt), fmt)


def to_chart(x: float | Fraction, fmt: Fields | str) -> Fraction:
    r"""Return the steps from zero to ``x``, as :func:`fp8manifold.to_chart` has them.

    .. math:: \varphi(x) = \operatorname{sign}(x)
              \left[ (e - e_{min}) 2^M + |x| / 2^{e - M} \right], \; e = e(x)

    Args:
        x: a number. What is beyond the range, Inf included, goes to its end.
        fmt: a format or its name.

    Raises:
        ValueError: NaN, or a name that can't be read.

    Example:
        >>> to_chart(1.0625, "E4M3")
        Fraction(113, 2)
    """
    fmt = _fields(fmt)
    position = _position(_size_in_range(x, fmt), fmt)
    return position if x >= 0 else -position


def from_chart(c: float | Fraction, fmt: Fields | str) -> Fraction:
    """Return the value at a coordinate, as :func:`fp8manifold.from_chart` has it.

    It is linear between the values of two codes.

    Args:
        c: a finite coordinate. What is beyond the largest code goes to the end of the
            range.
        fmt: a format or its name.

    Raises:
        ValueError, OverflowError: NaN and Inf; a name that can't be read.

    Example:
        >>> from_chart(56.5, "E4M3")
        Fraction(17, 16)
    """
    fmt = _fields(fmt)
    position = min(abs(Fraction(c)), Fraction(max_code(fmt)))
    code, fraction = divmod(position, 1)
    below = magnitude(code, fmt)
    above = magnitude(code + 1, fmt)
    value = below + fraction * (above - below)
    return value if c >= 0 else -value


# More entries than float64 has binades.
@lru_cache(maxsize=4096)
def _power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _spacing(exponent: int, fmt: Fields) -> Fraction:
    return _power_of_two(exponent - fmt.mantissa_bits)


def _exponent(size: Fraction, fmt: Fields) -> int:
    """Return ``max(floor(log2(size)), emin)``, and ``emin`` for zero."""
    emin = 1 - fmt.bias
    if not size:
        return emin
    # The lengths of two integers tell the logarithm of their quotient up to one.
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < _power_of_two(exponent):
        exponent -= 1
    return max(exponent, emin)


def _position(size: Fraction, fmt: Fields) -> Fraction:
    """Return the steps from zero to a magnitude, as if the exponent had no upper end."""
    exponent = _exponent(size, fmt)
    emin = 1 - fmt.bias
    return (exponent - emin) * (1 << fmt.mantissa_bits) + size / _spacing(exponent, fmt)


def _size_in_range(x: float | Fraction, fmt: Fields) -> Fraction:
    """Return ``|x|``, or the largest value if that is smaller."""
    largest = magnitude(max_code(fmt), fmt)
    return largest if abs(x) == math.inf else min(abs(Fraction(x)), largest)


def encode(
    x: float,
    fmt: Fields | str,
    rounding: str = "nearest",
    overflow: str = "saturate",
    bits: int | None = None,
) -> int:
    r"""Round a number and return its code, as :func:`fp8manifold.encode` does.

    A magnitude between the codes ``c`` and ``c + 1``, a fraction ``f`` of the way, goes
    to ``c + 1`` where

    .. math:: f > 1/2, \text{ or } f = 1/2 \text{ and } c \text{ is odd (nearest)}; \quad
              f > 0 \text{ and the sign is that of the mode (up, down)}; \quad
              bits < 2^{24} f \text{ (stochastic)}

    A negative number's draw is ``2^24 - 1 - bits``, so that one draw moves both signs
    in one direction on the line.

    Args:
        x: any number.
        fmt: a format or its name.
        rounding: ``nearest``, ``toward_zero``, ``up``, ``down`` or ``stochastic``.
        overflow: ``saturate``, or ``inf_or_nan``: Inf, or NaN where the layout has no
            Inf (``finite`` saturates).
        bits: the draw of ``stochastic``: ``0 <= bits < 2**24``.

    Raises:
        ValueError: an unknown mode, ``stochastic`` without ``bits`` in range, or NaN in
            a format that has none.

    Example:
        >>> encode(1.06, "E4M3"), encode(-1.06, "E4M3", "down")
        (56, 185)
        >>> encode(1.06, "E4M3", "stochastic", bits=0)
        57
    """
    fmt = _fields(fmt)
    check_choice("rounding", rounding, ("nearest", "toward_zero", "up", "down", "stochastic"))
    check_choice("overflow", overflow, ("saturate", "inf_or_nan"))
    if rounding == "stochastic" and (bits is None or not 0 <= bits < DRAWS):
        raise ValueError(f"rounding='stochastic' needs {bits=} to be a draw: 0 <= bits < 2**24")
    negative = math.copysign(1.0, x) < 0
    if math.isnan(x):
        return _nan_code(fmt)
    if math.isinf(x):
        code = _code_beyond(fmt, rounding, overflow, negative=negative, infinite=True)
    else:
        code, fraction = divmod(_position(abs(Fraction(x)), fmt), 1)
        if _moves_on(code, fraction, rounding, bits, negative=negative):
            code += 1
        if code > max_code(fmt):
            code = _code_beyond(fmt, rounding, overflow, negative=negative, infinite=False)
    if code in nan_codes(fmt) or not negative:
        return code
    signed_code = code + sign_bit(fmt)
    # Where the code of -0 is NaN, -0 becomes +0.
    if code == 0 and signed_code in nan_codes(fmt):
        return 0
    return signed_code


def round_to_grid(
    x: float,
    fmt: Fields | str,
    rounding: str = "nearest",
    overflow: str = "saturate",
    bits: int | None = None,
) -> float:
    """Round a number to a value, as :func:`fp8manifold.round_to_grid` does.

    Args:
        x: any number. NaN stays NaN.
        fmt: a format or its name.
        rounding: ``nearest``, ``toward_zero``, ``up``, ``down`` or ``stochastic``.
        overflow: ``saturate`` or ``inf_or_nan``, as in :func:`encode`.
        bits: the draw of ``stochastic``: ``0 <= bits < 2**24``.

    Raises:
        ValueError: an unknown mode, or ``stochastic`` without ``bits``.

    Example:
        >>> round_to_grid(500.0, "E4M3"), round_to_grid(500.0, "E4M3", overflow="inf_or_nan")
        (448.0, nan)
    """
    if math.isnan(x):
        return x
    return decode(encode(x, fmt, rounding, overflow, bits), fmt)


def _moves_on(
    code: int, fraction: Fraction, rounding: str, bits: int | None, *, negative: bool
) -> bool:
    """True if a magnitude between a code and the next one goes to the next one."""
    if rounding == "nearest":
        half = Fraction(1, 2)
        return fraction > half or (fraction == half and code % 2 == 1)
    if rounding == "stochastic":
        assert bits is not None
        draw = DRAWS - 1 - bits if negative else bits
        return draw < fraction * DRAWS
    away_from_zero = "down" if negative else "up"
    return fraction > 0 and rounding == away_from_zero


def _code_beyond(
    fmt: Fields, rounding: str, overflow: str, *, negative: bool, infinite: bool
) -> int:
    """Return the code without a sign of a number beyond the largest value.

    Where rounding is towards zero, a finite number gets the largest value, and Inf
    stays Inf.
    """
    inwards = rounding in ("toward_zero", "up" if negative else "down")
    if overflow == "saturate" or fmt.layout == "finite" or (inwards and not infinite):
        return max_code(fmt)
    infinity = inf_code(fmt)
    return _nan_code(fmt) if infinity is None else infinity


def _nan_code(fmt: Fields) -> int:
    codes = nan_codes(fmt)
    infinity = inf_code(fmt)
    if not codes:
        raise ValueError(
            f"x is NaN, and E{fmt.exponent_bits}M{fmt.mantissa_bits} has no code for NaN"
        )
    if fmt.layout == "ieee" and infinity is not None:
        # The quiet NaN has the top bit of the mantissa.
        return infinity + (1 << (fmt.mantissa_bits - 1))
    return codes[0]
