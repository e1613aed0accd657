"""Operands of products in 8 bits, made on a GPU: a launch each, two for columns."""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._triton import is_interpreted, options
from fp8manifold._triton.kinds import as_constants, format_of
from fp8manifold.formats import as_format

__all__ = ["columns_on_gpu", "int8_on_gpu", "int8_rows_on_gpu", "rows_on_gpu", "transpose_on_gpu"]

_E4M3, _INT8 = 0x43E00000, 0x42FE0000  # float32 bits of 448 and 127
_IN_REGISTERS: Final = 16384
_ELEMENTS: Final = 2048
_TILE: Final = (128, 64)


def rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3's codes (M, K) of rows and their scales (M, 1): read once up to 16,384 values a row, and twice beyond.

    Args:
        x: (M, K) of bfloat16, float16 or float32.
        fold: powers of two that multiply the columns first: float32, K of them or one.
    """
    return _rows(x, fold, _E4M3)


def int8_rows_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same in whole numbers from -127 to 127."""
    codes, scales = _rows(x, fold, _INT8)
    return codes.view(torch.int8), scales


def columns_on_gpu(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """E4M3's codes (N, M) of the columns of (M, N) and their scales (N, 1); ``fold`` has M factors of rows or one."""
    (height, width), x = x.shape, _by_rows(x)
    amax = torch.zeros(width, dtype=torch.int32, device=x.device)
    codes = torch.empty((width, height), dtype=torch.uint8, device=x.device)
    scales = torch.empty((width, 1), device=x.device)
    folded, folds = (scales, 0) if fold is None else (fold.contiguous(), min(fold.numel(), 2))
    sizes, facts = (height, width, x.stride(0)), (folds, *_TILE)
    _launch("amax_kernel", _tiles(height, width), (x, folded, amax, *sizes, *facts))
    arguments = (x, folded, amax, codes, scales, *sizes, _E4M3, _format(x.device), *facts)
    _launch("columns_kernel", _tiles(height, width), arguments)
    return codes, scales


def transpose_on_gpu(codes: Tensor) -> Tensor:
    """A copy of (N, K) by columns: uint8 (K, N)."""
    return _copied(codes, integers=False, transposed=True)


def int8_on_gpu(codes: Tensor, transposed: bool) -> Tensor:
    """The whole numbers of E1M6's codes, in units of its spacing: int8 (N, K), or (K, N)."""
    return _copied(codes, integers=True, transposed=transposed).view(torch.int8)


def _rows(x: Tensor, fold: Tensor | None, largest: int) -> tuple[Tensor, Tensor]:
    (height, width), x = x.shape, _by_rows(x)
    codes = torch.empty((height, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((height, 1), device=x.device)
    rows, columns, warps = _program(width)
    folded, folds = (scales, 0) if fold is None else (fold.contiguous(), min(fold.numel(), 2))
    facts = (largest, _format(x.device), folds, width > _IN_REGISTERS, rows, columns)
    arguments = (x, folded, codes, scales, height, width, x.stride(0), *facts)
    _launch("rows_kernel", (max(1, -(-height // rows)),), arguments, warps)
    return codes, scales


def _copied(codes: Tensor, *, integers: bool, transposed: bool) -> Tensor:
    (height, width), codes = codes.shape, codes.contiguous()
    out = torch.empty((width, height) if transposed else (height, width), dtype=torch.uint8, device=codes.device)
    _launch("copy_kernel", _tiles(height, width), (codes, out, height, width, integers, transposed, *_TILE))
    return out


def _by_rows(x: Tensor) -> Tensor:
    """A matrix whose rows are contiguous, at any distance from each other; of bfloat16 its bits."""
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
    """None where the card converts to E4M3 itself; elsewhere, and in the interpreter, what its bits are made from."""
    if device.type == "cuda" and not is_interpreted() and torch.cuda.get_device_capability(device) >= (8, 9):
        return None
    return as_constants(format_of(as_format("E4M3")))


@cache
def _options(warps: int) -> dict[str, bool | int]:
    return options() | {"num_warps": warps}


@cache
def _kernel(name: str) -> Any:
    from fp8manifold._triton import operand_kernels

    return getattr(operand_kernels, name)


def _launch(name: str, grid: tuple[int, ...], arguments: tuple[Any, ...], warps: int = 4) -> None:
    with torch.cuda.device(arguments[0].device if arguments[0].is_cuda else -1):
        _kernel(name)[grid](*arguments, **_options(warps))
