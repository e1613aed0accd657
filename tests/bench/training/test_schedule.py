"""Learning-rate schedules."""

import pytest
from bench_runs import one_step, train, trainer_of

from nanogpt_bench.config.schema import COURSES, OptimizerConfig
from nanogpt_bench.loop.train import run
from nanogpt_bench.setup.optimizers import lr_factor, stiffness_at
from nanogpt_bench.setup.resolve import resolve


def factors(**settings: object) -> list[float]:
    config = OptimizerConfig(**settings)
    return [lr_factor(config, step, 100) for step in range(101)]


#: settings, and the factors from a step on
FACTORS = [
    ({"warmup_steps": 9}, 0, [step / 10 for step in range(1, 11)]),
    ({"warmup_steps": 0, "schedule": "trapezoid", "min_lr_ratio": 0.0}, 0, [1.0] * 80),
    ({"warmup_steps": 0, "schedule": "trapezoid", "min_lr_ratio": 0.0}, 80, [1 - step / 20 for step in range(21)]),
    ({"warmup_steps": 20, "schedule": "linear", "min_lr_ratio": 0.0}, 20, [1 - step / 80 for step in range(81)]),
    ({"warmup_steps": 10, "schedule": "step", "step_at": 0.25, "min_lr_ratio": 0.1}, 10, [1.0] * 15 + [0.1] * 76),
]


@pytest.mark.parametrize(("settings", "start", "expected"), FACTORS)
def test_a_schedule_has_its_factors(settings, start, expected):
    assert factors(**settings)[start : start + len(expected)] == pytest.approx(expected)


#: what is left of the way after 0, 2, 4, 6 and 8 of 8 steps
LEFT = {"linear": [1, 0.75, 0.5, 0.25, 0], "cosine": [1, 0.8536, 0.5, 0.1464, 0], "step": [1, 1, 0, 0, 0]}


@pytest.mark.parametrize("course", COURSES)
def test_k_follows_its_course_by_name(tiny, course):
    options = {"optimizer__stiffness_schedule": course, "train__max_steps": 8}
    config = resolve(tiny(rule="stiffness-anneal", model__format="E4M3", **options))
    assert [stiffness_at(config, step) for step in range(0, 9, 2)] == pytest.approx(LEFT[course], abs=1e-4)
    trainer = trainer_of(config)
    train(trainer, 1)  # and the optimizer takes it


@pytest.mark.parametrize("rule", ["muon-stochastic", "stochastic-8bit"])
def test_the_last_steps_are_written_back_in_another_way(tiny, rule, tmp_path):
    """Residuals come to be at the fourth of six steps."""
    options = {"optimizer__writeback_end": "residual8", "optimizer__step_at": 0.5}
    config, plain = (tiny(rule=rule, model__format="E4M3", train__max_steps=6, **more) for more in (options, {}))
    trainer, seen = trainer_of(config), []
    for number in range(1, 7):
        one_step(trainer, number)
        seen.append(any("residual" in state for state in trainer.optimizer.state.values()))
    assert seen == [False] * 3 + [True] * 3
    whole, other = (run(config, tmp_path / name) for name, config in (("whole", config), ("other", plain)))
    assert whole["bytes_per_quantized_parameter"] > other["bytes_per_quantized_parameter"]


def test_the_rate_in_ulps_follows_the_schedule_of_the_learning_rate(tiny):
    options = {"optimizer__schedule": "step", "optimizer__warmup_steps": 0, "optimizer__min_lr_ratio": 0.5}
    trainer = trainer_of(tiny(rule="riemannian", model__format="E4M3", train__max_steps=4, **options))
    rates = []
    for number in range(1, 5):
        rates.append((one_step(trainer, number).record["lr"], trainer.optimizer.param_groups[0]["lr"]))
    assert rates == [(2.0, 2.0)] * 2 + [(1.0, 1.0)] * 2
