"""Ordinary parameters in bfloat16 and float16: stored with one stochastic rounding, or they stall as codes would.

An update below half a spacing, ``2^-9`` of a bfloat16 weight, is lost to rounding to nearest in every step.
"""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold.optim._writeback import rule_of

__all__ = ["rounds_at_random", "to_half"]

_HALVES: Final = (torch.bfloat16, torch.float16)
_EXPONENT, _MAGNITUDE, _SIGN = 0x7F800000, 0x7FFFFFFF, -(2**31)
_LARGEST_BFLOAT16, _LARGEST_FLOAT16 = 0x7F7F0000, 65504.0


def rounds_at_random(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether what is stored as floats is rounded stochastically: halves, but under the write-back ``nearest``."""
    return parameter.dtype in _HALVES and (group["writeback"] is None or rule_of(group).draws)


def to_half(x: Tensor, dtype: torch.dtype, draws: Tensor) -> Tensor:
    """One of the two neighbours of every value, away from zero with the odds of what would be cut off.

    .. math:: P(b) = \\frac{|x| - a}{b - a}, \\qquad a \\le |x| < b

    Values stay, -0, NaN and Inf too; finite ones beyond the largest value become that, and no draw makes them Inf.

    Args:
        x: float32.
        dtype: bfloat16 or float16.
        draws: 24 random bits each (int32), of which bfloat16 takes the upper 16: exact odds.
    """
    bits = x.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    rounded = _bfloat16_bits(magnitude, draws) if dtype is torch.bfloat16 else _float16_bits(magnitude, draws)
    stored = torch.where(magnitude < _EXPONENT, rounded, magnitude) | (bits & _SIGN)
    return stored.view(torch.float32).to(dtype)


def _bfloat16_bits(magnitude: Tensor, draws: Tensor) -> Tensor:
    """What is cut off carries into the rest where it exceeds the draw."""
    return ((magnitude + ((draws >> 8) ^ 0xFFFF)) & -65536).clamp(max=_LARGEST_BFLOAT16)


def _float16_bits(magnitude: Tensor, draws: Tensor) -> Tensor:
    """Whole spacings, which float16's subnormals bound from below, and one more where the rest exceeds the draw."""
    power = (magnitude & _EXPONENT).clamp(min=(127 - 14) << 23)
    steps = magnitude.view(torch.float32) * (((2 * 127 + 10) << 23) - power).view(torch.float32)
    whole = steps.to(torch.int32)
    away = draws.to(torch.float32) * 2.0**-24 < steps - whole.to(torch.float32)
    value = (whole + away.to(torch.int32)).to(torch.float32) * (power - (10 << 23)).view(torch.float32)
    return value.clamp(max=_LARGEST_FLOAT16).view(torch.int32)
