"""From model.formats to quantised layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.errors import BenchError
from nanogpt_bench.model import GPTShape, build_model
from nanogpt_bench.resolve import resolve
from nanogpt_bench.settings import load_config
from nanogpt_bench.surgery import quantize, quantized_layers


def quantized(*arguments: str, tie: bool = False, width: int = 16) -> nn.Module:
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, tie_weights=tie), seed=0)
    return quantize(model, resolve(load_config(None, list(arguments))))


def test_patterns_choose_layers_and_formats() -> None:
    model = quantized("--model.formats", "{attn: E4M3, mlp.fc: E3M4, blocks.1.mlp.fc: none}", "--model.storage=grid")
    formats = {name: layer.weight_format.name for name, layer in quantized_layers(model).items()}
    assert formats == {
        "blocks.0.attn.qkv": "E4M3",
        "blocks.0.attn.proj": "E4M3",
        "blocks.0.mlp.fc": "E3M4",
        "blocks.1.attn.qkv": "E4M3",
        "blocks.1.attn.proj": "E4M3",
    }


def test_a_layer_specification_reaches_the_layer() -> None:
    model = quantized("--model.formats", "{mlp: {weight: e4m3, activation: E5M2, ste: clipped}}")
    spec = model.get_submodule("blocks.0.mlp.fc").spec
    assert spec == fm.LayerSpec("E4M3", activation="E5M2", ste="clipped")


def test_a_layer_with_quantised_activations_only_has_no_quantised_weight() -> None:
    model = quantized("--model.formats", "{mlp: {activation: E5M2}, attn: E4M3}")
    assert not any("mlp" in name for name in quantized_layers(model))


@pytest.mark.parametrize(("writeback", "kept"), [("residual8", True), ("residual4", True), ("stochastic", False)])
def test_a_residual_finds_what_rounding_the_weights_left(writeback: str, kept: bool) -> None:
    model = quantized("--model.format=E4M3", "--model.storage=fp8", f"--optimizer.writeback={writeback}")
    layers = quantized_layers(model).values()
    assert {isinstance(layer.weight, fm.FP8Parameter) for layer in layers} == {True}
    assert {layer.weight.remainder is not None for layer in layers} == {kept}


def test_scales_of_blocks_reach_one_byte_weights_only() -> None:
    model = quantized("--model.format=E4M3", "--model.storage=fp8", "--model.granularity=block", width=32)
    assert {layer.weight.block_size for layer in quantized_layers(model).values()} == {32}
    with pytest.raises(BenchError, match=r"granularity='block' needs storage='fp8'"):
        quantized("--model.format=E4M3", "--model.storage=grid", "--model.granularity=block")


def test_a_continuous_layer_holds_the_float_weights_on_its_format_s_manifold() -> None:
    layers = quantized_layers(quantized("--model.format=E4M3", "--model.storage=continuous"))
    floats = quantized()
    for name, layer in layers.items():
        assert type(layer.weight.manifold) is fm.StiffnessManifold
        assert layer.weight.manifold.format.name == "E4M3"
        assert torch.equal(layer.weight, floats.get_submodule(name).weight)
        x = torch.ones(1, layer.in_features)
        assert torch.equal(layer(x), floats.get_submodule(name)(x))


def test_a_float_run_is_left_alone() -> None:
    assert not quantized_layers(quantized())


def test_a_tied_head_can_be_left_alone_but_not_quantised() -> None:
    left = quantized("--model.formats", "{'*': E4M3, lm_head: none}", tie=True)
    assert "lm_head" not in quantized_layers(left)
    with pytest.raises(BenchError, match="lm_head"):
        quantized("--model.format", "E4M3", tie=True)


@pytest.mark.parametrize(
    ("formats", "parts"),
    [
        ("{attn.qqv: E4M3}", ["attn.qqv", "attn.qkv"]),
        ("{mlp: {wieght: E4M3}}", ["wieght", "weight"]),
        ("{mlp: {weight: E4M3, ste: clip}}", ["clip", "clipped"]),
        ("{mlp: {weight: E4M9}}", ["model.formats.mlp", "E4M9"]),
        ("{mlp: 3}", ["model.formats.mlp", "3"]),
    ],
)
def test_what_cannot_be_matched_or_read_is_named_in_one_line(formats: str, parts: list[str]) -> None:
    with pytest.raises(BenchError) as caught:
        quantized("--model.formats", formats)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
