"""FP8Manifold: the grid as a manifold. Where retractions land, what nearest loses, what stochastic keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import each
from manifold_cases import (
    FORMATS,
    deterministic,
    every_format,
    every_metric,
    exact_scale,
    few_formats,
    grid,
    lands_on_grid,
    same_bits,
    spread,
)

import fp8manifold as fm

pytestmark = pytest.mark.covering(2)

both_roundings = each("rounding", ["nearest", "stochastic"])


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


@every_format
@every_metric
@exact_scale
@both_roundings
def test_retraction_is_the_rounded_exponential(fmt, metric, scale, rounding) -> None:
    """To the bit, at every code but for steps of zero: half and other parts of an ULP, far, and beyond the ends."""
    ambient = fm.StiffnessManifold(fmt, scale, metric)
    x = spread(grid(fmt), scale)
    steps = torch.tensor(
        [0.5, -0.5, 0.3125, -1.625, 2.0**-10, -5.28125, 7.7, 1e3, -1e12, math.inf], dtype=torch.float64
    )
    u = steps[:, None] * ambient.stiffness(x)
    key = {"seed": 11, "step": 1} if rounding == "stochastic" else {}
    for retraction, moved in (("exponential", ambient.expmap(x, u)), ("euclidean", x + u)):
        manifold = fm.FP8Manifold(fmt, scale, rounding, seed=11, metric=metric, retraction=retraction)
        manifold.counter += 1
        assert same_bits(manifold.retr(x, u), fm.round_to_grid(moved / scale, fmt, rounding, **key) * scale)


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
