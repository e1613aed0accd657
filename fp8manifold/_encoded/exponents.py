"""Scales of blocks as they are kept: the exponent of a power of two, a byte, as E8M0 has it."""

from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.squares import BlockSize
from fp8manifold._encoded.storage import expand_scale, is_traced

__all__ = ["ONE", "checked_exponents", "decoded_scale", "expand_kept", "exponents_of"]

ONE: Final = 127
"""The byte of a scale of 1."""
_MANTISSA_BITS: Final = 23
_ENDS: Final = "from 2^-126 to 2^127"


def exponents_of(scale: Tensor) -> Tensor:
    """The byte ``e`` of each scale ``2^(e - 127)``.

    Args:
        scale: float32.

    Raises:
        ValueError: an entry that is no power of two from 2^-126 to 2^127.
    """
    bits = scale.view(torch.int32)
    exponents = bits >> _MANTISSA_BITS
    if not is_traced(scale):
        wrong = (exponents << _MANTISSA_BITS != bits) | (exponents < 1) | (exponents > 254)
        if bool(wrong.any()):
            entry = scale[wrong][0].item()
            raise ValueError(f"scale holds {entry:g}: every entry must be a power of two, those of blocks {_ENDS}")
    return exponents.to(torch.uint8)


def decoded_scale(exponents: Tensor) -> Tensor:
    """The way back, float32; 0 for a byte of 0, which is memory without values."""
    return (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def expand_kept(kept: Tensor, block_size: BlockSize, shape: torch.Size) -> Tensor:
    """Scales, as they are kept, in a shape that broadcasts against the values."""
    return expand_scale(decoded_scale(kept) if block_size else kept, block_size, shape)


def checked_exponents(exponents: Tensor) -> Tensor:
    """Bytes as files have them.

    Raises:
        ValueError: 0 or 255, which stand for 2^-127 and NaN.
    """
    if not is_traced(exponents):
        wrong = (exponents == 0) | (exponents == 255)
        if bool(wrong.any()):
            entry = int(exponents[wrong][0])
            raise ValueError(f"scale holds the exponent {entry}: those of blocks are 1 to 254, {_ENDS}")
    return exponents
