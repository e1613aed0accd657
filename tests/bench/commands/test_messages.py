"""Messages and tables: verdicts that fit a screen, heads that count, a page that prints whole."""

from pathlib import Path

import causal_models
import pytest
from bench_runs import refusal
from damages import put
from safetensors.torch import load_file, save_file

from nanogpt_bench.model.causal import load_causal, outline
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import Row
from nanogpt_bench.report.tables import WIDEST, to_markdown, to_text
from nanogpt_bench.runs.load import Run


def test_a_long_verdict_is_folded_and_widens_no_other_line():
    why = "runtime.device: 'cuda' is not available on this machine; allowed: auto, cpu, and so on " * 2
    failed = {"status": "failed", "failure": {"kind": "BenchError", "message": why.strip(), "step": 0}, "seed": 1}
    good = {"status": "finished", "final_val_loss": 2.0, "best_val_loss": 2.0, "seed": 1}
    rows = [
        Row("fp32", "fp32", "none", (Run(Path("a"), summary=good),)),
        Row("E4M3 nearest", "nearest", "E4M3", (Run(Path("b"), summary=failed),)),
    ]
    results = measure(rows, rows[0])
    text = to_text(results).splitlines()
    assert max(map(len, text)) <= WIDEST
    assert len(results[1].verdict.text) > WIDEST
    assert "".join(results[1].verdict.text.split()) in "".join(
        line.rpartition("| ")[2].rstrip(" |") for line in text
    ).replace(" ", "")
    heading, rule, first, _ = to_markdown(results).splitlines()
    assert max(map(len, (heading, rule, first))) <= WIDEST


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_of_its_own_counts_whatever_the_settings_say(kind, tmp_path):
    folder = causal_models.write(tmp_path / kind, kind, tied=False)
    put("tie_word_embeddings", True)(folder / "config.json")
    found, model = outline(str(folder)), load_causal(str(folder))
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert not found.shared


def test_a_copy_of_the_embedding_is_the_tied_head_and_none_is_refused(tmp_path):
    folder = causal_models.write(tmp_path / "same")
    file = folder / "model.safetensors"
    held = load_file(file)
    save_file({**held, "lm_head.weight": held["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    found, model = outline(str(folder)), load_causal(str(folder))
    assert list(found.shared) == ["lm_head"]
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    other = causal_models.write(tmp_path / "none")
    put("tie_word_embeddings", False)(other / "config.json")
    with refusal(r"does not fit its config\.json: missing weight 'lm_head\.weight'"):
        load_causal(str(other))


def test_the_page_is_printed_whole():
    from importlib import resources

    rules = resources.files("nanogpt_bench.report").joinpath("page.css").read_text().partition("@media print")[2]
    assert ".scroll, pre { overflow: visible; }" in rules
    assert "break-inside: avoid" in rules
