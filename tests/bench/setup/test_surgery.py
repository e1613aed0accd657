"""Formats put into a model.

What becomes of its layers, and the examples of the documentation.
"""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from bench_runs import flags, refusal, resolved, train, trainer_of
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.keys import FIELDS, get
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import CONFIGS_FOLDER, find_config, load_config
from nanogpt_bench.loop.train import run
from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize


def quantized(*arguments: str, tie: bool = False, width: int = 16) -> nn.Module:
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, tie_weights=tie), seed=0)
    shape = {"model.n_embd": width, "model.n_layer": 2, "model.n_head": 2, "model.tie_weights": tie}
    return quantize(model, resolved([*flags(shape), *arguments]))


@pytest.mark.parametrize(("writeback", "is_kept"), [("residual8", True), ("stochastic", False)])
def test_a_residual_finds_what_rounding_the_weights_left(writeback, is_kept):
    model = quantized(
        "--model.format=E4M3", "--model.storage=codes", f"--optimizer.writeback={writeback}"
    )
    layers = quantized_layers(model).values()
    assert {isinstance(layer.weight, fm.FP8Parameter) for layer in layers} == {True}
    assert {layer.weight.remainder is not None for layer in layers} == {is_kept}


def test_a_continuous_layer_holds_the_float_weights_on_its_format_s_manifold():
    layers = quantized_layers(quantized("--model.format=E4M3", "--model.storage=continuous"))
    for name, plain in ((name, quantized().get_submodule(name)) for name in layers):
        layer, x = layers[name], torch.ones(1, plain.in_features)
        assert type(layer.weight.manifold) is fm.StiffnessManifold, name
        assert layer.weight.manifold.format.name == "E4M3", name
        assert torch.equal(layer.weight, plain.weight), name
        assert torch.equal(layer(x), plain(x)), name


@pytest.mark.parametrize(("storage", "is_between"), [("continuous", True), ("grid", False)])
def test_a_state_keeps_weights_between_the_points_of_a_format_only_where_they_are_never_rounded(
    storage, is_between
):
    model, peer = (quantized("--model.format=E4M3", f"--model.storage={storage}") for _ in range(2))
    (name, layer), *_ = quantized_layers(model).items()
    with torch.no_grad():
        layer.weight.mul_(1.01)
    with nullcontext() if is_between else pytest.warns(UserWarning, match="are off the grid"):
        state = model.state_dict()
    peer.load_state_dict(state)
    weight = quantized_layers(peer)[name].weight
    assert torch.equal(weight, layer.weight) is is_between, storage
    assert weight.manifold is quantized_layers(peer)[name].manifold


@pytest.mark.parametrize(
    ("draws", "words"),
    [("independent", ()), ("dither", ["--optimizer.draws=dither"])],
    ids=["independent", "dither"],
)
@pytest.mark.parametrize("storage", ["grid", "codes"])
def test_draws_are_the_weights_own_as_well(draws, words, storage):
    """Other writers of a weight then draw as its optimizer does.

    A checkpoint records how.
    """
    layers = quantized_layers(
        quantized("--model.format=E4M3", f"--model.storage={storage}", *words)
    )
    assert {layer.weight.manifold.draws for layer in layers.values()} == {draws}


STORAGES = ["master", "grid", "codes", "continuous"]


@pytest.mark.parametrize(("tied", "is_left"), [("untie", False), ("leave", True)])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_tied_head_is_untied_or_left_as_asked(storage, tied, is_left):
    options = ("--model.format=E4M3", f"--model.storage={storage}", f"--model.tied={tied}")
    model = quantized(*options, tie=True)
    assert ("lm_head" not in quantized_layers(model)) is is_left
    assert (model.lm_head.weight is model.token_embedding.weight) is is_left
    assert type(model.token_embedding.weight) is nn.Parameter


@pytest.mark.parametrize("storage", STORAGES)
def test_a_tied_head_of_which_nothing_is_said_is_refused(storage):
    options = ("--model.format=E4M3", f"--model.storage={storage}")
    with refusal(r"model.formats: .*'lm_head' is shared .*tied='untie'.*tied='leave'"):
        quantized(*options, tie=True)


@pytest.mark.parametrize(
    ("formats", "parts"),
    [
        ("{attn.qqv: E4M3}", ["attn.qqv", "attn.qkv"]),
        ("{mlp: {wieght: E4M3}}", ["wieght", "weight"]),
        ("{mlp: {weight: E4M9}}", ["model.formats.mlp", "E4M9"]),
        ("{mlp: 3}", ["model.formats.mlp", "3"]),
        ("{mlp: {gradient: E5M2, ste: relu}}", ["model.formats", "ste='relu'", "no operand takes"]),
    ],
)
def test_what_cannot_be_matched_or_read_is_named_in_one_line(formats, parts):
    with refusal() as caught:
        quantized("--model.formats", formats)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_what_always_stays_float_is_said_to():
    with refusal(r"model\.formats\.norm1: LayerNorm 'blocks.0.norm1' stays float") as caught:
        quantized("--model.formats.norm1", "E4M3", "--model.formats.attn", "E4M3")
    assert str(caught.value).endswith(
        "attn.qkv, attn.proj, mlp.fc, mlp.proj, lm_head, attn, mlp, blocks.N"
    )
    with refusal(r"'atn' matches none of the 9 linear layers; did you mean 'attn'"):
        quantized("--model.formats.atn", "E4M3")


OPERANDS = ("weight", "activation", "activation_gradient", "weight_gradient")
SMALL = {
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.n_embd": 32,
    "model.block_size": 16,
    "train.max_steps": 30,
}
SMALL |= {
    "train.batch_size": 4,
    "eval.interval": 30,
    "eval.batches": 2,
    "optimizer.warmup_steps": 2,
}
SMALL |= {"optimizer.lr": 0.02, "monitor.interval": 15, "shadow.interval": 15}
ALL = ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc", "blocks.0.mlp.proj", "lm_head")
ATTENTION, MLP, HEAD = ALL[:2], ALL[2:4], ALL[4:]
NORMALISED = (ALL[0], ALL[2], ALL[4])
#: for each file and operand, the layers that have a format; operands and layers left
#: out have none
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


def small(name: str, corpus_dir: Path, *arguments: str) -> Config:
    return load_config(find_config(name), [*flags(SMALL | {"data.dir": corpus_dir}), *arguments])


def formats_of(model, operand):
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, fm.QuantizedLinear)
    }
    specs = {name: getattr(layer.spec, operand) for name, layer in layers.items()}
    return {name: spec.format.name for name, spec in specs.items() if spec is not None}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_quantises_what_it_says_and_trains(name, corpus_dir, tmp_path):
    config = small(name, corpus_dir)
    model = trainer_of(config).model
    for operand in OPERANDS:
        wanted = {}
        for layers, fmt in EXAMPLES[name].get(operand, {}).items():
            wanted |= dict.fromkeys(layers, fmt)
        assert formats_of(model, operand) == wanted, operand
    summary = run(config, tmp_path / "run")
    assert summary["status"] == "finished"
    assert summary["final_val_loss"] < summary["first_val_loss"] - 0.2


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "bf16_baseline"])
def test_every_example_differs_from_the_baseline_in_nothing_else(name):
    baseline, example = (
        resolve(load_config(CONFIGS_FOLDER / f"{file}.yaml")) for file in ("bf16_baseline", name)
    )
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
    "delayed": {
        "weight": "E4M3",
        "activation": "E4M3",
        "gradient": "E5M2",
        "policy": "delayed",
        "history": 16,
    },
    "static": {"weight": "E4M3", "activation": "E4M3", "policy": "static"},
    "clipped": {"weight": "E4M3", "activation": "E4M3", "ste": "clipped"},
    "stochastic": {
        "weight": "E4M3",
        "activation": "E4M3",
        "gradient": "E5M2",
        "rounding": "stochastic",
    },
}


@pytest.mark.filterwarnings(
    "ignore::fp8manifold.SaturationWarning"
)  # static scales: it says so, and trains on
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_and_repeats(option, accumulation, corpus_dir):
    formats = json.dumps({"attn": OPTIONS[option], "mlp": OPTIONS[option]})
    arguments = ("--model.formats", formats, f"--train.accumulation={accumulation}")
    losses = []
    for _ in range(2):
        trainer = trainer_of(small("bf16_baseline", corpus_dir, *arguments))
        old_loss = trainer.validate()
        train(trainer, 12)
        losses.append(trainer.validate())
        assert losses[-1] < old_loss - 0.1
    assert losses[0] == losses[1]


@pytest.mark.parametrize("storage", ["grid", "codes", "continuous"])
def test_gradients_are_quantised_whatever_the_storage(storage, corpus_dir):
    formats = json.dumps(
        {"*": {"weight": "E4M3", "activation": "E4M3", "gradient": "E5M2", "rounding": "split"}}
    )
    arguments = (
        "--model.formats",
        formats,
        f"--model.storage={storage}",
        "--optimizer.name=stiffness_adamw",
    )
    trainer = trainer_of(small("bf16_baseline", corpus_dir, *arguments))
    train(trainer, 1)
    assert trainer.model.lm_head.weight_gradient_scaler.value != 1
    assert math.isfinite(trainer.validate())


def test_one_magnitude_for_all_gradients_is_a_choice(corpus_dir):
    formats = json.dumps(
        {"*": {"weight": "E4M3", "gradient": {"format": "E4M3", "scale": "global"}}}
    )
    trainer = trainer_of(small("bf16_baseline", corpus_dir, "--model.formats", formats))
    train(trainer, 2)
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, fm.QuantizedLinear)]
    assert len({layer.weight_gradient_scaler.value.item() for layer in layers}) == 1
    assert sum(layer.shared_amax is not None for layer in layers) == 1
