"""Where quantised weights live: one byte gives the losses of its simulation, and holds what it says it holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_runs import recorded, trainer_of

import fp8manifold as fm
from nanogpt_bench.config.rules import RULES, WITH_TWIN, available_rules
from nanogpt_bench.config.schema import ROUNDED, Config
from nanogpt_bench.loop.train import run
from nanogpt_bench.loop.trainer import Trainer
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.setup.memory import bytes_of

Tiny = Callable[..., Config]
ONE_BYTE = [name for name in available_rules() if RULES[name].storage in ROUNDED]
#: values of a simulated byte are multiplied as they are, so it has no products of codes
SIMULATED = [name for name in ONE_BYTE if RULES[name].products is None]
#: they begin with what rounding the float weights left, which a simulated byte does not keep
RESIDUAL = ("residual8",)
#: what a weight and its optimizer state hold in one-byte storage, scales and block scales left out
HELD = {
    "nearest": 9.0,
    "stochastic": 9.0,
    "momentum": 9.0,
    "stiffness": 9.0,
    "riemannian": 9.0,
    "residual8": 10.0,
    "stochastic-8bit": 3.0,
    "stochastic-fp8": 3.0,
    "stiffness-lion": 5.0,
    "muon-stochastic": 2.0,
    "muon-residual8": 3.0,
    "madam": 5.0,
    "sgd-stochastic": 5.0,
    "stiffness-sgd": 5.0,
    "riemannian-sgd": 5.0,
}


def train(trainer: Trainer, steps: int) -> list[float]:
    return [trainer.train_step(trainer.new_step(number, last=False), ()) for number in range(1, steps + 1)]


@pytest.mark.parametrize("fmt", ["E4M3", "E7M0"])
@pytest.mark.parametrize("rule", [name for name in SIMULATED if RULES[name].writeback not in RESIDUAL])
def test_one_byte_and_its_simulation_are_the_same_run_bit_for_bit(tiny: Tiny, rule: str, fmt: str) -> None:
    room = {"model__headroom": 1024.0}  # a byte's scale doubles where a weight reaches its end, and a grid's does not
    byte, floats = (
        trainer_of(tiny(rule=rule, model__format=fmt, model__storage=name, **room)) for name in ("fp8", "grid")
    )
    assert train(byte, 8) == train(floats, 8)
    assert byte.validate() == floats.validate()
    twins = quantized_layers(floats.model)
    for name, layer in quantized_layers(byte.model).items():
        assert torch.equal(layer.weight_codes(), twins[name].weight_codes()), name


@pytest.mark.parametrize("rule", HELD)
def test_a_weight_holds_the_bytes_of_its_scheme(tiny: Tiny, rule: str) -> None:
    trainer = trainer_of(tiny(rule=rule, model__format="E4M3", model__storage="fp8", model__n_embd=128))
    train(trainer, 2)
    weights = [layer.weight for layer in quantized_layers(trainer.model).values()]
    each = bytes_of(weights, trainer.optimizer) / sum(weight.numel() for weight in weights)
    # One float32 scale a row of 128 or 512, block scales of the averages, counters.
    assert HELD[rule] < each < HELD[rule] + 0.15


def test_an_unrounded_rule_moves_weights_off_the_grid_and_has_no_stall(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny(rule="stiffness-unrounded", model__format="E4M3", optimizer__lr=0.02, train__max_steps=40)
    trainer = trainer_of(config)
    layers = quantized_layers(trainer.model)
    start = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    drawn = trainer_of(tiny(rule="fp32"))
    for name, layer in layers.items():  # the float weights of the same seed, not their roundings
        assert torch.equal(start[name], drawn.model.get_submodule(name).weight)
        assert layer.weight_format is not None
    train(trainer, 2)
    assert all(not torch.equal(layer.weight, start[name]) for name, layer in layers.items())
    summary = run(config, tmp_path / "r")
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.2
    assert (summary["storage"], summary["stall"], summary["stall_metric"]) == ("continuous", None, None)
    assert 12 <= summary["bytes_per_quantized_parameter"] < 12.5
    records = recorded(tmp_path / "r")
    assert records[1]["stiffness/exponent"] == 1.0


@pytest.mark.parametrize("rule", RESIDUAL)
def test_a_residual_begins_with_the_float_weights(tiny: Tiny, rule: str) -> None:
    trainer = trainer_of(tiny(rule=rule, model__format="E4M3", optimizer__lr=1e-12, optimizer__weight_decay=0))
    floats = trainer_of(tiny(rule="fp32"))
    train(trainer, 1)
    bits = int(rule[-1])
    for name, layer in quantized_layers(trainer.model).items():
        weight, state = layer.weight, trainer.optimizer.state[layer.weight]
        assert weight.remainder is None  # handed over
        assert state["residual"].dtype == (torch.int8 if bits == 8 else torch.uint8)
        start = floats.model.get_submodule(name).weight.detach()
        if bits == 8:
            code = fm.to_chart(weight.dequantize() / layer.weight_scale(), "E4M3")
            value = fm.from_chart(code + state["residual"] / 256, "E4M3") * layer.weight_scale()
            step = fm.ulp(start / layer.weight_scale(), "E4M3") * layer.weight_scale()
            assert bool(((value - start).abs() <= step / 256).all()), name
            assert not torch.equal(weight.dequantize(), value), name


@pytest.mark.parametrize("fmt", ["E4M3", "E7M0"])
@pytest.mark.parametrize("rule", WITH_TWIN)
def test_a_float_twin_takes_the_step_of_its_rule_without_its_rounding(tiny: Tiny, rule: str, fmt: str) -> None:
    """From the same weights and batch: what the rule writes is a neighbour of what the twin keeps."""
    twin, rounded = (
        trainer_of(tiny(rule=name, model__format=fmt, optimizer__warmup_steps=0, **grid))
        for name, grid in ((f"{rule}-float", {}), (rule, {"model__storage": "grid"}))
    )
    with torch.no_grad():
        for own, other in zip(twin.model.parameters(), rounded.model.parameters(), strict=True):
            own.copy_(other)
    assert train(twin, 1) == train(rounded, 1)
    layers, moved = quantized_layers(rounded.model), 0
    others = {name: layer.weight for name, layer in quantized_layers(twin.model).items()}
    for name, layer in layers.items():
        ulps = layer.manifold.to_chart(layer.weight) - layer.manifold.to_chart(others[name])
        assert ulps.abs().max() < 1 + 1e-4
        moved += int((others[name] != layer.weight).sum())
    assert moved  # the twin is off the grid
    quantized = {id(layer.weight) for layer in (*layers.values(), *quantized_layers(twin.model).values())}
    for own, other in zip(twin.model.parameters(), rounded.model.parameters(), strict=True):
        assert id(own) in quantized or torch.equal(own, other)
