"""ulp, to_chart and from_chart: the code as a coordinate."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from grid_inputs import NAMED, ODD, critical, critical64, every_16_bit, float16_holds

import fp8manifold as fm
from fp8manifold import reference

pytestmark = pytest.mark.covering(2)
#: of a test of three parameters every case stays in the default run
all_cases = pytest.mark.covering(3)

ALL = NAMED | ODD
named = pytest.mark.parametrize("fmt", NAMED.values(), ids=NAMED)
every_format = pytest.mark.parametrize("fmt", ALL.values(), ids=ALL)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@cache
def points_of(fmt):
    """Return the magnitudes of the codes in order, and the gap above each, in float64."""
    codes = range(reference.max_code(fmt) + 2)
    magnitudes = [float(reference.magnitude(code, fmt)) for code in codes]
    values = torch.tensor(magnitudes, dtype=torch.float64)
    return values[:-1], values.diff().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_format
def test_ulp_is_the_gap_to_the_next_value_and_the_chart_of_a_grid_point_its_signed_code(
    fmt, dtype, compare_bits
):
    """At every code, away from zero; at the top, the gap to the code that would come
    next.
    """
    magnitudes, gaps = points_of(fmt)
    counts = torch.arange(len(magnitudes), dtype=torch.float64)
    values = torch.cat([-magnitudes, magnitudes]).to(dtype)
    codes = torch.cat([-counts, counts]).to(dtype)
    if dtype == torch.float16 and not float16_holds(fmt):
        with pytest.raises(TypeError, match="float16"):
            fm.ulp(values, fmt)
        return
    compare_bits(fm.ulp(values, fmt), np.concatenate([gaps, gaps]), values, fmt.name)
    compare_bits(fm.to_chart(values, fmt), codes.double().numpy(), values, fmt.name)
    compare_bits(fm.from_chart(codes, fmt), values.double().numpy(), codes, fmt.name)


def critical_points(fmt, dtype):
    if dtype == torch.float32:
        return torch.from_numpy(critical(fmt)).float()
    return torch.from_numpy(critical64(fmt))


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ulp_is_the_definition(fmt, dtype, compare_bits):
    """At every critical point."""
    x = critical_points(fmt, dtype)
    expected = [
        math.nan if math.isnan(v) else float(reference.ulp(min(abs(v), fmt.max), fmt))
        for v in x.tolist()
    ]
    compare_bits(fm.ulp(x, fmt), np.array(expected), x, fmt.name)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_chart_is_the_definition(fmt, dtype, compare_bits):
    """At every critical point inside the range.

    Exact values are rounded to float64, and on to float32, over which float64 has 29
    bits to spare.
    """
    x = critical_points(fmt, dtype)
    x = x[x.abs() <= fmt.max]
    exact = [float(reference.to_chart(v, fmt)) for v in x.tolist()]
    expected = torch.tensor(exact, dtype=torch.float64)
    expected = torch.where(expected == 0, expected.copysign(x), expected).to(dtype).double()
    compare_bits(fm.to_chart(x, fmt), expected.numpy(), x, fmt.name)


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_from_chart_is_the_definition(fmt, dtype, compare_bits):
    """Linear between the values of the codes: at every eighth of a step."""
    end = 8 * reference.max_code(fmt)
    c = torch.arange(-end, end + 1, dtype=torch.float64) / 8
    expected = np.array([float(reference.from_chart(v, fmt)) for v in c.tolist()])
    c = c.to(dtype)
    compare_bits(fm.from_chart(c, fmt), expected, c, fmt.name)


FUNCTIONS = pytest.mark.parametrize("function", [fm.ulp, fm.to_chart, fm.from_chart])


@all_cases
@named
@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_dtypes_are_float64_rounded_once(fmt, dtype, function, compare_bits):
    """A format that float16 does not hold is refused in it."""
    x = every_16_bit(dtype)
    if dtype == torch.float16 and not float16_holds(fmt):
        with pytest.raises(TypeError, match="float16"):
            function(x, fmt)
        return
    expected = function(x.double(), fmt).to(dtype).double().numpy()
    compare_bits(function(x, fmt), expected, x, f"{fmt.name} {function.__name__}")


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ends_zero_and_nan(fmt, dtype):
    top = reference.max_code(fmt)
    ends = [math.inf, -math.inf, 0.0, -0.0]
    x = torch.tensor([*ends, fmt.max * 1.5, -fmt.max * 3], dtype=dtype)
    assert fm.to_chart(x, fmt).tolist() == [top, -top, 0.0, 0.0, top, -top]
    c = torch.tensor([*ends, top + 0.5, -1e9], dtype=dtype)
    assert fm.from_chart(c, fmt).tolist() == [fmt.max, -fmt.max, 0.0, 0.0, fmt.max, -fmt.max]
    nan = torch.tensor(math.nan, dtype=dtype)
    assert fm.to_chart(nan, fmt).isnan()
    assert fm.from_chart(nan, fmt).isnan()


@pytest.mark.parametrize(
    "cut",
    [lambda x: x.permute(2, 0, 1), lambda x: x[:, ::2], lambda x: x[1, 2, 3], lambda x: x[:0]],
    ids=["permuted", "sliced", "scalar", "empty"],
)
@FUNCTIONS
def test_results_keep_shapes_and_follow_strides(function, cut):
    x = torch.linspace(-3, 3, 60).reshape(3, 4, 5)
    result = function(cut(x), "E4M3")
    assert result.shape == cut(x).shape
    assert torch.equal(result, cut(function(x, "E4M3")))


@FUNCTIONS
def test_inputs_that_require_grad_give_the_same_numbers(function):
    x = torch.linspace(-3, 3, 60)
    assert torch.equal(function(x.clone().requires_grad_(), "E4M3").detach(), function(x, "E4M3"))
