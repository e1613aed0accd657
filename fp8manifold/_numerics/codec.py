"""Turn floats into values and codes of a format, and codes back into floats.

**Code to value.** A code without its sign counts the representable values from zero up.
Every binade has ``2^M`` codes, spaced by ``S = 2^(e - M)``; subnormals share the spacing
of the first one::

    E4M3 (M = 3, bias = 7), code 62      0 0111 110
    first code of its binade             0 0111 000         56
    spacing, a float32 by its field      E + 127 - bias - M -> 2^(7 - 7 - 3) = 1/8
    value                                (62 - 56 + 2^M) * 1/8 = 1.75

**Value to code.** The same backwards. The exponent field of ``|x|`` gives ``2^e``, and
the float32 whose field is ``2 * 127 + M`` minus that field is the exact ``1 / S``::

    x = 1.8                              e = 0, steps = 1.8 * 8 = 14.4 -> 14
    codes below the binade               (e - emin) * 2^M = 6 * 8 = 48
    code                                 48 + 14 = 62

A step count that rounds up to ``2^(M + 1)`` needs no special case: its sum is the first
code of the next binade. Stochastic rounding takes a draw ``r`` of 24 bits, and a
fraction ``f`` of a step moves on to the next code if ``r < 2^24 f``. With ``extra_bits``
all of this runs on the grid of a format with that many more mantissa bits. That is how
the remainder of a rounding is stored.

**Value to value.** Where no code is wanted, rounding to nearest adds ``1.5 * 2^(23 - M)``
times ``2^e`` and subtracts it again (:func:`_round_to_nearest`). At that size the spacing
of float32 itself is ``S``::

    x = 1.8, constant 1.5 * 2^20         float32 near it is spaced by 1/8
    1.8 + 1572864                        1572865.75
    - 1572864                            1.75

Codes are integer arithmetic on float32 fields, which a compiler fuses into one pass, and
which meets no float32 subnormals: some processors take a hundred times longer for these.
"""

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat, Layout
from fp8manifold.random_bits import RANDOM_BITS

Rounding = Literal["nearest", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "inf_or_nan"]
ROUNDINGS: Final[tuple[str, ...]] = get_args(Rounding)
OVERFLOWS: Final[tuple[str, ...]] = get_args(Overflow)

# The fields of float32.
_MANTISSA_BITS: Final = 23
_BIAS: Final = 127
_EXPONENT_MASK: Final = 0x7F800000
_MAGNITUDE_MASK: Final = 0x7FFFFFFF
_SIGN_MASK: Final = -(2**31)

_DRAW_MASK: Final = (1 << RANDOM_BITS) - 1
_FIXED_POINT_BITS: Final = 5
"""Mantissa bits up to which a number of steps and a draw fit in 31 bits together."""


def decode_with_ulp(codes: Tensor, fmt: FloatFormat, extra_bits: int = 0) -> tuple[Tensor, Tensor]:
    r"""Return (values, spacings) of codes, in float32.

    .. math:: S = 2^{\max(E, 1) - bias - M}, \qquad x = \pm (code - (\max(E, 1) - 1) 2^M) S

    Codes are uint8, or int32 where they have ``extra_bits`` more mantissa bits than the
    format. Those of NaN and Inf are read as numbers beyond ``max``.
    """
    sign_bit = fmt.sign_bit << extra_bits
    code = codes.to(torch.int32)
    magnitude = code & (sign_bit - 1)
    value, ulp = decode_magnitude(magnitude, fmt, extra_bits)
    signs = (code << (32 - fmt.bits - extra_bits)) & _SIGN_MASK
    return (value.view(torch.int32) | signs).view(torch.float32), ulp


def decode_signed(signed: Tensor, fmt: FloatFormat, extra_bits: int) -> tuple[Tensor, Tensor]:
    """Return (values, spacings) of signed codes (int32).

    Signed codes are whole chart coordinates: they count from the lowest value up.
    """
    value, ulp = decode_magnitude(signed.abs(), fmt, extra_bits)
    return (value.view(torch.int32) | (signed & _SIGN_MASK)).view(torch.float32), ulp


def encode_signed(x: Tensor, fmt: FloatFormat, draws: Tensor | None, extra_bits: int) -> Tensor:
    """Return the signed codes (int32) of ``x`` rounded as in :func:`encode_finite`."""
    bits = x.view(torch.int32)
    # -1 for a negative number, else 0
    negative = bits >> 31
    draws = None if draws is None else mirror_draws(draws, negative)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    # negates in two's complement where negative is -1
    return (code ^ negative) - negative


def decode_magnitude(
    magnitude: Tensor, fmt: FloatFormat, extra_bits: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (values, spacings) of codes (int32) without a sign."""
    mantissa_bits = fmt.mantissa_bits + extra_bits
    codes_per_binade = 1 << mantissa_bits
    # Subnormals count in the spacing of the first binade of normal numbers.
    first_code = (magnitude & -codes_per_binade).clamp(min=codes_per_binade)
    exponent_shift = (_BIAS - fmt.bias - mantissa_bits) << _MANTISSA_BITS
    ulp_bits = (first_code << (_MANTISSA_BITS - mantissa_bits)) + exponent_shift
    ulp = ulp_bits.view(torch.float32)
    steps = magnitude - first_code + codes_per_binade
    return steps.to(torch.float32) * ulp, ulp


def decode_with_specials(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the values of any codes, NaN and Inf included, in float32."""
    value, _ = decode_with_ulp(codes, fmt)
    magnitude_mask = fmt.sign_bit - 1
    if fmt.inf_code is not None:
        is_inf = (codes & magnitude_mask) == fmt.inf_code
        value = torch.where(is_inf, value * float("inf"), value)
    if not fmt.nan_codes:
        return value
    if len(fmt.nan_codes) == 1:
        return torch.where(codes == fmt.nan_codes[0], float("nan"), value)
    return torch.where((codes & magnitude_mask) >= fmt.nan_codes[0], float("nan"), value)


def encode_finite(
    x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0
) -> Tensor:
    """Return the codes (int32) of float32 numbers, none of them NaN; Inf saturates.

    Rounding is to nearest, or stochastic with ``draws`` of 24 bits. With ``extra_bits``
    the grid is that of a format with so many more mantissa bits.
    """
    bits = x.view(torch.int32)
    draws = None if draws is None else mirror_draws(draws, bits >> 31)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    sign_bit = fmt.sign_bit << extra_bits
    signs = (bits >> (32 - fmt.bits - extra_bits)) & sign_bit
    if fmt.has_negative_zero:
        return code | signs
    # code + (sign_bit - 1) has the sign bit set unless the code is 0, which stays +0.
    return code + ((code + (sign_bit - 1)) & signs)


def mirror_draws(draws: Tensor, negative: Tensor) -> Tensor:
    """Return ``2^24 - 1 - r`` for each draw ``r`` where ``negative`` is -1, else ``r``.

    One draw then moves both signs in one direction on the line. Draws that follow each
    other evenly in time stay so where a weight crosses 0.
    """
    return draws ^ (negative & _DRAW_MASK)


def encode_magnitude(
    x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0
) -> Tensor:
    """Return :func:`encode_finite` of numbers that are not negative."""
    mantissa_bits = fmt.mantissa_bits + extra_bits
    if draws is None:
        steps, below = encoding_steps(x, fmt, extra_bits)
        whole = torch.round(steps).to(torch.int32)
        if mantissa_bits == 0:
            # One value per binade: torch rounds 1.5 steps to 2. The lower code,
            # 1 + below, is the even one where the number of codes below is odd.
            whole = whole - (steps == 1.5).to(torch.int32) * (below & 1)
    elif _fits_fixed_point(fmt, mantissa_bits):
        parts, below = encoding_steps(x, fmt, extra_bits, RANDOM_BITS)
        # f > r exactly where f + (2^24 - 1 - r) carries into the whole steps. What is
        # less than a part counts as one: a draw of 0 moves every fraction.
        whole = (parts.ceil().to(torch.int32) + (draws ^ _DRAW_MASK)) >> RANDOM_BITS
    else:
        steps, below = encoding_steps(x, fmt, extra_bits)
        whole = steps.to(torch.int32)
        fraction = steps - whole.to(torch.float32)
        # The sign bit of r - f, spread over the word: -1 where the fraction goes on.
        goes_on = (draws.to(torch.float32) * 2.0**-RANDOM_BITS - fraction).view(torch.int32) >> 31
        whole = whole - goes_on
    return whole + below


def _fits_fixed_point(fmt: FloatFormat, mantissa_bits: int) -> bool:
    """True if parts of 2^-24 of a step can be counted in 31 bits.

    The factor from values to parts must be a normal float32, too.
    """
    if mantissa_bits > _FIXED_POINT_BITS:
        return False
    exponents = [mantissa_bits + RANDOM_BITS - e for e in (fmt.emin, fmt.emax)]
    return all(-_BIAS < exponent <= _BIAS for exponent in exponents)


def encoding_steps(
    x: Tensor, fmt: FloatFormat, extra_bits: int = 0, part_bits: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (steps, codes below) of numbers that are not negative.

    Steps are ``|x| / S 2^part_bits``, float32, of ``x`` cut off at the largest value.
    The codes below are ``(e - emin) 2^M``, int32.
    """
    mantissa_bits = fmt.mantissa_bits + extra_bits
    magnitude = x.view(torch.int32).clamp(max=largest_bits(fmt))
    lowest_power = (_BIAS + fmt.emin) << _MANTISSA_BITS
    power = (magnitude & _EXPONENT_MASK).clamp(min=lowest_power)
    # A float32 whose exponent field is this one minus that of 2^e is 2^(M + part_bits - e).
    field = 2 * _BIAS + mantissa_bits + part_bits
    inverse_ulp = ((field << _MANTISSA_BITS) - power).view(torch.float32)
    steps = magnitude.view(torch.float32) * inverse_ulp
    if fmt.ulp_min > 1:
        # The quotient of the smallest floats underflows to 0. A draw of 0 has to move
        # these too, for which any small positive number will do.
        steps = torch.maximum(steps, magnitude.view(torch.float32).clamp(max=2.0**-100))
    below = (power >> (_MANTISSA_BITS - mantissa_bits)) - ((_BIAS + fmt.emin) << mantissa_bits)
    return steps, below


def encode_with_nan(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None) -> Tensor:
    """Return the uint8 codes of ``x``, float32 in units of the scale.

    NaN gives the format's code for it; a format without one must not be given NaN.
    """
    codes = encode_finite(x, fmt, draws).to(torch.uint8)
    return codes if fmt.nan_code is None else torch.where(x.isnan(), fmt.nan_code, codes)


def largest_bits(fmt: FloatFormat) -> int:
    """Return the bits of the format's largest value as a float32."""
    field = max(fmt.max_code >> fmt.mantissa_bits, 1)
    steps = fmt.max_code - ((field - 1) << fmt.mantissa_bits)
    # Steps of a format whose largest value is subnormal have a leading bit below 2^M.
    leading_bit = steps.bit_length() - 1
    exponent = field - fmt.bias - fmt.mantissa_bits + leading_bit
    mantissa = (steps - (1 << leading_bit)) << (_MANTISSA_BITS - leading_bit)
    return ((exponent + _BIAS) << _MANTISSA_BITS) + mantissa


def joined_codes(codes: Tensor, residual: Tensor, fmt: FloatFormat, bits: int) -> Tensor:
    """Return codes (int32) and residuals as signed codes with ``bits`` more mantissa bits.

    The residual is what rounding left, in parts of ``2^-bits`` of a step.
    """
    # -1 for a negative number, else 0
    negative = -((codes & fmt.sign_bit) >> (fmt.bits - 1))
    signed = ((codes & (fmt.sign_bit - 1)) ^ negative) - negative
    return (signed << bits) + residual


def split_codes(
    signed: Tensor, fmt: FloatFormat, bits: int, old_codes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (nearest codes, residuals) of signed codes: :func:`joined_codes` undone.

    A residual reaches from ``-2^(bits - 1)`` up to, but not including, ``2^(bits - 1)``.
    A zero is -0 where the old code was -0.
    """
    nearest = (signed + (1 << (bits - 1))) >> bits
    zeros = (old_codes == fmt.sign_bit) * fmt.sign_bit
    codes = torch.where(nearest == 0, zeros, nearest.abs() | (nearest & fmt.sign_bit))
    return codes, signed - (nearest << bits)


def keep_nan_codes(codes: Tensor, old_codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return codes (int32) as bytes, with the old code wherever that was NaN.

    In a format of several NaN codes, Inf keeps its code too. Steps of an optimizer are
    for finite weights.
    """
    if not fmt.nan_codes:
        return codes.to(torch.uint8)
    old_codes = old_codes.to(torch.int32)
    if len(fmt.nan_codes) == 1:
        special = old_codes == fmt.nan_codes[0]
    else:
        special = (old_codes & (fmt.sign_bit - 1)) > fmt.max_code
    return torch.where(special, old_codes, codes).to(torch.uint8)


def round_block(
    x: Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    overflow: str,
    bits: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Return a float32 or float64 tensor rounded to the grid, in its dtype.

    ``out`` is memory to write into. It works in place from the first copy on, as
    another temporary costs as much as an operation.
    """
    if overflow == "saturate" or fmt.layout == Layout.FINITE:
        bounded = torch.clamp(x, -fmt.max, fmt.max, out=out)
        return _round_unbounded(bounded, x, fmt, rounding, bits)
    return _round_overflowing(x, fmt, rounding, bits)


def _round_unbounded(
    y: Tensor, x: Tensor, fmt: FloatFormat, rounding: Rounding, bits: Tensor | None
) -> Tensor:
    """Round ``y`` in place as if the exponent had no upper end.

    Return it with the signs of ``x``.
    """
    if rounding == "nearest":
        scratch = _round_to_nearest(y, fmt)
        if not fmt.has_negative_zero:
            # The difference of two equal numbers is +0 already.
            return y
    else:
        scratch = _round_by_fraction(y, fmt, rounding, bits)
    fields = float_bits(y.dtype)
    signs = torch.bitwise_and(
        x.view(fields.integer), fields.sign_mask, out=scratch.view(fields.integer)
    )
    # Brings -0 back, and leaves every other value as it is.
    y.view(fields.integer).bitwise_or_(signs)
    # -0 + 0 is +0
    return y if fmt.has_negative_zero else y.add_(0.0)


def _round_to_nearest(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Round ``y`` in place, ties to the even code; return its scratch memory.

    Adding ``1.5 * 2^(23-M)`` times the power of two of each value pushes out the bits
    below the last one. Subtracting it again leaves the rounded value.
    """
    fields = float_bits(y.dtype)
    power = binade(y, fmt.emin)
    constant = 1.5 * 2.0 ** (fields.mantissa_bits - fmt.mantissa_bits)
    if fmt.mantissa_bits == 0:
        # One value per binade: the even code is that of an even exponent field, not an
        # even multiple of the ulp. An odd multiple of the power of two in the constant
        # turns the tie the other way. The format's field has the parity of the float's
        # where the biases differ by an even number, and else the other.
        odd = (power.view(fields.integer) >> fields.mantissa_bits).bitwise_and_(1)
        magic = power.mul_(constant + (1 ^ ((fields.bias - fmt.bias) & 1)))
        magic.view(fields.integer).bitwise_xor_(odd)
    else:
        magic = power.mul_(constant)
    y.add_(magic).sub_(magic)
    return magic


def _round_by_fraction(
    y: Tensor, fmt: FloatFormat, rounding: Rounding, bits: Tensor | None
) -> Tensor:
    """Replace ``y`` in place by its rounded magnitude; return its scratch memory.

    For all modes but ``nearest``. Masks would cost several times as much as clamp and
    ceil.
    """
    # Where the smallest ulp exceeds 1, the quotient of the smallest float by it would
    # underflow: count finer units.
    units_per_ulp = 1.0 if fmt.ulp_min <= 1 else 2.0**RANDOM_BITS
    # What the signs decide is read before they go.
    if rounding == "up":
        grows = y.sign().clamp_(0.0, 1.0)
    elif rounding == "down":
        grows = (-y.sign()).clamp_(0.0, 1.0)
    elif rounding == "stochastic":
        assert bits is not None
        draws = mirror_draws(bits, y.signbit().to(torch.int32).neg_())
    y.abs_()
    unit = binade(y, fmt.emin).mul_(2.0**-fmt.mantissa_bits / units_per_ulp)
    y.div_(unit)
    steps = y.floor() if units_per_ulp == 1 else (y * (1 / units_per_ulp)).floor_()
    if rounding == "toward_zero":
        # Zero by subtraction, so that a NaN stays.
        y.sub_(y)
    else:
        # The fraction of an ulp, in units: in [0, units_per_ulp).
        y.sub_(steps, alpha=units_per_ulp)
        if rounding == "stochastic":
            y.sub_(draws.to(y.dtype), alpha=units_per_ulp * 2.0**-RANDOM_BITS)
            y.clamp_(0.0, 1.0).ceil_()
        else:
            y.clamp_(0.0, 1.0).ceil_().mul_(grows)
    y.add_(steps).mul_(unit)
    if units_per_ulp != 1:
        y.mul_(units_per_ulp)
    return unit


def _round_overflowing(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, bits: Tensor | None
) -> Tensor:
    """Return rounded values, with Inf or NaN for those beyond ``max``."""
    # In these modes a finite value never rounds past the end of its side.
    keeps_top = rounding in ("toward_zero", "down")
    keeps_bottom = rounding in ("toward_zero", "up")
    # Far enough beyond max to be rounded beyond it, near enough to be rounded at all.
    beyond = 4.0 * 2.0**fmt.emax
    low = -fmt.max if keeps_bottom else -beyond
    high = fmt.max if keeps_top else beyond
    y = _round_unbounded(x.clamp(low, high), x, fmt, rounding, bits)
    special = torch.full_like(x, float("inf") if fmt.inf_code is not None else float("nan"))
    overflows = (y.abs() > fmt.max) | x.isinf()
    return torch.where(overflows, torch.copysign(special, x), y)
