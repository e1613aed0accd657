"""FP8Manifold: the grid as a manifold. Where retractions land, what nearest loses, what stochastic keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manifold_cases import (
    FORMATS,
    METRICS,
    deterministic,
    every_format,
    every_metric,
    every_scale,
    few_formats,
    grid,
    lands_on_grid,
    off_grid,
    ruler,
    same_bits,
    spread,
)

import fp8manifold as fm

pytestmark = pytest.mark.covering(2)

DRAWS = 1_000_000

both_roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
any_float = st.floats(width=32, allow_nan=False)


# ---------------------------------------------------------------------------------------- on the grid
@deterministic
@given(
    name=st.sampled_from(sorted(FORMATS)),
    scale=st.sampled_from([1.0, 2.0**-7, 0.3]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    retraction=st.sampled_from(["exponential", "euclidean"]),
    metric=st.sampled_from(sorted(METRICS)),
    pairs=st.lists(st.tuples(any_float, any_float), min_size=1),
)
def test_retraction_lands_on_the_grid(name, scale, rounding, retraction, metric, pairs) -> None:
    """From any point of the grid along any float32, the tiny, the huge and Inf included."""
    fmt = FORMATS[name]
    manifold = fm.FP8Manifold(fmt, scale, rounding, seed=3, metric=METRICS[metric], retraction=retraction)
    x, u = torch.tensor(pairs, dtype=torch.float32).unbind(1)
    y = manifold.retr(manifold.projx(x), u)
    assert lands_on_grid(y, fmt, scale)
    assert manifold.check_point_on_manifold(y)


@deterministic
@given(
    name=st.sampled_from(sorted(FORMATS)),
    scale=st.sampled_from([1.0, 0.3]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    retraction=st.sampled_from(["exponential", "euclidean"]),
    xs=st.lists(st.floats(width=32), min_size=1),
    zero=st.sampled_from([0.0, -0.0]),
)
def test_retraction_of_zero_is_the_point_itself(name, scale, rounding, retraction, xs, zero) -> None:
    """Bit for bit, for every float32: -0, Inf, NaN, and points off the grid."""
    manifold = fm.FP8Manifold(FORMATS[name], scale, rounding, retraction=retraction)
    x = torch.tensor(xs, dtype=torch.float32)
    assert same_bits(manifold.retr(x, torch.full_like(x, zero)), x)
    assert same_bits(manifold.expmap(x, torch.full_like(x, zero)), x)


@few_formats
@every_metric
@every_scale
def test_the_rest_is_the_ambient_manifold(fmt, metric, scale) -> None:
    """exp, log, dist, transport, inner and gradient are those of StiffnessManifold; exp leaves the grid."""
    ours, ambient = fm.FP8Manifold(fmt, scale, metric=metric), fm.StiffnessManifold(fmt, scale, metric)
    x, y = spread(grid(fmt), scale), spread(grid(fmt).flip(0), scale)
    u = 0.3 * ambient.stiffness(x)
    assert same_bits(ours.expmap(x, u), ambient.expmap(x, u))
    assert same_bits(ours.logmap(x, y), ambient.logmap(x, y))
    assert same_bits(ours.dist(x, y), ambient.dist(x, y))
    assert same_bits(ours.transp(x, y, u), ambient.transp(x, y, u))
    assert same_bits(ours.component_inner(x, u), ambient.component_inner(x, u))
    assert same_bits(ours.egrad2rgrad(x, u), ambient.egrad2rgrad(x, u))
    if metric in ("ulp", "log"):
        assert not ours.check_point_on_manifold(ours.expmap(x, u))
    assert not ours.reversible
    assert ambient.reversible


# ------------------------------------------------------------------------------------------- nearest
@every_format
@every_scale
def test_nearest_stalls_below_half_an_ulp(fmt, scale) -> None:
    """Bit stall: exactly the steps below half a code are lost, at every code but the ends, in both directions."""
    manifold = fm.FP8Manifold(fmt, scale)
    codes = torch.from_numpy(ruler(fmt).codes[1:-1])
    x = spread(torch.from_numpy(ruler(fmt).values[1:-1]), scale)
    for direction in (1.0, -1.0):
        ulp = direction * manifold.stiffness(x)
        next_point = spread(torch.from_numpy(ruler(fmt).inverse(codes.numpy() + direction)), scale)
        assert (manifold.retr(x, 0.499 * ulp) == x).all()
        assert (manifold.retr(x, 0.501 * ulp) == next_point).all()


@every_format
def test_nearest_breaks_ties_to_the_even_code(fmt) -> None:
    manifold = fm.FP8Manifold(fmt)
    codes, x = ruler(fmt).codes[1:-1], torch.from_numpy(ruler(fmt).values[1:-1])
    moved = manifold.retr(x, 0.5 * manifold.stiffness(x))
    even = np.where(codes % 2 == 0, codes, codes + 1)
    assert (moved == torch.from_numpy(ruler(fmt).inverse(even))).all()


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E7M0", "E6M1"])
@both_roundings
def test_the_two_retractions_differ_across_a_power_of_two(name, rounding) -> None:
    """One ULP inward from 2^k: exp goes one code down, x + u two (below the edge, codes are half as far apart)."""
    fmt = FORMATS[name]
    x = torch.exp2(torch.arange(fmt.emin + 3, fmt.emax, dtype=torch.float64))
    exponential, euclidean = (fm.FP8Manifold(fmt, 1.0, rounding, retraction=k) for k in ("exponential", "euclidean"))
    u = -exponential.stiffness(x)
    assert same_bits(exponential.retr(x, u), x + u / 2)
    lands = x + u if fmt.mantissa_bits else torch.zeros_like(x)
    assert same_bits(euclidean.retr(x, u), lands)
    assert same_bits(exponential.retr(x, -u), euclidean.retr(x, -u))


# ----------------------------------------------------------------------------------------- stochastic
#: Start code and step in ULPs, both dyadic so that the expected value is exact in float32: inside a binade; from a
#: power of two outward and inward; across one; subnormal; from zero; across zero; a small step; steps of many codes.
MOVES = {
    "normal": ("middle", 0.3125),
    "edge-outward": ("edge", 0.3125),
    "edge-inward": ("edge", -0.3125),
    "across-edge": ("above-edge", -1.625),
    "subnormal": (1, 0.25),
    "zero": (0, 0.375),
    "across-zero": (1, -1.625),
    "negative": ("minus-middle", -0.4375),
    "small": ("middle", 2.0**-10),
    "long": ("middle", -5.28125),
}


def start_code(fmt: fm.FloatFormat, where: str | int) -> int:
    """A code in the middle of the range, on an edge or beside one."""
    per_binade = 2**fmt.mantissa_bits
    edge = max(fmt.max_code // (2 * per_binade), 1) * per_binade
    named = {"edge": edge, "above-edge": edge + 1, "middle": edge + per_binade // 2, "minus-middle": -edge - 1}
    return named[where] if isinstance(where, str) else where


@few_formats
@pytest.mark.parametrize(("where", "step"), MOVES.values(), ids=MOVES)
def test_stochastic_retraction_is_unbiased(fmt, where, step) -> None:
    """Over 10^6 draws: only the two true neighbours of exp_x(u), the upper one as often as a fair binomial says."""
    manifold = fm.FP8Manifold(fmt, 1.0, "stochastic", seed=11)
    rule, code = ruler(fmt), start_code(fmt, where)
    x = torch.full((DRAWS,), float(rule.inverse(np.float64(code))))
    y = manifold.retr(x, step * manifold.stiffness(x)).double()

    # the step counts codes of x's own side: one ULP of x is one code everywhere
    target = float(np.clip(code + step, rule.codes[0], rule.codes[-1]))
    low, high = rule.inverse(np.array([math.floor(target), math.floor(target) + 1]))
    p = target - math.floor(target)
    ups = int((y == high).sum())
    assert ups + int((y == low).sum()) == DRAWS
    sigma = math.sqrt(DRAWS * p * (1 - p))
    assert abs(ups - DRAWS * p) <= 4 * sigma
    mean, expected = float(y.mean()), float(rule.inverse(np.float64(target)))
    assert abs(mean - expected) <= 4 * (high - low) * sigma / DRAWS + 1e-12 * abs(expected)


@few_formats
@every_scale
def test_stochastic_is_unbiased_with_a_scale_and_off_the_grid(fmt, scale) -> None:
    """From points off the grid, in float32, with any scale, 10^6 draws a row."""
    manifold = fm.FP8Manifold(fmt, scale, "stochastic", seed=12)
    start = off_grid(fmt, 20, seed=4, share=0.9)
    x = spread(start.repeat_interleave(DRAWS // 20), scale).float()
    u = 0.4 * manifold.stiffness(x)
    y, expected = manifold.retr(x, u).double(), manifold.expmap(x, u).double()
    scales = spread(torch.ones((), dtype=torch.float64), scale).expand(*x.shape[:-1], 1)
    for rows in range(20):
        part = slice(rows * (DRAWS // 20), (rows + 1) * (DRAWS // 20))
        units = (expected[..., part.start : part.start + 1] / scales).numpy()
        f = (c := ruler(fmt).chart(units)) - np.floor(c)
        gap = torch.from_numpy(ruler(fmt).inverse(np.floor(c) + 1) - ruler(fmt).inverse(np.floor(c))) * scales
        sigma = gap * torch.from_numpy(np.sqrt(f * (1 - f) / (DRAWS // 20)))
        error = (y[..., part].mean(-1, keepdim=True) - expected[..., part.start : part.start + 1]).abs()
        assert (error <= 4 * sigma + 1e-6 * gap).all()


def test_stochastic_under_the_log_metric_rounds_in_value() -> None:
    """On a logarithmic chart rounding the coordinate would be biased by some 4% (E7M0): the value is rounded."""
    manifold = fm.FP8Manifold("E7M0", 1.0, "stochastic", seed=6, metric="log")
    x = torch.full((DRAWS,), 4.0)
    u = 0.4 * manifold.stiffness(x)
    target = 4 * math.exp(0.4)
    f = (target - 4) / 4
    error = abs(float(manifold.retr(x, u).double().mean()) - target)
    assert error <= 4 * 4 * math.sqrt(f * (1 - f) / DRAWS) + 1e-5


@few_formats
def test_stochastic_saturates_at_the_ends(fmt) -> None:
    manifold = fm.FP8Manifold(fmt, 1.0, "stochastic")
    x = torch.full((1000,), fmt.max)
    assert same_bits(manifold.retr(x, 0.4 * manifold.stiffness(x)), x)
    assert same_bits(manifold.retr(-x, -0.4 * manifold.stiffness(x)), -x)


# -------------------------------------------------------------------------------- the counter and seed


def test_every_stochastic_retraction_advances_the_counter() -> None:
    manifold, x = fm.FP8Manifold("E4M3", 1.0, "stochastic"), torch.ones(1000)
    assert manifold.counter.dtype == torch.int64
    for count in range(3):
        assert int(manifold.counter) == count
        manifold.retr_transp(x, x * 0.01, x)
    assert int(manifold.state_dict()["counter"]) == 3
    first = fm.FP8Manifold("E4M3", 1.0, "stochastic")
    assert not torch.equal(first.retr(x, x * 0.05), first.retr(x, x * 0.05))


def test_nothing_else_advances_the_counter() -> None:
    x = torch.ones(5)
    nearest, manifold = fm.FP8Manifold("E4M3"), fm.FP8Manifold("E4M3", 1.0, "stochastic")
    nearest.retr(x, x)
    for use in (manifold.projx, lambda x: manifold.expmap(x, x), manifold.stiffness, lambda x: manifold.dist(x, x)):
        use(x)
    manifold.random(5)
    manifold.check_point_on_manifold(x)
    assert int(nearest.counter) == int(manifold.counter) == 0


# --------------------------------------------------------------------------------------------- random
@few_formats
@both_roundings
def test_random_points_lie_on_the_grid_and_spread_over_the_codes(fmt, rounding) -> None:
    """Chi-square of 10^5 points over the codes: every code alike, the two ends half as often."""
    torch.manual_seed(0)
    manifold, n = fm.FP8Manifold(fmt, 0.5, rounding), 100_000
    points = manifold.random(n, dtype=torch.float64)
    assert points.manifold is manifold
    assert lands_on_grid(points.detach(), fmt, 0.5)
    codes = (manifold.to_chart(points.detach()) + fmt.max_code).round().long()
    counts = torch.bincount(codes, minlength=2 * fmt.max_code + 1).double()
    expected = torch.full_like(counts, n / (2 * fmt.max_code))
    expected[[0, -1]] /= 2
    chi2, freedom = float(((counts - expected).square() / expected).sum()), 2 * fmt.max_code
    assert abs(chi2 - freedom) <= 5 * math.sqrt(2 * freedom)
