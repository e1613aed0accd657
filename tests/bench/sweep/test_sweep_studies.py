"""Sensitivity: what a sweep over layer patterns finds."""

import csv
from pathlib import Path

import pytest
import yaml
from sweep_runs import read_json, runs_of

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import check_inputs
from nanogpt_bench.sweep.sensitivity import plan_study


def vocabulary(run: Path) -> int:
    config = yaml.safe_load((run / "config.yaml").read_text())
    return read_json(Path(config["data"]["dir"]) / "meta.json")["vocab_size"]


@pytest.mark.usefixtures("_forked_workers")
def test_sensitivity_of_patterns_and_blocks(write, capsys):
    options = {"patterns": ["mlp.fc", "lm_head", "*"]}
    settings = {"rule": "nearest", "train.max_steps": 12, "eval.interval": 6, "optimizer.lr": 0.02}
    path = write(settings=settings, axes={"model.format": ["E3M4", "E7M0"]}, sensitivity=options)
    assert main(["sweep", str(path), "--sensitivity", "--out", "out", "--workers", "1"]) == 0
    found = read_json(Path("out/sensitivity.json"))
    assert found["patterns"] == ["mlp.fc", "lm_head", "*", "blocks.0", "blocks.1"]
    assert found["formats"] == ["E3M4", "E7M0"]
    assert (found["rule"], found["operand"], found["reference"], found["seeds"]) == ("nearest", "weight", "fp32", [42])
    summaries = {path.parent.name: read_json(path) for path in Path("out").glob("*/summary.json")}
    assert len(summaries) == 11
    reference = summaries["fp32-seed=42"]["final_val_loss"]
    assert found["reference_loss"] == reference
    table = {line["run"]: line for line in csv.DictReader(Path("out/results.csv").read_text().splitlines())}
    assert table["fp32"]["verdict"] == "reference"
    assert float(table["E7M0 lm_head"]["gap"]) == pytest.approx(found["gap"][1][1])
    entry = next(run for run in runs_of(Path("out")).values() if run["label"] == "E7M0 lm_head")
    assert found["gap"][1][1] == pytest.approx(summaries[entry["name"]]["final_val_loss"] - reference)
    assert entry["axes"] == {"pattern": "lm_head", "model.format": "E7M0"}
    assert summaries[entry["name"]]["quantized_parameters"] == 16 * vocabulary(Path("out") / entry["name"])
    # E7M0 stalls where E3M4 moves: quantising every layer must cost more, and more than quantising one of them.
    everything = found["gap"][2]
    assert everything[1] > everything[0]
    assert everything[1] > found["gap"][0][1]
    assert found["status"] == [[None, None]] * 5
    table = capsys.readouterr().out
    assert "| quantised alone | E3M4 | E7M0 |" in table
    assert "| all layers | " in table
    best = {p: found["formats"][row.index(min(row))] for p, row in zip(found["patterns"], found["gap"], strict=True)}
    assert f"lowest gaps: --model.formats.mlp.fc {best['mlp.fc']} --model.formats.lm_head {best['lm_head']}\n" in table


@pytest.mark.parametrize("operand", ["activation", "gradient"])
def test_sensitivity_of_other_operands(write, operand):
    options = {"patterns": ["mlp.fc"], "blocks": False, "operand": operand}
    path = write(settings={"rule": "master"}, axes={"model.format": ["E1M6"]}, sensitivity=options)
    study = plan_study(read_sweep(path))
    (run,) = study.cells["mlp.fc", "E1M6"]
    spec = resolve(build_config(run.settings)).model.formats["mlp.fc"]
    assert spec == {operand: "E1M6"}
    check_inputs(study.planned)  # and the surgery takes it
    assert (study.operand, run.format, run.rule) == (operand, "E1M6", "master")
