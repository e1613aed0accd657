"""Learning-rate schedules."""

from __future__ import annotations

import pytest

from nanogpt_bench.config.schema import OptimizerConfig
from nanogpt_bench.step.schedule import lr_factor


def factors(**settings: object) -> list[float]:
    config = OptimizerConfig(**settings)  # type: ignore[arg-type]
    return [lr_factor(config, step, 100) for step in range(101)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    rising = factors(warmup_steps=9)[:10]
    assert rising == pytest.approx([step / 10 for step in range(1, 11)])


def test_cosine_falls_to_its_floor_and_passes_the_middle_halfway() -> None:
    values = factors(warmup_steps=0, min_lr_ratio=0.1)
    assert (values[0], values[50], values[100]) == pytest.approx((1.0, 0.55, 0.1))
    assert values == sorted(values, reverse=True)


def test_trapezoid_stays_then_falls_linearly() -> None:
    values = factors(warmup_steps=0, schedule="trapezoid", decay_share=0.2, min_lr_ratio=0.0)
    assert values[:81] == [1.0] * 81
    assert values[80:] == pytest.approx([1 - step / 20 for step in range(21)])


def test_constant_stays() -> None:
    assert set(factors(warmup_steps=0, schedule="constant")) == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "trapezoid", "constant"])
def test_a_warm_up_longer_than_the_run_never_exceeds_the_peak(schedule: str) -> None:
    assert max(factors(warmup_steps=500, schedule=schedule)) < 0.21
