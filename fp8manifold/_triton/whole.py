"""Kernels over one array on a GPU, one launch each.

::

    array_on_gpu                 decode, round or encode an array
    rows_on_gpu, int8_rows_on_gpu, columns_on_gpu
                                 operands of products in 8 bits: codes and scales of the
                                 rows of a matrix, or of its columns, transposed
    copied_on_gpu                codes of an operand, transposed or as whole numbers

The kernels are those of :mod:`fp8manifold._triton.arrays`.
"""

from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold._triton import is_interpreted, options
from fp8manifold._triton.kinds import as_constants, format_of
from fp8manifold.formats import FloatFormat, as_format

_ELEMENTS_PER_PROGRAM: Final = 2048
"""Elements that a program takes."""
_LARGEST_E4M3: Final = 0x43E00000  # float32 bits of 448
_LARGEST_INT8: Final = 0x42FE0000  # float32 bits of 127
_IN_REGISTERS: Final = 16384
"""The longest row that is read once."""
_TILE: Final = (128, 64)


def array_on_gpu(
    kernel: str,
    x: Tensor,
    fmt: FloatFormat,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    keys: tuple[int, ...] | None = None,
    *,
    rescale: bool = False,
) -> Tensor | None:
    """Run ``decode``, ``round`` or ``encode`` over a contiguous array.

    Return None where scales do not fit it.

    Args:
        kernel: its name.
        x: codes or values.
        fmt: their format.
        dtype: that of the result.
        scale: float32, one in all or one for each of equal runs.
        keys: three round keys and a phase, the first with the position of the first
            element added; None rounds to nearest.
        rescale: whether rounded values are multiplied by the scale again.
    """
    rows = 1 if scale is None else scale.numel()
    length, remainder = divmod(x.numel(), rows)
    if remainder or (scale is not None and scale.device != x.device):
        return None
    width = min(_ELEMENTS_PER_PROGRAM, 1 << (length - 1).bit_length())
    tile_rows = _ELEMENTS_PER_PROGRAM // width
    in_row = -(-length // width)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = _one(x.device) if scale is None else scale
    arrays: tuple[Tensor, ...] = (_as_kernels_take(x), scales, _as_kernels_take(out))
    constants: tuple[bool, ...] = ()
    if kernel != "decode":
        arrays = (*arrays, _words(keys, x.device))
        constants = (keys is not None,)
        if kernel == "encode":
            constants = (*constants, format_of(fmt).in_fixed_point())
        constants = (*constants, scale is not None)
        if kernel == "round":
            constants = (*constants, rescale)
    programs = -(-rows // tile_rows) * in_row
    sizes = (rows, length, in_row)
    arguments = (*arrays, *sizes, _constants_of(fmt), *constants, tile_rows, width)
    _launch(f"{kernel}_kernel", (programs,), arguments)
    return out


def _as_kernels_take(x: Tensor) -> Tensor:
    """Return bfloat16 as its bits, and everything else as it is."""
    return x.view(torch.uint16) if x.dtype is torch.bfloat16 else x


@lru_cache(maxsize=256)
def _constants_of(fmt: FloatFormat) -> Any:
    return as_constants(format_of(fmt))


@lru_cache(maxsize=16)
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)


def _words(keys: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Return keys on the device, uint32.

    An argument that happens to be 1 would be compiled for as a constant.
    """
    words = torch.from_numpy(np.array(keys or (0, 0, 0, 0), dtype=np.int32))
    if device.type == "cuda":
        words = words.pin_memory().to(device, non_blocking=True)
    return words.view(torch.uint32)


# --------------------------------------------------------------------------------------
# Operands of products


def rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (M, K) of ``x * fold``, and a scale for each row (M, 1).

    Rows of up to 16,384 values are read once. ``fold`` has K factors or one.
    """
    return _rows_and_scales(x, fold, _LARGEST_E4M3)


def int8_rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`rows_on_gpu`, in whole numbers from -127 to 127."""
    codes, scales = _rows_and_scales(x, fold, _LARGEST_INT8)
    return codes.view(torch.int8), scales


def columns_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (N, M) of the columns of ``fold * x``, and their scales (N, 1).

    ``x`` is (M, N), and ``fold`` has M factors of rows or one.
    """
    height, width = x.shape
    x = _with_contiguous_rows(x)
    amax = torch.zeros(width, dtype=torch.int32, device=x.device)
    codes = torch.empty((width, height), dtype=torch.uint8, device=x.device)
    scales = torch.empty((width, 1), dtype=torch.float32, device=x.device)
    factors, folds = _fold_arguments(fold, scales)
    grid = _tile_grid(height, width)
    sizes = (height, width, x.stride(0))
    _launch("amax_kernel", grid, (x, factors, amax, *sizes, folds, *_TILE))
    constants = (_LARGEST_E4M3, _e4m3_constants(x.device), folds, *_TILE)
    _launch("columns_kernel", grid, (x, factors, amax, codes, scales, *sizes, *constants))
    return codes, scales


def copied_on_gpu(codes: Tensor, *, integers: bool, transposed: bool) -> Tensor:
    """Return a copy of (N, K), ``transposed`` to (K, N).

    With ``integers``, E1M6's codes become whole numbers of its spacing, int8.
    """
    height, width = codes.shape
    codes = codes.contiguous()
    shape = (width, height) if transposed else (height, width)
    out = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    arguments = (codes, out, height, width, integers, transposed, *_TILE)
    _launch("copy_kernel", _tile_grid(height, width), arguments)
    return out.view(torch.int8) if integers else out


def _rows_and_scales(x: Tensor, fold: Tensor | None, largest: int) -> tuple[Tensor, Tensor]:
    """Return codes of rows and their scales; ``largest`` is float32 bits."""
    height, width = x.shape
    x = _with_contiguous_rows(x)
    codes = torch.empty((height, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((height, 1), dtype=torch.float32, device=x.device)
    rows, columns, warps = _program(width)
    factors, folds = _fold_arguments(fold, scales)
    sizes = (height, width, x.stride(0))
    is_long = width > _IN_REGISTERS
    constants = (largest, _e4m3_constants(x.device), folds, is_long, rows, columns)
    arguments = (x, factors, codes, scales, *sizes, *constants)
    _launch("rows_kernel", (max(1, -(-height // rows)),), arguments, warps)
    return codes, scales


def _fold_arguments(fold: Tensor | None, placeholder: Tensor) -> tuple[Tensor, int]:
    """Return factors and FOLDS: 2 for several, 1 for one in all, 0 for none.

    Without factors a kernel gets any tensor in their place.
    """
    if fold is None:
        return placeholder, 0
    return fold.contiguous(), min(fold.numel(), 2)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous, at any distance from each other."""
    return _as_kernels_take(x if x.stride(1) == 1 else x.contiguous())


def _tile_grid(height: int, width: int) -> tuple[int, int]:
    """Return the grid of programs, one at least.

    There may be nothing to read, and scales of it to write.
    """
    return max(1, -(-height // _TILE[0])), max(1, -(-width // _TILE[1]))


@cache
def _program(width: int) -> tuple[int, int, int]:
    """Return rows, columns and warps of a program over whole rows."""
    columns = _IN_REGISTERS // 2 if width > _IN_REGISTERS else 1 << max(width - 1, 0).bit_length()
    rows = max(1, _ELEMENTS_PER_PROGRAM // columns)
    return rows, columns, max(4, rows * columns // 1024)


@cache
def _e4m3_constants(device: torch.device) -> Any:
    """Return the constants of E4M3, or None where the GPU converts to it itself.

    The interpreter always needs them.
    """
    has_capability = (
        device.type == "cuda"
        and not is_interpreted()
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )
    return None if has_capability else as_constants(format_of(as_format("E4M3")))


# --------------------------------------------------------------------------------------
# Launches


@cache
def _kernel(name: str) -> Any:
    from fp8manifold._triton import arrays

    return getattr(arrays, name)


@cache
def _options(warps: int) -> dict[str, bool | int]:
    return options() | {"num_warps": warps}


def _launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], warps: int = 4) -> None:
    """Launch a kernel on the device of its first argument."""
    first = arguments[0]
    # -1 leaves the current device as it is.
    with torch.cuda.device(first.device if first.is_cuda else -1):
        _kernel(name)[grid](*arguments, **_options(warps))
