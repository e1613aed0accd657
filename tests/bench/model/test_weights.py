"""A model's weights in a file: nothing is lost on the way, and a file of another model is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nanogpt_bench.config.settings import load_config
from nanogpt_bench.model.gpt import GPTShape, build_model
from nanogpt_bench.model.weights import fill, quantized_layers, save_weights
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.surgery import quantize
from nanogpt_bench.system.errors import BenchError

TOKENS = torch.arange(11)[None]


def wrapped(storage: str, seed: int, fmt: str = "E4M3", width: int = 32, tie: bool = False) -> nn.Module:
    formats = f"{{'*': {fmt}, lm_head: none, mlp.fc: {{weight: {fmt}, activation: E5M2}}}}"
    shape = ["--model.n_layer=2", "--model.n_head=2", f"--model.n_embd={width}"]
    config = resolve(load_config(None, [*shape, "--model.formats", formats, "--model.storage", storage]))
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, bias=True, tie_weights=tie), seed)
    return quantize(model, config).eval()


@pytest.mark.parametrize("storage", ["master", "grid", "fp8", "continuous"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_wrapped_model_comes_back_as_it_was(tmp_path: Path, storage: str, tie: bool) -> None:
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


def test_one_byte_weights_take_a_byte_in_the_file(tmp_path: Path) -> None:
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
def test_weights_of_another_model_are_refused(tmp_path: Path, there: dict[str, object], words: str) -> None:
    save_weights(wrapped(**{"storage": "fp8", "seed": 0, **there}), tmp_path / "w")  # type: ignore[arg-type]
    model = wrapped("fp8", 1)
    before = {name: layer.weight_codes().clone() for name, layer in quantized_layers(model).items()}
    with pytest.raises(BenchError, match=words):
        fill(model, load_file(tmp_path / "w"), {}, "weights")
    for name, layer in quantized_layers(model).items():
        assert torch.equal(layer.weight_codes(), before[name])
