"""Sweeps over the length: a schedule and a reference for each, and the gap by it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from bench_runs import recorded
from sweep_runs import train_here

from nanogpt_bench.cli import main
from nanogpt_bench.report.chart import looks
from nanogpt_bench.report.figures import chosen
from nanogpt_bench.report.ladders import LADDERS, cells_of, climbed, ladder_chart
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.runs.find import find_runs
from nanogpt_bench.runs.load import load_run

LENGTH = LADDERS[0]


@pytest.fixture(scope="module")
def swept(tmp_path_factory, corpus_dir):
    """A sweep over two lengths and two seeds, trained."""
    folder = tmp_path_factory.mktemp("lengths")
    settings = {
        "data.dir": str(corpus_dir),
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
        "train": {"batch_size": 4, "precision": "float32"},
        "eval": {"interval": 100, "batches": 5},
        "optimizer": {"warmup_steps": 1, "stiffness_end": None},
        "runtime.threads": 1,
    }
    axes = {"rule": ["fp32", "sgd"], "train.max_steps": [4, 8], "seed": [1, 2]}
    path = folder / "sweep.yaml"
    path.write_text(json.dumps({"settings": settings, "axes": axes, "reference": "fp32"}))
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        assert main(["sweep", str(path), "--out", str(folder / "out"), "--workers", "1"]) == 0
    return folder / "out"


def test_every_length_has_the_whole_of_its_schedule(swept):
    for steps in (4, 8):
        rates = [record["lr"] for record in recorded(swept / f"sgd-max_steps={steps}-seed=1")[1:]]
        peak = 0.1
        cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / (steps - 1))) for step in range(1, steps)]
        assert rates == pytest.approx([peak / 2, *(peak * factor for factor in cosine)])


def test_each_length_is_measured_against_its_own(swept):
    rows = group_rows([load_run(path) for path in find_runs([swept])])
    results = measure(rows, find_reference(rows, "fp32 max_steps=4"))
    found = climbed(LENGTH, results)
    assert list(found) == ["sgd"]
    for steps, result in found["sgd"].items():
        apart = [_loss(swept, "sgd", steps, seed) - _loss(swept, "fp32", steps, seed) for seed in (1, 2)]
        assert result.difference.mean == pytest.approx(sum(apart) / 2)
        assert result.difference.seeds == 2
    heading, line = cells_of(LENGTH, found)
    assert heading == ["run", "4 steps", "8 steps"]
    assert line[0] == "sgd"
    assert (swept / "gap_by_length.md").read_text().splitlines()[0].split()[1] == "run"
    page = (swept / "report.html").read_text()
    assert 'id="length"' in page
    assert line[1] in page
    chart = ladder_chart(LENGTH, results, {**looks(rows), "sgd": looks(rows)["sgd max_steps=4"]})
    (line,) = chart.values
    assert (line["row"], line["x"]) == ("sgd", [4.0, 8.0])
    assert line["y"] == [found["sgd"][steps].difference.mean for steps in (4, 8)]
    bars = next(layer["data"]["values"] for layer in chart.spec["layer"] if "data" in layer)
    assert [(bar["low"], bar["high"]) for bar in bars] == [
        (each.low, each.high) for each in (found["sgd"][steps].difference for steps in (4, 8))
    ]
    assert 'id="chart-length"' in page
    assert chosen([chart]) == {"gap_by_length": [chart]}


def _loss(swept: Path, rule: str, steps: int, seed: int) -> float:
    return json.loads((swept / f"{rule}-max_steps={steps}-seed={seed}" / "summary.json").read_text())["final_val_loss"]


def test_a_validation_states_its_standard_error(swept):
    for run in find_runs([swept]):
        summary, last = json.loads((run / "summary.json").read_text()), recorded(run)[-1]
        assert 0 < summary["final_val_loss_se"] == last["val/loss_se"] < 1
    table = (swept / "table.md").read_text()
    assert "val s.e." not in table.splitlines()[0]  # several seeds: their intervals take its place
    head, *lines = csv.reader((swept / "results.csv").read_text().splitlines())
    assert all(0 < float(line[head.index("final_val_loss_se")]) < 1 for line in lines)
