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
    with pytest.raises(ValueError, match="this layer has weight=None: only a weight with a format has codes"):
        layer.weight_codes()


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


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ({"atn": "E4M3"}, ValueError, "pattern 'atn' matches none of the 49 linear layers; did you mean 'attn'"),
        ({"*": "E4M3", "blocks.12": "E4M3"}, ValueError, "'blocks.12'"),
        ({"att": "E4M3"}, ValueError, "'att'"),
        ({"*": "E4M3", "embedding": "none"}, ValueError, "'embedding'"),
        ("E4M33", ValueError, "E4M33"),
        ({"attn": "E9M9"}, ValueError, "E9M9"),
        ({"attn": {"weights": "E4M3"}}, ValueError, "unknown key 'weights'.*did you mean 'weight'"),
        ({"attn": {"weight": "E4M3", "ste": "clip"}}, ValueError, "ste='clip'.*'clipped'"),
        ({"attn": {"weight": "E4M3", "ste": "clipped"}}, ValueError, "ste='clipped', which no operand takes"),
        ({"attn": {"activation": "E4M3", "granularity": "tensor"}}, ValueError, "granularity='tensor'.* of a weight"),
        ({"attn": {"weight": "E4M3", "policy": "late"}}, ValueError, "policy='late'"),
        ({"attn": 4}, TypeError, r"formats\['attn'\].*int"),
        ({4: "E4M3"}, TypeError, "key 4"),
        (["E4M3"], TypeError, "list"),
        ({}, ValueError, "empty"),
    ],
)
def test_bad_formats_are_refused_and_the_model_left_alone(formats: Any, error: type[Exception], message: str) -> None:
    model = Model()
    with left_alone(model), pytest.raises(error, match=message) as caught:
        quantize_model(model, formats, "grid")
    with pytest.raises(error) as sooner:
        check_formats(formats, sizes_of(model), "grid")
    assert str(sooner.value) == str(caught.value)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"storage": "fp8x"}, ValueError, "storage='fp8x'"),
        ({"storage": "gird"}, ValueError, "did you mean 'grid'"),
        ({"granularity": "row"}, ValueError, "granularity='row'"),
        ({"rounding": "up"}, ValueError, "rounding='up'"),
        ({"headroom": 0.5}, ValueError, r"headroom=0\.5"),
        ({"headroom": 0.5, "storage": "master"}, ValueError, r"headroom=0\.5"),
        ({"headroom": "16"}, TypeError, "headroom='16'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 1.0}, TypeError, r"seed=1\.0"),
    ],
)
def test_bad_options_are_refused_and_the_model_left_alone(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = Model()
    with left_alone(model), pytest.raises(error, match=message):
        quantize_model(model, "E4M3", **{"storage": "grid", **options})


@pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_before_anything_is_done(bad: float, storage: Any) -> None:
    """In the last layer of all: the others are not touched."""
    model = Model()
    model.lm_head.weight.data[3, 2] = bad
    with left_alone(model), pytest.raises(ValueError, match="NaN or Inf"):
        quantize_model(model, "E4M3", storage)
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    assert len(formats_of(model)) == 48


@storages
def test_tied_weights_are_refused(storage: Any) -> None:
    model = Model(tied=True)
    with (
        left_alone(model),
        pytest.raises(ValueError, match=r"'lm_head' is shared \(embedding.weight, lm_head.weight\)"),
    ):
        quantize_model(model, "E4M3", storage)
    quantize_model(model, {"*": "E4M3", "lm_head": "none"}, storage)
    assert model.lm_head.weight is model.embedding.weight
    assert "lm_head" not in formats_of(model)


@storages
def test_a_layer_in_two_places_is_refused(storage: Any) -> None:
    """Replacing it in one would untie it silently."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    with left_alone(model), pytest.raises(ValueError, match="shared"):
        quantize_model(model, "E4M3", storage)


def test_what_is_quantised_already_is_refused_unless_left_alone() -> None:
    model = quantize_model(Model(), {"mlp": "E4M3"}, "grid")
    with left_alone(model), pytest.raises(ValueError, match=r"'blocks\.0\.mlp\.fc' is quantised already"):
        quantize_model(model, "E5M2", "grid")
    quantize_model(model, {"*": "E5M2", "mlp": "none"}, "grid")
    assert set(formats_of(model).values()) == {"E4M3", "E5M2"}


def test_other_things_than_models_are_refused() -> None:
    with pytest.raises(TypeError, match="dict"):
        quantize_model({}, "E4M3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Conv1d"):
        QuantizedLinear(nn.Conv1d(1, 1, 1), LayerSpec("E4M3"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="matches none of the 0 linear layers"):
        quantize_model(nn.Sequential(nn.ReLU()), "E4M3")
