"""Learning rate limits and sensitivity: what the special modes of a sweep find."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from sweep_runs import read_json, runs_of, trained

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import LrLimits, read_sweep
from nanogpt_bench.sweep.lr_limits import limits, next_lr
from nanogpt_bench.sweep.plan import check_inputs
from nanogpt_bench.sweep.sensitivity import plan_study

# Learning rate limits


@pytest.mark.parametrize("limit", [0.0021, 0.4, 1.0, 3.7, 900.0])
@pytest.mark.parametrize("resolution", [1.1, 1.5, 4.0])
def test_bisection_closes_in_on_the_limit(limit, resolution):
    options, tried = LrLimits(resolution=resolution, span=4096.0), {}
    while (lr := next_lr(tried, options, 1.0)) is not None:
        assert lr not in tried
        tried[lr] = lr <= limit
    stable, unstable = limits(tried)
    assert stable <= limit < unstable <= stable * resolution * 1.001
    assert len(tried) <= 16


@pytest.mark.parametrize(("always", "expected"), [(True, (64.0, None)), (False, (None, 1 / 64))])
def test_the_search_ends_at_its_span(always, expected):
    options, tried = LrLimits(span=64.0), {}
    while (lr := next_lr(tried, options, 1.0)) is not None:
        tried[lr] = always
    assert limits(tried) == tuple(side and pytest.approx(side, rel=1e-3) for side in expected)


@pytest.mark.usefixtures("_stub_workers")
def test_lr_limits_of_every_point_and_again_after_an_interruption(write, capsys):
    path = write(axes={"rule": ["sgd"], "seed": [1, 3]}, lr_limits={"resolution": 1.25})
    assert main(["sweep", str(path), "--lr-limits", "--out", "out"]) == 0
    rows = read_json(Path("out/lr_limits.json"))["rows"]
    assert [(row["rule"], row["format"], row["seed"]) for row in rows] == [("sgd", "none", 1), ("sgd", "none", 3)]
    for row, limit in zip(rows, (0.3, 0.1), strict=True):
        assert row["largest_stable_lr"] <= limit < row["smallest_unstable_lr"] <= row["largest_stable_lr"] * 1.2501
        assert [entry["stable"] for entry in row["tried"]] == [entry["lr"] <= limit for entry in row["tried"]]
        assert {entry["status"] for entry in row["tried"]} == {"finished", "failed"}
    first = trained()
    assert len(first) == len(set(first)) == sum(len(row["tried"]) for row in rows)
    assert "| none | sgd | 1 |" in capsys.readouterr().out
    # What ended is read again, what was cut off is trained again, and the answer is the same.
    manifest = read_json(Path("out/sweep.json"))
    for run in manifest["runs"][3:]:
        (Path("out") / run["name"] / "summary.json").unlink()
    assert main(["sweep", str(path), "--lr-limits", "--out", "out"]) == 0
    assert sorted(trained()) == sorted(run["name"] for run in manifest["runs"][3:])
    assert read_json(Path("out/lr_limits.json"))["rows"] == rows


# Real trainings


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
