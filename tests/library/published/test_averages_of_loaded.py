"""Averages of models that `fm.load` reads, and of models that transformers quantised."""

import warnings

import pytest
import torch
import transformers

import fp8manifold as fm

TOKENS = torch.arange(8)[None]


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=16)
    return transformers.LlamaForCausalLM(config)


def from_floats(folder):
    llama().save_pretrained(folder)
    return fm.load(folder, "E4M3", embeddings="E4M3")


def from_a_saved_folder(folder):
    fm.save(fm.quantize_model(llama(), "E4M3"), folder)
    return fm.load(folder)


def from_codes(folder):
    fm.save(fm.quantize_model(llama(), "E4M3"), folder, layout="codes")
    return fm.load(folder)


def from_published_codes(folder):
    fm.save(fm.quantize_model(llama(), "E4M3"), folder, layout="compressed-tensors")
    return fm.load(folder)


@pytest.mark.parametrize(
    "read", [from_floats, from_a_saved_folder, from_codes, from_published_codes]
)
def test_a_model_that_was_loaded_is_averaged_in_floats(read, tmp_path):
    model = read(tmp_path / "model")
    average = fm.averaged_model(model)
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), 1e-2)
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    for _ in range(4):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        for total, p in zip(sums, model.parameters(), strict=True):
            total += p.detach().float()
    for total, p in zip(sums, average.module.parameters(), strict=True):
        assert type(p) is torch.nn.Parameter
        torch.testing.assert_close(p.detach(), total / 4, rtol=1e-5, atol=1e-6)
    average.module.save_pretrained(tmp_path / "average")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "average")
    assert torch.equal(plain(TOKENS).logits, average.module(TOKENS).logits)


@pytest.mark.extra("diffusers")
def test_an_average_of_another_library_warns_once():
    from diffusers.training_utils import EMAModel

    model = fm.quantize_model(torch.nn.Linear(8, 8), "E4M3")
    average = EMAModel(model.parameters(), decay=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            average.step(model.parameters())
    kinds = [warning.category for warning in caught]
    assert kinds.count(fm.RepeatedRoundingWarning) == 1


def test_a_copy_in_floats_is_a_plain_tensor():
    weight = fm.quantize_model(torch.nn.Linear(8, 8), "E4M3").weight
    copied = weight.detach().clone().float()
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, weight.dequantize())
