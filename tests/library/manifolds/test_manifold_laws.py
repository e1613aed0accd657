"""The laws of the geometry: metric, geodesics, transport, projection and gradients, on
the grid and off it.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from manifold_cases import (
    EPS,
    FORMATS,
    both_dtypes,
    chart_error,
    deterministic,
    every_format,
    every_metric,
    every_scale,
    exact_scale,
    few_formats,
    grid,
    interior_and_grid,
    lands_on_grid,
    off_grid,
    pairs,
    ruler,
    same_bits,
    spread,
    ulp_as_function,
)

import fp8manifold as fm

pytestmark = pytest.mark.covering(2)


@every_format
@exact_scale
@both_dtypes
def test_dist_is_the_number_of_steps_for_all_pairs(fmt, scale, dtype, compare_bits) -> None:
    """Bit for bit, with +0 and -0 the same point."""
    x, y = pairs(grid(fmt, dtype))
    codes = np.append(ruler(fmt).codes, 0.0)
    expected = np.abs(codes[:, None] - codes[None, :]).flatten()
    dist = fm.StiffnessManifold(fmt, scale).dist(spread(x, scale), spread(y, scale))
    compare_bits(dist, expected, x, fmt.name)


@every_format
@every_metric
def test_signed_zeros_are_one_point(fmt, metric) -> None:
    zero = torch.tensor(0.0)
    manifold = fm.StiffnessManifold(fmt, metric=metric)
    assert manifold.dist(zero, -zero) == 0
    assert manifold.logmap(-zero, zero) == 0
    assert manifold.stiffness(-zero) == manifold.stiffness(zero) > 0


@every_format
@every_scale
@both_dtypes
def test_stiffness_is_the_gap_to_the_next_neighbour_outward(fmt, scale, dtype) -> None:
    """At every code, both signs, zeros and powers of two included: the step to where
    the next code is or would be.
    """
    x = grid(fmt, dtype)
    gaps = torch.from_numpy(ruler(fmt).stiffness(x.double().numpy())).to(dtype)
    manifold = fm.StiffnessManifold(fmt, scale)
    assert same_bits(manifold.stiffness(spread(x, scale)), spread(gaps, scale))


@every_format
@exact_scale
@both_dtypes
def test_whole_steps_from_code_to_code_are_exact(fmt, scale, dtype, compare_bits) -> None:
    """exp_x(log_x(y)) == y bit for bit between all pairs of codes, also in float32."""
    manifold = fm.StiffnessManifold(fmt, scale)
    x, y = pairs(grid(fmt, dtype)[:-1])
    steps = ruler(fmt).codes[None, :] - ruler(fmt).codes[:, None]
    u = torch.from_numpy(steps.flatten()).to(dtype) * manifold.stiffness(spread(x, scale))
    reached = manifold.expmap(spread(x, scale), u) + 0.0  # -0 and +0 are one point
    compare_bits(reached, spread(y, scale).double().numpy() + 0.0, x, fmt.name)


@few_formats
def test_transport_by_powers_of_two_is_exact_in_float32(fmt) -> None:
    manifold = fm.StiffnessManifold(fmt)
    x, y = (point.float() for point in interior_and_grid(fmt, 1.0))
    u = torch.linspace(-1, 1, len(x)) * manifold.stiffness(x)
    assert same_bits(manifold.transp(y, x, manifold.transp(x, y, u)), u)
    assert same_bits(manifold.norm(y, manifold.transp(x, y, u)), manifold.norm(x, u))


@every_format
@every_metric
@every_scale
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("huge", ["the largest", 1e30, math.inf])
def test_exp_stops_at_the_ends(fmt, metric, scale, dtype, huge) -> None:
    manifold = fm.StiffnessManifold(fmt, scale, metric)
    x = spread(torch.cat([off_grid(fmt, 50), grid(fmt)]).to(dtype), scale)
    end = spread(torch.tensor(fmt.max, dtype=dtype), scale).expand_as(x)
    u = torch.full_like(x, torch.finfo(dtype).max if huge == "the largest" else huge)
    assert same_bits(manifold.expmap(x, u), end)
    assert same_bits(manifold.expmap(x, -u), -end)
    assert same_bits(manifold.retr(x, u), end)


NAN = torch.tensor(math.nan)
ONE = torch.tensor(1.0)
#: what a manifold makes of NaN, by name
IMAGES = {
    "projx": lambda manifold: manifold.projx(NAN),
    "expmap, point": lambda manifold: manifold.expmap(NAN, ONE),
    "expmap, vector": lambda manifold: manifold.expmap(ONE, NAN),
    "retr, point": lambda manifold: manifold.retr(NAN, ONE),
    "retr, vector": lambda manifold: manifold.retr(ONE, NAN),
    "logmap, start": lambda manifold: manifold.logmap(NAN, ONE),
    "logmap, end": lambda manifold: manifold.logmap(ONE, NAN),
    "dist": lambda manifold: manifold.dist(ONE, NAN),
    "transp": lambda manifold: manifold.transp(ONE, ONE, NAN),
    "egrad2rgrad": lambda manifold: manifold.egrad2rgrad(ONE, NAN),
    "to_chart": lambda manifold: manifold.to_chart(NAN),
    "from_chart": lambda manifold: manifold.from_chart(NAN),
}


@few_formats
@every_metric
@pytest.mark.parametrize("kind", [fm.StiffnessManifold, fm.FP8Manifold])
@pytest.mark.covering(3)  # all cases
def test_nan_stays_nan(fmt, metric, kind) -> None:
    """Of all functions of a manifold."""
    manifold = kind(fmt, metric=metric)
    assert [name for name, image in IMAGES.items() if not image(manifold).isnan()] == []


@every_format
@every_scale
@both_dtypes
def test_projection_takes_the_nearest_point(fmt, scale, dtype) -> None:
    x = torch.cat([off_grid(fmt, 400), torch.tensor([1.01, -1.01, 3.0, -3.0]) * fmt.max]).to(dtype)
    points = spread(grid(fmt, dtype), scale)
    manifold = fm.FP8Manifold(fmt, scale)
    y = manifold.projx(spread(x, scale))
    assert lands_on_grid(y, fmt, scale)
    best = (spread(x, scale).unsqueeze(-1) - points.unsqueeze(-2)).abs().amin(-1)
    slack = 4 * torch.finfo(dtype).eps * spread(x, scale).abs()
    assert ((spread(x, scale) - y).abs() <= best + slack).all()
    projected = manifold.projx(points)
    assert (projected == points).all()
    assert same_bits(projected, points) or not fmt.has_negative_zero


def test_projection_of_the_continuous_manifold_keeps_what_is_inside() -> None:
    manifold = fm.StiffnessManifold("E4M3", torch.tensor([[0.25], [2.0]]))
    x = torch.tensor([[100.0, 200.0, -0.0], [800.0, -1e9, 897.0]])
    assert same_bits(
        manifold.projx(x), torch.tensor([[100.0, 112.0, -0.0], [800.0, -896.0, 896.0]])
    )


# ------------------------------------------------------------------------------------------
# metrics
def derivative(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(y.sum(), x)[0]


@few_formats
@every_metric
@every_scale
def test_gradient_of_dist_and_log_is_one_over_stiffness(fmt, metric, scale) -> None:
    manifold = fm.StiffnessManifold(fmt, scale, metric)
    x, y = (point.requires_grad_() for point in interior_and_grid(fmt, scale))
    one_over_s = 1 / manifold.stiffness(x).detach()
    sign = torch.sign(x - y).detach()
    assert torch.allclose(derivative(manifold.dist(x, y), x), sign * one_over_s, rtol=1e-12, atol=0)
    assert torch.allclose(derivative(manifold.dist(y, x), x), sign * one_over_s, rtol=1e-12, atol=0)
    assert torch.allclose(derivative(manifold.to_chart(x), x), one_over_s, rtol=1e-12, atol=0)
    expected = manifold.stiffness(x).detach() / manifold.stiffness(y).detach()
    assert torch.allclose(derivative(manifold.logmap(x, y), y), expected, rtol=1e-12, atol=0)


@few_formats
@every_metric
@every_scale
def test_gradient_of_exp_is_the_ratio_of_stiffnesses(fmt, metric, scale) -> None:
    """d exp_x(u) / du = S(y) / S(x), for ends off the kinks; 1 at u = 0 everywhere."""
    manifold = fm.StiffnessManifold(fmt, scale, metric)
    x, _ = interior_and_grid(fmt, scale)
    y = spread(off_grid(fmt, x.shape[-1], seed=5, share=0.99), scale)
    u = manifold.logmap(x, y).requires_grad_()
    ratio = manifold.stiffness(y) / manifold.stiffness(x)
    assert torch.allclose(derivative(manifold.expmap(x, u), u), ratio, rtol=1e-6, atol=0)
    still = torch.zeros_like(x).requires_grad_()
    assert same_bits(derivative(manifold.expmap(x, still), still), torch.ones_like(x))


@every_format
@every_scale
def test_a_function_equal_to_ulp_is_the_ulp_metric(fmt, scale) -> None:
    by_function, named = (
        fm.StiffnessManifold(fmt, scale, ulp_as_function),
        fm.StiffnessManifold(fmt, scale),
    )
    x, y = interior_and_grid(fmt, scale)
    assert same_bits(by_function.stiffness(x), named.stiffness(x))
    assert same_bits(by_function.to_chart(x), named.to_chart(x))
    assert same_bits(by_function.dist(x, y), named.dist(x, y))
    assert same_bits(by_function.logmap(x, y), named.logmap(x, y))
    assert same_bits(by_function.egrad2rgrad(x, y), named.egrad2rgrad(x, y))
    u = named.logmap(x, y) * 0.61
    assert (
        named.dist(by_function.expmap(x, u), named.expmap(x, u)) <= chart_error(named, x, y)
    ).all()


@few_formats
def test_metric_log_is_multiplicative_above_the_smallest_normal(fmt) -> None:
    """S = max(|x|, 2^emin) 2^-M: a step of t ULPs multiplies by exp(t 2^-M)."""
    manifold = fm.StiffnessManifold(fmt, metric="log")
    x = torch.tensor([fmt.min_normal, 1.1 * fmt.min_normal, -0.9 * fmt.max], dtype=torch.float64)
    assert torch.allclose(manifold.stiffness(x), x.abs() * 2.0**-fmt.mantissa_bits, rtol=EPS)
    u = 0.5 * manifold.stiffness(x) * x.sign()
    inside = (x * math.exp(0.5 * 2.0**-fmt.mantissa_bits)).clamp(-fmt.max, fmt.max)
    assert torch.allclose(manifold.expmap(x, u), inside, rtol=1e-12)
    below = torch.tensor([0.0, 0.3 * fmt.min_normal], dtype=torch.float64)
    assert same_bits(manifold.stiffness(below), torch.full_like(below, fmt.ulp_min))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_metric
@pytest.mark.parametrize("kind", [fm.StiffnessManifold, fm.FP8Manifold])
@pytest.mark.covering(3)  # all cases
def test_half_precision_points_are_computed_in_float32(kind, dtype, metric) -> None:
    fmt = FORMATS["E4M3"]
    x = grid(fmt, dtype)
    y = x.flip(0)
    manifold = kind(fmt, metric=metric)
    wide = manifold.to_chart(x.float())
    assert same_bits(manifold.to_chart(x), wide.to(dtype))
    assert same_bits(manifold.stiffness(x), manifold.stiffness(x.float()).to(dtype))
    assert same_bits(manifold.expmap(x, y), manifold.expmap(x.float(), y.float()).to(dtype))
    assert same_bits(manifold.retr(x, y), manifold.retr(x.float(), y.float()).to(dtype))
    assert same_bits(manifold.projx(x), x)
    assert manifold.check_point_on_manifold(x)


# ----------------------------------------------- the grid: where retractions land and
# what is drawn
both_roundings = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


@deterministic
@given(
    name=st.sampled_from(sorted(FORMATS)),
    scale=st.sampled_from([1.0, 0.3]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    retraction=st.sampled_from(["exponential", "euclidean"]),
    xs=st.lists(st.floats(width=32), min_size=1),
    zero=st.sampled_from([0.0, -0.0]),
)
def test_retraction_of_zero_is_the_point_itself(
    name, scale, rounding, retraction, xs, zero
) -> None:
    """Bit for bit, for every float32: -0, Inf, NaN, and points off the grid."""
    manifold = fm.FP8Manifold(FORMATS[name], scale, rounding, retraction=retraction)
    x = torch.tensor(xs, dtype=torch.float32)
    assert same_bits(manifold.retr(x, torch.full_like(x, zero)), x)
    assert same_bits(manifold.expmap(x, torch.full_like(x, zero)), x)


@every_format
@every_metric
@exact_scale
@both_roundings
@pytest.mark.parametrize("retraction", ["exponential", "euclidean"])
def test_retraction_is_the_rounded_exponential(fmt, metric, scale, rounding, retraction) -> None:
    """To the bit, at every code but for steps of zero: half and other parts of an ULP,
    far, and beyond the ends.
    """
    ambient = fm.StiffnessManifold(fmt, scale, metric)
    x = spread(grid(fmt), scale)
    steps = torch.tensor(
        [0.5, -0.5, 0.3125, -1.625, 2.0**-10, -5.28125, 7.7, 1e3, -1e12, math.inf],
        dtype=torch.float64,
    )
    u = steps[:, None] * ambient.stiffness(x)
    key = {"seed": 11, "step": 1} if rounding == "stochastic" else {}
    moved = ambient.expmap(x, u) if retraction == "exponential" else x + u
    manifold = fm.FP8Manifold(fmt, scale, rounding, seed=11, metric=metric, retraction=retraction)
    manifold.counter += 1
    assert same_bits(
        manifold.retr(x, u), fm.round_to_grid(moved / scale, fmt, rounding, **key) * scale
    )


def test_every_stochastic_retraction_advances_the_counter() -> None:
    manifold = fm.FP8Manifold("E4M3", 1.0, "stochastic")
    x = torch.ones(1000)
    assert manifold.counter.dtype == torch.int64
    counts = []
    for _ in range(3):
        counts.append(int(manifold.counter))
        manifold.retr_transp(x, x * 0.01, x)
    assert counts == [0, 1, 2]
    assert int(manifold.state_dict()["counter"]) == 3


def test_two_stochastic_retractions_draw_apart() -> None:
    manifold = fm.FP8Manifold("E4M3", 1.0, "stochastic")
    x = torch.ones(1000)
    assert not torch.equal(manifold.retr(x, x * 0.05), manifold.retr(x, x * 0.05))


def test_a_retraction_to_nearest_advances_no_counter() -> None:
    manifold = fm.FP8Manifold("E4M3")
    manifold.retr(torch.ones(1000), torch.ones(1000))
    assert int(manifold.counter) == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda manifold, x: manifold.projx(x),
        lambda manifold, x: manifold.expmap(x, x),
        lambda manifold, x: manifold.stiffness(x),
        lambda manifold, x: manifold.dist(x, x),
        lambda manifold, x: manifold.random(5),
        lambda manifold, x: manifold.check_point_on_manifold(x),
    ],
    ids=["projx", "expmap", "stiffness", "dist", "random", "check"],
)
def test_nothing_but_a_retraction_advances_the_counter(use) -> None:
    manifold = fm.FP8Manifold("E4M3", 1.0, "stochastic")
    use(manifold, torch.ones(1000))
    assert int(manifold.counter) == 0


@few_formats
@both_roundings
def test_random_points_lie_on_the_grid_and_spread_over_the_codes(fmt, rounding) -> None:
    """Chi-square of 10^5 points over the codes: every code alike, the two ends half as
    often.
    """
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


# ------------------------------------------------- means of the rounded retractions

#: the share of a step of 0.2 ULP from a power of two that is made in the mean, by
#: retraction and direction
ONE_SIDED = {
    ("exponential", "inwards"): 0.5,
    ("exponential", "outwards"): 1.0,
    ("euclidean", "inwards"): 1.0,
    ("euclidean", "outwards"): 1.0,
}


@pytest.mark.parametrize(("case", "share"), ONE_SIDED.items(), ids=map("-".join, ONE_SIDED))
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4", "E7M0"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_a_small_step_from_a_power_of_two(name, sign, case, share) -> None:
    """The exponential map has a derivative of 1/2 towards zero there, and so has the
    mean of its rounding.
    """
    retraction, side = case
    manifold = fm.FP8Manifold(name, rounding="stochastic", seed=3, retraction=retraction)
    x = torch.full((200_000,), 2.0 * sign)
    step = 0.2 * manifold.stiffness(x) * sign * (1 if side == "outwards" else -1)
    moved = (manifold.retr(x, step) - x) / step
    assert moved.mean().item() == pytest.approx(share, abs=0.02)
    if retraction == "exponential":
        assert (manifold.expmap(x, step) - x)[0].item() == pytest.approx(
            share * step[0].item(), rel=1e-5
        )


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E3M4"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_a_small_step_from_inside_a_binade(name, sign) -> None:
    manifold = fm.FP8Manifold(name, rounding="stochastic", seed=3)
    x = torch.full((200_000,), 1.25)
    step = 0.2 * sign * manifold.stiffness(x)
    moved = (manifold.retr(x, step) - x) / step
    assert moved.mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
@pytest.mark.parametrize("retraction", ["exponential", "euclidean"])
def test_steps_whose_mean_is_zero_push_outwards_under_the_exponential_retraction(
    name, retraction
) -> None:
    """By ``exp(T / 4 (ln 2 / 2^M)^2)`` in the mean; straight steps leave the mean."""
    steps, scale = 200, 2.0**-6 if name == "E4M3" else 1.0
    options = {"scale": scale, "rounding": "stochastic", "seed": 1, "retraction": retraction}
    manifold = fm.FP8Manifold(name, **options)
    generator = torch.Generator().manual_seed(0)
    w = manifold.projx(torch.randn(20_000, generator=generator) * 0.02)
    first = w.abs().mean()
    for _ in range(steps):
        signs = torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
        w = manifold.retr(w, 0.5 * signs * manifold.stiffness(w))
    growth = math.exp(steps / 4 * (math.log(2) / 2**manifold.format.mantissa_bits) ** 2)
    expected = growth if retraction == "exponential" else 1.0
    assert (w.abs().mean() / first).item() == pytest.approx(expected, rel=0.1)
