"""The GPT: shapes, initial values, causality; its weights in a file, and back."""

import pytest
import torch
from bench_runs import refusal, resolved
from safetensors.torch import load_file
from torch import nn

from nanogpt_bench.model.gpt import FLOATS, GPT, GPTShape, build_model, linear_sizes
from nanogpt_bench.model.weights import fill, quantized_layers, save_weights
from nanogpt_bench.setup.surgery import quantize

SMALL = GPTShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)


def test_what_is_known_of_layers_before_there_is_a_model_is_so():
    modules = dict(GPT(SMALL).named_modules())
    linear = {name: (m.in_features, m.out_features) for name, m in modules.items() if isinstance(m, torch.nn.Linear)}
    assert list(linear_sizes(2, 32, 50).items()) == list(linear.items())
    kinds = {name.rpartition(".")[2]: type(module).__name__ for name, module in modules.items()}
    blocks = {"blocks", "0", "1", "attn", "mlp", ""}  # what holds others
    floats = {last: kind for last, kind in kinds.items() if kind != "Linear" and last not in blocks}
    assert {name.rpartition(".")[2]: type(modules[name]).__name__ for name in FLOATS} == floats
    assert {name: type(modules[name]).__name__ for name in FLOATS} == FLOATS


def test_a_token_does_not_see_later_ones():
    model = build_model(SMALL, seed=0)
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10] = 49
    difference = (model(tokens) - model(changed)).detach().abs().amax(-1)[0]
    assert float(difference[:10].max()) == 0.0
    assert float(difference[10:].min()) > 0.0


def test_initial_values_follow_gpt2():
    model = build_model(GPTShape(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=300, bias=True), seed=0)
    for name, std in (("blocks.0.attn.qkv", 0.02), ("blocks.3.mlp.proj", 0.005), ("token_embedding", 0.02)):
        assert float(model.get_submodule(name).weight.detach().std()) == pytest.approx(std, rel=0.02)
    assert float(model.blocks[0].mlp.fc.bias.detach().abs().max()) == 0.0


def test_the_seed_decides_and_the_global_generator_stays():
    before = torch.get_rng_state()
    one, same, other = (build_model(SMALL, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_tying_shares_one_parameter():
    tied = GPT(GPTShape(2, 2, 32, 16, vocab_size=50, tie_weights=True))
    assert tied.lm_head.weight is tied.token_embedding.weight
    total = sum(parameter.numel() for parameter in GPT(SMALL).parameters())
    assert sum(parameter.numel() for parameter in tied.parameters()) == total - 50 * 32


def test_dropout_acts_in_training_only():
    model = build_model(GPTShape(1, 2, 32, 16, vocab_size=50, dropout=0.5), seed=0)
    tokens = torch.arange(16)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


TOKENS = torch.arange(11)[None]


def wrapped(storage: str, seed: int, fmt: str = "E4M3", width: int = 32, tie: bool = False) -> nn.Module:
    formats = f"{{'*': {fmt}, lm_head: none, mlp.fc: {{weight: {fmt}, activation: E5M2}}}}"
    shape = ["--model.n_layer=2", "--model.n_head=2", f"--model.n_embd={width}"]
    config = resolved([*shape, "--model.formats", formats, "--model.storage", storage])
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, bias=True, tie_weights=tie), seed)
    return quantize(model, config).eval()


@pytest.mark.parametrize("storage", ["master", "grid", "fp8", "continuous"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_wrapped_model_comes_back_as_it_was(tmp_path, storage, tie):
    saved, other = wrapped(storage, 0, tie=tie), wrapped(storage, 1, tie=tie)
    assert not torch.equal(saved(TOKENS), other(TOKENS))
    save_weights(saved, tmp_path / "new" / "model.safetensors")
    fill(other, load_file(tmp_path / "new" / "model.safetensors"), {}, "weights")
    assert torch.equal(saved(TOKENS), other(TOKENS))
    for name, layer in quantized_layers(saved).items():
        twin = quantized_layers(other)[name]
        assert torch.equal(layer.weight_codes(), twin.weight_codes()), name
        assert torch.equal(layer.weight_scale(), twin.weight_scale()), name
    assert (other.lm_head.weight is other.token_embedding.weight) is tie
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_one_byte_weights_take_a_byte_in_the_file(tmp_path):
    sizes = {}
    for storage in ("fp8", "grid"):
        path = tmp_path / storage
        save_weights(wrapped(storage, 0, width=64), path)
        sizes[storage] = path.stat().st_size
    weights = 2 * 12 * 64**2
    assert sizes["grid"] - sizes["fp8"] == pytest.approx(3 * weights, rel=0.1)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"width": 16}, r"are of another model: .* is float32 \(11, 16\) there, float32 \(11, 32\) here"),
        ({"fmt": "E5M2"}, "E5M2"),
        ({"storage": "grid"}, "float32 .* there, E4M3 codes .* here"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, there, words):
    save_weights(wrapped(**{"storage": "fp8", "seed": 0, **there}), tmp_path / "w")
    model = wrapped("fp8", 1)
    before = {name: layer.weight_codes().clone() for name, layer in quantized_layers(model).items()}
    with refusal(words):
        fill(model, load_file(tmp_path / "w"), {}, "weights")
    for name, layer in quantized_layers(model).items():
        assert torch.equal(layer.weight_codes(), before[name])
