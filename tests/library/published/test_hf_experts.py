"""Mixtures of experts of transformers, whose experts are one parameter: in codes, trained, saved and read."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import SIZES, llama, seeded, transformers
from surgery_models import bits
from torch import Tensor

import fp8manifold as fm
from fp8manifold import FP8Parameter, huggingface, quantize_model

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries announce is their own business
TOKENS = torch.arange(16).view(2, 8)
COMMON: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32},
    "GptOss": {"num_local_experts": 4, "head_dim": 32, "layer_types": ["full_attention"] * 2},
}


def mixture(kind: str, **more: Any) -> Any:
    model = seeded(kind, getattr(transformers, f"{kind}Config")(**COMMON, **KINDS[kind], **more))
    model.set_experts_implementation("eager")
    return model.eval()


def options_of(kind: str) -> dict[str, Any]:
    biases = {"*_bias": "none"} if kind == "GptOss" else {}
    return {"parameters": {"*.experts.*": "E4M3", **biases}, "embeddings": "E4M3"}


def quantized(kind: str, **more: Any) -> Any:
    return quantize_model(mixture(kind), "E4M3", "fp8", **options_of(kind), **more)


def loss_of(model: Any) -> Tensor:
    return model(TOKENS, labels=TOKENS).loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_and_gradients_are_those_of_the_values(kind: str) -> None:
    model = quantized(kind)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.scale.shape == (*experts.gate_up_proj.shape[:-1], 1)
    assert isinstance(experts.down_proj, FP8Parameter)
    report = fm.quantization_report(model)
    assert report.quantized_parameters > 0.95 * report.parameters
    floats: Any = fm.dequantize_model(copy.deepcopy(model))
    assert torch.equal(model(TOKENS).logits, floats(TOKENS).logits)
    for each in (model, floats):
        loss_of(each).backward()
    theirs = dict(floats.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, theirs[name].grad), name
    for way in ("grouped_mm", "batched_mm"):
        for each in (model, floats):
            each.set_experts_implementation(way)
        assert torch.equal(model(TOKENS).logits, floats(TOKENS).logits), way


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_they_are_saved_and_read(kind: str, tmp_path: Path) -> None:
    model = quantized(kind, seed=3)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    huggingface.attach(model).save_pretrained(tmp_path)
    other, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.values()), said
    assert bits(other) == bits(model)
    other.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert bits(again) == bits(model)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    ours = bits(model)["held"]
    assert all(ours[f"model.{name}"] == value for name, value in bits(base)["held"].items())


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_are_read_into_codes(kind: str, dtype: Any, tmp_path: Path) -> None:
    mixture(kind).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    floats = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    wanted = quantize_model(floats, "E4M3", "fp8", **options_of(kind))
    config = huggingface.quantization_config("E4M3", **options_of(kind))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype)
    assert bits(read) == bits(wanted)


@pytest.mark.parametrize("tied", ["refuse", "leave", "untie"])
def test_a_tied_embedding_in_codes_is_saved_and_read(tied: Any, tmp_path: Path) -> None:
    model = llama().eval()
    model.save_pretrained(tmp_path / "floats")
    quantize_model(model, "E4M3", "fp8", embeddings="E4M3", tied=tied)
    huggingface.attach(model).save_pretrained(tmp_path / "codes")
    asked = huggingface.quantization_config("E4M3", embeddings="E4M3", tied=tied)
    auto = transformers.AutoModelForCausalLM
    for other in (
        auto.from_pretrained(tmp_path / "codes"),
        auto.from_pretrained(tmp_path / "floats", quantization_config=asked),
    ):
        assert bits(other) == bits(model)
        assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
        head, embedding = other.get_output_embeddings().weight, other.get_input_embeddings().weight
        assert (head is embedding) == (tied != "untie")
        assert all(isinstance(weight, FP8Parameter) for weight in (head, embedding))


def test_the_experts_are_exported_as_the_floats_that_they_are(tmp_path: Path) -> None:
    model = quantized("Mixtral")
    fm.export_model(model, tmp_path)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = (each.model.layers[0].mlp.experts.down_proj for each in (model, other))
    assert torch.equal(theirs, ours.dequantize())
    other.set_experts_implementation("eager")
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
