"""The bit fields of the floats that the library computes in.

Their exponent field gives the power of two below a number exactly, without a logarithm::

    6.5 = 1.625 * 2^2      0 10000001 10100000000000000000000
    & exponent mask        0 10000001 00000000000000000000000   = 4.0

    2^n                    (n + bias) << mantissa bits

Fields of positive numbers are ordered like the numbers, so that an integer maximum with
the field of ``2^emin`` is the lower end of the exponent.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fp8manifold.formats import FloatFormat

Exponent = TypeVar("Exponent", int, Tensor)


@dataclass(frozen=True)
class FloatBits:
    """The fields of an IEEE float, and the integer dtype of its width."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int
    exponent_mask: int
    sign_mask: int

    def power_of_two(self, exponent: Exponent) -> Exponent:
        """Return the bits of ``2^exponent``."""
        return (exponent + self.bias) << self.mantissa_bits


_FIELDS = {
    torch.float32: FloatBits(torch.int32, 23, 127, 0x7F800000, -(2**31)),
    torch.float64: FloatBits(torch.int64, 52, 1023, 0x7FF0000000000000, -(2**63)),
}
_HALVES = (torch.float16, torch.bfloat16)


def float_bits(dtype: torch.dtype) -> FloatBits:
    return _FIELDS[dtype]


def working_dtype(x: Tensor, name: str = "x") -> torch.dtype:
    """Return the dtype ``x`` is computed in: float64 for float64, else float32.

    Raises:
        TypeError: ``x`` is no tensor, or of another dtype than the four common floats.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.dtype in _HALVES:
        return torch.float32
    if x.dtype not in _FIELDS:
        raise TypeError(
            f"{name} has dtype {x.dtype}: float16, bfloat16, float32 or float64 is needed"
        )
    return x.dtype


def check_holds(dtype: torch.dtype, fmt: FloatFormat) -> None:
    """Raise TypeError unless every finite value of ``fmt`` is a value of ``dtype``."""
    if dtype is torch.float16 and (fmt.max > 65504 or fmt.ulp_min < 2.0**-24):
        raise TypeError(
            f"float16 can't hold {fmt.name}, whose values reach from {fmt.ulp_min:g} to "
            f"{fmt.max:g}: use bfloat16, float32 or float64"
        )


def binade(x: Tensor, lowest: int | Tensor) -> Tensor:
    """Return ``2^max(floor(log2|x|), lowest)`` of a float32 or float64 tensor, exactly.

    Inf and NaN give Inf.
    """
    fields = _FIELDS[x.dtype]
    bits = x.view(fields.integer) & fields.exponent_mask
    if isinstance(lowest, Tensor):
        lowest_bits = fields.power_of_two(lowest.to(fields.integer))
        return torch.maximum(bits, lowest_bits).view(x.dtype)
    return bits.clamp_min_(fields.power_of_two(lowest)).view(x.dtype)
