"""Codes to values and back as integer arithmetic on float32 fields: what a compiler fuses into one pass.

No tables and no float32 subnormals, which some processors handle a hundred times more slowly; bit for bit what
:func:`fp8manifold.encode` and :func:`fp8manifold.decode` give, eager and compiled.
"""

import torch
from torch import Tensor

from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import RANDOM_BITS

_MANTISSA, _BIAS = 23, 127
_EXPONENT_MASK, _MAGNITUDE_MASK, _SIGN = 0x7F800000, 0x7FFFFFFF, -(2**31)
_IN_FIXED_POINT = 5  # mantissa bits up to which a whole number of steps and a draw fit in 31 bits


def decode_with_ulp(codes: Tensor, fmt: FloatFormat, extra_bits: int = 0) -> tuple[Tensor, Tensor]:
    """Values and spacing of the finite codes of ``fmt``; codes of NaN and Inf come out as numbers beyond ``max``.

    .. math:: S = 2^{\\max(E, 1) - bias - M}, \\qquad x = \\pm (code - (\\max(E, 1) - 1) 2^M) S

    uint8, or int32 with ``extra_bits`` more mantissa bits and the sign in the same place above them.
    """
    sign = fmt.sign_bit << extra_bits
    code = codes.to(torch.int32)
    magnitude = code & (sign - 1)
    value, ulp = decode_magnitude(magnitude, fmt, extra_bits)
    signs = (code << (32 - fmt.bits - extra_bits)) & _SIGN
    return (value.view(torch.int32) | signs).view(torch.float32), ulp


def decode_signed(signed: Tensor, fmt: FloatFormat, extra_bits: int) -> tuple[Tensor, Tensor]:
    """Values and spacing of signed codes (int32): those of a chart, which count up from the lowest value."""
    value, ulp = decode_magnitude(signed.abs(), fmt, extra_bits)
    return (value.view(torch.int32) | (signed & _SIGN)).view(torch.float32), ulp


def encode_signed(x: Tensor, fmt: FloatFormat, draws: Tensor | None, extra_bits: int) -> Tensor:
    """Signed codes (int32) of the rounded values of ``x``: :func:`encode_finite` short of the sign bit."""
    bits = x.view(torch.int32)
    negative = bits >> 31
    draws = None if draws is None else mirrored(draws, negative)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    return (code ^ negative) - negative


def decode_magnitude(magnitude: Tensor, fmt: FloatFormat, extra_bits: int = 0) -> tuple[Tensor, Tensor]:
    """Values and spacing of codes (int32) without a sign."""
    m = fmt.mantissa_bits + extra_bits
    binade = (magnitude & -(1 << m)).clamp(min=1 << m)
    ulp = ((binade << (_MANTISSA - m)) + ((_BIAS - fmt.bias - m) << _MANTISSA)).view(torch.float32)
    steps = magnitude - binade + (1 << m)
    return steps.to(torch.float32) * ulp, ulp


def decode_bits(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Values of any codes, NaN and Inf included: float32, in units of the scale."""
    value, _ = decode_with_ulp(codes, fmt)
    if fmt.inf_code is not None:
        value = torch.where((codes & (fmt.sign_bit - 1)) == fmt.inf_code, value * float("inf"), value)
    if not fmt.nan_codes:
        return value
    if len(fmt.nan_codes) == 1:
        return torch.where(codes == fmt.nan_codes[0], float("nan"), value)
    return torch.where((codes & (fmt.sign_bit - 1)) >= fmt.nan_codes[0], float("nan"), value)


def encode_finite(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0) -> Tensor:
    """Codes (int32) of the rounded values of ``x``, which holds no NaN; what is out of range saturates.

    Draws of 24 bits round stochastically; without, ties go to even codes.  ``extra_bits`` are a finer grid's.
    """
    bits = x.view(torch.int32)
    draws = None if draws is None else mirrored(draws, bits >> 31)
    code = encode_magnitude((bits & _MAGNITUDE_MASK).view(torch.float32), fmt, draws, extra_bits)
    sign = fmt.sign_bit << extra_bits
    signs = (bits >> (32 - fmt.bits - extra_bits)) & sign
    return code | signs if fmt.has_negative_zero else code + ((code + (sign - 1)) & signs)


def mirrored(draws: Tensor, negative: Tensor) -> Tensor:
    """Draws ``2^24 - 1 - r`` where ``negative`` is -1, and ``r`` where it is 0.

    A magnitude rounds away from zero where its fraction exceeds the draw. With the mirrored draw a negative number
    rounds in the same direction on the line as a positive one of the same draw, so draws that follow each other evenly
    in time stay even where a weight crosses 0.
    """
    return draws ^ (negative & ((1 << RANDOM_BITS) - 1))


def encode_magnitude(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0) -> Tensor:
    """:func:`encode_finite` of values that are not negative."""
    m = fmt.mantissa_bits + extra_bits
    fixed = draws is not None and _in_fixed_point(fmt, m)
    steps, below = encoding_steps(x, fmt, extra_bits, RANDOM_BITS if fixed else 0)
    if draws is None:
        whole = _nearest(steps, below, m)
    else:
        whole = _stochastic_fixed(steps, draws) if fixed else _stochastic(steps, draws)
    return whole + below


def encoding_steps(x: Tensor, fmt: FloatFormat, extra_bits: int = 0, parts: int = 0) -> tuple[Tensor, Tensor]:
    """How many spacings a value that is not negative has, and what is added to them for its code (int32).

    .. math:: x / S \\; 2^{parts}, \\qquad (\\lfloor \\log_2 x \\rfloor - e_{min}) \\, 2^M

    What is out of range is taken to its end.
    """
    m = fmt.mantissa_bits + extra_bits
    magnitude = x.view(torch.int32).clamp(max=largest_bits(fmt))
    power = (magnitude & _EXPONENT_MASK).clamp(min=(_BIAS + fmt.emin) << _MANTISSA)
    exponent = 2 * _BIAS + m + parts
    steps = magnitude.view(torch.float32) * ((exponent << _MANTISSA) - power).view(torch.float32)
    if fmt.ulp_min > 1:  # the quotient of the smallest floats underflows, where a draw of 0 must still see it
        steps = torch.maximum(steps, magnitude.view(torch.float32).clamp(max=2.0**-100))
    return steps, (power >> (_MANTISSA - m)) - ((_BIAS + fmt.emin) << m)


def encode_bits(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None) -> Tensor:
    """uint8 codes of the rounded values of ``x`` (float32, units of the scale); NaN gives the format's NaN code.

    A format without one has nothing to give: its callers look for NaN first.
    """
    codes = encode_finite(x, fmt, draws).to(torch.uint8)
    return codes if fmt.nan_code is None else torch.where(x.isnan(), fmt.nan_code, codes)


def largest_bits(fmt: FloatFormat) -> int:
    field = max(fmt.max_code >> fmt.mantissa_bits, 1)
    steps = fmt.max_code - ((field - 1) << fmt.mantissa_bits)
    leading = steps.bit_length() - 1
    exponent = field - fmt.bias - fmt.mantissa_bits + leading
    return ((exponent + _BIAS) << _MANTISSA) + ((steps - (1 << leading)) << (_MANTISSA - leading))


def _stochastic(steps: Tensor, draws: Tensor) -> Tensor:
    """Whole steps, one more where the fraction exceeds the draw: the sign bit of their difference says so."""
    whole = steps.to(torch.int32)
    fraction = steps - whole.to(torch.float32)
    return whole - ((draws.to(torch.float32) * 2.0**-RANDOM_BITS - fraction).view(torch.int32) >> 31)


def _in_fixed_point(fmt: FloatFormat, mantissa_bits: int) -> bool:
    """Whether steps in parts of ``2^-24`` fit in 31 bits, and float32 has what takes a value there."""
    exponents = (mantissa_bits + RANDOM_BITS - e for e in (fmt.emin, fmt.emax))
    return mantissa_bits <= _IN_FIXED_POINT and all(-_BIAS < e <= _BIAS for e in exponents)


def _stochastic_fixed(parts: Tensor, draws: Tensor) -> Tensor:
    """The same of ``2^24`` parts of a step: a fraction exceeds a draw where the two carry into the whole steps.

    What is less than a part counts as one: every draw is below it.
    """
    return (parts.ceil().to(torch.int32) + (draws ^ ((1 << RANDOM_BITS) - 1))) >> RANDOM_BITS


def _nearest(steps: Tensor, below: Tensor, mantissa_bits: int) -> Tensor:
    """Ties to the even code: the even multiple, but without mantissa bits the binade decides."""
    whole = torch.round(steps).to(torch.int32)
    if mantissa_bits:
        return whole
    return whole - (steps == 1.5).to(torch.int32) * (below & 1)


# Codes with what rounding left beside them


def joined_codes(codes: Tensor, residual: Tensor, fmt: FloatFormat, bits: int) -> Tensor:
    """Code and residual as one signed code of the format with that many more mantissa bits."""
    negative = -((codes & fmt.sign_bit) >> (fmt.bits - 1))
    signed = ((codes & (fmt.sign_bit - 1)) ^ negative) - negative
    return (signed << bits) + residual


def split_codes(signed: Tensor, fmt: FloatFormat, bits: int, old: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest code and what is left, between ``-2^(bits-1)`` and ``2^(bits-1) - 1`` parts of a step.

    Of the two zeros it is -0 where the ``old`` code was.
    """
    nearest = (signed + (1 << (bits - 1))) >> bits
    codes = torch.where(nearest == 0, (old == fmt.sign_bit) * fmt.sign_bit, nearest.abs() | (nearest & fmt.sign_bit))
    return codes, signed - (nearest << bits)


def unless_special(codes: Tensor, old: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes (int32) as bytes, but codes of NaN stay what they are: the step knows only finite weights."""
    if fmt.nan_codes:
        old = old.to(torch.int32)
        special = old == fmt.nan_codes[0] if len(fmt.nan_codes) == 1 else (old & (fmt.sign_bit - 1)) > fmt.max_code
        codes = torch.where(special, old, codes)
    return codes.to(torch.uint8)
