"""Gradient figures, dead runs and the comparison with a shadow, against definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_cases import ROWS, grid_weight, normal

import fp8manifold as fm
from fp8manifold.monitor import DeadRuns, Histogram, gradient_figures, shadow_figures, update_to_noise

SHAPES = pytest.mark.parametrize("shape", [(5,), (400, 700)])
SIZES = pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])


@SHAPES
@SIZES
def test_norms_and_signal(shape: tuple[int, ...], size: float) -> None:
    g = (normal(*shape, seed=1) + 0.3) * size
    g.view(-1)[:2] = 0
    found, wide = gradient_figures(g), g.double()
    assert found.l2 == pytest.approx(wide.norm().item(), rel=1e-5)
    assert found.linf == g.abs().max().item()
    assert found.snr == pytest.approx((wide.mean().abs() / wide.std(correction=0)).item(), rel=1e-4)
    assert found.zero == 2 / g.numel()
    assert found.size == g.numel()


def test_zero_constant_and_empty_gradients() -> None:
    zero = gradient_figures(torch.zeros(3, 4))
    assert (zero.l2, zero.linf, zero.snr, zero.zero) == (0, 0, None, 1)
    constant = gradient_figures(torch.full((1000,), 0.1))
    assert constant.snr is None
    assert constant.l2 == pytest.approx(math.sqrt(10))
    empty = gradient_figures(torch.empty(0))
    assert (empty.size, empty.l2, empty.linf, empty.snr, empty.zero) == (0, 0, 0, None, 0)
    assert gradient_figures(torch.tensor([1.0, -1.0])).snr == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@SHAPES
def test_gradients_that_are_not_finite(bad: float, shape: tuple[int, ...]) -> None:
    g = normal(*shape)
    g.view(-1)[0], g.view(-1)[1] = 0, bad
    found = gradient_figures(g)
    assert not math.isfinite(found.l2)
    assert str(found.linf) == str(bad)
    assert found.snr is None
    assert found.zero == 1 / g.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    g = normal(1000, dtype=dtype)
    assert gradient_figures(g).l2 == pytest.approx(g.double().norm().item(), rel=1e-5)


# Against the shadow


@SHAPES
@SIZES
def test_equal_gradients_have_cosine_1(shape: tuple[int, ...], size: float) -> None:
    g = normal(*shape) * size
    found = shadow_figures(g, g.clone())
    assert (found.cosine, found.quant_snr_db) == (1.0, math.inf)
    assert shadow_figures(g, -g).cosine == -1.0
    assert shadow_figures(g, g / 3).cosine == pytest.approx(1, abs=1e-6)


@SHAPES
def test_cosine_and_noise_are_the_definitions(shape: tuple[int, ...]) -> None:
    reference = normal(*shape, seed=1) * 1e-6
    g = reference + normal(*shape, seed=2) * 3e-7
    found, a, b = shadow_figures(g, reference), g.double().flatten(), reference.double().flatten()
    assert found.cosine == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-5)
    noise = 10 * math.log10(b.square().sum() / (a - b).square().sum())
    assert found.quant_snr_db == pytest.approx(noise, rel=1e-4)
    assert found.size == g.numel()


def test_gradients_of_other_size_still_have_an_angle() -> None:
    g = normal(1000)
    found = shadow_figures(g * 1e-30, g)
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert found.quant_snr_db == pytest.approx(0, abs=1e-5)
    assert shadow_figures(g, g * 1e-30).quant_snr_db == pytest.approx(-600, rel=1e-3)
    assert shadow_figures(g.bfloat16(), g).cosine == pytest.approx(1, abs=1e-4)
    assert shadow_figures(g.double(), g).cosine == pytest.approx(1, abs=1e-6)


def test_gradients_without_an_angle() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert shadow_figures(zero, zero) == shadow_figures(zero, zero)
    for g, reference in ((zero, zero), (one * math.nan, one), (one, one * math.inf), (zero[:0], zero[:0])):
        found = shadow_figures(g, reference)
        assert (found.cosine, found.quant_snr_db) == (None, None)
    lost = shadow_figures(zero, one)
    assert (lost.cosine, lost.quant_snr_db) == (None, 0)
    invented = shadow_figures(one, zero)
    assert (invented.cosine, invented.quant_snr_db) == (None, -math.inf)


def test_the_gradient_of_a_quantised_layer_has_a_smaller_cosine() -> None:
    g = normal(64, 64)
    cosines = [shadow_figures(fm.round_to_grid(g, name), g).cosine for name in ("E4M3", "E5M2", "E7M0")]
    assert cosines == sorted(cosines, reverse=True)
    assert all(0.9 < c < 1 for c in cosines)


# Updates against rounding noise


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "E1M6"])
def test_noise_is_the_variance_of_stochastic_rounding(name: str) -> None:
    weight = grid_weight(name, (3, 40), ROWS).detach()
    target = weight + normal(3, 40, seed=2) * 0.3 * fm.ulp(weight / ROWS, name) * ROWS
    draws = 4000
    many = (target / ROWS).expand(draws, 3, 40)
    errors = (fm.round_to_grid(many, name, "stochastic", seed=1) * ROWS - target).double()
    measured = (target - weight).double().square().sum() / errors.square().mean(0).sum()
    assert update_to_noise(weight, target, name, ROWS) == pytest.approx(measured.item(), rel=0.05)


def test_noise_at_the_edges() -> None:
    one = torch.ones(4)
    assert update_to_noise(one, one, "E4M3") is None
    assert update_to_noise(one, one * 2, "E4M3") == math.inf
    assert update_to_noise(one, one * 1e6, "E4M3") == math.inf
    assert update_to_noise(one[:0], one[:0], "E4M3") is None
    assert math.isnan(update_to_noise(one, one * math.nan, "E4M3") or 0.0)
    half = update_to_noise(one, one + 0.0625, "E4M3")
    assert half == 0.0625**2 / (0.25 * 0.125**2)
    tiny = update_to_noise(one * 1e-25, one * 1.0625e-25, "E4M3", 1e-25)
    assert tiny == pytest.approx(half, rel=1e-4)


# Dead runs


@pytest.mark.parametrize("shape", [(60,), (300, 500)])
def test_runs_are_counted(shape: tuple[int, ...]) -> None:
    runs, counts = DeadRuns(patience=3, threshold=0.5), torch.zeros(shape, dtype=torch.int64)
    for step in range(8):
        g = normal(*shape, seed=step)
        runs.update(g)
        counts = (counts + 1) * (g.abs() < 0.5)
    assert runs.runs is not None
    assert torch.equal(runs.runs.long(), counts)
    assert runs.dead == (counts >= 3).double().mean().item()
    lengths = runs.lengths()
    inside = [(counts >= low) & (counts < high) for low, high in zip(lengths.edges, lengths.edges[1:], strict=False)]
    assert list(lengths.counts) == [int(mask.sum()) for mask in inside]


def test_dead_is_a_hundred_steps_below_the_threshold() -> None:
    runs = DeadRuns()
    g = torch.tensor([0.0, 9e-9, 1e-8, 0.0])
    for step in range(100):
        assert runs.dead == 0
        runs.update(g if step != 50 else torch.tensor([0.0, -9e-9, 0.0, 1.0]))
    assert runs.dead == 0.5
    assert runs.lengths() == Histogram((0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0), (1, 0, 0, 0, 0, 0, 1, 2))
    runs.update(torch.tensor([math.nan, 0.0, 0.0, 0.0]))
    assert runs.dead == 0.25


def test_runs_of_steps_that_were_not_looked_at_and_long_ones() -> None:
    runs = DeadRuns(patience=100)
    for _ in range(4):
        runs.update(torch.zeros(2), steps=30)
    assert runs.dead == 1
    for _ in range(3):
        runs.update(torch.zeros(2), steps=32000)
    assert runs.runs is not None
    assert runs.runs.tolist() == [32767] * 2
    assert runs.lengths().edges[-1] == 2.0**15


@pytest.mark.parametrize("shape", [(3, 4), (300, 500)])
def test_runs_of_transposed_half_precision_and_of_several_steps(shape: tuple[int, int]) -> None:
    runs, counts = DeadRuns(threshold=0.5), torch.zeros(shape, dtype=torch.int64)
    for seed, steps in enumerate((1, 30000, 1, 5000, 2)):
        g = normal(*reversed(shape), seed=seed).bfloat16().T
        if seed < 2:
            g = g * 0.01
        runs.update(g, steps)
        counts = (counts + steps).clamp(max=32767) * (g.float().abs() < 0.5)
    assert runs.runs is not None
    assert torch.equal(runs.runs.long(), counts)
    assert counts.max() == 32767


def test_runs_before_anything_and_of_nothing() -> None:
    runs = DeadRuns()
    assert (runs.dead, runs.lengths()) == (0, Histogram((0.0, 1.0), (0,)))
    runs.update(torch.empty(0))
    assert (runs.dead, runs.lengths()) == (0, Histogram((0.0, 1.0), (0,)))
