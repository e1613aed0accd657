"""Gradient figures, dead runs, the noise of rounding and the angle to a shadow's.

They are compared with definitions in float64.
"""

import math

import pytest
import torch
from bench_runs import recorded
from torch import nn
from watched_models import SCALES, format_of, normal, observers_of, on_grid, one_step, watched

import fp8manifold as fm
from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors.gradients import (
    GRAD_L2,
    GRAD_SNR,
    GRAD_ZERO,
    DeadRuns,
    gradient_figures,
    update_to_noise,
)
from nanogpt_bench.monitors.shadow import shadow_figures


@pytest.mark.parametrize("shape", [(5,), (400, 700)])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1.0, torch.float32),
        (1.0, torch.bfloat16),
        (1.0, torch.float16),
        (1e-25, torch.float32),
        (1e-25, torch.float64),
        (1e25, torch.float32),
        (1e25, torch.float64),
    ],
)
def test_norms_and_signal(shape, size, dtype):
    g = ((normal(*shape, seed=1) - 0.3) * size).to(dtype)
    g.view(-1)[:2] = 0
    figures, wide = gradient_figures(g), g.double()
    signal = wide.mean().abs() / wide.std(correction=0)
    assert figures[GRAD_L2] == pytest.approx(wide.norm().item(), rel=1e-5)
    assert figures[GRAD_SNR] == pytest.approx(signal.item(), rel=1e-4)
    assert figures[GRAD_ZERO] == 2 / g.numel()


def test_gradients_without_signal():
    assert list(gradient_figures(torch.zeros(3, 4)).values()) == [0, None, 1]
    assert list(gradient_figures(torch.empty(0)).values()) == [0, None, 0]
    constant = gradient_figures(torch.full((1000,), 0.1))
    assert (constant[GRAD_L2], constant[GRAD_SNR]) == (pytest.approx(math.sqrt(10)), None)
    assert gradient_figures(torch.tensor([1.0, -1.0]))[GRAD_SNR] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_has_no_signal(bad):
    figures = gradient_figures(torch.tensor([0.0, bad, 1.0, 2.0]))
    assert (math.isfinite(figures[GRAD_L2] or 0.0), figures[GRAD_SNR], figures[GRAD_ZERO]) == (
        False,
        None,
        0.25,
    )


@pytest.mark.parametrize("name", ["E4M3", "E7M0", "E1M6"])
def test_noise_is_the_variance_of_stochastic_rounding(name):
    weight = on_grid(name, 3, 40) * SCALES
    target = weight + normal(3, 40, seed=2) * 0.3 * fm.ulp(weight / SCALES, name) * SCALES
    many = (target / SCALES).expand(4000, 3, 40)
    errors = (fm.round_to_grid(many, name, "stochastic", seed=1) * SCALES - target).double()
    measured = (target - weight).double().square().sum() / errors.square().mean(0).sum()
    assert update_to_noise(weight, target, format_of(name), SCALES) == pytest.approx(
        measured.item(), rel=0.05
    )


@pytest.mark.parametrize(
    ("target", "ratio"),
    [
        (1.0, None),
        (2.0, math.inf),
        (1e6, math.inf),
        (math.inf, math.inf),
        (1.0625, 0.0625**2 / (0.25 * 0.125**2)),
    ],
)
def test_noise_at_the_edges(target, ratio):
    one = torch.ones(4)
    assert update_to_noise(one, one * target, format_of("E4M3")) == ratio
    assert update_to_noise(one[:0], one[:0], format_of("E4M3")) is None
    assert math.isnan(update_to_noise(one, one * math.nan, format_of("E4M3")) or 0.0)
    tiny = update_to_noise(one * 1e-25, one * 1.0625e-25, format_of("E4M3"), 1e-25)
    assert tiny == pytest.approx(0.0625**2 / (0.25 * 0.125**2), rel=1e-4)


@pytest.mark.parametrize("shape", [(3, 4), (300, 500)])
def test_runs_are_counted_of_transposed_half_precision_and_of_several_steps(shape):
    runs, counts = DeadRuns(), torch.zeros(shape, dtype=torch.int64)
    for seed, steps in enumerate((1, 30000, 1, 5000, 2, 60, 60)):
        g = normal(*reversed(shape), seed=seed, std=1e-10 if seed < 2 else 1e-8).bfloat16().T
        runs.update(g, steps)
        counts = (counts + steps).clamp(max=32767) * (g.float().abs() < 1e-8)
        assert runs.runs is not None, (seed, steps)
        assert torch.equal(runs.runs.long(), counts), (seed, steps)
        assert runs.dead == (counts >= 100).double().mean().item(), (seed, steps)
    assert 0 < runs.dead < 1


def test_dead_is_a_hundred_steps_below_the_threshold():
    runs = DeadRuns()
    assert runs.dead == 0
    for step in range(100):
        assert runs.dead == 0, step
        runs.update(
            torch.tensor([0.0, -9e-9, 1e-8 if step != 50 else 0.0, 0.0 if step != 50 else 1.0])
        )
    assert runs.dead == 0.5
    resumed = DeadRuns()
    resumed.load_state(runs.state())
    resumed.update(torch.tensor([math.nan, 0.0, 0.0, 0.0]))
    assert (runs.dead, resumed.dead) == (0.5, 0.25)
    nothing = DeadRuns()
    nothing.update(torch.empty(0))
    assert nothing.dead == 0


@pytest.mark.parametrize("small", [0.0, 1e-9])
def test_a_weight_is_dead_after_its_steps_without_a_gradient(small):
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    observers, dead = observers_of(watched(model, dead_interval=50), "gradients"), []
    for number, first in (
        (50, 1.0),
        (100, small),
        (120, 1.0),
        (150, small),
        (200, 1.0),
        (250, small),
    ):
        model.zero_grad()
        record = one_step(model, observers, torch.tensor([[first, 1.0]]), number=number).record
        dead.append(record["grad/dead/0"])
    assert dead == [0.0, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert (record["grad/l2/0"], record["grad/zero/0"]) == (
        pytest.approx((1 + small**2) ** 0.5),
        0.5 * (small == 0),
    )


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("shape", [(5,), (400, 700)])
def test_cosine_and_noise_are_the_definitions(size, shape):
    reference = normal(*shape, seed=1) * size
    g = reference + normal(*shape, seed=2) * 0.3 * size
    (cosine, decibels), a, b = (
        shadow_figures(g, reference),
        g.double().flatten(),
        reference.double().flatten(),
    )
    assert cosine == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-5)
    assert decibels == pytest.approx(
        10 * math.log10(b.square().sum() / (a - b).square().sum()), rel=1e-4
    )
    assert shadow_figures(g, g.clone()) == (1.0, math.inf)
    assert shadow_figures(g, -g)[0] == -1.0


def test_gradients_of_other_size_have_an_angle_and_zeros_none():
    g = normal(1000)
    assert shadow_figures(g * 1e-30, g) == (pytest.approx(1, abs=1e-6), pytest.approx(0, abs=1e-5))
    assert shadow_figures(g, g * 1e-30)[1] == pytest.approx(-600, rel=1e-3)
    zero, one = torch.zeros(3), torch.ones(3)
    assert shadow_figures(zero, one) == (None, 0)
    assert shadow_figures(one, zero) == (None, -math.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_another_dtype_have_an_angle(dtype):
    g = normal(1000)
    assert shadow_figures(g.to(dtype), g)[0] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("g", "reference"),
    [
        pytest.param(torch.zeros(3), torch.zeros(3), id="zeros"),
        pytest.param(torch.full((3,), math.nan), torch.ones(3), id="nan"),
        pytest.param(torch.ones(3), torch.full((3,), math.inf), id="reference inf"),
        pytest.param(torch.empty(0), torch.empty(0), id="empty"),
    ],
)
def test_gradients_without_an_angle(g, reference):
    assert shadow_figures(g, reference) == (None, None)


@pytest.mark.parametrize("settings", [{}, {"train__accumulation": 3}, {"model__dropout": 0.3}])
def test_float32_weights_have_a_shadow_that_agrees_exactly(tiny, tmp_path, settings):
    run(
        tiny(rule="fp32", shadow__enabled=True, shadow__interval=3, train__max_steps=4, **settings),
        tmp_path / "r",
    )
    records = recorded(tmp_path / "r")
    assert ["grad/cosine" in record for record in records] == [False, False, False, True, True]
    for record in records[3:]:
        assert record["grad/cosine"] == record["grad/cosine_min"] == 1.0
        assert record["grad/cosine/lm_head"] == 1.0
        assert record["grad/quant_snr_db/lm_head"] is None  # no noise at all
        assert record["shadow/overhead"] > 0


def test_the_shadow_holds_dequantised_weights(tiny, tmp_path):
    settings = {
        "rule": "master",
        "model__format": "E2M1",
        "train__precision": "float32",
        "shadow__enabled": True,
    }
    settings |= {"shadow__interval": 1, "train__max_steps": 1}
    run(tiny(**settings), tmp_path / "r")
    # the straight-through gradient is that at the dequantised weights
    assert 1 - 1e-6 < recorded(tmp_path / "r")[-1]["grad/cosine_min"] <= 1
