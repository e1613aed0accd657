"""Geometry figures against the closed forms, the manifold's own maps and cases known by hand."""

from __future__ import annotations

import math

import geoopt
import numpy as np
import pytest
import torch
from optimizer_cases import ROWS, grid_weight, normal, stored_weight

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.monitor import (
    PathTracker,
    chart_distance,
    geometry_figures,
    metric_min_eigenvalue,
    orthogonality,
    warp_figures,
)

NAMES = ["E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1"]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def stiffness_of(w: torch.Tensor, name: str, scale: torch.Tensor | float) -> torch.Tensor:
    return (fm.ulp((w / scale).double(), name) * scale).double()


# The stiffness field


@EVERY_FORMAT
@pytest.mark.parametrize("columns", [50, 70_000])
def test_figures_are_the_definitions(name: str, columns: int) -> None:
    w, g = normal(3, columns, std=0.1), normal(3, columns, seed=1) * 1e-4
    scale = fm.storage_scale(w, name)
    g[0, :5] = 0
    found, s = geometry_figures(w, name, scale, g * w), stiffness_of(w, name, scale)
    assert found.stiffness_mean == pytest.approx(s.mean().item(), rel=1e-5)
    assert found.warp_spread == pytest.approx(s.log2().std(correction=0).item(), rel=1e-3, abs=1e-9)
    x, y = w.abs().double().log().flatten(), s.log().flatten()
    assert found.warp_slope == pytest.approx(float(np.polyfit(x, y, 1)[0]), rel=1e-3, abs=1e-6)
    there = (g * w) != 0
    if s.unique().numel() == 1:  # in E1M6, and in E2M1 with three scales that agree
        assert found.gradient_stiffness_correlation is None
    else:
        correlation = np.corrcoef((g * w).abs().double()[there].log(), s[there].log())[0, 1]
        assert found.gradient_stiffness_correlation == pytest.approx(float(correlation), rel=1e-2, abs=1e-3)
    mean = s.mean()
    assert found.metric_min_eigenvalue == pytest.approx((mean / s.clamp(mean / 256, mean * 16)).square().min().item())
    assert found.size == w.numel()


def test_a_uniform_grid_is_not_warped() -> None:
    """Below its largest binade E1M6 is fixed point: one stiffness everywhere, whatever the scale."""
    for scale in (2.0**-6, 0.013):
        w = normal(400, 400, std=0.1).clamp(-3.9 * scale, 3.9 * scale)
        found = geometry_figures(w, "E1M6", scale, normal(400, 400))
        assert (found.warp_spread, found.warp_slope) == (0.0, pytest.approx(0, abs=1e-12))
        assert found.gradient_stiffness_correlation is None
        assert found.stiffness_mean == pytest.approx(scale / 32)
        assert found.metric_min_eigenvalue == pytest.approx(1)


def test_a_logarithmic_grid_has_slope_1() -> None:
    powers = torch.exp2(torch.arange(-20.0, 20.0))
    found = geometry_figures(powers, "E7M0", gradient=powers.square())
    assert found.warp_slope == pytest.approx(1)
    assert found.warp_spread == pytest.approx(torch.arange(40.0).std(correction=0).item())
    assert found.gradient_stiffness_correlation == pytest.approx(1)
    assert geometry_figures(powers, "E7M0", gradient=1 / powers).gradient_stiffness_correlation == pytest.approx(-1)


def test_the_smallest_eigenvalue_is_bounded_as_optimizers_bound_it() -> None:
    w = torch.cat([torch.full((1000,), 1.0), torch.tensor([2.0**40])])
    assert geometry_figures(w, "E7M0").metric_min_eigenvalue == pytest.approx(2.0**-8)
    unbounded = geometry_figures(w, "E7M0", clip=math.inf).metric_min_eigenvalue
    assert unbounded == pytest.approx(1001**-2, rel=1e-3)


@EVERY_FORMAT
def test_the_off_grid_share(name: str) -> None:
    weight = grid_weight(name, (3, 2000), ROWS).detach()
    assert geometry_figures(weight, name, ROWS).off_grid == 0
    moved = weight.clone()
    moved[0, :37] += 0.3 * fm.ulp(weight[0, :37] / ROWS[0], name) * ROWS[0]
    moved[1, :5] = 3 * fm.FloatFormat.from_string(name).max * ROWS[1] if name != "E7M0" else 2.0**100
    assert geometry_figures(moved, name, ROWS).off_grid == 42 / 6000
    assert geometry_figures(normal(3, 2000), name, ROWS).off_grid > 0.9


def test_the_grid_of_any_scale_and_of_one_byte_weights() -> None:
    x = normal(200, 200)
    for name in ("E4M3", "E5M2", "E1M6"):
        scale = fm.amax_scale(x, name)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert geometry_figures(fm.fake_quantize(x.to(dtype), name, scale), name, scale).off_grid == 0
    weight = stored_weight()
    assert geometry_figures(weight, "E4M3", weight.expanded_scale()).off_grid == 0


def test_fields_without_weights_or_numbers() -> None:
    empty = geometry_figures(torch.empty(0), "E4M3", gradient=torch.empty(0))
    assert (empty.stiffness_mean, empty.off_grid, empty.metric_min_eigenvalue, empty.warp_spread) == (0, 0, 1, 0)
    assert (empty.warp_slope, empty.gradient_stiffness_correlation) == (None, None)
    assert geometry_figures(torch.zeros(4), "E4M3").warp_slope is None
    assert geometry_figures(torch.ones(4), "E4M3", gradient=torch.zeros(4)).gradient_stiffness_correlation is None
    bad = geometry_figures(torch.tensor([1.0, math.nan, 2.0]), "E4M3")
    assert math.isnan(bad.stiffness_mean)
    assert math.isnan(bad.warp_spread)
    assert math.isnan(bad.metric_min_eigenvalue)
    assert bad.warp_slope is None
    assert bad.off_grid == pytest.approx(1 / 3)


# Steps and paths


@EVERY_FORMAT
@pytest.mark.parametrize("size", [0.01, 1.0, 20.0])
def test_warp_of_a_step_is_the_exponential_map_less_a_straight_line(name: str, size: float) -> None:
    manifold = fm.StiffnessManifold(name, ROWS.double())
    before = grid_weight(name, (3, 300), ROWS).detach()
    stiffness = stiffness_of(before, name, ROWS)
    target = (before + normal(3, 300, seed=1) * size * stiffness).float()
    end = manifold.projx(target.double())
    moved = manifold.expmap(before.double(), end - before.double())
    found = warp_figures(before, target, name, ROWS)
    expected = ((moved - end).abs() / stiffness).mean().item()
    assert found.warp_distortion == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert found.warp_crossings == (stiffness_of(end, name, ROWS) != stiffness).double().mean().item()


def test_warp_of_steps_known_by_hand() -> None:
    """From 1 (S = 1/8) by -1/8: one code inwards is 1/16, where the straight line goes two."""
    found = warp_figures(torch.tensor([1.0]), torch.tensor([0.875]), "E4M3")
    assert (found.warp_crossings, found.warp_distortion) == (1.0, 0.5)
    inside = warp_figures(torch.tensor([1.0]), torch.tensor([1.9]), "E4M3")
    assert (inside.warp_crossings, inside.warp_distortion) == (0.0, 0.0)
    subnormal = warp_figures(torch.tensor([2.0**-8]), torch.tensor([-(2.0**-8)]), "E4M3")
    assert (subnormal.warp_crossings, subnormal.warp_distortion) == (0.0, 0.0)
    through_zero = warp_figures(torch.tensor([1.0]), torch.tensor([-1.0]), "E4M3")
    assert through_zero.warp_crossings == 0
    assert through_zero.warp_distortion > 8


def test_warp_of_nothing_and_of_no_numbers() -> None:
    one = torch.ones(2)
    empty = warp_figures(one[:0], one[:0], "E4M3")
    assert (empty.size, empty.warp_crossings, empty.warp_distortion) == (0, 0, 0)
    assert math.isnan(warp_figures(one, one * math.nan, "E4M3").warp_distortion)
    assert warp_figures(one * 448, one * 1e9, "E4M3").warp_distortion == 0


@EVERY_FORMAT
@pytest.mark.parametrize("columns", [40, 60_000])
def test_distance_is_the_manifolds(name: str, columns: int) -> None:
    a, b = normal(3, columns, std=0.1), normal(3, columns, seed=1, std=0.1)
    expected = fm.StiffnessManifold(name, ROWS.double()).dist(a.double(), b.double()).mean().item()
    assert chart_distance(a, b, name, ROWS) == pytest.approx(expected, rel=1e-5)
    assert chart_distance(a, a, name, ROWS) == 0


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "P3109_8P4F"])
def test_distance_counts_representable_steps(name: str) -> None:
    fmt = fm.FloatFormat.from_string(name)
    values = torch.tensor(sorted({v for v in fmt.values if abs(v) < 1e30}))
    assert chart_distance(values[:-1], values[1:], fmt) == 1
    assert chart_distance(values[:1], values[-1:], fmt) == len(values) - 1
    somewhere = normal(200, std=3.0)
    exact = [abs(reference.to_chart(v, fmt) - reference.to_chart(1.0, fmt)) for v in somewhere.tolist()]
    assert chart_distance(somewhere, torch.ones(200), fmt) == pytest.approx(float(sum(exact)) / 200, rel=1e-6)


def test_distance_keeps_the_digits_of_a_small_step() -> None:
    a = torch.full((10,), -300.0)
    assert chart_distance(a, torch.nextafter(a, torch.tensor(0.0)), "E4M3") == 2.0**-15 / 32


def test_distance_at_the_edges() -> None:
    one = torch.ones(2)
    assert chart_distance(one[:0], one[:0], "E4M3") == 0
    assert chart_distance(one * math.inf, one * 448, "E4M3") == 0
    assert math.isnan(chart_distance(one, one * math.nan, "E4M3"))
    assert chart_distance(one, -one, "E4M3") == 112


def test_a_path_there_and_back() -> None:
    start = grid_weight("E4M3", (3, 50), ROWS).detach()
    away = (start + 5 * fm.ulp(start / ROWS, "E4M3") * ROWS).clamp(-448 * 2.0**-6, 448 * 2.0**-6)
    path = PathTracker(start, "E4M3")
    path.update(start, ROWS)
    assert (path.length, path.displacement) == (0, 0)
    path.update(away, ROWS)
    once = chart_distance(start, away, "E4M3", ROWS)
    assert path.length == path.displacement == once > 0
    path.update(start, ROWS)
    assert path.length == pytest.approx(2 * once)
    assert path.displacement == 0


def test_a_path_remembers_values_and_not_tensors() -> None:
    w = torch.ones(3)
    path = PathTracker(w, "E4M3")
    w.fill_(2.0)
    path.update(w)
    w.fill_(4.0)
    path.update(w)
    assert (path.length, path.displacement) == (16, 16)


# Metrics and constraints


def test_the_smallest_eigenvalue() -> None:
    root = normal(6, 4).double()
    matrix = root.T @ root
    expected = torch.linalg.eigvalsh(matrix).min().item()
    assert metric_min_eigenvalue(matrix) == pytest.approx(expected)
    assert metric_min_eigenvalue(matrix, damping=0.5) == pytest.approx(expected + 0.5)
    assert metric_min_eigenvalue((root @ root.T).float()) == pytest.approx(0, abs=1e-5)
    assert metric_min_eigenvalue(torch.diag(torch.tensor([3.0, -2.0]))) == -2
    assert metric_min_eigenvalue(torch.tensor([3.0, 2.0]), 1.0) == 3
    assert metric_min_eigenvalue(torch.empty(0)) == math.inf
    assert math.isnan(metric_min_eigenvalue(torch.tensor([[1.0, math.nan], [math.nan, 1.0]])))


def test_orthogonality_of_a_constrained_parameter() -> None:
    q = geoopt.Stiefel().projx(normal(3, 8, 5))
    assert orthogonality(q) < 1e-5
    assert orthogonality(q * 2) == pytest.approx(3 * math.sqrt(5), rel=1e-5)
    assert orthogonality(torch.eye(4)) == 0
    assert orthogonality(torch.empty(0, 3)[:, :0]) == 0
    assert math.isnan(orthogonality(torch.full((2, 2), math.nan)))
