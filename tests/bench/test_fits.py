"""More than a machine has is refused in one line, before anything of it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import load_config
from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.model import causal
from nanogpt_bench.model.gpt import build_model
from nanogpt_bench.setup.memory import parameters_of
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.setup.start import model_shape

TOO_MUCH = (
    "model.n_embd 2000000",
    "train.batch_size 1000000000",
    "eval.batches 100000000000",
)


@pytest.mark.parametrize("command", ["run fp32.yaml", "run e4m3.yaml", "evaluate fp32.yaml --formats E4M3"])
@pytest.mark.parametrize("asked", [*TOO_MUCH, f"model.n_embd {10**200}"])
def test_what_there_is_no_memory_for_is_refused_before_it_is_made(
    asked: str,
    command: str,
    corpus_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    key, value = asked.split()
    small = ["--data.dir", str(corpus_dir), "--model.block_size", "16", "--model.n_head", "1"]
    assert main([*command.split(), *small, f"--{key}", value]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{key} {value}" in told
    assert "GiB are free" in told
    assert not Path("runs").exists()


def test_threads_have_a_limit(corpus_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "fp32.yaml", "--data.dir", str(corpus_dir), "--runtime.threads", "100000"]) == 2
    assert "runtime.threads: 100000 is out of range; give a whole number >= 1 and <= 1024" in capsys.readouterr().err


def test_what_is_counted_is_what_a_model_has(tiny: Callable[..., Config]) -> None:
    config = resolve(tiny())
    shape = model_shape(config, open_corpus(config))
    matrices = [parameter for parameter in build_model(shape, 0).parameters() if parameter.dim() == 2]
    assert parameters_of(shape) == sum(parameter.numel() for parameter in matrices)


def test_what_fits_is_trained(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(causal, "free_memory", lambda: 10_000_000)
    small = ["--model.block_size", "16", "--model.n_layer", "1", "--model.n_head", "1", "--train.batch_size", "2"]
    words = ["run", "fp32.yaml", "--data.dir", str(corpus_dir), "--model.n_embd", "32", *small]
    assert main([*words, "--train.max_steps", "1", "--eval.batches", "1"]) == 0
    assert load_config(None).runtime.threads is None
