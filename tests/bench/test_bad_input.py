"""What is wrong on disk, seen from the command line: one line and exit code 2, or read as far as it is whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nanogpt_bench.cli import main

MODEL = ["--model.n_layer=1", "--model.n_embd=16", "--model.n_head=2", "--model.block_size=16", "--eval.batches=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def same_length(folder: Path) -> None:
    data = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(data[2:] + data[:2])


@pytest.mark.parametrize(
    "command", [["run", "bf16_baseline", *MODEL], ["compare", "--max-steps=1"]], ids=["run", "compare"]
)
@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (same_length, "does not have the sha256 that meta.json gives"),
        (lambda folder: (folder / "meta.json").unlink(), "has no meta.json"),
    ],
)
def test_a_bad_corpus_ends_a_command_before_it_begins(
    command: list[str],
    damage: Callable[[Path], object],
    part: str,
    corpus_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(corpus_dir, folder)
    damage(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([*command, f"--data.dir={folder}"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert part in error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_the_report_of_a_run_with_a_cut_last_line_has_what_is_whole_and_says_so(corpus_dir: Path) -> None:
    words = ["run", "bf16_baseline", "--name=a", f"--data.dir={corpus_dir}", *MODEL, "--train.max_steps=4"]
    assert main(words) == 0
    metrics = Path("runs/a/metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes()[:-7])
    whole = metrics.read_bytes()
    assert main(["report", "runs/a", "--out", "page"]) == 0
    assert "the last line is cut off" in Path("page/report.html").read_text(encoding="utf-8")
    assert metrics.read_bytes() == whole
