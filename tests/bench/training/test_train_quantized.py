"""Runs with 8-bit weights learn, repeat and stay on the grid.

They report what the contract asks.
"""

from itertools import product

import pytest
import torch
from bench_runs import recorded, train, trainer_of
from covering import covering

import fp8manifold as fm
from nanogpt_bench.config.rules import RULES, available_rules
from nanogpt_bench.config.schema import ROUNDED, WITHOUT_FORMATS
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.weights import quantized_layers

QUANTIZED = [name for name in available_rules() if RULES[name].storage not in WITHOUT_FORMATS]
ON_GRID = [name for name in QUANTIZED if RULES[name].storage in ROUNDED]
#: larger than the defaults, for runs of few steps; the unit is the optimizer's
LR = {"riemannian_adam": 0.5, "riemannian_sgd": 2e3, "sgd": 0.1}
LR |= {
    "stiffness_sgd": 0.005,
    "stiffness_lion": 0.003,
}  # at four and six times these rates every second seed diverges
KEYS = ("storage", "optimizer", "writeback", "moments")
SAMPLE = covering([{key: getattr(RULES[rule], key) for key in KEYS} for rule in QUANTIZED], 1)
STALL = {
    "master": "stall/code_unchanged",
    "codes": "stall/update_lost",
    "grid": "stall/update_lost",
}


def config_of(tiny, rule, **overrides):
    lr = LR.get(RULES[rule].optimizer, 0.02)
    return tiny(**{"rule": rule, "model__format": "E4M3", "optimizer__lr": lr, **overrides})


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=[] if index in SAMPLE else pytest.mark.slow)
        for index, rule in enumerate(QUANTIZED)
    ],
)
def test_a_rule_repeats_however_often_one_looks(tiny, tmp_path, rule):
    configs = [
        config_of(tiny, rule, train__max_steps=12, monitor__interval=interval)
        for interval in (12, 12, 4)
    ]
    assert (
        len(
            {
                run(config, tmp_path / f"{index}")["final_val_loss"]
                for index, config in enumerate(configs)
            }
        )
        == 1
    )


@pytest.mark.parametrize("rule", QUANTIZED)
def test_a_rule_runs_and_reports(tiny, tmp_path, rule):
    config, messages = config_of(tiny, rule, train__max_steps=40, eval__interval=40), []
    summary = run(config, tmp_path / "a", on_progress=messages.append)
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.2
    assert (summary["rule"], summary["format"], summary["storage"]) == (
        rule,
        "E4M3",
        RULES[rule].storage,
    )
    records = recorded(tmp_path / "a")
    assert ("stiffness/exponent" in records[1]) is (RULES[rule].stiffness is not None)
    metric = STALL.get(RULES[rule].storage)
    assert summary["stall_metric"] == metric
    losing = RULES[rule].writeback == "nearest" or RULES[rule].storage == "master"
    # What is told on the way is what the table says: means, of what says something
    # under this rule.
    assert (messages[-1].stall, messages[-1].arrived) == (
        summary["stall"] if losing else None,
        summary["arrived"],
    )
    if RULES[rule].storage in ROUNDED and not losing:
        # at this rate stiff weights are sent beyond the largest value, where they can't
        # go
        assert (0 if RULES[rule].stiffness else 0.9) < summary["arrived"] < 1.1
    if metric is None:  # nothing is rounded
        assert summary["stall"] is None
        return
    measured = [record for record in records if metric in record]
    assert [record["step"] for record in measured] == list(range(2, 41, 2))
    assert 0 <= summary["stall"] <= 1
    assert f"{metric}/blocks.0.attn.qkv" in measured[0]


@pytest.mark.parametrize(
    ("rule", "storage"),
    # codes that are multiplied as they are have no simulation
    [
        (rule, storage)
        for rule, storage in product(ON_GRID, ROUNDED)
        if not (storage == "grid" and RULES[rule].products)
    ],
)
def test_weights_move_and_stay_on_their_grid(tiny, rule, storage):
    trainer = trainer_of(config_of(tiny, rule, model__storage=storage))
    old_codes = {
        name: layer.weight_codes() for name, layer in quantized_layers(trainer.model).items()
    }
    train(trainer, 5)
    for name, layer in quantized_layers(trainer.model).items():
        weight = layer.quantized_weight().detach()
        weight = (
            weight.dequantize()
            if isinstance(weight, fm.FP8Tensor)
            else weight.as_subclass(torch.Tensor)
        )
        decoded = fm.decode(layer.weight_codes(), "E4M3") * layer.weight_scale()
        assert torch.equal(weight, decoded), name
        assert not torch.equal(layer.weight_codes(), old_codes[name]), name


@pytest.mark.parametrize(("rule", "storage"), [("stochastic", "grid"), ("master", "master")])
def test_a_copy_or_a_simulated_grid_holds_floats(tiny, tmp_path, rule, storage):
    summary = run(config_of(tiny, rule, model__storage=storage), tmp_path / "r")
    assert 12 <= summary["bytes_per_quantized_parameter"] < 12.1


def test_the_riemannian_rule_decays_quantised_weights_at_float_lr(tiny):
    trainer = trainer_of(
        config_of(tiny, "riemannian", optimizer__weight_decay=0.2, optimizer__float_lr=0.01)
    )
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    assert decays == pytest.approx([0.002, 0.0])
    sizes = [
        sum(parameter.numel() for parameter in group["params"])
        for group in trainer.optimizer.param_groups
    ]
    assert sizes[0] == sum(
        layer.weight.numel() for layer in quantized_layers(trainer.model).values()
    )
