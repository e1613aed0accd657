"""Torch's own 8-bit float dtypes: which formats have one, and codes seen as it and back."""

from typing import Final

import torch
from torch import Tensor

from fp8manifold.formats import FloatFormat, as_format

__all__ = ["FLOAT8", "as_codes", "as_float8", "float8_format"]

FLOAT8: Final[dict[FloatFormat, torch.dtype]] = {
    as_format("E4M3"): torch.float8_e4m3fn,
    as_format("E5M2"): torch.float8_e5m2,
    as_format("E4M3FNUZ"): torch.float8_e4m3fnuz,
    as_format("E5M2FNUZ"): torch.float8_e5m2fnuz,
}
"""The formats whose codes torch reads as numbers, and the dtypes in which it does."""

_IN_FILES: Final = ("E4M3", "E5M2")
"""Those that every release of safetensors can write."""


def as_float8(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes as the numbers that files hold, where they have a dtype for them; the others stay uint8."""
    return codes.view(FLOAT8[fmt]) if fmt.name in _IN_FILES else codes


def as_codes(tensor: Tensor) -> Tensor:
    """The codes of a tensor of one of the float8 dtypes; any other stays as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8.values() else tensor


def float8_format(dtype: torch.dtype) -> FloatFormat | None:
    """The format whose codes a dtype has, or None."""
    return next((fmt for fmt, known in FLOAT8.items() if known == dtype), None)
