"""Operands of products on hardware for FP8 and INT8.

An activation or gradient becomes rows of codes, each at a power-of-two scale of its own
(``round_rows``, ``round_columns``, ``int8_rows``). The bytes of a weight in codes are
copied into the layout and dtype that the product wants (``transpose_bytes``,
``codes_to_int8``).

These are the definitions, in torch's operators: a CPU runs them, a compiler fuses them,
and kernels are compared with them. Codes are uint8 in the layout of
``torch.float8_e4m3fn``; scales are float32 powers of two, one per row.
"""

import math
from typing import Final

import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._native._arrays import has_memory
from fp8manifold._triton.whole import columns_on_gpu, copied_on_gpu, int8_rows_on_gpu, rows_on_gpu

LARGEST_CODE_VALUE: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_MANTISSA: Final = 23


def pow2_scales(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return scales that take magnitudes to ``largest`` at most, and their inverses.

    A scale is the least such power of two. It is 1 for a magnitude of 0. Where a
    magnitude is Inf or NaN, it is NaN and its inverse 0.
    """
    fraction, exponent = math.frexp(largest)
    # what takes a mantissa above that of ``largest`` over to the next exponent
    carry = 2**_MANTISSA - 1 - int((2 * fraction - 1) * 2**_MANTISSA)
    # the field of amax, plus 1 where its mantissa is above that of ``largest``, minus
    # the exponent of ``largest``
    biased = ((amax.view(torch.int32) + carry) >> _MANTISSA).sub(exponent - 1).clamp(min=1)
    biased = torch.where(amax == 0, 127, biased)
    scale = (biased << _MANTISSA).view(torch.float32)
    inverse = ((254 - biased) << _MANTISSA).view(torch.float32)
    is_finite = amax.isfinite()
    return torch.where(is_finite, scale, math.nan), torch.where(is_finite, inverse, 0.0)


def _has_kernels(x: Tensor) -> bool:
    """Return True if a kernel can read ``x`` on its GPU.

    A compiler gets the definition, which it fuses with others.
    """
    # in this order: no compiler traces the last
    return x.is_cuda and has_memory(x) and _triton.is_available()


def _in_units(x: Tensor, fold: Tensor | None, largest: float, axis: int) -> tuple[Tensor, Tensor]:
    """Return ``x * fold`` in units of the scale of its row or column, and the scales.

    The division is exact. Units are 0 where the scale is NaN.
    """
    wide = x.float() if fold is None else x.float() * fold
    scale, inverse = pow2_scales(wide.abs().amax(axis, keepdim=True), largest)
    return torch.where(scale.isnan(), 0.0, wide * inverse), scale


def round_rows(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (M, K) of ``x * fold``, and a scale (M, 1) per row.

    ``fold`` has scales that ``x`` takes in first: None, K powers of two, or one scale.
    """
    if _has_kernels(x):
        return rows_on_gpu(x, fold)
    units, scale = _in_units(x, fold, LARGEST_CODE_VALUE[torch.float8_e4m3fn], 1)
    return units.to(torch.float8_e4m3fn).view(torch.uint8), scale


def round_columns(g: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes (N, M) of ``(g * fold)^T``, and a scale (N, 1) per column of g.

    ``fold`` is None or (M, 1).
    """
    if _has_kernels(g):
        return columns_on_gpu(g, fold)
    units, scale = _in_units(g, fold, LARGEST_CODE_VALUE[torch.float8_e4m3fn], 0)
    return units.to(torch.float8_e4m3fn).view(torch.uint8).t().contiguous(), scale.view(-1, 1)


def int8_rows(x: Tensor, fold: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``x * fold`` (M, K) in int8, and a scale (M, 1) per row.

    It is as :func:`round_rows`, to whole numbers from -127 to 127, ties to even.
    """
    if _has_kernels(x):
        return int8_rows_on_gpu(x, fold)
    units, scale = _in_units(x, fold, LARGEST_CODE_VALUE[torch.int8], 1)
    return units.round().to(torch.int8), scale


_LIBRARY: Final = torch.library.Library("fp8manifold", "FRAGMENT")
_LIBRARY.define("transpose_bytes(Tensor codes, Tensor? after) -> Tensor")
_LIBRARY.define("codes_to_int8(Tensor codes, bool transposed, Tensor? after) -> Tensor")


def _transpose_bytes(codes: Tensor, after: Tensor | None) -> Tensor:
    if _has_kernels(codes):
        return copied_on_gpu(codes, integers=False, transposed=True)
    return codes.t().contiguous()


def _as_int8(codes: Tensor, transposed: bool, after: Tensor | None) -> Tensor:
    if _has_kernels(codes):
        return copied_on_gpu(codes, integers=True, transposed=transposed)
    magnitude = (codes & 127).to(torch.int8)
    signed = torch.where(codes > 127, -magnitude, magnitude)
    return signed.t().contiguous() if transposed else signed


_LIBRARY.impl("transpose_bytes", _transpose_bytes, "CompositeExplicitAutograd")
_LIBRARY.impl("codes_to_int8", _as_int8, "CompositeExplicitAutograd")


def transpose_bytes(codes: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the transpose (K, N) of codes (N, K), contiguous.

    A compiled graph makes it only once ``after``, a gradient, is there: made earlier,
    it would be saved until then.
    """
    transposed: Tensor = torch.ops.fp8manifold.transpose_bytes(codes, after)
    return transposed


def codes_to_int8(
    codes: Tensor, *, transposed: bool = False, after: Tensor | None = None
) -> Tensor:
    """Return the whole numbers that E1M6 codes stand for in units of its spacing, int8.

    They are (N, K), or (K, N) if ``transposed``. ``after`` is as in
    :func:`transpose_bytes`.
    """
    integers: Tensor = torch.ops.fp8manifold.codes_to_int8(codes, transposed, after)
    return integers
