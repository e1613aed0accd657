"""GPT-2 of transformers, whose linear layers are ``Conv1D``: quantised, trained, saved, and put back."""

import copy
from typing import Any

import pytest
import torch
from hf_cases import gpt2, logits
from laws import each
from optimizer_cases import normal, through_disk
from torch import nn

import fp8manifold as fm
from fp8manifold import LayerSpec, QuantizedLinear, dequantize_model, quantize_model

storages = each("storage", ["master", "grid", "fp8"])


@pytest.fixture(scope="module")
def made() -> Any:
    return gpt2(n_layer=1).eval()


def quantized(model: Any, storage: Any, **options: Any) -> Any:
    return quantize_model(copy.deepcopy(model), {"*": "E4M3"}, storage, tied="leave", **options)


def convs(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if type(m).__name__ in ("Conv1D", "QuantizedConv1D")}


@storages
def test_it_computes_what_fake_quantisation_by_hand_does(made: Any, storage: Any) -> None:
    model, by_hand = quantized(made, storage), copy.deepcopy(made)
    assert len(convs(model)) == 4
    for name, conv in convs(by_hand).items():
        rows = conv.weight.data.t()
        scale = None if storage == "master" else fm.storage_scale(rows, "E4M3")
        conv.weight.data = fm.fake_quantize(rows, "E4M3", scale, granularity="channel").t()
        layer = convs(model)[name]
        assert isinstance(layer, QuantizedLinear)
        assert torch.equal(layer.quantized_weight().detach().t() + 0, conv.weight)
        assert (layer.nf, layer.nx, layer.bias.numel()) == (conv.nf, conv.nx, conv.nf)
        assert layer.weight_scale().numel() == conv.nf
    torch.testing.assert_close(logits(model), logits(by_hand), rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits(model), logits(made))
    assert "QuantizedConv1D" in str(fm.quantization_report(model))


@storages
@each("assign", [False, True])
def test_state_dicts_of_every_kind(made: Any, storage: Any, assign: bool) -> None:
    model, other = quantized(made, storage), quantized(made, storage, seed=1)
    for layer in convs(other).values():
        with torch.no_grad():
            layer.weight.mul_(0.5)
    state = model.state_dict()
    assert set(made.state_dict()) <= set(state)
    other.load_state_dict(through_disk(state), assign=assign)
    assert torch.equal(logits(other), logits(model))
    if storage != "grid":  # whose scales are part of its state
        other, parts = quantized(made, storage), ("_scale", "_counter", "_traits")
        rest = {name: x for name, x in other.state_dict().items() if not name.endswith(parts)}
        other.load_state_dict({**rest, **through_disk(made.state_dict())}, assign=assign)
        assert torch.equal(logits(other), logits(model))
    if storage != "fp8":
        floats = copy.deepcopy(made)
        floats.load_state_dict({name: state[name] for name in made.state_dict()}, assign=assign)
        name = "transformer.h.0.attn.c_proj"
        assert torch.equal(floats.get_submodule(name).weight, model.get_submodule(name).weight.t() + 0)


@storages
def test_the_way_back_gives_conv1d(made: Any, storage: Any) -> None:
    model = quantized(made, storage)
    model.transformer.h[0].mlp.c_fc.note = "kept"
    expected, keys = logits(model), set(made.state_dict())
    state = torch.get_rng_state()
    dequantize_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(model.state_dict()) == keys
    for name, conv in convs(made).items():
        back = model.get_submodule(name)
        assert type(back) is type(conv)
        assert back.weight.shape == conv.weight.shape
        assert set(vars(back)) - set(vars(conv)) == ({"note"} if name.endswith("c_fc") else set())
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)


def test_gradients_and_hooks_of_a_transposed_weight(made: Any) -> None:
    model = copy.deepcopy(made)
    conv = model.transformer.h[0].attn.c_proj
    alone = copy.deepcopy(conv)
    alone.weight.grad = normal(32, 32)
    assert torch.equal(quantize_model(alone, "E4M3", "fp8").weight.grad, normal(32, 32).t())  # type: ignore[arg-type]
    conv.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="hooks, which would be given the transposed gradient: remove them first"):
        quantize_model(model, {"c_proj": LayerSpec("E4M3")}, storage="master")
    assert type(model.transformer.h[0].mlp.c_proj) is type(conv)
