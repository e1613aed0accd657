"""ulp, to_chart and from_chart: the code as a coordinate."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from grid_inputs import NAMED, ODD, critical, critical64, every_16_bit, float16_holds
from laws import each

import fp8manifold as fm
from fp8manifold import reference

pytestmark = pytest.mark.covering(2)

ALL = NAMED | ODD
named = each("fmt", NAMED.values(), ids=NAMED)
every = each("fmt", ALL.values(), ids=ALL)


def dtypes(fmt: fm.FloatFormat) -> list[torch.dtype]:
    return [torch.float64, torch.float32, torch.bfloat16] + [torch.float16] * float16_holds(fmt)


def grid(fmt: fm.FloatFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = range(reference.max_code(fmt) + 1)
    values = torch.tensor([float(reference.magnitude(m, fmt)) for m in codes], dtype=torch.float64)
    signed = torch.tensor(codes, dtype=torch.float64)
    return torch.cat([-values, values]).to(dtype), torch.cat([-signed, signed]).to(dtype)


def finite_in_range(x: torch.Tensor, fmt: fm.FloatFormat) -> torch.Tensor:
    return x[x.abs() <= fmt.max]


def rounded_once(values: list[Fraction], dtype: type[np.floating]) -> np.ndarray:
    """Exact values to float64, and on to dtype (float64 has 29 bits to spare over float32)."""
    return np.array([float(v) for v in values]).astype(dtype)


@every
def test_ulp_is_the_gap_to_the_next_value(fmt, compare_bits) -> None:
    """At every code, away from zero; at the top, the gap to the code that would come next."""
    codes = range(reference.max_code(fmt) + 1)
    gaps = np.array([float(reference.magnitude(m + 1, fmt) - reference.magnitude(m, fmt)) for m in codes])
    for dtype in dtypes(fmt):
        values, _ = grid(fmt, dtype)
        compare_bits(fm.ulp(values, fmt), np.concatenate([gaps, gaps]), values, fmt.name)


@named
def test_ulp_everywhere(fmt, compare_bits) -> None:
    for x in (torch.from_numpy(critical(fmt)).float(), torch.from_numpy(critical64(fmt))):
        expected = [reference.ulp(min(abs(v), fmt.max), fmt) if v == v else math.nan for v in x.tolist()]
        compare_bits(fm.ulp(x, fmt), np.array([float(v) for v in expected]), x, fmt.name)


@every
def test_chart_of_a_grid_point_is_its_signed_code(fmt, compare_bits) -> None:
    for dtype in dtypes(fmt):
        values, codes = grid(fmt, dtype)
        compare_bits(fm.to_chart(values, fmt), codes.double().numpy(), values, fmt.name)
        compare_bits(fm.from_chart(codes, fmt), values.double().numpy(), codes, fmt.name)


@named
def test_chart_is_the_definition(fmt, compare_bits) -> None:
    """Rounded once at every critical point inside the range: where it increases and is continuous, so is ours."""
    for points, dtype in (
        (torch.from_numpy(critical(fmt)).float(), np.float32),
        (torch.from_numpy(critical64(fmt)), np.float64),
    ):
        x = finite_in_range(points, fmt)
        expected = rounded_once([reference.to_chart(v, fmt) for v in x.tolist()], dtype)
        expected = np.where(expected == 0, np.copysign(expected, x.numpy()), expected)
        compare_bits(fm.to_chart(x, fmt), expected, x, fmt.name)


@named
def test_from_chart_is_the_definition(fmt, compare_bits) -> None:
    """Linear between the values of the codes: at every eighth of a step, in float32 and float64."""
    c = torch.arange(-8 * reference.max_code(fmt), 8 * reference.max_code(fmt) + 1, dtype=torch.float64) / 8
    expected = np.array([float(reference.from_chart(v, fmt)) for v in c.tolist()])
    compare_bits(fm.from_chart(c, fmt), expected, c, fmt.name)
    compare_bits(fm.from_chart(c.float(), fmt), expected, c.float(), fmt.name)


@named
@each("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_dtypes_are_float64_rounded_once(fmt, dtype, compare_bits) -> None:
    if dtype == torch.float16 and not float16_holds(fmt):
        for function in (fm.ulp, fm.to_chart, fm.from_chart):
            with pytest.raises(TypeError, match="float16"):
                function(torch.ones(3, dtype=dtype), fmt)
        return
    x = every_16_bit(dtype)
    for function in (fm.ulp, fm.to_chart, fm.from_chart):
        expected = function(x.double(), fmt).to(dtype).double().numpy()
        compare_bits(function(x, fmt), expected, x, f"{fmt.name} {function.__name__}")


@named
@each("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ends_zero_and_nan(fmt, dtype) -> None:
    top, end = reference.max_code(fmt), [math.inf, -math.inf, math.nan, 0.0, -0.0]
    chart = fm.to_chart(torch.tensor(end, dtype=dtype), fmt)
    assert chart[:2].tolist() == [top, -top]
    assert chart[2].isnan()
    assert chart[3:].tolist() == [0.0, 0.0]
    beyond = fm.to_chart(torch.tensor([fmt.max * 1.5, -fmt.max * 3], dtype=dtype), fmt)
    assert beyond.tolist() == [top, -top]
    back = fm.from_chart(torch.tensor([*end, top + 0.5, -1e9], dtype=dtype), fmt)
    assert back[[0, 1, 3, 4, 5, 6]].tolist() == [fmt.max, -fmt.max, 0.0, 0.0, fmt.max, -fmt.max]
    assert back[2].isnan()


@each("function", [fm.ulp, fm.to_chart, fm.from_chart])
def test_shapes_and_strides(function) -> None:
    x = torch.linspace(-3, 3, 60).reshape(3, 4, 5)
    whole = function(x, "E4M3")
    assert torch.equal(function(x.permute(2, 0, 1), "E4M3"), whole.permute(2, 0, 1))
    assert torch.equal(function(x[:, ::2], "E4M3"), whole[:, ::2])
    assert function(x[1, 2, 3], "E4M3").shape == ()
    assert function(x[:0], "E4M3").shape == (0, 4, 5)
    assert torch.equal(function(x.clone().requires_grad_(), "E4M3").detach(), whole)
