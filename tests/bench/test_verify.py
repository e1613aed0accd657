"""`verify`: a run folder as it was written is whole; every damage is named, and what an interruption leaves is none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


def drop_line(path: Path, number: int) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def cut(path: Path, length: int = 5) -> None:
    path.write_bytes(path.read_bytes()[:-length])


def change_summary(folder: Path, **values: object) -> None:
    content = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(content | values))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_finished_run_is_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_run(folder)
    assert (found.problems, found.notes, found.last_step, found.whole) == ([], [], 6, [4, 6])
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: whole, steps up to 6, 2 whole checkpoints\n"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: drop_line(run / "metrics.jsonl", 3), "metrics.jsonl: line 4 is of step 4, after 2 comes 3"),
        (lambda run: append(run / "metrics.jsonl", '{"step": 6}\n'), "line 8 is of step 6, after 6 comes 7"),
        (lambda run: append(run / "metrics.jsonl", '{"step": NaN}\n'), "line 8 is no record with a step"),
        (lambda run: append(run / "metrics.jsonl", "[" * 9000 + "\n"), "line 8 is no record with a step"),
        (lambda run: cut(run / "metrics.jsonl"), "metrics.jsonl: line 7 is cut off"),
        (lambda run: cut(run / "histograms.jsonl"), "histograms.jsonl: line .* is cut off"),
        (lambda run: append(run / "histograms.jsonl", '{"step": 9}\n'), "goes on to step 9, metrics.jsonl to 6"),
        (lambda run: append(run / "alerts.jsonl", '{"step": 5}\n{"step": 2}\n'), "line 2 is of step 2, after step 5"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl can't be read: No such file"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml' is not YAML"),
        (lambda run: (run / "environment.json").unlink(), "environment.json is missing"),
        (lambda run: cut(run / "summary.json"), "summary.json can't be read: it is no JSON"),
        (lambda run: (run / "summary.json").write_text("[]"), "summary.json holds no mapping"),
        (lambda run: change_summary(run, steps=7), "summary.json counts 7 steps, metrics.jsonl ends with 6"),
        (lambda run: change_summary(run, final_val_loss=1.0), "has final_val_loss 1, the last validation "),
        (lambda run: change_summary(run, final_val_loss=None), "has final_val_loss none, the last validation "),
        (lambda run: change_summary(run, status="failed"), "has final_val_loss .*, a failed run has none"),
        (lambda run: change_summary(run, final_val_loss_se=9.0), "has final_val_loss_se 9, the last validation "),
        (lambda run: change_summary(run, best_val_loss=1.0), "has best_val_loss 1, the lowest validation "),
        (lambda run: change_summary(run, first_val_loss=1.0), "has first_val_loss 1, the first validation "),
        (lambda run: change_summary(run, stall=0.5), "has stall 0.5, the mean of the records "),
        (lambda run: change_summary(run, arrived=0.5), "has arrived 0.5, the mean of the records "),
        (lambda run: change_summary(run, tokens=5), "has tokens 5, the last record "),
        (lambda run: change_summary(run, tokens_per_s=5.0), "has tokens_per_s 5, the records come to "),
        (lambda run: change_summary(run, bytes_per_parameter=3.0), "bytes_per_parameter 3, held_bytes over parameters"),
        (lambda run: change_summary(run, held_bytes=3, bytes_per_parameter=3 / 4), "has bytes_per_parameter 0.75"),
        (
            lambda run: cut(run / "checkpoints/step-4/state.json"),
            "step-4': state.json: has .* bytes, its manifest says",
        ),
        (lambda run: commit(run, Contents(8, {}), keep_last=9), "step-8': metrics.jsonl ends with step 6"),
    ],
)
def test_damage_is_named(
    folder: Path, damage: Callable[[Path], object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(folder)
    assert main(["verify", str(folder)]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{folder}: not whole, ")
    assert any(re.search(rf"^  problem: .*{words}", line) for line in lines), lines


def test_bytes_are_those_of_the_last_checkpoint(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    held = summary["held_bytes"]
    contents = Contents(6, {"model": {"w": torch.zeros(1)}}, facts={"outcome": {"held_bytes": held}})
    shutil.rmtree(folder / "checkpoints" / "step-6")
    commit(folder, contents, keep_last=2)
    assert check_run(folder).problems == []
    change_summary(folder, held_bytes=2 * held, bytes_per_parameter=2 * held / summary["parameters"])
    assert check_run(folder).problems == [f"summary.json has held_bytes {2 * held}, the last checkpoint {held}"]


def test_what_an_interruption_leaves_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "summary.json").unlink()
    cut(folder / "metrics.jsonl")
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
    cut(folder / "checkpoints" / "step-6" / "manifest.json", 1)
    assert main(["verify", str(folder.parent)]) == 1
    output = capsys.readouterr().out
    assert "e4m3: not whole" in output
    assert "step-6': manifest.json: does not end with its own sha256" in output
    assert "other: whole, steps up to 6, 0 whole checkpoints\n  note: there are no checkpoints\n" in output
