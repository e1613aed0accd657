"""Floats to values of a format, to its codes, and back: pure functions of tensors and
draws.

Codes are integer arithmetic on float32 fields, which a compiler fuses into one pass,
without float32 subnormals, which some processors handle a hundred times more slowly.
"""

from typing import Final, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import RANDOM_BITS

Rounding = Literal["nearest", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "inf_or_nan"]
ROUNDINGS: Final[tuple[str, ...]] = get_args(Rounding)
OVERFLOWS: Final[tuple[str, ...]] = get_args(Overflow)
_MANTISSA, _BIAS = 23, 127
_EXPONENT_MASK, _MAGNITUDE_MASK, _SIGN = 0x7F800000, 0x7FFFFFFF, -(2**31)
_IN_FIXED_POINT = 5  # mantissa bits up to which a whole number of steps and a draw fit in 31 bits


def decode_with_ulp(codes: Tensor, fmt: FloatFormat, extra_bits: int = 0) -> tuple[Tensor, Tensor]:
    """Values and spacing of codes, uint8, or int32 with ``extra_bits`` more; NaN and
    Inf are numbers beyond ``max``.

    .. math:: S = 2^{\\max(E, 1) - bias - M}, \\qquad x = \\pm (code - (\\max(E, 1) - 1) 2^M) S
    """
    sign = fmt.sign_bit << extra_bits
    code = codes.to(torch.int32)
    magnitude = code & (sign - 1)
    value, ulp = decode_magnitude(magnitude, fmt, extra_bits)
    signs = (code << (32 - fmt.bits - extra_bits)) & _SIGN
    return (value.view(torch.int32) | signs).view(torch.float32), ulp


def decode_signed(signed: Tensor, fmt: FloatFormat, extra_bits: int) -> tuple[Tensor, Tensor]:
    """Values and spacing of signed codes (int32): those of a chart, which count up from
    the lowest value.
    """
    value, ulp = decode_magnitude(signed.abs(), fmt, extra_bits)
    return (value.view(torch.int32) | (signed & _SIGN)).view(torch.float32), ulp


def encode_signed(x: Tensor, fmt: FloatFormat, draws: Tensor | None, extra_bits: int) -> Tensor:
    """Signed codes (int32) of the rounded values of ``x``: :func:`encode_finite` short
    of the sign bit.
    """
    bits = x.view(torch.int32)
    negative = bits >> 31
    draws = None if draws is None else mirrored(draws, negative)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    return (code ^ negative) - negative


def decode_magnitude(
    magnitude: Tensor, fmt: FloatFormat, extra_bits: int = 0
) -> tuple[Tensor, Tensor]:
    """Values and spacing of codes (int32) without a sign."""
    m = fmt.mantissa_bits + extra_bits
    binade = (magnitude & -(1 << m)).clamp(min=1 << m)
    ulp = ((binade << (_MANTISSA - m)) + ((_BIAS - fmt.bias - m) << _MANTISSA)).view(torch.float32)
    return (magnitude - binade + (1 << m)).to(torch.float32) * ulp, ulp


def decode_bits(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Values of any codes, NaN and Inf included: float32, in units of the scale."""
    value, _ = decode_with_ulp(codes, fmt)
    if fmt.inf_code is not None:
        value = torch.where(
            (codes & (fmt.sign_bit - 1)) == fmt.inf_code, value * float("inf"), value
        )
    if not fmt.nan_codes:
        return value
    if len(fmt.nan_codes) == 1:
        return torch.where(codes == fmt.nan_codes[0], float("nan"), value)
    return torch.where((codes & (fmt.sign_bit - 1)) >= fmt.nan_codes[0], float("nan"), value)


def encode_finite(
    x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0
) -> Tensor:
    """Codes (int32) of ``x`` without NaN, to nearest or by draws of 24 bits; with
    ``extra_bits`` on a finer grid.
    """
    bits = x.view(torch.int32)
    draws = None if draws is None else mirrored(draws, bits >> 31)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    sign = fmt.sign_bit << extra_bits
    signs = (bits >> (32 - fmt.bits - extra_bits)) & sign
    return code | signs if fmt.has_negative_zero else code + ((code + (sign - 1)) & signs)


def mirrored(draws: Tensor, negative: Tensor) -> Tensor:
    """Draws ``2^24 - 1 - r`` where ``negative`` is -1: both signs move in one direction
    on the line by one draw.

    Draws that follow each other evenly in time stay so where a weight crosses 0.
    """
    return draws ^ (negative & ((1 << RANDOM_BITS) - 1))


def encode_magnitude(
    x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0
) -> Tensor:
    """:func:`encode_finite` of values that are not negative."""
    m = fmt.mantissa_bits + extra_bits
    # steps in parts of 2^-24 fit in 31 bits, and the factor from values to them is a
    # normal float32
    fixed = m <= _IN_FIXED_POINT and all(
        -_BIAS < m + RANDOM_BITS - e <= _BIAS for e in (fmt.emin, fmt.emax)
    )
    fixed = fixed and draws is not None
    steps, below = encoding_steps(x, fmt, extra_bits, RANDOM_BITS if fixed else 0)
    if draws is None:
        whole = torch.round(steps).to(torch.int32)
        if (
            m == 0
        ):  # one value per binade: the even code is that of an even binade, not an even multiple
            whole = whole - (steps == 1.5).to(torch.int32) * (below & 1)
    elif fixed:  # a fraction exceeds a draw where both carry into the whole steps; less than a part counts as one
        whole = (steps.ceil().to(torch.int32) + (draws ^ ((1 << RANDOM_BITS) - 1))) >> RANDOM_BITS
    else:
        whole = steps.to(torch.int32)
        fraction = steps - whole.to(torch.float32)
        whole = whole - (
            (draws.to(torch.float32) * 2.0**-RANDOM_BITS - fraction).view(torch.int32) >> 31
        )
    return whole + below


def encoding_steps(
    x: Tensor, fmt: FloatFormat, extra_bits: int = 0, parts: int = 0
) -> tuple[Tensor, Tensor]:
    """``x / S 2^parts`` of positive values, up to the largest, and
    ``(floor(log2 x) - emin) 2^M`` (int32).
    """
    m = fmt.mantissa_bits + extra_bits
    magnitude = x.view(torch.int32).clamp(max=largest_bits(fmt))
    power = (magnitude & _EXPONENT_MASK).clamp(min=(_BIAS + fmt.emin) << _MANTISSA)
    exponent = 2 * _BIAS + m + parts
    steps = magnitude.view(torch.float32) * ((exponent << _MANTISSA) - power).view(torch.float32)
    if (
        fmt.ulp_min > 1
    ):  # the quotient of the smallest floats underflows, where a draw of 0 must still see it
        steps = torch.maximum(steps, magnitude.view(torch.float32).clamp(max=2.0**-100))
    return steps, (power >> (_MANTISSA - m)) - ((_BIAS + fmt.emin) << m)


def encode_bits(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None) -> Tensor:
    """uint8 codes of ``x`` (float32, units of the scale); NaN gives the format's code
    for it, if it has one.
    """
    codes = encode_finite(x, fmt, draws).to(torch.uint8)
    return codes if fmt.nan_code is None else torch.where(x.isnan(), fmt.nan_code, codes)


def largest_bits(fmt: FloatFormat) -> int:
    field = max(fmt.max_code >> fmt.mantissa_bits, 1)
    steps = fmt.max_code - ((field - 1) << fmt.mantissa_bits)
    leading = steps.bit_length() - 1
    exponent = field - fmt.bias - fmt.mantissa_bits + leading
    return ((exponent + _BIAS) << _MANTISSA) + ((steps - (1 << leading)) << (_MANTISSA - leading))


def joined_codes(codes: Tensor, residual: Tensor, fmt: FloatFormat, bits: int) -> Tensor:
    """Code and residual as one signed code of the format with that many more mantissa
    bits.
    """
    negative = -((codes & fmt.sign_bit) >> (fmt.bits - 1))
    signed = ((codes & (fmt.sign_bit - 1)) ^ negative) - negative
    return (signed << bits) + residual


def split_codes(signed: Tensor, fmt: FloatFormat, bits: int, old: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest code (-0 if it is 0 and the ``old`` one -0) and the rest, up to
    ``2^(bits-1)`` parts of a step.
    """
    nearest = (signed + (1 << (bits - 1))) >> bits
    codes = torch.where(
        nearest == 0, (old == fmt.sign_bit) * fmt.sign_bit, nearest.abs() | (nearest & fmt.sign_bit)
    )
    return codes, signed - (nearest << bits)


def keep_nan_codes(codes: Tensor, old: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes (int32) as bytes, where the ``old`` code was NaN the old one: steps are for
    finite weights.
    """
    if fmt.nan_codes:
        old = old.to(torch.int32)
        special = (
            old == fmt.nan_codes[0]
            if len(fmt.nan_codes) == 1
            else (old & (fmt.sign_bit - 1)) > fmt.max_code
        )
        codes = torch.where(special, old, codes)
    return codes.to(torch.uint8)


def round_block(
    x: Tensor,
    fmt: FloatFormat,
    rounding: str,
    overflow: str,
    bits: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """A float32 or float64 tensor on the grid, in its dtype; in place, as a temporary
    costs as much as an operation.
    """
    if overflow == "saturate" or fmt.layout == "finite":
        return _round_unbounded(torch.clamp(x, -fmt.max, fmt.max, out=out), x, fmt, rounding, bits)
    return _round_overflowing(x, fmt, rounding, bits)


def _round_unbounded(
    y: Tensor, x: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None
) -> Tensor:
    """``y``, with the signs of ``x``, rounded in place as if the exponent had no upper
    end.
    """
    scratch = _nearest(y, fmt) if rounding == "nearest" else _by_fraction(y, fmt, rounding, bits)
    if not fmt.has_negative_zero and rounding == "nearest":
        return y  # the difference of two equal numbers is +0 already
    fields = float_bits(y.dtype)
    signs = torch.bitwise_and(
        x.view(fields.integer), fields.sign_mask, out=scratch.view(fields.integer)
    )
    y.view(fields.integer).bitwise_or_(
        signs
    )  # brings -0 back, and leaves every other value as it is
    return y if fmt.has_negative_zero else y.add_(0.0)


def _nearest(y: Tensor, fmt: FloatFormat) -> Tensor:
    """Add ``1.5 * 2^(23-M)`` times each value's power of two in place, which pushes out
    the bits below the last one.
    """
    fields = float_bits(y.dtype)
    power = binade(y, fmt.emin)
    constant = 1.5 * 2.0 ** (fields.mantissa_bits - fmt.mantissa_bits)
    if fmt.mantissa_bits == 0:
        # One value per binade: the even code is that of an even exponent field, not an
        # even multiple of the ulp. An odd multiple of the power of two in the constant
        # turns the tie the other way.
        odd = (power.view(fields.integer) >> fields.mantissa_bits).bitwise_and_(1)
        magic = power.mul_(constant + (1 ^ ((fields.bias - fmt.bias) & 1)))
        magic.view(fields.integer).bitwise_xor_(odd)
    else:
        magic = power.mul_(constant)
    y.add_(magic).sub_(magic)
    return magic


def _by_fraction(y: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None) -> Tensor:
    """Magnitudes of all modes but nearest, without masks, which cost several times as
    much as clamp and ceil.
    """
    # Where the smallest ulp exceeds 1, the quotient of the smallest float by it would
    # underflow: count finer units.
    finer = 1.0 if fmt.ulp_min <= 1 else 2.0**RANDOM_BITS
    if rounding in ("up", "down"):
        grows = (y.sign() if rounding == "up" else -y.sign()).clamp_(0.0, 1.0)
    elif rounding == "stochastic":
        assert bits is not None
        draws = mirrored(bits, y.signbit().to(torch.int32).neg_())
    y.abs_()
    unit = binade(y, fmt.emin).mul_(2.0**-fmt.mantissa_bits / finer)
    y.div_(unit)
    steps = y.floor() if finer == 1 else (y * (1 / finer)).floor_()
    if rounding == "toward_zero":
        y.sub_(y)  # not zero_: a NaN stays
    else:
        y.sub_(steps, alpha=finer)  # the fraction of an ulp, in units
        if rounding == "stochastic":
            y.sub_(draws.to(y.dtype), alpha=finer * 2.0**-RANDOM_BITS).clamp_(0.0, 1.0).ceil_()
        else:
            y.clamp_(0.0, 1.0).ceil_().mul_(grows)
    y.add_(steps).mul_(unit)
    if finer != 1:
        y.mul_(finer)
    return unit


def _round_overflowing(x: Tensor, fmt: FloatFormat, rounding: str, bits: Tensor | None) -> Tensor:
    """Results beyond ``max`` become Inf, or NaN where the layout has no Inf."""
    keeps_top = rounding in (
        "toward_zero",
        "down",
    )  # a finite value never rounds up past +max in these modes
    keeps_bottom = rounding in ("toward_zero", "up")
    beyond = 4.0 * 2.0**fmt.emax
    bounded = x.clamp(-fmt.max if keeps_bottom else -beyond, fmt.max if keeps_top else beyond)
    y = _round_unbounded(bounded, x, fmt, rounding, bits)
    special = torch.full_like(x, float("inf") if fmt.inf_code is not None else float("nan"))
    return torch.where((y.abs() > fmt.max) | x.isinf(), torch.copysign(special, x), y)
