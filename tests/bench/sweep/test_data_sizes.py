"""Sweeps over the size of the data: every point once through so much text, and where its gap appears."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from sweep_runs import train_here

from nanogpt_bench.cli import main
from nanogpt_bench.report.chart import looks
from nanogpt_bench.report.ladders import LADDERS, appearance, cells_of, climbed, ladder_chart
from nanogpt_bench.report.results import Difference, measure
from nanogpt_bench.report.rows import find_reference, group_rows
from nanogpt_bench.runs.find import find_runs
from nanogpt_bench.runs.load import load_run
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.tuning import Tuning

DATA = LADDERS[1]
TUNE = {"keys": ["optimizer.lr"], "seeds": [3], "steps": 2}


def sweep_file(folder: Path, corpus_dir: Path, **more: object) -> Path:
    path = folder / "sizes.yaml"
    settings = {
        "data.dir": str(corpus_dir),
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
        "train": {"batch_size": 4, "precision": "float32"},
        "eval": {"interval": 100, "batches": 5},
        "optimizer.warmup_steps": 1,
        "runtime.threads": 1,
    }
    axes = {"rule": ["fp32", "sgd"], "seed": [1, 2]}
    path.write_text(json.dumps({"settings": settings, "axes": axes, "reference": {"rule": "fp32"}} | more))
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, corpus_dir: Path) -> Path:
    """Two rules, two seeds and two sizes, trained."""
    folder = tmp_path_factory.mktemp("sizes")
    words = ["sweep", str(sweep_file(folder, corpus_dir)), "--out", str(folder / "out"), "--workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        assert main([*words, "--data-sizes", "800,200"]) == 0
    return folder / "out"


def test_every_run_goes_once_through_its_text(swept: Path) -> None:
    runs = find_runs([swept])
    assert len(runs) == 8  # the reference is one of the rows
    for run in runs:
        settings = yaml.safe_load((run / "config.yaml").read_text())
        size = settings["data"]["train_tokens"]
        assert size in (200, 800)
        assert json.loads((run / "summary.json").read_text())["steps"] == size // 64


def test_the_gap_is_to_the_reference_of_the_same_size(swept: Path) -> None:
    rows = group_rows([load_run(path) for path in find_runs([swept])])
    results = measure(rows, find_reference(rows, "fp32 train_tokens=200 max_steps=3"))
    found = climbed(DATA, results)
    assert list(found) == ["sgd"]
    for size, result in found["sgd"].items():
        name = f"train_tokens={size}-max_steps={size // 64}"
        losses = [
            [json.loads((swept / f"{rule}-{name}-seed={seed}" / "summary.json").read_text()) for seed in (1, 2)]
            for rule in ("sgd", "fp32")
        ]
        apart = [one["final_val_loss"] - other["final_val_loss"] for one, other in zip(*losses, strict=True)]
        assert result.difference is not None
        assert result.difference.mean == pytest.approx(sum(apart) / 2)
    heading, line = cells_of(DATA, found)
    assert heading == ["run", "200 tokens", "800 tokens", "gap appears at"]
    assert line[-1] == {None: "-", 200: "200", 800: "800"}[appearance(found["sgd"])]
    assert (swept / "gap_by_data.md").read_text().splitlines()[0].split()[1] == "run"
    assert not (swept / "gap_by_length.md").exists()
    page = (swept / "report.html").read_text()
    assert 'id="data"' in page
    assert 'id="chart-data"' in page
    chart = ladder_chart(DATA, results, {**looks(rows), "sgd": looks(rows)["sgd train_tokens=200 max_steps=3"]})
    assert chart is not None
    rings = [
        layer["data"]["values"]
        for layer in chart.spec["layer"]
        if layer["mark"].get("type") == "point" and "data" in layer
    ]
    expected = [size for size in (200, 800) if size == appearance(found["sgd"])]
    assert [ring["x"] for values in rings for ring in values] == pytest.approx(expected)


def test_a_gap_appears_where_an_interval_first_leaves_0_out() -> None:
    def rung(low: float, high: float) -> SimpleNamespace:
        return SimpleNamespace(difference=Difference((low + high) / 2, 3, low, high))

    rungs = {400: rung(0.01, 0.03), 100: rung(-0.02, 0.02), 200: rung(-0.01, 0.03), 800: rung(-0.01, 0.1)}
    assert appearance(rungs) == 400
    assert appearance({100: rungs[100]}) is None
    assert appearance({100: SimpleNamespace(difference=Difference(0.5, 1)), 400: rungs[400]}) == 400
    assert appearance({50: rung(-0.03, -0.01), **rungs}) == 50


@pytest.mark.parametrize(
    ("more", "options", "words"),
    [
        ({}, ["--data-sizes", "63"], "63 tokens are less than a step takes, which is 64"),
        ({}, ["--data-sizes", "100000000"], "data.train_tokens: 100000000 is not allowed"),
        ({}, ["--data-sizes", "200", "--lr-limits"], "leave --lr-limits out"),
        ({}, ["--data-sizes", "200", "--train.max_steps", "4"], "what train.max_steps is, and it is given"),
        ({"axes": {"data.train_tokens": [200, 400]}}, ["--data-sizes", "200"], "sizes.yaml has it as an axis"),
        (
            {"axes": {"rule": ["fp32"]}, "reference": None, "tune": TUNE, "confirm": {"seeds": [1], "steps": 4}},
            ["--data-sizes", "200"],
            "so does confirm.steps of sizes.yaml",
        ),
        ({}, ["--data-sizes", "few"], "few"),
    ],
)
def test_what_can_t_be_is_one_line(
    tmp_path: Path,
    corpus_dir: Path,
    more: dict[str, object],
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = sweep_file(tmp_path, corpus_dir, **more)
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), *options]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("*/config.yaml"))


@pytest.mark.parametrize(("settings", "searches"), [({}, 4), ({"data.train_tokens": None}, 2)])
def test_sizes_share_a_search_where_the_trials_have_one_text(
    settings: dict[str, object], searches: int, tmp_path: Path, corpus_dir: Path
) -> None:
    tune, axes = TUNE | {"settings": settings}, {"rule": ["fp32", "sgd"]}
    path = sweep_file(tmp_path, corpus_dir, axes=axes, reference=None, tune=tune, confirm={"seeds": [1]})
    sweep = replace(read_sweep(path), data_sizes=(200, 800))
    tuning = Tuning(sweep, SweepRecord(tmp_path / "out", "tune"))
    assert len(tuning.searches) == searches
    confirmed = [run for search in tuning.searches for run in search.confirmed]
    sizes = [(run.settings["data.train_tokens"], run.settings["train.max_steps"]) for run in confirmed]
    assert sorted(sizes) == [(200, 3), (200, 3), (800, 12), (800, 12)]
