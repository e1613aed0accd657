"""Meters of memory say the bytes that codes and their scales take."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn

import fp8manifold as fm

SHAPE = (128, 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("granularity", "scale_bytes"),
    [("tensor", 4), ("channel", 4 * 128), ("block", 128 * 8), ("square", 2)],
)
def test_a_weight_says_what_it_holds(granularity, scale_bytes, dtype):
    weight = fm.FP8Parameter(torch.randn(SHAPE), "E4M3", granularity=granularity, dtype=dtype)
    assert weight.nbytes == 128 * 256 + scale_bytes
    assert (weight.element_size(), weight.itemsize) == (1, 1)
    assert weight.detach().nbytes == weight.nbytes
    # of floats, as it has always been
    assert weight.untyped_storage().nbytes() == 128 * 256 * dtype.itemsize
    assert weight.dequantize().nbytes == 128 * 256 * dtype.itemsize


def test_a_remainder_counts_while_it_is_there():
    weight = fm.FP8Parameter(torch.randn(SHAPE), "E4M3", keep_remainder=True)
    assert weight.nbytes == 2 * 128 * 256 + 4 * 128
    with torch.no_grad():
        weight.mul_(0.5)
    assert weight.nbytes == 128 * 256 + 4 * 128


def test_views_say_the_codes_that_they_show():
    weight = fm.FP8Parameter(torch.randn(SHAPE), "E4M3")
    assert (weight[:2].nbytes, weight.t().element_size()) == (2 * 256, 1)


@pytest.mark.parametrize(("accumulate", "bytes_each"), [(None, 0), ("bfloat16", 2)])
def test_a_gradient_that_was_spent_or_summed_says_what_it_holds(accumulate, bytes_each):
    model = fm.quantize_model(nn.Sequential(nn.Linear(64, 32, bias=False)), "E4M3")
    optimizer = fm.optim.StiffnessAdamW(model.parameters())
    with fm.optim.step_in_backward(optimizer, accumulate=accumulate):
        model(torch.ones(2, 64)).sum().backward()
        gradient = model[0].weight.grad
        assert gradient.nbytes == 64 * 32 * bytes_each
        assert (gradient.element_size(), gradient.itemsize) == (bytes_each, bytes_each)
        assert gradient.numel() == 64 * 32


def test_a_report_has_the_bytes_of_layers_and_model():
    shared = nn.Linear(8, 8, bias=False)
    model = nn.ModuleDict({"a": nn.Linear(8, 4), "b": shared, "c": nn.Embedding(8, 8)})
    model["c"].weight = shared.weight
    report = fm.quantization_report(fm.quantize_model(model, "E4M3", tied="leave"))
    sizes = {layer.name: layer.bytes for layer in report.layers}
    # codes, a scale a row, and a bias in float32
    assert sizes == {"a": 32 + 16 + 16, "b": 256, "c": 256}
    assert report.bytes == 64 + 256
    assert str(report).endswith(", 320 bytes")


def test_the_format_is_in_the_string_of_a_model():
    model = fm.quantize_model(nn.Sequential(nn.Linear(8, 4)), "E3M4")
    assert "weight=E3M4" in str(model)


class Scaled(nn.Embedding):
    """An embedding with a line of its own, which continues that of its base."""

    def extra_repr(self):
        return f"scaled, {super().extra_repr()}"


class Continued(nn.Embedding):
    """An embedding whose line begins with that of its base."""

    def extra_repr(self):
        return f"{super().extra_repr()}, continued"


class Stack(nn.Module):
    """A stack of matrices, whose class has no line of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(2, 4, 8))
        self.second = nn.Parameter(torch.randn(2, 8, 4))


def test_the_formats_of_other_parameters_are_in_the_string_of_a_model():
    model = nn.Sequential(nn.Embedding(32, 8), Scaled(32, 8), nn.Conv2d(8, 8, 3), Stack())
    before = str(model)
    patterns = {"1.weight": "E5M2", "2.*": "E3M4", "3.*": "E4M3"}
    fm.quantize_model(model, None, embeddings={"0": "E4M3"}, parameters=patterns)
    lines = str(model).splitlines()[1:-1]
    assert [line.strip() for line in lines] == [
        "(0): Embedding(32, 8, weight=E4M3)",
        "(1): Scaled(scaled, 32, 8, weight=E5M2)",
        "(2): Conv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), weight=E3M4)",
        "(3): Stack(first=E4M3, second=E4M3)",
    ]
    assert str(copy.deepcopy(model)) == str(pickle.loads(pickle.dumps(model))) == str(model)
    fm.dequantize_model(model)
    assert str(model) == before


def test_a_line_that_continues_that_of_its_base_shows_the_format_once():
    model = nn.Sequential(nn.Embedding(32, 8), Continued(32, 8))
    fm.quantize_model(model, None, embeddings="E4M3", parameters={"1.weight": "E4M3"})
    assert str(model[1]) == "Continued(32, 8, weight=E4M3, continued)"


@pytest.mark.parametrize("embeddings", [None, "E4M3"])
def test_the_footprint_of_a_model_of_transformers_counts_codes_and_scales(embeddings):
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    floats = model.get_memory_footprint()
    buffers = floats - model.get_memory_footprint(return_buffers=False)
    assert floats == sum(p.nbytes for p in model.parameters()) + buffers
    fm.quantize_model(model, "E4M3", embeddings=embeddings)
    held = 0
    for parameter in model.parameters():
        if isinstance(parameter, fm.FP8Parameter):
            held += parameter.codes.nbytes + parameter.kept_scale.nbytes
        else:
            held += parameter.nbytes
    assert model.get_memory_footprint(return_buffers=False) == held
    assert held < 0.5 * floats
    fm.dequantize_model(model)
    assert model.get_memory_footprint() == floats
