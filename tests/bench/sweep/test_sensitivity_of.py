"""`sweep --sensitivity --of runs/X`: which layers of a trained model can be rounded, and to what."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main
from nanogpt_bench.evaluation.losses import evaluate_run
from nanogpt_bench.report import build
from nanogpt_bench.sweep import sensitivity


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.yaml").write_text("axes: {model.format: [E4M3, E2M1]}\nsensitivity: {patterns: [mlp.fc, lm_head, '*']}\n")


def table(out: str) -> dict[str, object]:
    return dict(json.loads((Path(out) / "sensitivity.json").read_text()))


def test_a_cell_is_the_evaluation_of_that_layer_in_that_format(
    trained: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "write_figures", lambda *_: None)  # drawing takes seconds
    assert main(["sweep", "few.yaml", "--sensitivity", "--of", str(trained["one byte"]), "--out", "out"]) == 0
    found = table("out")
    assert found["patterns"] == ["mlp.fc", "lm_head", "*", "blocks.0"]
    assert found["formats"] == ["E4M3", "E2M1"]
    assert found["of"] == f"{trained['one byte']}, checkpoints/step-6"
    own, floats, *rows = evaluate_run(trained["one byte"], formats=["E4M3", "E2M1"])
    assert (found["trained_loss"], found["reference_loss"]) == (own.val_loss, floats.val_loss)
    assert found["gap"][2] == [row.val_loss - floats.val_loss for row in rows]
    assert all(abs(line[1]) > abs(line[0]) for line in found["gap"])
    printed = capsys.readouterr().out
    assert "| quantised alone | E4M3 | E2M1 |" in printed
    assert printed.splitlines()[-1] == "out/report.html"
    page = Path("out/report.html").read_text()
    assert "Which format works where" in page
    assert "rounded after the training" in page


def test_the_shipped_formats_and_the_newest_checkpoint_are_the_default(
    trained: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "report", lambda runs, *, out: out / "report.html")
    checkpoint = step_file(trained["tied"], 3)
    command = ["sweep", "--sensitivity", "--of", str(checkpoint)]
    assert main(command) == 2
    assert "--model.tied untie, --model.tied leave" in capsys.readouterr().err.splitlines()[-1]
    assert main([*command, "--model.tied=leave"]) == 0
    printed = capsys.readouterr()
    assert "only formats and patterns are taken" in printed.err
    assert re.search(r"\| lm_head \| (left in float \| ){4}left in float \|", printed.out)
    assert table("runs/sensitivity-of-tied")["step"] == 3
    assert main([*command, "--model.tied=leave", "--eval.batches=1"]) == 0  # a table of this kind is replaced
