"""The floor of rounding, by hand, over the last quarter of a run, and after a resume."""

import pytest
import torch
from bench_runs import one_step, trainer_of
from torch import nn

import fp8manifold as fm
from nanogpt_bench.loop.observers import build_observers
from nanogpt_bench.monitors import floor
from nanogpt_bench.monitors.floor import FloorObserver, rounding_floor
from nanogpt_bench.monitors.points import Step


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap_at(magnitude, fmt):
    """The distance between the two numbers of a format around a magnitude."""
    codes = torch.arange(128, dtype=torch.uint8)
    numbers = sorted({abs(number) for number in fm.decode(codes, fmt).tolist()})
    below = max(number for number in numbers if number <= magnitude)
    return numbers[numbers.index(below) + 1] - below


@pytest.mark.parametrize("fmt", ["E2M5", "E7M0"])
def test_a_floor_is_a_quarter_of_gradient_times_gap(fmt):
    weight, gradient = normal(3, 5, seed=1), normal(3, 5, seed=2)
    scales = fm.FP8Parameter(weight, fmt).scale
    assert scales.shape == (3, 1)
    total = 0.0
    for row in range(3):
        scale = scales[row, 0].item()
        for column in range(5):
            gap = scale * gap_at(abs(weight[row, column].item()) / scale, fmt)
            total += abs(gradient[row, column].item()) * gap / 4
    assert rounding_floor(weight, gradient, fmt) == pytest.approx(total, rel=1e-6)


def steps_of(observer, layers, numbers):
    """Take steps of some numbers with gradients and weights of their own; return the
    last record.
    """
    for number in numbers:
        step = Step(number, nn.Identity(), None, last=number == 8)
        for place, layer in enumerate(layers.values()):
            layer.weight.data = normal(3, 5, seed=100 * place + number)
            layer.weight.grad = normal(3, 5, seed=1000 + 100 * place + number)
        observer.before_step(step)
        observer.complete_record(step)
    return step.record


def test_the_record_is_the_mean_over_the_last_quarter_of_the_averaged_gradients_floor(monkeypatch):
    monkeypatch.setattr(floor, "INTERVAL", 1)
    names = ("blocks.0.mlp.fc", "blocks.1.mlp.fc", "lm_head")
    layers = {name: nn.Linear(5, 3, bias=False) for name in names}
    record = steps_of(FloorObserver(layers, ["E4M3"], 0.5, 8), layers, range(1, 9))
    expected = dict.fromkeys(names, 0.0)
    for place, name in enumerate(names):
        for last in (7, 8):
            weights = {number: 0.5 ** (last - number) for number in range(1, last + 1)}
            average = sum(
                weight * normal(3, 5, seed=1000 + 100 * place + number)
                for number, weight in weights.items()
            ) / sum(weights.values())
            weight = normal(3, 5, seed=100 * place + last)
            expected[name] += rounding_floor(weight, average, "E4M3") / 2
    assert record == pytest.approx(
        {
            "floor/loss/E4M3": sum(expected.values()),
            "floor/loss/E4M3/mlp.fc": expected[names[0]] + expected[names[1]],
            "floor/loss/E4M3/lm_head": expected["lm_head"],
        },
        rel=1e-5,
    )
    whole, resumed = (FloorObserver(layers, ["E4M3"], 0.5, 8) for _ in range(2))
    assert steps_of(whole, layers, range(1, 8)) == {}
    resumed.load_state(whole.state())
    assert steps_of(resumed, layers, [8]) == record


def test_a_float_run_records_the_floors_of_the_formats_named(tiny):
    settings = {"rule": "muon", "train__max_steps": 4, "model__n_embd": 16}
    trainer = trainer_of(tiny(**settings, monitor__floor_formats="[E2M5, E7M0]"))
    built = build_observers(trainer.config, trainer, None, baseline={}, tell=lambda alert: None)
    (observer,) = (one for one in built.all if isinstance(one, FloorObserver))
    assert observer._decay == 0.95
    for number in range(1, 4):
        one_step(trainer, number, observer)
    step = trainer.new_step(4, last=True)
    trainer.train_step(step, [observer])
    observer.complete_record(step)
    kinds = ("attn.qkv", "attn.proj", "mlp.fc", "mlp.proj", "lm_head")
    for fmt in ("E2M5", "E7M0"):
        parts = [step.record[f"floor/loss/{fmt}/{kind}"] for kind in kinds]
        assert sum(parts) == pytest.approx(step.record[f"floor/loss/{fmt}"]), fmt
    assert step.record["floor/loss/E7M0"] > 5 * step.record["floor/loss/E2M5"] > 0
