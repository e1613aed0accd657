"""ulp, to_chart and from_chart: the code as a coordinate; and the mean of a stiffness
field, counted in pieces.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from grid_inputs import NAMED, ODD, critical, critical64, every_16_bit, float16_holds
from optimizer_cases import normal, step_from

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._base.blocks import BLOCK
from fp8manifold._numerics.stiffness import bounded_share, reference_stiffness

pytestmark = pytest.mark.covering(2)

ALL = NAMED | ODD
named = pytest.mark.parametrize("fmt", NAMED.values(), ids=NAMED)
every_format = pytest.mark.parametrize("fmt", ALL.values(), ids=ALL)


@every_format
def test_ulp_is_the_gap_to_the_next_value_and_the_chart_of_a_grid_point_its_signed_code(
    fmt, compare_bits
):
    """At every code, away from zero; at the top, the gap to the code that would come
    next.
    """
    upward = torch.arange(reference.max_code(fmt) + 2, dtype=torch.float64)
    magnitudes = torch.tensor(
        [float(reference.magnitude(int(m), fmt)) for m in upward], dtype=torch.float64
    )
    gaps, upward, magnitudes = magnitudes.diff().numpy(), upward[:-1], magnitudes[:-1]
    for dtype in [torch.float64, torch.float32, torch.bfloat16] + [torch.float16] * float16_holds(
        fmt
    ):
        values, codes = (torch.cat([-x, x]).to(dtype) for x in (magnitudes, upward))
        compare_bits(fm.ulp(values, fmt), np.concatenate([gaps, gaps]), values, fmt.name)
        compare_bits(fm.to_chart(values, fmt), codes.double().numpy(), values, fmt.name)
        compare_bits(fm.from_chart(codes, fmt), values.double().numpy(), codes, fmt.name)


@named
def test_ulp_and_chart_are_the_definition(fmt, compare_bits):
    """At every critical point; the chart inside the range: where it increases and is
    continuous, so is ours.

    Exact values are rounded to float64, and on to float32, over which float64 has 29
    bits to spare.
    """
    for x in (torch.from_numpy(critical(fmt)).float(), torch.from_numpy(critical64(fmt))):
        expected = [
            reference.ulp(min(abs(v), fmt.max), fmt) if v == v else math.nan for v in x.tolist()
        ]
        compare_bits(fm.ulp(x, fmt), np.array([float(v) for v in expected]), x, fmt.name)
        x = x[x.abs() <= fmt.max]
        expected = torch.tensor(
            [float(reference.to_chart(v, fmt)) for v in x.tolist()], dtype=torch.float64
        )
        expected = torch.where(expected == 0, expected.copysign(x), expected).to(x.dtype).double()
        compare_bits(fm.to_chart(x, fmt), expected.numpy(), x, fmt.name)


@named
def test_from_chart_is_the_definition(fmt, compare_bits):
    """Linear between the values of the codes: at every eighth of a step, in float32 and
    float64.
    """
    c = (
        torch.arange(
            -8 * reference.max_code(fmt), 8 * reference.max_code(fmt) + 1, dtype=torch.float64
        )
        / 8
    )
    expected = np.array([float(reference.from_chart(v, fmt)) for v in c.tolist()])
    compare_bits(fm.from_chart(c, fmt), expected, c, fmt.name)
    compare_bits(fm.from_chart(c.float(), fmt), expected, c.float(), fmt.name)


@named
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_dtypes_are_float64_rounded_once(fmt, dtype, compare_bits):
    x = every_16_bit(dtype)
    for function in (fm.ulp, fm.to_chart, fm.from_chart):
        if dtype == torch.float16 and not float16_holds(fmt):
            with pytest.raises(TypeError, match="float16"):
                function(x, fmt)
            continue
        expected = function(x.double(), fmt).to(dtype).double().numpy()
        compare_bits(function(x, fmt), expected, x, f"{fmt.name} {function.__name__}")


@named
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_ends_zero_and_nan(fmt, dtype):
    top, end = reference.max_code(fmt), [math.inf, -math.inf, math.nan, 0.0, -0.0]
    chart = fm.to_chart(torch.tensor([*end, fmt.max * 1.5, -fmt.max * 3], dtype=dtype), fmt)
    assert chart[[0, 1, 3, 4, 5, 6]].tolist() == [top, -top, 0.0, 0.0, top, -top]
    assert chart[2].isnan()
    back = fm.from_chart(torch.tensor([*end, top + 0.5, -1e9], dtype=dtype), fmt)
    assert back[[0, 1, 3, 4, 5, 6]].tolist() == [fmt.max, -fmt.max, 0.0, 0.0, fmt.max, -fmt.max]
    assert back[2].isnan()


@pytest.mark.parametrize("function", [fm.ulp, fm.to_chart, fm.from_chart])
def test_shapes_and_strides(function):
    x = torch.linspace(-3, 3, 60).reshape(3, 4, 5)
    whole = function(x, "E4M3")
    for cut in (lambda x: x.permute(2, 0, 1), lambda x: x[:, ::2], lambda x: x[1, 2, 3]):
        assert torch.equal(function(cut(x), "E4M3"), cut(whole))
    assert function(x[:0], "E4M3").shape == (0, 4, 5)
    assert torch.equal(function(x.clone().requires_grad_(), "E4M3").detach(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 100, BLOCK, 3 * BLOCK + 7])
def test_the_mean_of_a_field_and_the_share_are_those_of_the_whole(count, dtype):
    exponents = torch.randint(-20, 20, (count,), generator=torch.Generator().manual_seed(count))
    x = torch.ldexp(torch.ones(count, dtype=dtype), exponents.to(dtype))
    mean = float(
        sum(Fraction(value) * int((x == value).sum()) for value in x.unique().tolist()) / count
    )
    assert math.isclose(reference_stiffness(x), mean, rel_tol=2**-52)
    ratio = x / mean
    assert (
        bounded_share(x, mean, 0.1, 16.0) == ((ratio < 0.1) | (ratio > 16.0)).sum().item() / count
    )
    x[-1] *= 1.5  # no power of two, in the last piece
    assert math.isclose(
        reference_stiffness(x), mean + 0.5 * x[-1].item() / 1.5 / count, rel_tol=2**-50
    )


def test_a_first_step_counts_no_more_than_a_piece_at_once(monkeypatch):
    """Exponents of a whole field, and their int64 copies, took 15 bytes a weight beside
    the weight.
    """
    sizes, count = [], torch.bincount
    monkeypatch.setattr(
        torch,
        "bincount",
        lambda x, *rest, **keywords: sizes.append(x.numel()) or count(x, *rest, **keywords),
    )
    p = fm.FP8Parameter(normal(600, 512, seed=1), "E4M3")
    step_from(fm.optim.StiffnessAdamW([p], 1e-3, moments="8bit"), p, normal(600, 512, seed=2))
    assert sum(sizes) == p.numel()
    assert max(sizes) <= BLOCK
