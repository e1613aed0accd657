"""Decoding, rounding and encoding whole arrays on a GPU: a launch each, and None where that is not to be had."""

from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold._triton import options
from fp8manifold._triton.kinds import as_constants, format_of
from fp8manifold.formats import FloatFormat

__all__ = ["decode_on_gpu", "encode_on_gpu", "round_on_gpu"]

_ELEMENTS: Final = 2048
"""Of a program."""


def decode_on_gpu(
    codes: Tensor, fmt: FloatFormat, dtype: torch.dtype, scale: Tensor | None, *, spacing: bool
) -> Tensor | None:
    """``scale * decode(codes)``, or the spacings; 3 bytes a weight move for bfloat16."""
    matrix = _matrix(codes, scale)
    if matrix is None:
        return None
    from fp8manifold._triton.arrays import decode_kernel

    scale, shape, grid, tile = matrix
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    bits = out.view(torch.uint16) if dtype is torch.bfloat16 else out
    _launch(decode_kernel, grid, codes, (codes, scale, bits, *shape, _constants_of(fmt), spacing, *tile))
    return out


def round_on_gpu(
    x: Tensor, fmt: FloatFormat, keys: tuple[int, ...] | None, scale: Tensor | None, *, rescale: bool
) -> Tensor | None:
    """``scale * round(x / scale)``.

    Keys are three round keys and a phase, the first with the position of the first element.
    """
    matrix = _matrix(x, scale)
    if matrix is None:
        return None
    from fp8manifold._triton.arrays import round_kernel

    places, shape, grid, tile = matrix
    out = torch.empty_like(x)
    facts = (_constants_of(fmt), keys is not None, scale is not None, rescale)
    _launch(round_kernel, grid, x, (x, places, out, _words(keys, x.device), *shape, *facts, *tile))
    return out


def encode_on_gpu(
    x: Tensor, fmt: FloatFormat, keys: tuple[int, ...] | None, scale: Tensor | None = None
) -> Tensor | None:
    """The codes of ``x / scale``."""
    matrix = _matrix(x, scale)
    if matrix is None:
        return None
    from fp8manifold._triton.arrays import encode_kernel

    places, shape, grid, tile = matrix
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    bits = x.view(torch.uint16) if x.dtype is torch.bfloat16 else x
    facts = (_constants_of(fmt), keys is not None, format_of(fmt).fixed(), scale is not None)
    _launch(encode_kernel, grid, x, (bits, places, out, _words(keys, x.device), *shape, *facts, *tile))
    return out


Matrix = tuple[Tensor, tuple[int, int, int], int, tuple[int, int]]
"""Scales; rows, length and programs a row; programs; rows and columns of a program."""


def _matrix(x: Tensor, scale: Tensor | None) -> Matrix | None:
    rows = 1 if scale is None else scale.numel()
    length, rest = divmod(x.numel(), rows)
    if rest or (scale is not None and scale.device != x.device):
        return None
    width = min(_ELEMENTS, 1 << (length - 1).bit_length())
    tile = (_ELEMENTS // width, width)
    in_row = -(-length // width)
    scale = _one(x.device) if scale is None else scale
    return scale, (rows, length, in_row), -(-rows // tile[0]) * in_row, tile


def _launch(kernel: Any, grid: int, x: Tensor, arguments: tuple[Any, ...]) -> None:
    with torch.cuda.device(x.device if x.is_cuda else -1):
        kernel[(grid,)](*arguments, **options())


@lru_cache(maxsize=256)
def _constants_of(fmt: FloatFormat) -> Any:
    return as_constants(format_of(fmt))


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def _words(keys: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Keys on the device, uint32: an argument that happens to be 1 would be a constant, and compiled for anew."""
    words = torch.from_numpy(np.array(keys or (0, 0, 0, 0), dtype=np.int32))
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    return words.view(torch.uint32)
