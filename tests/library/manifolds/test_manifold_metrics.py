"""The metrics of the manifolds: gradients, functions as metrics, formulas, dtypes."""

import math

import pytest
import torch
from laws import each
from manifold_cases import (
    EPS,
    FORMATS,
    chart_error,
    every_format,
    every_metric,
    every_scale,
    few_formats,
    grid,
    interior_and_grid,
    off_grid,
    same_bits,
    smooth_function,
    spread,
    ulp_as_function,
)

import fp8manifold as fm

pytestmark = pytest.mark.covering(2)


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
    ours, named = fm.StiffnessManifold(fmt, scale, ulp_as_function), fm.StiffnessManifold(fmt, scale)
    x, y = interior_and_grid(fmt, scale)
    assert same_bits(ours.stiffness(x), named.stiffness(x))
    assert same_bits(ours.to_chart(x), named.to_chart(x))
    assert same_bits(ours.dist(x, y), named.dist(x, y))
    assert same_bits(ours.logmap(x, y), named.logmap(x, y))
    assert same_bits(ours.egrad2rgrad(x, y), named.egrad2rgrad(x, y))
    u = named.logmap(x, y) * 0.61
    assert (named.dist(ours.expmap(x, u), named.expmap(x, u)) <= chart_error(named, x, y)).all()


@few_formats
def test_a_function_holds_its_middle_value_between_neighbours(fmt) -> None:
    manifold = fm.StiffnessManifold(fmt, metric=smooth_function)
    knots = grid(fmt)[:-1]
    middle = (knots[1:] + knots[:-1]) / 2
    assert torch.allclose(manifold.stiffness(middle), smooth_function(middle, fmt), rtol=EPS, atol=0)
    assert torch.allclose(manifold.dist(knots[1:], knots[:-1]), knots.diff() / smooth_function(middle, fmt))


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


@few_formats
@every_scale
def test_metric_euclidean_is_addition(fmt, scale) -> None:
    manifold = fm.StiffnessManifold(fmt, scale, "euclidean")
    x = spread(off_grid(fmt, 300, share=0.5), scale)
    u = spread(torch.linspace(-1, 1, 300, dtype=torch.float64) * fmt.max * 0.1, scale)
    assert torch.allclose(manifold.expmap(x, u), manifold.projx(x + u), rtol=1e-12)
    assert torch.allclose(manifold.logmap(x, x + u), u, rtol=1e-6, atol=1e-9 * fmt.max)
    assert same_bits(manifold.stiffness(x), spread(torch.ones(300, dtype=torch.float64), scale))


@each("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_metric
def test_half_precision_points_are_computed_in_float32(dtype, metric) -> None:
    fmt = FORMATS["E4M3"]
    x = grid(fmt, dtype)
    y = x.flip(0)
    for manifold in (fm.StiffnessManifold(fmt, metric=metric), fm.FP8Manifold(fmt, metric=metric)):
        wide = manifold.to_chart(x.float())
        assert same_bits(manifold.to_chart(x), wide.to(dtype))
        assert same_bits(manifold.stiffness(x), manifold.stiffness(x.float()).to(dtype))
        assert same_bits(manifold.expmap(x, y), manifold.expmap(x.float(), y.float()).to(dtype))
        assert same_bits(manifold.retr(x, y), manifold.retr(x.float(), y.float()).to(dtype))
        assert same_bits(manifold.projx(x), x)
        assert manifold.check_point_on_manifold(x)
