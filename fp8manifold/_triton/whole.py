"""Whole arrays on a GPU, one launch each: decoded, rounded, encoded, and operands of
products in 8 bits.
"""

from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold._triton import is_interpreted, options
from fp8manifold._triton.kinds import as_constants, format_of
from fp8manifold.formats import FloatFormat, as_format

_ELEMENTS: Final = 2048  #: Elements that a program takes.
_E4M3, _INT8 = 0x43E00000, 0x42FE0000  # float32 bits of 448 and 127
_IN_REGISTERS: Final = 16384
_TILE: Final = (128, 64)


def array_on_gpu(
    made: str,
    x: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    keys: tuple[int, ...] | None = None,
    *,
    rescale: bool = False,
    spacing: bool = False,
) -> Tensor | None:
    """A contiguous array through ``decode``, ``round`` or ``encode``; None where scales
    do not fit it.

    ``scale`` is float32, one in all or one for each of equal runs. ``keys`` are three
    round keys and a phase, the first with the position of the first element.
    """
    rows = 1 if scale is None else scale.numel()
    length, rest = divmod(x.numel(), rows)
    if rest or (scale is not None and scale.device != x.device):
        return None
    width = min(_ELEMENTS, 1 << (length - 1).bit_length())
    tile = (_ELEMENTS // width, width)
    in_row = -(-length // width)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    given, target = (
        part.view(torch.uint16) if part.dtype is torch.bfloat16 else part for part in (x, out)
    )
    arrays: tuple[Tensor, ...] = (given, _one(x.device) if scale is None else scale, target)
    facts: tuple[bool, ...] = (spacing,)
    if made != "decode":
        arrays = (*arrays, _words(keys, x.device))
        fixed = (format_of(fmt).fixed(),) if made == "encode" else ()
        facts = (
            keys is not None,
            *fixed,
            scale is not None,
            *([rescale] if made == "round" else []),
        )
    grid = -(-rows // tile[0]) * in_row
    _launch(
        f"{made}_kernel",
        (grid,),
        (*arrays, rows, length, in_row, _constants_of(fmt), *facts, *tile),
    )
    return out


@lru_cache(maxsize=256)
def _constants_of(fmt: FloatFormat) -> Any:
    return as_constants(format_of(fmt))


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def _words(keys: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Keys on the device, uint32: an argument that happens to be 1 would be compiled
    for as a constant.
    """
    words = torch.from_numpy(np.array(keys or (0, 0, 0, 0), dtype=np.int32))
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    return words.view(torch.uint32)


def rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3 codes (M, K) of rows, read once up to 16,384 values, and scales (M, 1);
    ``fold`` has K factors or one.
    """
    return _rows(x, fold, _E4M3)


def int8_rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows and scales as :func:`rows_on_gpu` makes them, in whole numbers from -127 to
    127.
    """
    codes, scales = _rows(x, fold, _INT8)
    return codes.view(torch.int8), scales


def columns_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3's codes (N, M) of the columns of (M, N) and their scales (N, 1); ``fold``
    has M factors of rows or one.
    """
    (height, width), x = x.shape, _by_rows(x)
    amax = torch.zeros(width, dtype=torch.int32, device=x.device)
    codes = torch.empty((width, height), dtype=torch.uint8, device=x.device)
    scales = torch.empty((width, 1), device=x.device)
    folded, folds = _folds(fold, scales)
    sizes, facts = (height, width, x.stride(0)), (folds, *_TILE)
    _launch("amax_kernel", _tiles(height, width), (x, folded, amax, *sizes, *facts))
    arguments = (x, folded, amax, codes, scales, *sizes, _E4M3, _format(x.device), *facts)
    _launch("columns_kernel", _tiles(height, width), arguments)
    return codes, scales


def copied_on_gpu(codes: Tensor, *, integers: bool, transposed: bool) -> Tensor:
    """A copy of (N, K), ``transposed`` to (K, N), of bytes or of E1M6's codes as
    ``integers`` of its spacing: int8.
    """
    (height, width), codes = codes.shape, codes.contiguous()
    out = torch.empty(
        (width, height) if transposed else (height, width), dtype=torch.uint8, device=codes.device
    )
    _launch(
        "copy_kernel",
        _tiles(height, width),
        (codes, out, height, width, integers, transposed, *_TILE),
    )
    return out.view(torch.int8) if integers else out


def _rows(x: Tensor, fold: Tensor | None, largest: int) -> tuple[Tensor, Tensor]:
    (height, width), x = x.shape, _by_rows(x)
    codes = torch.empty((height, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((height, 1), device=x.device)
    rows, columns, warps = _program(width)
    folded, folds = _folds(fold, scales)
    facts = (largest, _format(x.device), folds, width > _IN_REGISTERS, rows, columns)
    arguments = (x, folded, codes, scales, height, width, x.stride(0), *facts)
    _launch("rows_kernel", (max(1, -(-height // rows)),), arguments, warps)
    return codes, scales


def _folds(fold: Tensor | None, instead: Tensor) -> tuple[Tensor, int]:
    """Factors, or any tensor in their place, and 2 for several, 1 for one in all, 0 for
    none.
    """
    return (instead, 0) if fold is None else (fold.contiguous(), min(fold.numel(), 2))


def _by_rows(x: Tensor) -> Tensor:
    """A matrix whose rows are contiguous, at any distance from each other; bfloat16 as
    its bits.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    return x.view(torch.uint16) if x.dtype is torch.bfloat16 else x


def _tiles(height: int, width: int) -> tuple[int, int]:
    """Programs, one at least: there may be nothing to read, and scales of it to write."""
    return max(1, -(-height // _TILE[0])), max(1, -(-width // _TILE[1]))


@cache
def _program(width: int) -> tuple[int, int, int]:
    """Rows, columns and warps."""
    columns = _IN_REGISTERS // 2 if width > _IN_REGISTERS else 1 << max(width - 1, 0).bit_length()
    rows = max(1, _ELEMENTS // columns)
    return rows, columns, max(4, rows * columns // 1024)


@cache
def _format(device: torch.device) -> Any:
    """None where the GPU converts to E4M3 itself; elsewhere, and in the interpreter,
    the facts to compute its bits.
    """
    if (
        device.type == "cuda"
        and not is_interpreted()
        and torch.cuda.get_device_capability(device) >= (8, 9)
    ):
        return None
    return as_constants(format_of(as_format("E4M3")))


@cache
def _kernel(name: str) -> Any:
    from fp8manifold._triton import arrays

    return getattr(arrays, name)


@cache
def _options(warps: int) -> dict[str, bool | int]:
    return options() | {"num_warps": warps}


def _launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], warps: int = 4) -> None:
    with torch.cuda.device(arguments[0].device if arguments[0].is_cuda else -1):
        _kernel(name)[grid](*arguments, **_options(warps))
