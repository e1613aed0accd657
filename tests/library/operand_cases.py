"""Operands of products in 8 bits against their definition.

`test_triton_interpreted.py` runs these tests interpreted, and a GPU runs them.
"""

import math
from unittest import mock

import pytest
import torch
from optimizer_cases import normal
from triton_twins import CARD, COUNTS, different

import fp8manifold as fm
from fp8manifold._encoded import products
from fp8manifold._encoded.products import (
    codes_to_int8,
    int8_rows,
    round_columns,
    round_rows,
    transpose_bytes,
)
from fp8manifold._triton import whole
from fp8manifold._triton.whole import columns_on_gpu, copied_on_gpu, int8_rows_on_gpu, rows_on_gpu
from fp8manifold.formats import as_format

ROWS = {"E4M3": (rows_on_gpu, round_rows), "int8": (int8_rows_on_gpu, int8_rows)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def same(results, expected):
    COUNTS["launches"] += 1
    COUNTS["elements"] += expected[0].numel()
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == wanted.dtype, index
        assert result.is_contiguous(), index
        assert not different(
            *(x.view(torch.uint8) if x.dtype is torch.int8 else x for x in (result, wanted))
        ), index


def matrix(width, dtype, seed=1):
    x = normal(23, width, seed=seed) * torch.exp2(normal(23, 1, seed=seed + 1).mul(6).round())
    # At and beyond the ends of E4M3 and of int8, a large number, tiny ones, both zeros.
    ends = (448.0, 449.0, -480.0, 464.0, 127.0, -127.5, 2.0**15, 1e-38, 1e-41, 6e-8, 0.0, -0.0)
    for row, end in enumerate(ends):
        x[row, width // 2 :] = end
    x[:6] *= (normal(6, width, seed=seed + 2) > -0.5) * torch.exp2(
        -normal(6, width, seed=seed).abs().mul(5).round()
    )
    for row, end in enumerate((448.0, 449.0, -480.0, math.inf, -math.inf, math.nan), 12):
        x[row, -1] = end
    x[20] = torch.finfo(dtype).max
    return x.to(dtype)


def fold_of(kind, width):
    """Return what columns are multiplied by: nothing, one number, or one each."""
    if kind == "no":
        return None
    if kind == "one":
        return torch.tensor([[0.125]])
    return torch.exp2(normal(1, width, seed=3).mul(4).round())


def on_card(x):
    return None if x is None else x.to(CARD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 256, 1000, 2048])
@pytest.mark.parametrize("folds", ["no", "one", "each"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows(kind, folds, width, dtype):
    x = matrix(width, dtype)
    fold = fold_of(folds, width)
    round_on_card, definition = ROWS[kind]
    same(round_on_card(on_card(x), on_card(fold)), definition(x, fold))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 256, 1000, 2048])
@pytest.mark.parametrize("folds", ["no", "one", "each"])
def test_columns(folds, width, dtype):
    x = matrix(width, dtype).t()
    fold = fold_of(folds, width)
    of_rows = None if fold is None else fold.t()
    same(columns_on_gpu(on_card(x), on_card(of_rows)), round_columns(x, of_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16384, 16385, 20000])
@pytest.mark.parametrize("kind", ROWS)
def test_long_rows(kind, width, dtype):
    """Rows that registers just hold, and longer ones, which kernels read in several turns."""
    x = matrix(width, dtype)[::6]
    # A large entry that the last turn does not read.
    x[1, 3] = 30000.0
    fold = torch.exp2(normal(1, width, seed=3).mul(4).round())
    round_on_card, definition = ROWS[kind]
    same(round_on_card(on_card(x), on_card(fold)), definition(x, fold))


def test_any_distance_between_rows_and_between_columns():
    x, fold = matrix(96, torch.bfloat16), torch.exp2(normal(1, 40, seed=3).round())
    x_on_card, fold_on_card = x.to(CARD), fold.to(CARD)
    cuts = (lambda x: x[:, 3:43], lambda x: x[::2, 16:56], lambda x: x[:, 1:81:2])
    for cut in cuts:
        same(rows_on_gpu(cut(x_on_card), fold_on_card), round_rows(cut(x), fold))
        same(
            columns_on_gpu(cut(x_on_card).t(), fold_on_card.t()),
            round_columns(cut(x).t(), fold.t()),
        )
        same(columns_on_gpu(cut(x_on_card), None), round_columns(cut(x), None))


def every_bfloat16():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def boundaries_of_codes():
    """Return values, the middles between them, and the floats beside these middles."""
    values = fm.decode(torch.arange(127, dtype=torch.uint8), "E4M3")
    middles = torch.cat([(values[1:] + values[:-1]) / 2, torch.arange(127) + 0.5])
    near = torch.cat(
        [values, middles, *(torch.nextafter(middles, middles * end) for end in (0, 2))]
    )
    return torch.cat([near, -near])


@pytest.mark.parametrize(("name", "largest"), [("E4M3", 448.0), ("int8", 127.0)])
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [(every_bfloat16, torch.bfloat16), (boundaries_of_codes, torch.float32)],
    ids=["every number of bfloat16", "boundaries of codes"],
)
def test_numbers_under_a_scale_of_1_have_the_nearest_codes(numbers, dtype, name, largest):
    """A card may convert them by one instruction."""
    inside = numbers()
    inside = inside[inside.abs() <= largest]
    inside = torch.cat([inside, torch.zeros(-len(inside) % 127)]).view(-1, 127)
    x = torch.cat([torch.full((len(inside), 1), largest), inside], dim=1).to(dtype)
    codes, scales = ROWS[name][0](x.to(CARD))
    assert scales.unique().tolist() == [1.0]
    exact = {"E4M3": fm.encode(x.float(), "E4M3"), "int8": x.float().round().to(torch.int8)}
    same((codes, scales), (exact[name], torch.ones(len(x), 1)))


@pytest.mark.parametrize("shape", [(128, 64), (1, 1), (70, 50), (300, 131)])
def test_codes_by_columns_and_as_integers(shape):
    codes = torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    unit = as_format("E1M6").ulp_min
    integers = (fm.decode(codes, "E1M6") / unit).to(torch.int8)
    codes_on_card = codes.to(CARD)
    assert not different(copied_on_gpu(codes_on_card, integers=False, transposed=True), codes.t())
    assert not different(copied_on_gpu(codes_on_card.t(), integers=False, transposed=True), codes)
    assert not different(copied_on_gpu(codes_on_card, integers=True, transposed=True), integers.t())
    assert not different(copied_on_gpu(codes_on_card, integers=True, transposed=False), integers)
    COUNTS["elements"] += 4 * codes.numel()


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_of_nothing(shape):
    x = torch.empty(shape, device=CARD)
    codes, scales = rows_on_gpu(x)
    assert codes.shape == shape
    assert scales.tolist() == [[1.0]] * shape[0]
    codes, scales = columns_on_gpu(x, torch.ones(shape[0], 1, device=CARD))
    assert codes.shape == shape[::-1]
    assert scales.tolist() == [[1.0]] * shape[1]
    assert copied_on_gpu(codes, integers=False, transposed=True).shape == shape


def test_what_products_ask_for_is_launched(monkeypatch):
    def all_operands(x, codes):
        rounded = [*round_rows(x), *round_columns(x), *int8_rows(x)]
        return [
            *rounded,
            transpose_bytes(codes),
            codes_to_int8(codes),
            codes_to_int8(codes, transposed=True),
        ]

    x, codes = matrix(48, torch.bfloat16)[:16], torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = all_operands(x, codes)
    launch = mock.Mock(wraps=whole._launch)
    monkeypatch.setattr(whole, "_launch", launch)
    monkeypatch.setattr(products, "_has_kernels", lambda x: True)
    same(tuple(all_operands(x.to(CARD), codes.to(CARD))), tuple(expected))
    launched = [call.args[0] for call in launch.call_args_list]
    assert launched == [
        *("rows_kernel", "amax_kernel", "columns_kernel", "rows_kernel"),
        *3 * ("copy_kernel",),
    ]
