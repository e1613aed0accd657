"""The comparison of gradients with a shadow's, against definitions in float64, and runs beside one."""

import math

import pytest
import torch
from bench_runs import recorded
from watched_models import normal

from nanogpt_bench.loop.train import run
from nanogpt_bench.monitors.shadow import shadow_figures


@pytest.mark.parametrize("shape", [(5,), (400, 700)])
def test_cosine_and_noise_are_the_definitions(shape):
    for size in (1.0, 1e-25, 1e25):
        reference = normal(*shape, seed=1) * size
        g = reference + normal(*shape, seed=2) * 0.3 * size
        (cosine, decibels), a, b = shadow_figures(g, reference), g.double().flatten(), reference.double().flatten()
        assert cosine == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-5)
        assert decibels == pytest.approx(10 * math.log10(b.square().sum() / (a - b).square().sum()), rel=1e-4)
        assert shadow_figures(g, g.clone()) == (1.0, math.inf)
        assert shadow_figures(g, -g)[0] == -1.0


def test_gradients_of_other_size_and_dtype_still_have_an_angle():
    g = normal(1000)
    assert shadow_figures(g * 1e-30, g) == (pytest.approx(1, abs=1e-6), pytest.approx(0, abs=1e-5))
    assert shadow_figures(g, g * 1e-30)[1] == pytest.approx(-600, rel=1e-3)
    for dtype in (torch.bfloat16, torch.float64):
        assert shadow_figures(g.to(dtype), g)[0] == pytest.approx(1, abs=1e-4)


def test_gradients_without_an_angle():
    zero, one = torch.zeros(3), torch.ones(3)
    for g, reference in ((zero, zero), (one * math.nan, one), (one, one * math.inf), (zero[:0], zero[:0])):
        assert shadow_figures(g, reference) == (None, None)
    assert shadow_figures(zero, one) == (None, 0)
    assert shadow_figures(one, zero) == (None, -math.inf)


@pytest.mark.parametrize("settings", [{}, {"train__accumulation": 3}, {"model__dropout": 0.3}])
def test_float32_weights_have_a_shadow_that_agrees_exactly(tiny, tmp_path, settings):
    run(tiny(rule="fp32", shadow__enabled=True, shadow__interval=3, train__max_steps=4, **settings), tmp_path / "r")
    records = recorded(tmp_path / "r")
    assert ["grad/cosine" in record for record in records] == [False, False, False, True, True]
    for record in records[3:]:
        assert record["grad/cosine"] == record["grad/cosine_min"] == 1.0
        assert record["grad/cosine/lm_head"] == 1.0
        assert record["grad/quant_snr_db/lm_head"] is None  # no noise at all
        assert record["shadow/overhead"] > 0


def test_the_shadow_holds_dequantised_weights(tiny, tmp_path):
    settings = {"rule": "master", "model__format": "E2M1", "train__precision": "float32", "shadow__enabled": True}
    settings |= {"shadow__interval": 1, "train__max_steps": 1}
    run(tiny(**settings), tmp_path / "r")
    # the straight-through gradient is that at the dequantised weights
    assert 1 - 1e-6 < recorded(tmp_path / "r")[-1]["grad/cosine_min"] <= 1
