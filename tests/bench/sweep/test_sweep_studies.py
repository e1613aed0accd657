"""Sweeps over lengths, sizes of the data, and layers.

Each has a reference, and the gap to it.
"""

import csv
import json
import math
from itertools import chain
from pathlib import Path

import pytest
import yaml
from bench_runs import recorded, summary_of
from sweep_runs import read_json, runs_of, small, train_here

from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.runs.load import find_runs
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import check_inputs
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.sensitivity import plan_study
from nanogpt_bench.sweep.tuning import Tuning


@pytest.mark.usefixtures("_forked_workers")
def test_sensitivity_of_patterns_and_blocks(write, capsys):
    options = {"patterns": ["mlp.fc", "lm_head", "*"]}
    settings = {"rule": "nearest", "train.max_steps": 12, "eval.interval": 6, "optimizer.lr": 0.02}
    path = write(settings=settings, axes={"model.format": ["E3M4", "E7M0"]}, sensitivity=options)
    assert main(["sweep", str(path), "--sensitivity", "--out", "out", "--workers", "1"]) == 0
    sensitivity = read_json(Path("out/sensitivity.json"))
    assert sensitivity["patterns"] == ["mlp.fc", "lm_head", "*", "blocks.0", "blocks.1"]
    assert sensitivity["formats"] == ["E3M4", "E7M0"]
    assert (
        sensitivity["rule"],
        sensitivity["operand"],
        sensitivity["reference"],
        sensitivity["seeds"],
    ) == (
        "nearest",
        "weight",
        "fp32",
        [42],
    )
    summaries = {path.parent.name: read_json(path) for path in Path("out").glob("*/summary.json")}
    assert len(summaries) == 11
    reference = summaries["fp32-seed=42"]["final_val_loss"]
    assert sensitivity["reference_loss"] == reference
    table = {
        line["run"]: line
        for line in csv.DictReader(Path("out/results.csv").read_text().splitlines())
    }
    assert table["fp32"]["verdict"] == "reference"
    assert float(table["E7M0 lm_head"]["gap"]) == pytest.approx(sensitivity["gap"][1][1])
    entry = next(run for run in runs_of(Path("out")).values() if run["label"] == "E7M0 lm_head")
    assert sensitivity["gap"][1][1] == pytest.approx(
        summaries[entry["name"]]["final_val_loss"] - reference
    )
    assert entry["axes"] == {"pattern": "lm_head", "model.format": "E7M0"}
    corpus = yaml.safe_load((Path("out") / entry["name"] / "config.yaml").read_text())["data"][
        "dir"
    ]
    vocab_size = read_json(Path(corpus) / "meta.json")["vocab_size"]
    assert summaries[entry["name"]]["quantized_parameters"] == 16 * vocab_size
    # E7M0 stalls where E3M4 moves: quantising every layer must cost more, and more than
    # quantising one of them.
    everything = sensitivity["gap"][2]
    assert everything[1] > everything[0]
    assert everything[1] > sensitivity["gap"][0][1]
    assert sensitivity["status"] == [[None, None]] * 5
    table = capsys.readouterr().out
    assert "| quantised alone | E3M4 | E7M0 |" in table
    assert "| all layers | " in table
    best = {
        p: sensitivity["formats"][row.index(min(row))]
        for p, row in zip(sensitivity["patterns"], sensitivity["gap"], strict=True)
    }
    assert (
        f"lowest gaps: --model.formats.mlp.fc {best['mlp.fc']} --model.formats.lm_head "
        f"{best['lm_head']}\n" in table
    )


@pytest.mark.parametrize("operand", ["activation", "gradient"])
def test_sensitivity_of_other_operands(write, operand):
    options = {"patterns": ["mlp.fc"], "blocks": False, "operand": operand}
    path = write(settings={"rule": "master"}, axes={"model.format": ["E1M6"]}, sensitivity=options)
    study = plan_study(read_sweep(path))
    (run,) = study.cells["mlp.fc", "E1M6"]
    assert resolve(build_config(run.settings)).model.formats["mlp.fc"] == {operand: "E1M6"}
    check_inputs(study.planned)  # and the surgery takes it
    assert (study.operand, run.format, run.rule) == (operand, "E1M6", "master")


TUNE = {"keys": ["optimizer.lr"], "seeds": [3], "steps": 2}


def sweep_file(folder, corpus_dir, **content):
    path = folder / "sizes.yaml"
    own_settings = {
        "eval.interval": 100,
        "eval.batches": 5,
        "optimizer.warmup_steps": 1,
        "optimizer.stiffness_end": None,
    }
    settings = small(corpus_dir, own_settings)
    axes = {"rule": ["fp32", "sgd"], "seed": [1, 2]}
    path.write_text(
        json.dumps({"settings": settings, "axes": axes, "reference": {"rule": "fp32"}} | content)
    )
    return path


def swept(folder, path):
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        assert main(["sweep", str(path), "--out", str(folder / "out"), "--workers", "1"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory, corpus_dir):
    """Two rules, two seeds and two lengths, trained."""
    folder = tmp_path_factory.mktemp("lengths")
    axes = {"rule": ["fp32", "sgd"], "train.max_steps": [4, 8], "seed": [1, 2]}
    return swept(folder, sweep_file(folder, corpus_dir, axes=axes, reference="fp32"))


@pytest.fixture(scope="module")
def sizes(tmp_path_factory, corpus_dir):
    """Two rules, two seeds and two sizes, trained."""
    folder = tmp_path_factory.mktemp("sizes")
    axes = {
        "rule": ["fp32", "sgd"],
        "data.train_tokens": [800, 200],
        "train.max_steps": [4],
        "seed": [1, 2],
    }
    return swept(folder, sweep_file(folder, corpus_dir, axes=axes))


@pytest.mark.parametrize("steps", [4, 8])
def test_every_length_has_the_whole_of_its_schedule(steps, lengths):
    rates = [record["lr"] for record in recorded(lengths / f"sgd-max_steps={steps}-seed=1")[1:]]
    cosine = [
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 1) / (steps - 1)))
        for step in range(1, steps)
    ]
    assert rates == pytest.approx([0.05, *(0.1 * factor for factor in cosine)])


@pytest.mark.parametrize("key", ["length", "data"])
def test_each_row_is_measured_against_the_reference_of_its_own(key, lengths, sizes):
    out, rungs = (lengths, (4, 8)) if key == "length" else (sizes, (200, 800))
    labels = {
        r: f"max_steps={r}" if key == "length" else f"train_tokens={r} max_steps=4" for r in rungs
    }
    rows = {
        row["run"]: row for row in csv.DictReader((out / "results.csv").read_text().splitlines())
    }
    for label in labels.values():
        ends = [
            [
                summary_of(out / f"{rule}-{label.replace(' ', '-')}-seed={seed}")["final_val_loss"]
                for seed in (1, 2)
            ]
            for rule in ("sgd", "fp32")
        ]
        row = rows[f"sgd {label}"]
        assert float(row["difference"]) == pytest.approx(
            sum(a - b for a, b in zip(*ends, strict=True)) / 2
        ), label
        assert row["difference_seeds"] == "2", label


def test_a_validation_states_its_standard_error(lengths):
    for run in find_runs([lengths]):
        assert 0 < summary_of(run)["final_val_loss_se"] == recorded(run)[-1]["val/loss_se"] < 1
    assert (
        "val s.e." not in (lengths / "table.md").read_text().splitlines()[0]
    )  # intervals of seeds take its place
    head, *lines = csv.reader((lengths / "results.csv").read_text().splitlines())
    assert all(0 < float(line[head.index("final_val_loss_se")]) < 1 for line in lines)


@pytest.mark.parametrize(("settings", "searches"), [({}, 4), ({"data.train_tokens": None}, 2)])
def test_sizes_share_a_search_where_the_trials_have_one_text(
    settings, searches, tmp_path, corpus_dir
):
    tune, axes = (
        TUNE | {"settings": settings},
        {"rule": ["fp32", "sgd"], "data.train_tokens": [200, 800]},
    )
    path = sweep_file(
        tmp_path, corpus_dir, axes=axes, reference=None, tune=tune, confirm={"seeds": [1]}
    )
    tuning = Tuning(read_sweep(path), SweepRecord(tmp_path / "out", "tune"))
    assert len(tuning.searches) == searches
    rows = chain.from_iterable(search.rows for search in tuning.searches)
    assert sorted(run.settings["data.train_tokens"] for run in rows) == [200, 200, 800, 800]
