"""Models of transformers that are not a stack of linear layers with attention, or not whole: what is said of them."""

import json
from pathlib import Path

import causal_models
import pytest
from safetensors.torch import load_file, save_file

from nanogpt_bench.cli import main

SMALL = ["--model.block_size", "16", "--train.max_steps", "2", "--eval.batches", "1", "--monitor.interval", "2"]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return causal_models.write(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


def test_experts_in_one_parameter_are_measured_around_and_named(mixtral, text_file, tmp_path, capsys):
    words = ["evaluate", "--model", str(mixtral), "--input", str(text_file), "--formats", "E4M3"]
    assert main([*words, "--model.block_size", "16", "--windows", "2", "--out", str(tmp_path / "out")]) == 0
    assert "model.layers.0.mlp.experts (18,432): " in capsys.readouterr().err
    rows = json.loads((tmp_path / "out" / "evaluation.json").read_text())["rows"]
    assert rows[1]["quantized_parameters"] == 2 * 4 * 32 * 32


def test_a_fine_tuning_says_what_it_leaves_in_float(mixtral, text_file, here, capsys):
    assert main(["prepare", "text", "--input", str(text_file), "--tokenizer", str(mixtral), "--out", "law"]) == 0
    assert main(["finetune", "--model", str(mixtral), "--data.dir", "law", "--name", "f", *SMALL]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left in float: ")]
    summary = json.loads(Path("runs/f/summary.json").read_text())
    left = summary["parameters"] - summary["quantized_parameters"]
    (line,) = said
    assert line.startswith(f"left in float: {left / summary['parameters']:.0%} of the weights, {left:,} of ")
    assert "most in model.layers.0.mlp.experts (18,432), model.layers.1.mlp.experts (18,432)" in line


@pytest.mark.parametrize("command", ["evaluate", "finetune"])
def test_a_model_without_attention_is_refused(command, text_file, tmp_path, corpus_dir, refused):
    text = ["--input", text_file] if command == "evaluate" else ["--data.dir", corpus_dir]
    said = refused(command, "--model", causal_models.write(tmp_path / "mamba", "mamba"), *text)
    assert "is of type 'mamba', without attention" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value, text_file, tmp_path, refused):
    model = causal_models.write(tmp_path / "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    said = refused("evaluate", "--model", model, "--input", text_file)
    assert "model.layers.0.mlp.down_proj.weight holds NaN or infinity in 1 of its 1,536 values" in said
