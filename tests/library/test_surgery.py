"""quantize_model: which layers are replaced, what the new ones compute, and that a refusal leaves the model alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optimizer_cases import bits_of, normal
from surgery_models import LINEARS, Model
from torch import nn

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, check_formats, dequantize_model, quantize_model

storages = pytest.mark.parametrize("storage", ["master", "grid"])


def sizes_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (m.in_features, m.out_features) for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def formats_of(model: nn.Module) -> dict[str, str]:
    return {
        name: module.weight_format.name
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and module.weight_format
    }


def everything(model: nn.Module) -> list[Any]:
    """Modules by identity and class, parameters and buffers by identity and bits."""
    modules = [(name, id(m), type(m)) for name, m in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [modules, [(name, id(t), type(t), bits_of(t)) for name, t in tensors]]


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    before = everything(model)
    yield
    assert everything(model) == before


# -------------------------------------------------------------------------------------------------------- patterns


@storages
@pytest.mark.parametrize("formats", ["E4M3", fm.FloatFormat(4, 3), LayerSpec("E4M3"), {"*": "e4m3"}], ids=str)
def test_one_format_for_every_linear_layer(formats: Any, storage: Any) -> None:
    model = Model()
    assert quantize_model(model, formats, storage) is model
    assert formats_of(model) == dict.fromkeys(LINEARS, "E4M3")
    assert type(model.embedding) is nn.Embedding
    assert type(model.blocks[0].norm) is nn.LayerNorm


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("attn", lambda n: ".attn." in n),
        ("attn.qkv", lambda n: n.endswith("attn.qkv")),
        ("fc", lambda n: n.endswith(".fc")),
        ("blocks.1", lambda n: n.startswith("blocks.1.")),
        ("1", lambda n: n.startswith("blocks.1.")),
        ("blocks.1?", lambda n: n.startswith(("blocks.10.", "blocks.11."))),
        ("blocks.[0-2].mlp", lambda n: n[7:9] in ("0.", "1.", "2.") and ".mlp." in n),
        ("q*", lambda n: n.endswith("qkv")),
        ("blocks.*.out", lambda n: n.endswith("out")),
        ("lm_head", lambda n: n == "lm_head"),
        ("blocks.3.attn.proj", lambda n: n == "blocks.3.attn.proj"),
    ],
)
def test_a_pattern_is_a_glob_over_whole_dotted_parts(pattern: str, matches: Any) -> None:
    model = quantize_model(Model(), {pattern: "E4M3"})
    assert set(formats_of(model)) == {name for name in LINEARS if matches(name)}


def test_the_most_literal_pattern_wins_in_any_order() -> None:
    formats = {
        "blocks.0.attn.qkv": "E5M2",
        "*": "E4M3",
        "attn": "E3M4",
        "mlp": "none",
        "lm_head": None,
        "attn.*": "E1M6",
    }
    for items in (list(formats.items()), list(formats.items())[::-1]):
        got = formats_of(quantize_model(Model(), dict(items)))
        assert got["blocks.0.attn.qkv"] == "E5M2"
        assert got["blocks.0.attn.proj"] == got["blocks.5.attn.qkv"] == "E1M6"
        assert set(got) == {name for name in LINEARS if "attn" in name}


def test_of_two_as_specific_the_later_wins() -> None:
    assert set(formats_of(quantize_model(Model(), {"fc": "E4M3", "f?": "E3M4", "?c": "E5M2"})).values()) == {"E4M3"}
    assert set(formats_of(quantize_model(Model(), {"f?": "E3M4", "?c": "E5M2"})).values()) == {"E5M2"}


def test_specs_and_dicts() -> None:
    spec = LayerSpec("E4M3", activation="E5M2", granularity="tensor", policy="static", ste="clipped")
    as_dict = {"weight": "E4M3", "activation": "E5M2", "granularity": "tensor", "policy": "static", "ste": "clipped"}
    model = quantize_model(Model(), {"attn": spec, "mlp": as_dict})
    assert model.blocks[0].attn.qkv.spec == model.blocks[0].mlp["fc"].spec == spec
    model = quantize_model(Model(), {"fc": {"weight": "E4M3"}, "qkv": "E4M3"}, granularity="tensor")
    assert model.blocks[0].mlp["fc"].spec.granularity == model.blocks[0].attn.qkv.spec.granularity == "tensor"
    assert LayerSpec("none").quantizes_nothing
    assert LayerSpec(None, "NONE").quantizes_nothing


def test_activations_alone() -> None:
    layer = quantize_model(nn.Linear(8, 4), LayerSpec(activation="E4M3"))
    x = normal(3, 8)
    assert torch.equal(layer(x), F.linear(fm.fake_quantize(x, "E4M3"), layer.weight, layer.bias))
    assert layer.weight_scale().item() == 1.0
    assert torch.equal(layer.quantized_weight(), layer.weight)


@storages
def test_a_model_that_is_a_linear_layer(storage: Any) -> None:
    linear = nn.Linear(8, 4)
    layer = quantize_model(linear, "E4M3", storage)
    assert type(layer) is QuantizedLinear
    assert layer.bias is linear.bias
    back = dequantize_model(layer)
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.quantized_weight())


def test_subclasses_of_linear_are_left_as_they_are() -> None:
    """Their forward is their own; a pattern that names nothing else is an error rather than ignored."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "fc": nn.Linear(8, 8)})
    quantize_model(model, "E4M3")
    assert formats_of(model) == {"fc": "E4M3"}
    with left_alone(model), pytest.raises(ValueError, match="'out_proj' matches none"):
        quantize_model(model, {"out_proj": "E4M3"})


# ------------------------------------------------------------------------------------------------- allowed or not
@pytest.mark.parametrize("tied", ["refuse", "untie", "leave"])
@pytest.mark.parametrize(
    "formats",
    [
        "E4M3",
        {"*": "E4M3", "attn": "none", "blocks.1": "E5M2", "mlp.out": {"weight": "E3M4", "activation": "E5M2"}},
        {"attn": {"activation": "E4M3"}, "blocks.1.attn": {"weight": "none"}, "lm_head": "E4M3"},
        {"*": {"weight": "E4M3", "granularity": "block"}},
        {"*": "E4M3", "lm_head": {"weight": {"format": "E4M3", "rounding": "nearest"}}},
    ],
    ids=str,
)
@storages
def test_what_is_allowed_is_known_without_a_model(storage: Any, formats: Any, tied: Any) -> None:
    model = Model(tied=True)
    shared = {"lm_head": ("embedding.weight", "lm_head.weight")}
    layers = sizes_of(model)
    try:
        quantize_model(model, formats, storage, tied=tied)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            check_formats(formats, layers, storage, tied=tied, shared=shared)
        return
    found = check_formats(formats, layers, storage, tied=tied, shared=shared)
    assert found == {name: m.spec for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    again = quantize_model(Model(tied=True), found, storage, tied=tied)
    assert [bits_of(p) for p in again.parameters()] == [bits_of(p) for p in model.parameters()]


@pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_may_be_left(bad: float, storage: Any) -> None:
    model = Model()
    model.lm_head.weight.data[3, 2] = bad
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    assert len(formats_of(model)) == 48


@storages
def test_tied_weights_may_be_left(storage: Any) -> None:
    model = Model(tied=True)
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    assert model.lm_head.weight is model.embedding.weight
    assert "lm_head" not in formats_of(model)


def test_what_is_quantised_already_may_be_left() -> None:
    model = quantize_model(Model(), {"mlp": "E4M3"}, "grid")
    quantize_model(model, {"*": "E5M2", "mlp": "none"}, "grid")
    assert set(formats_of(model).values()) == {"E4M3", "E5M2"}
