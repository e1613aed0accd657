"""The shipped configurations that show what surgery can do: what they quantise, and that they train."""

import json
import math
from pathlib import Path

import pytest
from bench_runs import flags, train, trainer_of
from laws import each
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import FOLDER, find_config, load_config
from nanogpt_bench.loop.train import run
from nanogpt_bench.setup.resolve import resolve

OPERANDS = ("weight", "activation", "activation_gradient", "weight_gradient")
SMALL = {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32, "model.block_size": 16, "train.max_steps": 30}
SMALL |= {"train.batch_size": 4, "eval.interval": 30, "eval.batches": 2, "optimizer.warmup_steps": 2}
SMALL |= {"optimizer.lr": 0.02, "monitor.interval": 15, "shadow.interval": 15}
ALL = ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc", "blocks.0.mlp.proj", "lm_head")
ATTENTION, MLP, HEAD = ALL[:2], ALL[2:4], ALL[4:]
NORMALISED = (ALL[0], ALL[2], ALL[4])
#: for each file and operand, the layers that have a format; operands and layers left out have none
EXAMPLES = {
    "bf16_baseline": {},
    **{name: {"weight": {ALL: name.upper()}} for name in ("e4m3", "e5m2", "e7m0")},
    "e4m3_uniform": {operand: {ALL: "E4M3"} for operand in OPERANDS},
    **{f"lm_head_{name.lower()}": {"weight": {HEAD: name}} for name in ("E5M2", "E7M0")},
    "attention_e4m3_mlp_e3m4": {
        **{operand: {ATTENTION: "E4M3", MLP: "E3M4"} for operand in OPERANDS[:2]},
        **{operand: {ATTENTION + MLP: "E5M2"} for operand in OPERANDS[2:]},
    },
    "e1m6_normalised": {"activation": {NORMALISED: "E1M6"}},
}


def small(name: str, corpus_dir: Path, *more: str) -> Config:
    return load_config(find_config(name), [*flags(SMALL | {"data.dir": corpus_dir}), *more])


def formats_of(model: nn.Module, operand: str) -> dict[str, str]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, fm.QuantizedLinear)}
    found = {name: getattr(layer.spec, operand) for name, layer in layers.items()}
    return {name: spec.format.name for name, spec in found.items() if spec is not None}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_quantises_what_it_says_and_trains(name, corpus_dir, tmp_path):
    config = small(name, corpus_dir)
    model = trainer_of(config).model
    for operand in OPERANDS:
        wanted = {layer: fmt for layers, fmt in EXAMPLES[name].get(operand, {}).items() for layer in layers}
        assert formats_of(model, operand) == wanted, operand
    summary = run(config, tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.2


@each("name", [name for name in EXAMPLES if name != "bf16_baseline"])
def test_every_example_differs_from_the_baseline_in_nothing_else(name):
    baseline, example = (resolve(load_config(FOLDER / f"{file}.yaml")) for file in ("bf16_baseline", name))
    differing = {key for key in FIELDS if get(baseline, key) != get(example, key)}
    assert differing == {"model.formats", "model.storage", "shadow.enabled"}


#: one of every option that surgery has, on small layers of 32 x n
OPTIONS = {
    "gradients of tensors": {"weight": "E4M3", "gradient": "E5M2"},
    "of activations alone": {"weight": "E4M3", "gradient": {"activation": "E5M2"}},
    "of weights alone": {"weight": "E4M3", "gradient": {"weight": "E5M2"}},
    "blocks everywhere": {
        "weight": {"format": "E4M3", "granularity": "block"},
        "activation": {"format": "E4M3", "granularity": "block"},
        "gradient": {"format": "E5M2", "granularity": "block", "rounding": "stochastic"},
    },
    "delayed": {"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2", "policy": "delayed", "history": 16},
    "static": {"weight": "E4M3", "activation": "E4M3", "policy": "static"},
    "clipped": {"weight": "E4M3", "activation": "E4M3", "ste": "clipped"},
    "stochastic": {"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2", "rounding": "stochastic"},
}


@pytest.mark.filterwarnings("ignore::fp8manifold.SaturationWarning")  # static scales: it says so, and trains on
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_and_repeats(option, accumulation, corpus_dir):
    formats = json.dumps({"attn": OPTIONS[option], "mlp": OPTIONS[option]})
    more = ("--model.formats", formats, f"--train.accumulation={accumulation}")
    losses = []
    for _ in range(2):
        trainer = trainer_of(small("bf16_baseline", corpus_dir, *more))
        before = trainer.validate()
        train(trainer, 12)
        losses.append(trainer.validate())
        assert losses[-1] < before - 0.1
    assert losses[0] == losses[1]


@pytest.mark.parametrize("storage", ["grid", "fp8", "continuous"])
def test_gradients_are_quantised_whatever_the_storage(storage, corpus_dir):
    formats = json.dumps({"*": {"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2", "rounding": "split"}})
    more = ("--model.formats", formats, f"--model.storage={storage}", "--optimizer.name=stiffness_adamw")
    trainer = trainer_of(small("bf16_baseline", corpus_dir, *more))
    train(trainer, 1)
    assert trainer.model.lm_head.weight_gradient_scaler.value != 1
    assert math.isfinite(trainer.validate())


def test_one_magnitude_for_all_gradients_is_a_choice(corpus_dir):
    formats = json.dumps({"*": {"weight": "E4M3", "gradient": {"format": "E4M3", "scale": "global"}}})
    trainer = trainer_of(small("bf16_baseline", corpus_dir, "--model.formats", formats))
    train(trainer, 2)
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, fm.QuantizedLinear)]
    assert len({layer.weight_gradient_scaler.value.item() for layer in layers}) == 1
    assert sum(layer.shared_amax is not None for layer in layers) == 1
