"""Operands of products straight from codes: rounded as another package rounds them, and the dtypes' own numbers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from laws import each
from optimizer_cases import normal
from torch import Tensor

import fp8manifold as fm
from fp8manifold._encoded.products import (
    codes_to_int8,
    int8_rows,
    pow2_scales,
    round_columns,
    round_rows,
    transpose_bytes,
)
from fp8manifold.formats import as_format

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def least_scale(amax: float, largest: int) -> float:
    """The least power of two that takes a magnitude to ``largest`` at most, by exact fractions."""
    if not np.isfinite(amax):
        return float("nan")
    exponent = -126
    while amax and Fraction(amax) > largest * Fraction(2) ** exponent:
        exponent += 1
    return 2.0 ** (exponent if amax else 0)


def quantised(x: Tensor, fold: Tensor | None, units: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of a float64 product, rounded by another package."""
    wide = x.double().numpy() * (1.0 if fold is None else fold.double().numpy())
    codes = np.zeros(wide.shape, np.int8 if units == "int8" else np.uint8)
    scales = np.ones((len(wide), 1), np.float32)
    for i, row in enumerate(wide):
        scales[i] = least_scale(np.abs(row).max(), 127 if units == "int8" else 448)
        if np.isfinite(scales[i, 0]):
            steps = row / np.float64(scales[i, 0])
            codes[i] = np.rint(steps) if units == "int8" else steps.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def edges(width: int = 64) -> Tensor:
    """Rows of all magnitudes, zeros of both signs, subnormals, the ends of the formats, and what is not finite."""
    x = normal(40, width, seed=1) * torch.exp2(normal(40, 1, seed=2).mul(20).round())
    ends = (0.0, -0.0, 448.0, 449.0, 480.0, 464.0, 127.0, 127.5, 1e-38, 1e-41, 3e38, torch.inf, -torch.inf, torch.nan)
    for row, end in enumerate(ends):
        x[row, width // 2 :] = end
    x[0] = 0.0
    x[1] = -0.0
    x[20] = torch.tensor([448.0, *(2.0**-k for k in range(5, 15))]).repeat(width)[:width]  # subnormals and ties of E4M3
    x[21] = torch.arange(width) + 0.5
    return x


def same(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert ours[0].dtype == expected[0].dtype
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1].view(torch.int32) & 0x7FC00000, expected[1].view(torch.int32) & 0x7FC00000)
    assert torch.equal(ours[1].nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("folded", [False, True])
def test_rows_and_columns_are_rounded_as_another_package_does(folded: bool, dtype: torch.dtype) -> None:
    x = edges().to(dtype)
    x = x.clamp(-1e30, 1e30) if folded and dtype is not torch.float16 else x  # short of the range
    fold = torch.exp2(normal(1, 64, seed=3).mul(6).round().clamp(-20, 20)) if folded else None
    x[x.abs() < 1e-30] *= not folded
    same(round_rows(x, fold), quantised(x, fold, "fp8"))
    same(int8_rows(x, fold), quantised(x, fold, "int8"))
    codes, scales = round_columns(x.t(), None if fold is None else fold.t())
    same((codes, scales), quantised(x, fold, "fp8"))
    assert codes.is_contiguous()


def test_scales_are_the_least_ones_at_every_end() -> None:
    for largest in (448.0, 127.0):
        at = largest * torch.exp2(torch.arange(-126, 118).float())
        above = torch.nextafter(at, torch.tensor(torch.inf))
        for amax, exponents in ((at, range(-126, 118)), (above, range(-125, 119))):
            scale, inverse = pow2_scales(amax, largest)
            assert torch.equal(scale, torch.exp2(torch.tensor(exponents).float()))
            assert torch.equal(scale * inverse, torch.ones_like(scale))
    scale, inverse = pow2_scales(torch.tensor([0.0, 1e-45, torch.inf, torch.nan]), 448.0)
    assert scale[:2].tolist() == [1.0, 2.0**-126]
    assert scale[2:].isnan().all()
    assert inverse.tolist() == [1.0, 2.0**126, 0.0, 0.0]


@each("fmt", FLOAT8)
def test_all_codes_are_numbers_of_the_dtype(fmt: str) -> None:
    read, decoded = ALL_CODES.view(FLOAT8[fmt]).float(), fm.decode(ALL_CODES, fmt)
    assert torch.equal(read.isnan(), decoded.isnan())
    assert torch.equal(read.nan_to_num().view(torch.int32), decoded.nan_to_num().view(torch.int32))
    w = fm.FP8Tensor(normal(32, 48, seed=1) * torch.exp2(normal(32, 1, seed=2).mul(4)), fmt)
    assert torch.equal(w.codes.view(FLOAT8[fmt]).float() * w.scale, w.dequantize())


def test_all_codes_of_e1m6_are_whole_numbers() -> None:
    unit, codes = as_format("E1M6").ulp_min, ALL_CODES.view(16, 16)
    assert torch.equal(codes_to_int8(codes) * unit, fm.decode(codes, "E1M6"))
    assert torch.equal(codes_to_int8(codes, transposed=True), codes_to_int8(codes).t())
    assert torch.equal(transpose_bytes(codes), codes.t())
    assert transpose_bytes(codes).is_contiguous()
