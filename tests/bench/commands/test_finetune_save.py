"""`finetune --save`: every kind of layer is written, and what would be in the way of it is said before the training."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import causal_models
import pytest
from bench_runs import flags, summary_of, trainer_of

from nanogpt_bench import checkpoint
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import find_config, load_config

SMALL = flags({"model.block_size": 16, "train.max_steps": 2, "train.batch_size": 2, "eval.batches": 1})
SMALL += flags({"optimizer.warmup_steps": 0, "optimizer.lr": 1e-2})


def prepared(folder: Path, text_file: Path, kind: str, **more: Any) -> list[str]:
    """A model and its text in a folder, and the words of a small fine-tuning of it."""
    model = causal_models.write(folder / "model", kind, **more)
    out = folder / "law"
    words = ["prepare", "text", "--input", str(text_file), "--tokenizer", str(model), "--out", str(out)]
    assert main([*words, "--limit-tokens", "2000"]) == 0
    return ["finetune", "--model", str(model), "--data.dir", str(out), *SMALL]


@pytest.fixture
def words(here, text_file):
    return prepared(here, text_file, "llama")


@pytest.mark.parametrize(
    ("kind", "tied", "more", "rule"),
    [
        ("gpt2", True, [], "stochastic"),
        ("gpt2", True, [], "stiffness-unrounded"),
        ("gpt2", True, ["--model.tied", "untie"], "stochastic"),
        ("gpt2", True, ["--model.embeddings", "E4M3"], "stochastic"),
        ("gpt2", False, [], "master"),
        ("mixtral", True, [], "stochastic"),
        ("llama", True, ["--model.embeddings", "E4M3"], "stochastic"),
    ],
)
def test_every_kind_of_layer_is_saved(kind, tied, more, rule, here, text_file):
    words = prepared(here, text_file, kind, tied=tied)
    assert main([*words, *more, "--rule", rule, "--train.precision", "float32", "--save", "saved"]) == 0
    loss = summary_of(here / "runs" / "finetune")["final_val_loss"]
    again = load_config(
        find_config("finetune"),
        [*SMALL, "--model.pretrained=./saved", "--data.dir=law", "--rule=fp32", "--model.format=null"],
    )
    assert trainer_of(again).validate() == pytest.approx(loss, rel=1e-5)


def test_what_is_in_the_way_of_saving_is_said_before_the_training(words, refused, monkeypatch):
    for more, told in {
        "--save saved --checkpoint.last false": "leave --checkpoint.last false out",
        "--save model/config.json/saved": "--save 'model/config.json/saved' can't be used: Not a directory",
        "--save saved --layout gguf": "--layout: 'gguf' is not known",
    }.items():
        assert told in refused(*words, "--rule", "fp32", "--model.format", "null", *more.split())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert "--save needs 1.1 MB below 'saved', 0.0 MB are free" in refused(*words, "--save", "saved")
    shutil.copytree("model", "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    words[words.index("--model") + 1] = str(Path("bare").absolute())
    assert "tokenizer" in refused(*words, "--save", "saved")
    assert not Path("runs").exists()
    assert not Path("saved").exists()


def test_weights_that_could_not_be_written_are_not_lost(words, monkeypatch, capsys):
    def fails(*_):
        Path("saved", "model.safetensors").write_text("the beginning")
        raise ValueError("of whatever kind")

    with monkeypatch.context() as patch:
        patch.setattr("fp8manifold.dequantize_model", fails)
        assert main([*words, "--save", "saved"]) == 2
    assert (
        "--save: 'saved' can't be written: ValueError: of whatever kind; the weights are kept in 'runs/finetune': the "
        "same command with --resume --name finetune and --save DIR writes them"
    ) in capsys.readouterr().err
    assert not Path("saved").exists()
    assert main([*words, "--resume", "--name", "finetune", "--save", "saved"]) == 0
    assert Path("saved", "model.safetensors").is_file()
