"""The GPT, its shapes, initial values and causality.

Weights in a file, and back; other models, and models in 16 bits.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers
from bench_runs import refusal, resolved
from safetensors.torch import load_file, save_file
from torch import nn

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.evaluation import measurement, report
from nanogpt_bench.model.causal import computes_in_float32, is_linear, load_narrow, window_losses
from nanogpt_bench.model.gpt import FLOATS, GPT, GPTShape, build_model, linear_sizes
from nanogpt_bench.model.weights import fill, quantized_layers, save_weights
from nanogpt_bench.setup.surgery import left_in_float, quantize

SMALL = GPTShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)


def test_what_is_known_of_layers_before_there_is_a_model_is_so():
    modules = dict(GPT(SMALL).named_modules())
    linear = {
        name: (m.in_features, m.out_features)
        for name, m in modules.items()
        if isinstance(m, torch.nn.Linear)
    }
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


def test_initial_values_follow_gpt2_and_the_seed_and_the_global_generator_stays():
    model = build_model(
        GPTShape(n_layer=8, n_head=4, n_embd=256, block_size=64, vocab_size=300, bias=True), seed=0
    )
    for name, std in (
        ("blocks.0.attn.qkv", 0.02),
        ("blocks.3.mlp.proj", 0.005),
        ("token_embedding", 0.02),
    ):
        assert float(model.get_submodule(name).weight.detach().std()) == pytest.approx(
            std, rel=0.02
        ), name
    assert float(model.blocks[0].mlp.fc.bias.detach().abs().max()) == 0.0
    larger = build_model(replace(model.shape, init_std=0.06), seed=0)
    for before, after in zip(model.parameters(), larger.parameters(), strict=True):
        if before.ndim == 2:
            torch.testing.assert_close(after, 3 * before)
    old_state = torch.get_rng_state()
    one, same, other_seed = (build_model(SMALL, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), old_state)
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other_seed.lm_head.weight)


def test_tying_shares_one_parameter_and_dropout_acts_in_training_only():
    tied = GPT(GPTShape(2, 2, 32, 16, vocab_size=50, tie_weights=True))
    assert tied.lm_head.weight is tied.token_embedding.weight
    total = sum(parameter.numel() for parameter in GPT(SMALL).parameters())
    assert sum(parameter.numel() for parameter in tied.parameters()) == total - 50 * 32
    model = build_model(GPTShape(1, 2, 32, 16, vocab_size=50, dropout=0.5), seed=0)
    tokens = torch.arange(16)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


TOKENS = torch.arange(11)[None]


def wrapped(
    storage: str, seed: int, fmt: str = "E4M3", width: int = 32, tie: bool = False
) -> nn.Module:
    formats = f"{{'*': {fmt}, lm_head: none, mlp.fc: {{weight: {fmt}, activation: E5M2}}}}"
    shape = ["--model.n_layer=2", "--model.n_head=2", f"--model.n_embd={width}"]
    config = resolved([*shape, "--model.formats", formats, "--model.storage", storage])
    model = build_model(GPTShape(2, 2, width, 16, vocab_size=11, bias=True, tie_weights=tie), seed)
    return quantize(model, config).eval()


@pytest.mark.parametrize("storage", ["master", "grid", "codes", "continuous"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_wrapped_model_comes_back_as_it_was(tmp_path, storage, tie):
    saved, other_model = wrapped(storage, 0, tie=tie), wrapped(storage, 1, tie=tie)
    assert not torch.equal(saved(TOKENS), other_model(TOKENS))
    save_weights(saved, tmp_path / "new" / "model.safetensors")
    fill(other_model, load_file(tmp_path / "new" / "model.safetensors"), {}, "weights")
    assert torch.equal(saved(TOKENS), other_model(TOKENS))
    for name, layer in quantized_layers(saved).items():
        twin = quantized_layers(other_model)[name]
        assert torch.equal(layer.weight_codes(), twin.weight_codes()), name
        assert torch.equal(layer.weight_scale(), twin.weight_scale()), name
    assert (other_model.lm_head.weight is other_model.token_embedding.weight) is tie
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_one_byte_weights_take_a_byte_in_the_file(tmp_path):
    for storage in ("codes", "grid"):
        save_weights(wrapped(storage, 0, width=64), tmp_path / storage)
    codes, grid = ((tmp_path / storage).stat().st_size for storage in ("codes", "grid"))
    assert grid - codes == pytest.approx(3 * 2 * 12 * 64**2, rel=0.1)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (
            {"width": 16},
            r"are of another model: .* is float32 \(11, 16\) there, but float32 \(11, 32\) in this",
        ),
        ({"fmt": "E5M2"}, "E5M2"),
        ({"storage": "grid"}, "float32 .* there, but E4M3 codes .* in this"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path, folder, words):
    save_weights(wrapped(**{"storage": "codes", "seed": 0, **folder}), tmp_path / "w")
    model = wrapped("codes", 1)
    old_codes = {
        name: layer.weight_codes().clone() for name, layer in quantized_layers(model).items()
    }
    with refusal(words):
        fill(model, load_file(tmp_path / "w"), {}, "weights")
    for name, layer in quantized_layers(model).items():
        assert torch.equal(layer.weight_codes(), old_codes[name]), name


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return causal_models.write(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


def test_experts_in_one_parameter_are_measured_around_and_named(
    mixtral, text_file, tmp_path, capsys
):
    words = ["evaluate", "--model", str(mixtral), "--input", str(text_file), "--formats", "E4M3"]
    assert (
        main([*words, "--model.block_size", "16", "--windows", "2", "--out", str(tmp_path / "out")])
        == 0
    )
    assert "model.layers.0.mlp.experts (18,432): " in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "evaluation.json").read_text())["rows"]
    assert rows[1]["quantized_parameters"] == 2 * 4 * 32 * 32


def test_a_fine_tuning_says_what_it_leaves_in_float(mixtral, text_file, working_folder, capsys):
    assert (
        main(
            [
                "prepare",
                "text",
                "--input",
                str(text_file),
                "--tokenizer",
                str(mixtral),
                "--out",
                "law",
            ]
        )
        == 0
    )
    quick = [
        "--model.block_size=16",
        "--train.max_steps=2",
        "--eval.batches=1",
        "--monitor.interval=2",
    ]
    assert (
        main(["finetune", "--model", str(mixtral), "--data.dir", "law", "--name", "f", *quick]) == 0
    )
    (line,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("left in float: ")
    )
    summary = json.loads(Path("runs/f/summary.json").read_text())
    float_count = summary["parameters"] - summary["quantized_parameters"]
    assert line.startswith(
        f"left in float: {float_count / summary['parameters']:.0%} of the weights, {float_count:,} of "
    )
    assert (
        "most in model.layers.0.mlp.experts (18,432), model.layers.1.mlp.experts (18,432)" in line
    )


@pytest.mark.parametrize("tied", ["shared weight", "shared layer", "own weight"])
def test_a_tied_weight_is_named_once(tied):
    model = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    if tied == "shared weight":
        model["head"].weight = model["table"].weight
    elif tied == "shared layer":
        model["head"] = model["table"]
    head = ", head (32)" if tied == "own weight" else ""
    assert left_in_float(model).endswith(f"; most in table (32){head}")


@pytest.mark.parametrize("command", ["evaluate", "finetune"])
def test_a_model_without_attention_is_refused(command, text_file, tmp_path, corpus_dir, refused):
    text = ["--input", text_file] if command == "evaluate" else ["--data.dir", corpus_dir]
    message = refused(command, "--model", causal_models.write(tmp_path / "mamba", "mamba"), *text)
    assert "has type 'mamba', which has no attention" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(text_file, tmp_path, refused, value):
    model = causal_models.write(tmp_path / "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    message = refused("evaluate", "--model", model, "--input", text_file)
    assert "model.layers.0.mlp.down_proj.weight has 1 NaN or Inf among its 1,536 values" in message


def write_model(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    causal_models.write(folder, kind, tied=kind != "gpt2")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", torch.bfloat16), ("gpt2", torch.float16), ("mixtral", torch.bfloat16)],
)
def test_no_float_of_a_linear_weight_is_there_and_every_figure_is(
    kind, dtype, text_file, tmp_path, monkeypatch
):
    """The results equal those of a model that holds float weights and codes."""
    model = write_model(tmp_path / kind, kind, dtype)
    words = [
        "evaluate",
        "--model",
        str(model),
        "--input",
        str(text_file),
        "--windows",
        "3",
        "--model.block_size=16",
    ]
    words += ["--formats", "E4M3,E2M1", "--scales", "tensor,channel"]
    dtypes = []

    def losses(model, *rest):
        layers = [
            module
            for module in model.modules()
            if is_linear(module) or isinstance(module, fm.QuantizedLinear)
        ]
        codes = [
            isinstance(module.weight, fm.FP8Tensor)
            for module in layers
            if module is not model.get_output_embeddings()
        ]
        dtypes.append({torch.uint8} if all(codes) else {module.weight.dtype for module in layers})
        return window_losses(model, *rest)

    monkeypatch.setattr(measurement, "window_losses", losses)
    assert main([*words, "--out", str(tmp_path / "anew")]) == 0
    assert dtypes == [{dtype}, *[{torch.uint8}] * 4]
    monkeypatch.setattr(
        report, "find_model", lambda _: {"gguf_file": ""}
    )  # of which floats alone are read
    assert main([*words, "--out", str(tmp_path / "floats")]) == 0
    assert dtypes[5] == {torch.float32}
    assert rows_of(tmp_path / "anew") == rows_of(tmp_path / "floats")


@pytest.mark.parametrize(
    "options", [["--sensitivity"], ["--embeddings"], ["--model.formats.embeddings", "E4M3"]]
)
def test_what_is_measured_beside_floats_holds_them(options, text_file, tmp_path, monkeypatch):
    model = write_model(tmp_path / "llama", "llama", torch.bfloat16)
    monkeypatch.setattr(report, "load_narrow", lambda _: pytest.fail("read without its floats"))
    words = [
        "evaluate",
        "--model",
        str(model),
        "--input",
        str(text_file),
        "--windows",
        "2",
        "--model.block_size=16",
    ]
    assert main([*words, "--formats", "E4M3", *options, "--out", str(tmp_path / "out")]) == 0


def test_models_that_compute_in_16_bits_are_measured_in_float32(tmp_path):
    assert load_narrow(str(causal_models.write(tmp_path / "floats"))) is None
    narrow = load_narrow(str(write_model(tmp_path / "llama", "llama", torch.bfloat16)))
    assert narrow.config.dtype is torch.float32
    layer = torch.nn.Linear(2, 2).bfloat16()
    layer.register_buffer("cache", torch.ones(2, dtype=torch.bfloat16), persistent=False)
    assert not computes_in_float32(layer)
