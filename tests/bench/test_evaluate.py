"""The loss of one set of weights in several formats, without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gpt2_checkpoints
import pytest

from nanogpt_bench import data as corpus
from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import Config
from nanogpt_bench.data.batches import load_corpus
from nanogpt_bench.evaluation.losses import evaluate
from nanogpt_bench.system.errors import BenchError

Tiny = Callable[..., Config]
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}


@pytest.fixture(scope="module")
def checkpoint(corpus_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = load_corpus(corpus_dir, 16).vocab_size
    return gpt2_checkpoints.write(tmp_path_factory.mktemp("gpt2"), vocab_size=vocabulary, **SIZES)


@pytest.fixture
def arguments(checkpoint: Path, corpus_dir: Path) -> list[str]:
    """The shipped file with a checkpoint of its own."""
    sizes = ["--model.block_size=16", "--eval.batches=2", "--train.batch_size=4", "--train.precision=float32"]
    return ["evaluate", "gpt2.yaml", f"--model.init_from={checkpoint}", f"--data.dir={corpus_dir}", *sizes]


def test_formats_with_more_mantissa_bits_lose_less(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "table.json"
    assert main([*arguments, "--formats", "E2M5,e4m3,E7M0", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["format"] for row in rows] == ["none", "E2M5", "E4M3", "E7M0"]
    assert [row["storage"] for row in rows] == ["float32", *["master"] * 3]
    weights = 2 * 12 * 16**2  # of the blocks; lm_head is tied, and the file leaves it alone
    assert [row["quantized_parameters"] for row in rows] == [0, *[weights] * 3]
    assert rows[0]["gap"] is None
    gaps = [abs(row["val_loss"] - rows[0]["val_loss"]) for row in rows[1:]]
    assert 0 < gaps[0] < gaps[1] < gaps[2]
    assert [abs(row["gap"]) for row in rows[1:]] == gaps
    printed = capsys.readouterr().out
    assert all(f"{row['val_loss']:.4f}" in printed for row in rows)
    assert "…" not in printed


def test_without_formats_the_file_s_own_stands_beside_float(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    words = capsys.readouterr().out
    assert "mixed" not in words
    assert words.count("E4M3") == 1
    assert words.count("none") == 1


def test_a_granularity_is_that_of_the_rows_in_a_format(tiny: Tiny) -> None:
    losses = {}
    for granularity in ("tensor", "channel"):
        rows = evaluate(tiny(model__granularity=granularity), ["E2M1"])
        losses[granularity] = [row.val_loss for row in rows]
    assert losses["tensor"][0] == losses["channel"][0]
    assert losses["tensor"][1] != losses["channel"][1]


def test_the_loss_is_the_first_of_a_run(tiny: Tiny, tmp_path: Path) -> None:
    from nanogpt_bench.loop.train import run

    config = tiny(rule="stochastic", model__format="E4M3")
    rows = evaluate(config, ["E3M4", "E4M3"])
    assert [row.storage for row in rows] == ["float32", "fp8", "fp8"]
    assert rows[2].val_loss == run(config, tmp_path / "run")["first_val_loss"]


@pytest.mark.parametrize("storage", ["master", "grid", "fp8"])
def test_saved_weights_come_back_with_their_loss(tiny: Tiny, checkpoint: Path, tmp_path: Path, storage: str) -> None:
    config = tiny(model__init_from=checkpoint, model__n_layer=2, model__storage=storage, model__format="E3M4")
    config.model.tied = "untie"
    rows = evaluate(config, save=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["E3M4.safetensors", "none.safetensors"]
    random = tiny(model__n_layer=2, model__storage=storage, model__format="E3M4", model__bias=True, model__gelu="tanh")
    (row,) = evaluate(random, weights=tmp_path / "E3M4.safetensors")
    assert (row.val_loss, row.gap) == (rows[1].val_loss, None)
    random.model.n_embd = 32
    with pytest.raises(BenchError, match="are of another model"):
        evaluate(random, weights=tmp_path / "E3M4.safetensors")


def test_the_default_corpus_is_prepared(
    corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus, "prepare_stdlib", lambda folder, **_: shutil.copytree(corpus_dir, folder))
    sizes = ["--model.n_layer=1", "--model.n_embd=16", "--model.n_head=2", "--model.block_size=16", "--eval.batches=1"]
    assert main(["evaluate", "e4m3", "--formats", "E4M33", *sizes]) == 2
    assert main(["evaluate", "e4m3", "--model.n_heads=2", *sizes]) == 2
    assert main(["evaluate", "e4m3", *sizes]) == 0
    assert "preparing data/stdlib" in capsys.readouterr().err
    assert (tmp_path / "data" / "stdlib" / "meta.json").is_file()


def test_nothing_to_compare_is_an_error(tiny: Tiny) -> None:
    with pytest.raises(BenchError, match="--formats"):
        evaluate(tiny())
