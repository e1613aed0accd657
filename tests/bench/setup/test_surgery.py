"""From model.formats to quantised layers."""

from contextlib import nullcontext

import pytest
import torch
from bench_runs import flags, refusal, resolved
from laws import each
from torch import nn

import fp8manifold as fm
from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.setup.surgery import quantize


def quantized(*arguments: str, tie: bool = False, width: int = 16) -> nn.Module:
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, tie_weights=tie), seed=0)
    shape = {"model.n_embd": width, "model.n_layer": 2, "model.n_head": 2, "model.tie_weights": tie}
    return quantize(model, resolved([*flags(shape), *arguments]))


@each(("writeback", "kept"), [("residual8", True), ("stochastic", False)])
def test_a_residual_finds_what_rounding_the_weights_left(writeback, kept):
    model = quantized("--model.format=E4M3", "--model.storage=fp8", f"--optimizer.writeback={writeback}")
    layers = quantized_layers(model).values()
    assert {isinstance(layer.weight, fm.FP8Parameter) for layer in layers} == {True}
    assert {layer.weight.remainder is not None for layer in layers} == {kept}


def test_a_continuous_layer_holds_the_float_weights_on_its_format_s_manifold():
    layers = quantized_layers(quantized("--model.format=E4M3", "--model.storage=continuous"))
    floats = quantized()
    for name, layer in layers.items():
        assert type(layer.weight.manifold) is fm.StiffnessManifold
        assert layer.weight.manifold.format.name == "E4M3"
        assert torch.equal(layer.weight, floats.get_submodule(name).weight)
        x = torch.ones(1, layer.in_features)
        assert torch.equal(layer(x), floats.get_submodule(name)(x))


def test_a_state_keeps_weights_between_the_points_of_a_format_only_where_they_are_never_rounded():
    for storage, kept in (("continuous", True), ("grid", False)):
        model, other = (quantized("--model.format=E4M3", f"--model.storage={storage}") for _ in range(2))
        (name, layer), *_ = quantized_layers(model).items()
        with torch.no_grad():
            layer.weight.mul_(1.01)
        with nullcontext() if kept else pytest.warns(UserWarning, match="are off the grid"):
            state = model.state_dict()
        other.load_state_dict(state)
        weight = quantized_layers(other)[name].weight
        assert torch.equal(weight, layer.weight) is kept, storage
        assert weight.manifold is quantized_layers(other)[name].manifold


@each("storage", ["grid", "fp8"])
def test_draws_are_the_weights_own_as_well(storage):
    """Other writers of a weight then draw as its optimizer does, and a checkpoint records how."""
    asked = quantized("--model.format=E4M3", f"--model.storage={storage}", "--optimizer.draws=dither")
    assert {layer.weight.manifold.draws for layer in quantized_layers(asked).values()} == {"dither"}
    plain = quantized("--model.format=E4M3", f"--model.storage={storage}")
    assert {layer.weight.manifold.draws for layer in quantized_layers(plain).values()} == {"independent"}


@each("storage", ["master", "grid", "fp8", "continuous"])
def test_a_tied_head_is_untied_or_left_as_asked(storage):
    options = ("--model.format=E4M3", f"--model.storage={storage}")
    model = quantized(*options, "--model.tied=untie", tie=True)
    assert "lm_head" in quantized_layers(model)
    assert type(model.token_embedding.weight) is nn.Parameter
    assert model.lm_head.weight is not model.token_embedding.weight
    model = quantized(*options, "--model.tied=leave", tie=True)
    assert "lm_head" not in quantized_layers(model)
    assert model.lm_head.weight is model.token_embedding.weight
    with refusal(r"model.formats: .*'lm_head' is shared .*tied='untie'.*tied='leave'"):
        quantized(*options, tie=True)


@each(
    ("formats", "parts"),
    [
        ("{attn.qqv: E4M3}", ["attn.qqv", "attn.qkv"]),
        ("{mlp: {wieght: E4M3}}", ["wieght", "weight"]),
        ("{mlp: {weight: E4M9}}", ["model.formats.mlp", "E4M9"]),
        ("{mlp: 3}", ["model.formats.mlp", "3"]),
        ("{mlp: {activation: {format: E4M9}}}", ["model.formats.mlp", "E4M9"]),
        ("{mlp: {gradient: E5M2, ste: relu}}", ["model.formats", "ste='relu'", "no operand takes"]),
    ],
)
def test_what_cannot_be_matched_or_read_is_named_in_one_line(formats, parts):
    with refusal() as caught:
        quantized("--model.formats", formats)
    for part in parts:
        assert part in str(caught.value)


@each(
    ("pattern", "what"), [("token_embedding", "Embedding 'token_embedding'"), ("norm1", "LayerNorm 'blocks.0.norm1'")]
)
def test_what_always_stays_float_is_said_to(pattern, what):
    with refusal(rf"model\.formats\.{pattern}: {what} stays float") as caught:
        quantized(f"--model.formats.{pattern}", "E4M3", "--model.formats.attn", "E4M3")
    assert str(caught.value).endswith("attn.qkv, attn.proj, mlp.fc, mlp.proj, lm_head, attn, mlp, blocks.N")
    with refusal(r"'atn' matches none of the 9 linear layers; did you mean 'attn'"):
        quantized("--model.formats.atn", "E4M3")
