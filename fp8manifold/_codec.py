"""Codes to values and back as integer arithmetic on float32 fields: what a compiler fuses into one pass.

No tables and no float32 subnormals, which some processors handle a hundred times more slowly; bit for bit what
:func:`fp8manifold.encode` and :func:`fp8manifold.decode` give, eager and compiled.
"""

import math

import torch
from torch import Tensor

from fp8manifold.formats import FloatFormat
from fp8manifold.random_bits import RANDOM_BITS

__all__ = ["decode_bits", "decode_with_ulp", "encode_bits", "encode_finite"]

_MANTISSA, _BIAS = 23, 127
_EXPONENT_MASK, _MAGNITUDE_MASK = 0x7F800000, 0x7FFFFFFF


def decode_with_ulp(codes: Tensor, fmt: FloatFormat, extra_bits: int = 0) -> tuple[Tensor, Tensor]:
    """Values and spacing of the finite codes of ``fmt``; codes of NaN and Inf come out as numbers beyond ``max``.

    .. math:: S = 2^{\\max(E, 1) - bias - M}, \\qquad x = \\pm (code - (\\max(E, 1) - 1) 2^M) S

    Args:
        codes: uint8, or int32 with ``extra_bits`` more mantissa bits and the sign in the same place above them.
        fmt: the format.
        extra_bits: mantissa bits beyond the format's own.

    Returns:
        Two float32 tensors of ``codes``' shape, in units of the scale.
    """
    m = fmt.mantissa_bits + extra_bits
    sign = fmt.sign_bit << extra_bits
    code = codes.to(torch.int32)
    magnitude = code & (sign - 1)
    exponent = (magnitude >> m).clamp(min=1)
    ulp = ((exponent + (_BIAS - fmt.bias - m)) << _MANTISSA).view(torch.float32)
    steps = magnitude - (exponent << m) + (1 << m)
    value = (steps.to(torch.float32) * ulp).view(torch.int32)
    signs = (code & sign) << (32 - fmt.bits - extra_bits)
    return (value | signs).view(torch.float32), ulp


def decode_bits(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Values of any codes, NaN and Inf included: float32, in units of the scale."""
    value, _ = decode_with_ulp(codes, fmt)
    if fmt.inf_code is not None:
        value = torch.where((codes & (fmt.sign_bit - 1)) == fmt.inf_code, value * math.inf, value)
    if not fmt.nan_codes:
        return value
    if len(fmt.nan_codes) == 1:
        return torch.where(codes == fmt.nan_codes[0], math.nan, value)
    return torch.where((codes & (fmt.sign_bit - 1)) >= fmt.nan_codes[0], math.nan, value)


def encode_finite(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None, extra_bits: int = 0) -> Tensor:
    """Codes (int32) of the rounded values of ``x``, which holds no NaN; what is out of range saturates.

    Args:
        x: float32, in units of the scale.
        fmt: the format.
        draws: 24-bit int32 draws for stochastic rounding; None rounds to nearest, ties to even codes.
        extra_bits: mantissa bits beyond the format's own, for a grid that much finer.
    """
    m = fmt.mantissa_bits + extra_bits
    bits = x.view(torch.int32)
    magnitude = (bits & _MAGNITUDE_MASK).clamp(max=_top(fmt))
    power = (magnitude & _EXPONENT_MASK).clamp(min=(_BIAS + fmt.emin) << _MANTISSA)
    reciprocal = (((2 * _BIAS + m) << _MANTISSA) - power).view(torch.float32)
    steps = magnitude.view(torch.float32) * reciprocal
    if fmt.ulp_min > 1:  # the quotient of the smallest floats underflows, where a draw of 0 must still see it
        steps = torch.maximum(steps, magnitude.view(torch.float32).clamp(max=2.0**-100))
    binade_codes = power >> (_MANTISSA - m)
    whole = _nearest(steps, binade_codes, m, _BIAS + fmt.emin) if draws is None else _stochastic(steps, draws)
    code = whole + binade_codes - ((_BIAS + fmt.emin) << m)
    sign = fmt.sign_bit << extra_bits
    signs = (bits >> (32 - fmt.bits - extra_bits)) & sign
    return code | signs if fmt.has_negative_zero else code + ((code + (sign - 1)) & signs)


def encode_bits(x: Tensor, fmt: FloatFormat, draws: Tensor | None = None) -> Tensor:
    """uint8 codes of the rounded values of ``x`` (float32, units of the scale); NaN gives the format's NaN code.

    A format without one has nothing to give: its callers look for NaN first.
    """
    codes = encode_finite(x, fmt, draws).to(torch.uint8)
    return codes if fmt.nan_code is None else torch.where(x.isnan(), fmt.nan_code, codes)


def _top(fmt: FloatFormat) -> int:
    """float32 bits of the format's largest value."""
    mantissa, exponent = math.frexp(fmt.max)
    return ((exponent - 1 + _BIAS) << _MANTISSA) + int((mantissa * 2 - 1) * 2**_MANTISSA)


def _stochastic(steps: Tensor, draws: Tensor) -> Tensor:
    """Whole steps, one more where the fraction exceeds the draw: the sign bit of their difference says so."""
    whole = steps.to(torch.int32)
    fraction = steps - whole.to(torch.float32)
    return whole - ((draws.to(torch.float32) * 2.0**-RANDOM_BITS - fraction).view(torch.int32) >> 31)


def _nearest(steps: Tensor, binade_codes: Tensor, mantissa_bits: int, lowest: int) -> Tensor:
    """Ties to the even code: the even multiple, but without mantissa bits the binade decides."""
    whole = torch.round(steps).to(torch.int32)
    if mantissa_bits:
        return whole
    return whole - (steps == 1.5).to(torch.int32) * ((binade_codes + lowest) & 1)
