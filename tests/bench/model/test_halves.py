"""A model evaluated without float32 weights: with the 16 bits per weight of its file, then in codes."""

import json
from pathlib import Path
from typing import Any

import causal_models
import pytest
import torch
import transformers

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.evaluation import measurement, report
from nanogpt_bench.model.causal import computes_in_float32, is_linear, load_narrow, window_losses


def written(folder: Path, kind: str, dtype: torch.dtype) -> Path:
    causal_models.write(folder, kind, tied=kind != "gpt2")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "evaluation.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("mixtral", torch.bfloat16)]
)
def test_no_float_of_a_linear_weight_is_there_and_every_figure_is(kind, dtype, text_file, tmp_path, monkeypatch):
    """The results equal those of a model that holds float weights and codes."""
    model = written(tmp_path / kind, kind, dtype)
    words = ["evaluate", "--model", str(model), "--input", str(text_file), "--windows", "3", "--model.block_size=16"]
    words += ["--formats", "E4M3,E2M1", "--scales", "tensor,channel"]
    held = []

    def losses(model, *rest):
        layers = [each for each in model.modules() if is_linear(each) or isinstance(each, fm.QuantizedLinear)]
        codes = [isinstance(each.weight, fm.FP8Tensor) for each in layers if each is not model.get_output_embeddings()]
        held.append({torch.uint8} if all(codes) else {each.weight.dtype for each in layers})
        return window_losses(model, *rest)

    monkeypatch.setattr(measurement, "window_losses", losses)
    assert main([*words, "--out", str(tmp_path / "anew")]) == 0
    assert held == [{dtype}, *[{torch.uint8}] * 4]
    monkeypatch.setattr(report, "find_model", lambda _: {"gguf_file": ""})  # of which floats alone are read
    assert main([*words, "--out", str(tmp_path / "floats")]) == 0
    assert held[5] == {torch.float32}
    assert rows_of(tmp_path / "anew") == rows_of(tmp_path / "floats")


@pytest.mark.parametrize("options", [["--sensitivity"], ["--embeddings"], ["--model.formats.embeddings", "E4M3"]])
def test_what_is_measured_beside_floats_holds_them(options, text_file, tmp_path, monkeypatch):
    model = written(tmp_path / "llama", "llama", torch.bfloat16)
    monkeypatch.setattr(report, "load_narrow", lambda _: pytest.fail("read without its floats"))
    words = ["evaluate", "--model", str(model), "--input", str(text_file), "--windows", "2", "--model.block_size=16"]
    assert main([*words, "--formats", "E4M3", *options, "--out", str(tmp_path / "out")]) == 0


def test_models_that_compute_in_16_bits_are_measured_in_float32(tmp_path):
    assert load_narrow(str(causal_models.write(tmp_path / "floats"))) is None
    narrow = load_narrow(str(written(tmp_path / "llama", "llama", torch.bfloat16)))
    assert narrow is not None
    assert narrow.config.dtype is torch.float32
    made = torch.nn.Linear(2, 2).bfloat16()
    made.register_buffer("cache", torch.ones(2, dtype=torch.bfloat16), persistent=False)
    assert not computes_in_float32(made)
