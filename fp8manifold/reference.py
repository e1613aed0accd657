"""The definition of rounding, codes, spacing and chart: one number at a time, slowly,
in exact rational arithmetic.

Every fast path of this library is tested against these functions. They take nothing
from a format but its four stored fields, so that any object which has them will do:
formats of more than eight bits too.
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

DRAWS: Final = 1 << 24  #: The number of values of a random draw.


class Fields(Protocol):
    """The facts of a format that the definition needs:
    :class:`~fp8manifold.FloatFormat` has them.
    """

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
    """The code whose only set bit is the sign; half the number of codes.

    Args:
        fmt: the format.

    Raises:
        AttributeError: no format.

    Example:
        >>> sign_bit(as_format("E4M3"))
        128
    """
    return 1 << (fmt.exponent_bits + fmt.mantissa_bits)


def inf_code(fmt: Fields) -> int | None:
    """The code of +Inf: the first of the top exponent (``ieee``), the last magnitude
    (``p3109e``), or None.

    Args:
        fmt: the format.

    Raises:
        AttributeError: no format.

    Example:
        >>> inf_code(as_format("E5M2")), inf_code(as_format("E4M3"))
        (124, None)
    """
    if fmt.layout == "ieee":
        return ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    return sign_bit(fmt) - 1 if fmt.layout == "p3109e" else None


@cache
def nan_codes(fmt: Fields) -> tuple[int, ...]:
    """The codes of NaN: those past Inf (``ieee``), the last magnitude (``fn``), none
    (``finite``), or the code of -0.

    Args:
        fmt: the format.

    Raises:
        AttributeError: no format.

    Example:
        >>> nan_codes(as_format("E4M3")), nan_codes(as_format("E4M3FNUZ"))
        ((127, 255), (128,))
    """
    sign, infinity = sign_bit(fmt), inf_code(fmt)
    if fmt.layout == "finite":
        return ()
    if fmt.layout in ("fnuz", "p3109e", "p3109f"):
        return (sign,)
    magnitudes = range(sign - 1 if infinity is None else infinity + 1, sign)
    return tuple(magnitudes) + tuple(m + sign for m in magnitudes)


@cache
def max_code(fmt: Fields) -> int:
    """The largest code without a sign that is a finite number.

    Args:
        fmt: the format.

    Raises:
        AttributeError: no format.

    Example:
        >>> max_code(as_format("E4M3"))
        126
    """
    specials = {*nan_codes(fmt), inf_code(fmt)}
    return max(m for m in range(sign_bit(fmt)) if m not in specials)


def magnitude(code: int, fmt: Fields) -> Fraction:
    """The value of a code without a sign, as if every code, at the top and past it,
    were a finite number.

    .. math:: 2^{\\max(E, 1) - bias} ([E > 0] + m / 2^M)

    Args:
        code: exponent field ``E`` and mantissa field ``m``.
        fmt: the format.

    Raises:
        AttributeError: no format.

    Example:
        >>> magnitude(1, as_format("E4M3")), magnitude(126, as_format("E4M3"))
        (Fraction(1, 512), Fraction(448, 1))
    """
    field, mantissa = divmod(code, (1 << fmt.mantissa_bits))
    if field == 0:
        return mantissa * _spacing(1 - fmt.bias, fmt)
    return ((1 << fmt.mantissa_bits) + mantissa) * _spacing(field - fmt.bias, fmt)


def decode(code: int, fmt: Fields | str) -> float:
    """The value of a code, as :func:`fp8manifold.decode` has it.

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
    return math.copysign(
        math.inf if unsigned == inf_code(fmt) else float(magnitude(unsigned, fmt)), 0.5 - negative
    )


def ulp(x: float | Fraction, fmt: Fields | str) -> Fraction:
    """The spacing of the format at ``x``: the stiffness S, as :func:`fp8manifold.ulp`
    has it.

    .. math:: S(x) = 2^{e(x) - M}, \\qquad e(x) = \\max(\\lfloor \\log_2 |x| \\rfloor, e_{min})

    Args:
        x: a number; beyond the range, Inf included, the spacing is that of the top
            binade.
        fmt: a format or its name.

    Raises:
        ValueError: NaN, or a name that can't be read.

    Example:
        >>> ulp(1.9, "E4M3"), ulp(0.0, "E4M3")
        (Fraction(1, 8), Fraction(1, 512))
    """
    fmt = _fields(fmt)
    return _spacing(_binade(_within(x, fmt), fmt), fmt)


def to_chart(x: float | Fraction, fmt: Fields | str) -> Fraction:
    """The number of representable steps from zero to ``x``, as
    :func:`fp8manifold.to_chart` has it.

    .. math:: \\varphi(x) = \\operatorname{sign}(x) \\left[ (e - e_{min}) 2^M + |x| / 2^{e - M} \\right], \\; e = e(x)

    Args:
        x: a number; what is beyond the range, Inf included, goes to its end.
        fmt: a format or its name.

    Raises:
        ValueError: NaN, or a name that can't be read.

    Example:
        >>> to_chart(1.0625, "E4M3")
        Fraction(113, 2)
    """
    fmt = _fields(fmt)
    position = _position(_within(x, fmt), fmt)
    return position if x >= 0 else -position


def from_chart(c: float | Fraction, fmt: Fields | str) -> Fraction:
    """The value at a coordinate, linear between those of two codes, as
    :func:`fp8manifold.from_chart` has it.

    Args:
        c: a finite coordinate; what is beyond the largest code goes to the end of the
            range.
        fmt: a format or its name.

    Raises:
        ValueError, OverflowError: NaN and Inf; a name that can't be read.

    Example:
        >>> from_chart(56.5, "E4M3")
        Fraction(17, 16)
    """
    fmt = _fields(fmt)
    low, fraction = divmod(min(abs(Fraction(c)), Fraction(max_code(fmt))), 1)
    below, above = magnitude(low, fmt), magnitude(low + 1, fmt)
    value = below + fraction * (above - below)
    return value if c >= 0 else -value


@lru_cache(maxsize=4096)  # more than float64 has binades
def _power(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def _spacing(exponent: int, fmt: Fields) -> Fraction:
    return _power(exponent - fmt.mantissa_bits)


def _binade(a: Fraction, fmt: Fields) -> int:
    """``max(floor(log2 a), emin)``, and emin of zero."""
    lowest = 1 - fmt.bias
    guess = a.numerator.bit_length() - a.denominator.bit_length()
    return max(guess if a >= _power(guess) else guess - 1, lowest) if a else lowest


def _position(a: Fraction, fmt: Fields) -> Fraction:
    """Steps from zero to a magnitude, as if the exponent had no upper end."""
    e = _binade(a, fmt)
    return (e - (1 - fmt.bias)) * (1 << fmt.mantissa_bits) + a / _spacing(e, fmt)


def _within(x: float | Fraction, fmt: Fields) -> Fraction:
    largest = magnitude(max_code(fmt), fmt)
    return largest if abs(x) == math.inf else min(abs(Fraction(x)), largest)


def encode(
    x: float,
    fmt: Fields | str,
    rounding: str = "nearest",
    overflow: str = "saturate",
    bits: int | None = None,
) -> int:
    """Round a number and return its code, as :func:`fp8manifold.encode` does.

    A magnitude between the codes ``c`` and ``c + 1``, a fraction ``f`` of the way, goes
    to ``c + 1`` where

    .. math:: f > 1/2, \\text{ or } f = 1/2 \\text{ and } c \\text{ is odd (nearest)}; \\quad
              f > 0 \\text{ and the sign is that of the mode (up, down)}; \\quad bits < 2^{24} f \\text{ (stochastic)}

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
        >>> encode(1.06, "E4M3"), encode(-1.06, "E4M3", "down"), encode(1.06, "E4M3", "stochastic", bits=0)
        (56, 185, 57)
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
        low, fraction = divmod(_position(abs(Fraction(x)), fmt), 1)
        code = low + _goes_on(low, fraction, rounding, bits, negative=negative)
        if code > max_code(fmt):
            code = _code_beyond(fmt, rounding, overflow, negative=negative, infinite=False)
    signed = code + negative * sign_bit(fmt)
    if code in nan_codes(fmt):
        return code
    return 0 if code == 0 and signed in nan_codes(fmt) else signed


def round_to_grid(
    x: float,
    fmt: Fields | str,
    rounding: str = "nearest",
    overflow: str = "saturate",
    bits: int | None = None,
) -> float:
    """Round a number to a value of the format, as :func:`fp8manifold.round_to_grid`
    does.

    Args:
        x: any number; NaN stays NaN.
        fmt, rounding, overflow, bits: as in :func:`encode`.

    Raises:
        ValueError: an unknown mode, or ``stochastic`` without ``bits``.

    Example:
        >>> round_to_grid(500.0, "E4M3"), round_to_grid(500.0, "E4M3", overflow="inf_or_nan")
        (448.0, nan)
    """
    return x if math.isnan(x) else decode(encode(x, fmt, rounding, overflow, bits), fmt)


def _goes_on(
    code: int, fraction: Fraction, rounding: str, bits: int | None, *, negative: bool
) -> bool:
    """True if a magnitude between a code and the next one goes to the next one."""
    if rounding == "nearest":
        return fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and code % 2 == 1)
    if rounding == "stochastic":
        assert bits is not None
        return (DRAWS - 1 - bits if negative else bits) < fraction * DRAWS
    return fraction > 0 and rounding == ("down" if negative else "up")


def _code_beyond(
    fmt: Fields, rounding: str, overflow: str, *, negative: bool, infinite: bool
) -> int:
    """The code without a sign of a number beyond the largest value; Inf stays Inf where
    rounding is inwards.
    """
    inwards = rounding == "toward_zero" or rounding == ("up" if negative else "down")
    if overflow == "saturate" or fmt.layout == "finite" or (inwards and not infinite):
        return max_code(fmt)
    infinity = inf_code(fmt)
    return _nan_code(fmt) if infinity is None else infinity


def _nan_code(fmt: Fields) -> int:
    codes, infinity = nan_codes(fmt), inf_code(fmt)
    if not codes:
        raise ValueError(
            f"x is NaN, and E{fmt.exponent_bits}M{fmt.mantissa_bits} has no code for NaN"
        )
    return (
        codes[0]
        if fmt.layout != "ieee" or infinity is None
        else infinity + (1 << (fmt.mantissa_bits - 1))
    )
