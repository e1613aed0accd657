"""`verify`: a run folder as it was written is whole; every damage is named, and what an interruption leaves is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damages import cut, put

from nanogpt_bench.checkpoint import Contents, commit
from nanogpt_bench.cli import main
from nanogpt_bench.commands.verify import check_run
from nanogpt_bench.config.schema import Config
from nanogpt_bench.loop.train import run

Tiny = Callable[..., Config]


@pytest.fixture(scope="module")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps with checkpoints of the fourth and the sixth."""
    folder = tmp_path_factory.mktemp("runs") / "e4m3"
    run(tiny(model__format="E4M3", monitor__interval=3), folder)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for step in (4, 6):
        commit(folder, Contents(step, {"model": {"w": torch.full((5,), float(step))}}), keep_last=2)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "e4m3"))


def test_a_finished_run_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_run(folder)
    assert (found.problems, found.notes, found.last_step, found.whole) == ([], [], 6, [4, 6])
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: whole, steps up to 6, 2 whole checkpoints\n"


def test_bytes_are_those_of_the_last_checkpoint(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    held = summary["held_bytes"]
    contents = Contents(6, {"model": {"w": torch.zeros(1)}}, facts={"outcome": {"held_bytes": held}})
    shutil.rmtree(folder / "checkpoints" / "step-6")
    commit(folder, contents, keep_last=2)
    assert check_run(folder).problems == []
    put("held_bytes", 2 * held)(folder / "summary.json")
    put("bytes_per_parameter", 2 * held / summary["parameters"])(folder / "summary.json")
    assert check_run(folder).problems == [f"summary.json has held_bytes {2 * held}, the last checkpoint {held}"]


def test_what_an_interruption_leaves_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "summary.json").unlink()
    cut()(folder / "metrics.jsonl")
    (folder / "checkpoints" / ".step-7.partial").mkdir()
    shutil.rmtree(folder / "checkpoints" / "step-6")
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}: whole, steps up to 5, 1 whole checkpoint",
        "  note: summary.json is missing: the run has not ended",
        "  note: metrics.jsonl: line 7 is cut off",
        "  note: histograms.jsonl goes on to step 6, metrics.jsonl to 5",
        "  note: checkpoints/.step-7.partial is no checkpoint; the next start removes litter",
    ]


def test_a_folder_of_runs_stands_for_the_runs_in_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, folder.with_name("other"))
    shutil.rmtree(folder.with_name("other") / "checkpoints")
    cut(1)(folder / "checkpoints" / "step-6" / "manifest.json")
    assert main(["verify", str(folder.parent)]) == 1
    output = capsys.readouterr().out
    assert "e4m3: not whole" in output
    assert "step-6': manifest.json: does not end with its own sha256" in output
    assert "other: whole, steps up to 6, 0 whole checkpoints\n  note: there are no checkpoints\n" in output
