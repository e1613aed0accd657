"""Sweeps: what a file plans, what is left when it is started again, and what the special modes find."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from nanogpt_bench.cli import main
from nanogpt_bench.compare import pool as pool_module
from nanogpt_bench.compare.board import Board
from nanogpt_bench.errors import BenchError
from nanogpt_bench.resolve import resolve
from nanogpt_bench.settings import build_config
from nanogpt_bench.sweep.axes import Axis, Range, assemble, grid_points, random_points
from nanogpt_bench.sweep.file import FOLDER, LrLimits, find_sweep, read_sweep, shipped_sweeps
from nanogpt_bench.sweep.lr_limits import limits, next_lr
from nanogpt_bench.sweep.plan import check_inputs, plan_sweep
from nanogpt_bench.sweep.sensitivity import plan_study
from nanogpt_bench.sweep.session import divide, threads_asked

Write = Callable[..., Path]
ON_GRID = {"rule": "nearest", "model.format": "E4M3", "model.storage": "grid"}


@pytest.fixture
def write(tmp_path: Path, corpus_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a sweep file over a tiny model, in a folder that becomes the current one."""
    monkeypatch.chdir(tmp_path)
    model = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}

    def writer(**content: object) -> Path:
        settings = {
            "data.dir": str(corpus_dir),
            "model": model,
            "train": {"max_steps": 4, "batch_size": 4, "precision": "float32"},
            "eval": {"interval": 2, "batches": 2},
            "optimizer.warmup_steps": 1,
            "runtime.threads": 1,
        }
        merged = {**content, "settings": {**settings, **content.get("settings", {})}}
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(merged, sort_keys=False))
        return path

    return writer


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def runs_of(folder: Path) -> dict[str, dict]:
    return {entry["name"]: entry for entry in read_json(folder / "sweep.json")["runs"]}


# The axes


def test_a_grid_is_every_combination():
    axes = (Axis("rule", ("a", "b")), Axis("optimizer.lr", Range(1.0, 100.0, points=3)), Axis("seed", (1, 2)))
    points = list(grid_points(axes))
    assert len(points) == 12
    assert points[0] == {"rule": "a", "optimizer.lr": 1.0, "seed": 1}
    assert [point["optimizer.lr"] for point in points[::2]] == [1.0, 10.0, 100.0] * 2


def test_random_points_lie_between_the_bounds_and_more_samples_leave_them():
    axes = (
        Axis("optimizer.lr", Range(1e-4, 1e-1)),
        Axis("train.batch_size", Range(4, 32, "linear", whole=True)),
        Axis("rule", ("a", "b")),
        Axis("seed", (1, 2)),
    )
    few, many = (list(random_points(axes, samples, seed=3)) for samples in (5, 40))
    assert many[:10] == few
    assert list(random_points(axes, 5, seed=4)) != few
    lrs = [point["optimizer.lr"] for point in many]
    assert all(1e-4 <= lr <= 1e-1 for lr in lrs)
    assert 10 < sum(lr < 3e-3 for lr in lrs) < 70  # about half lies below the geometric mean
    assert {type(point["train.batch_size"]) for point in many} == {int}
    assert {point["rule"] for point in many} == {"a", "b"}
    assert [point["seed"] for point in many] == [1, 2] * 40
    assert many[0] | {"seed": 2} == many[1]  # a point is trained at every seed


@pytest.mark.parametrize(
    ("base", "point", "formats"),
    [
        ({}, {"model.format": "E4M3"}, {"*": "E4M3"}),
        ({"model.format": "E4M3"}, {"model.formats.attn": "E5M2"}, {"*": "E4M3", "attn": "E5M2"}),
        ({"model.formats": {"*": "E4M3", "mlp": "none"}}, {"model.format": "E7M0"}, {"*": "E7M0", "mlp": "none"}),
        ({"model.format": "E4M3"}, {"model.formats.*.ste": "relu"}, {"*": {"weight": "E4M3", "ste": "relu"}}),
        (
            {},
            {"model.formats.mlp.fc.policy": "static", "model.formats.mlp.fc": "E5M2"},
            {"mlp.fc": {"weight": "E5M2", "policy": "static"}},
        ),
        (
            {"model.formats": {"*": {"weight": "E4M3", "activation": "E5M2"}}},
            {"model.format": "E3M4"},
            {"*": {"weight": "E3M4", "activation": "E5M2"}},
        ),
    ],
)
def test_formats_of_patterns_and_options_of_layers_are_axes_too(base, point, formats):
    assert assemble(base, point)["model.formats"] == formats
    resolve(build_config(assemble(base, point)))  # and the run understands them


# The plan


def test_any_setting_is_an_axis_and_float_rules_stand_once(write):
    axes = {
        "model.format": ["e4m3", "E7M0"],
        "rule": ["fp32", "nearest"],
        "optimizer.lr": ["1e-3", 0.002],
        "train.batch_size": [2, 3],
        "seed": [7, 8],
    }
    planned = plan_sweep(read_sweep(write(axes=axes, reference={"rule": "sgd"})))
    assert [run.label for run in planned[:2]] == ["sgd", "sgd"]
    labels = [run.label for run in planned[2:]]
    assert labels.count("fp32 lr=0.001 batch_size=2") == 2  # once a seed, not once a format
    assert len(planned) == 2 + 2 * (4 + 8)
    assert len({run.name for run in planned}) == len(planned)
    run = next(run for run in planned if run.label == "E7M0 nearest lr=0.001 batch_size=3" and run.seed == 8)
    assert run.name == "E7M0-nearest-lr=0.001-batch_size=3-seed=8"
    config = resolve(build_config(run.settings))
    assert (config.rule, config.optimizer.lr, config.train.batch_size, config.seed) == ("nearest", 0.001, 3, 8)
    assert config.model.formats == {"*": "E7M0"}
    assert config.train.max_steps == 4


def test_granularities_of_a_float_rule_are_one_point(write):
    axes = {"rule": ["fp32", "nearest"], "model.granularity": ["tensor", "channel"], "model.format": ["E4M3", "E7M0"]}
    planned = plan_sweep(read_sweep(write(axes=axes)))
    assert [run.rule for run in planned].count("fp32") == 1
    assert len(planned) == 1 + 4
    shared = {"model.granularity": "tensor", "model.formats.lm_head": "E5M2"}
    with pytest.raises(BenchError, match=r"model\.granularity: 'tensor' means nothing under rule 'fp32'"):
        plan_sweep(read_sweep(write(settings={"rule": "fp32", "model.granularity": "tensor"}, axes={"seed": [1]})))
    axes = {"rule": ["fp32", "nearest"], "model.format": ["E4M3"]}
    settings = [run.settings for run in plan_sweep(read_sweep(write(settings=shared, axes=axes)))]
    assert ["model.granularity" in one for one in settings] == [False, True]


def test_a_reference_leaves_the_rules_own_settings_behind(write):
    settings = {"rule": "stochastic", "model.format": "E4M3", "optimizer.lr": 0.5, "train.batch_size": 3}
    sweep = read_sweep(write(settings=settings, axes={"optimizer.beta1": [0.8]}, reference={"rule": "fp32"}))
    reference, other = (resolve(build_config(run.settings)) for run in plan_sweep(sweep))
    assert (reference.rule, reference.optimizer.lr, reference.train.batch_size) == ("fp32", 2e-3, 3)
    assert (other.rule, other.optimizer.lr, other.optimizer.beta1) == ("stochastic", 0.5, 0.8)


def test_settings_come_from_the_configuration_the_file_and_the_command_line(write, tmp_path):
    (tmp_path / "base.yaml").write_text("train: {max_steps: 99, batch_size: 7}\nmodel: {format: E4M3}\n")
    path = write(config="base.yaml", axes={"seed": [1]})
    (run,) = plan_sweep(read_sweep(path, ["--model.formats.attn", "E5M2", "--eval.batches=1"]))
    config = resolve(build_config(run.settings))
    assert (config.train.max_steps, config.train.batch_size, config.eval.batches) == (4, 4, 1)
    assert config.model.formats == {"*": "E4M3", "attn": "E5M2"}


@pytest.mark.parametrize("name", shipped_sweeps())
def test_shipped_sweeps_can_be_planned(name):
    sweep = read_sweep(find_sweep(name))
    if name == "sensitivity.yaml":
        study = plan_study(sweep)
        assert len(study.planned) == 1 + len(study.patterns) * len(study.formats) == 1 + (6 + 4) * 5
    else:
        assert len(plan_sweep(sweep)) > 4
    assert find_sweep(f"sweeps/{name}") == FOLDER / name


@pytest.mark.parametrize(
    ("content", "options", "parts"),
    [
        ({"axs": {}}, [], ["axs", "did you mean 'axes'"]),
        ({}, [], ["my.yaml has no axes"]),
        ({"axes": {"optimizer.l": [1]}}, [], ["optimizer.l", "'optimizer.lr'"]),
        ({"axes": {"optimizer.lr": []}}, [], ["axes.optimizer.lr", "list of values"]),
        ({"axes": {"optimizer.lr": [1, 1]}}, [], ["axes.optimizer.lr", "twice"]),
        ({"axes": {"optimizer.lr": {"min": 1}}}, [], ["axes.optimizer.lr.max", "None"]),
        ({"axes": {"optimizer.lr": {"min": 1, "max": 0}}}, [], ["axes.optimizer.lr", "min < max"]),
        ({"axes": {"optimizer.lr": {"min": 0, "max": 1}}}, [], ["axes.optimizer.lr", "log scale"]),
        ({"axes": {"optimizer.lr": {"min": 1, "mx": 2}}}, [], ["mx", "did you mean 'max'"]),
        ({"axes": {"optimizer.lr": {"min": 1, "max": 2}}}, [], ["axes.optimizer.lr", "points"]),
        ({"axes": {"optimizer.lr": [1, -1]}}, [], ["optimizer.lr", "-1", "> 0"]),
        ({"axes": {"rule": ["nearst"], "model.format": ["E4M3"]}}, [], ["nearst", "'nearest'"]),
        ({"axes": {"model.format": ["E4M33"]}}, [], ["E4M33", "E4M3"]),
        ({"axes": {"rule": ["nearest"]}}, [], ["nearest", "model.format", "(at rule 'nearest')"]),
        ({"axes": {"model.formats.mlp.fcc": ["E4M3"]}}, [], ["mlp.fcc", "did you mean 'mlp.fc'"]),
        (
            {"axes": {"model.granularity": ["block"]}, "settings": ON_GRID},
            [],
            ["model.formats", "granularity", "block"],
        ),
        ({"axes": {"seed": [1]}, "search": "gird"}, [], ["gird", "did you mean 'grid'"]),
        ({"axes": {"seed": [1]}, "samples": 0}, [], ["samples", "0", ">= 1"]),
        ({"axes": {"seed": [1]}, "workers": "two"}, [], ["workers", "two", "whole number"]),
        ({"axes": {"seed": [1]}, "lr_limits": {"span": 0.5}}, [], ["lr_limits.span", "0.5", "> 1"]),
        ({"axes": {"seed": [1]}, "lr_limits": {"spam": 2}}, [], ["spam", "did you mean 'span'"]),
        ({"axes": {"seed": [1]}, "settings": {"data.dir": "gone"}}, [], ["gone", "prepare"]),
        ({"axes": {"seed": [1]}, "config": "e4m4.yaml"}, [], ["e4m4.yaml", "e4m3.yaml"]),
        ({"axes": {"seed": [1]}}, ["--seed=3"], ["--seed", "axis"]),
        ({"axes": {"seed": [1]}}, ["--train.max_stps", "3"], ["train.max_stps", "train.max_steps"]),
        ({"axes": {"seed": [1]}}, ["--lr-limit"], ["--lr-limit", "did you mean '--lr-limits'"]),
        ({"axes": {"seed": [1]}}, ["--workers", "0"], ["--workers", ">= 1"]),
        ({"axes": {"optimizer.lr": [1]}}, ["--lr-limits"], ["optimizer.lr", "axes"]),
        ({"axes": {"seed": [1]}}, ["--sensitivity"], ["model.format"]),
        ({"axes": {"model.format": ["E4M3"], "rule": ["nearest"]}}, ["--sensitivity"], ["rule", "settings"]),
        (
            {"axes": {"model.format": ["E4M3"]}, "sensitivity": {"patterns": ["mlp.fcc"]}},
            ["--sensitivity"],
            ["mlp.fcc", "did you mean 'mlp.fc'"],
        ),
        (
            {"axes": {"model.format": ["E4M3"]}, "sensitivity": {"operand": "wight"}},
            ["--sensitivity"],
            ["wight", "did you mean 'weight'"],
        ),
    ],
)
def test_a_wrong_file_is_one_line_and_leaves_nothing(write, content, options, parts, capsys, tmp_path):
    path = write(**content)
    assert main(["sweep", str(path), "--out", "out", *options]) == 2
    output = capsys.readouterr()
    (line,) = output.err.strip().splitlines()
    for part in parts:
        assert part in line
    assert output.out == ""
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


def test_a_name_that_is_no_file_is_answered_with_the_nearest(capsys):
    assert main(["sweep", "lr_limit.yaml"]) == 2
    assert "did you mean 'lr_limits.yaml'" in capsys.readouterr().err


def test_cores_are_divided_among_the_workers():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert divide(None, 1000) == (cores, 1)
    assert divide(None, 1) == (1, cores)
    assert divide(cores + 3, 1000) == (cores + 3, 1)
    assert divide(None, 1000, 2) == (max(1, cores // 2), 2)
    assert divide(None, 1000, 10 * cores) == (1, 10 * cores)
    assert divide(3, 1000, 2) == (3, 2)


@pytest.mark.parametrize(("asked", "found"), [(None, None), (1, 1), ([1, 3], 3)])
def test_threads_in_the_settings_leave_fewer_workers(write, asked, found):
    key = "runtime.threads"
    axes = {"seed": [1, 2], **({key: asked} if isinstance(asked, list) else {})}
    path = write(axes=axes, settings={} if key in axes else {key: asked})
    if key in axes:
        path.write_text(path.read_text().replace("runtime.threads: 1\n", "", 1))
    assert threads_asked(plan_sweep(read_sweep(path))) == found


# Sessions, with workers that only write what a training would have found

STUB = """
import json, sys
from pathlib import Path
for line in sys.stdin:
    job = json.loads(line)
    settings, folder = job["settings"], Path(job["run_dir"])
    lr, seed = settings["optimizer.lr"], settings.get("seed", 42)
    if lr == 13:
        print("out of memory", file=sys.stderr)
        sys.exit(9)
    assert not folder.exists()
    folder.mkdir(parents=True)
    bad = lr > (0.1 if seed == 3 else 0.3)
    summary = {"name": folder.name, "rule": settings.get("rule"), "format": "none", "seed": seed, "steps": 4}
    summary |= {"status": "failed" if bad else "finished", "first_val_loss": 5.0, "best_val_loss": 2.0}
    summary |= {"failure": {"kind": "nan", "message": "train/loss is nan at step 3", "step": 3} if bad else None}
    summary |= {"failures": [{"kind": "divergence"}, {"kind": "nan"}] if bad else []}
    summary |= {"final_val_loss": None if bad else 2.0 + lr / 10}
    (folder / "summary.json").write_text(json.dumps(summary))
    with open("done.txt", "a") as log:
        print(folder.name, file=log)
    print(json.dumps({"kind": "done"}), flush=True)
"""


@pytest.fixture
def _stub_workers(monkeypatch):
    monkeypatch.setattr(pool_module, "WORKER", (sys.executable, "-c", STUB))


def trained() -> list[str]:
    """The runs that stub workers were given since the last call, in order."""
    path = Path("done.txt")
    names = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return names


@pytest.mark.usefixtures("_stub_workers")
def test_failures_are_recorded_and_only_what_is_left_is_done_again(write, capsys):
    path = write(axes={"optimizer.lr": [0.1, 0.2, 13, 0.4]}, settings={"rule": "sgd"})
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    out = Path("out")
    names = [f"sgd-lr={lr}-seed=42" for lr in ("0.1", "0.2", "13", "0.4")]
    assert [name for name in names if name != names[2]] == trained()
    runs = runs_of(out)
    assert list(runs) == names
    assert [runs[name]["status"] for name in names] == ["finished", "finished", "failed", "failed"]
    assert [runs[name]["failure"] for name in names] == [None, None, "crash", "nan"]
    assert runs[names[3]]["failures"] == ["divergence", "nan"]
    assert "out of memory" in read_json(out / names[2] / "summary.json")["failure"]["message"]
    table = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert [line["optimizer.lr"] for line in table] == ["0.1", "0.2", "13.0", "0.4"]
    assert [line["failure"] for line in table] == ["", "", "crash", "nan"]
    assert [line["failures"] for line in table] == ["", "", "", "divergence nan"]
    assert capsys.readouterr().out.strip().splitlines()[-1] == str(out / "report.html")

    # Nothing is left: the same command only writes the report again.
    assert main(["sweep", str(path), "--out", "out"]) == 0
    assert trained() == []

    # One run was cut off, and the axis has grown: these two are done, the others left as they are.
    (out / names[1] / "summary.json").unlink()
    manifest = read_json(out / "sweep.json")
    next(run for run in manifest["runs"] if run["name"] == names[1])["ended"] = False
    (out / "sweep.json").write_text(json.dumps(manifest))
    path = write(axes={"optimizer.lr": [0.1, 0.2, 13, 0.4, 0.05]}, settings={"rule": "sgd"})
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    assert sorted(trained()) == ["sgd-lr=0.05-seed=42", names[1]]
    assert len(runs_of(out)) == 5


@pytest.mark.usefixtures("_stub_workers")
def test_other_settings_under_the_same_names_are_refused(write, capsys):
    axes = {"optimizer.lr": [0.1]}
    assert main(["sweep", str(write(axes=axes)), "--out", "out"]) == 0
    before = (Path("out") / "sweep.json").read_bytes()
    assert main(["sweep", str(write(axes=axes)), "--out", "out", "--train.max_steps", "5"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "train.max_steps 4, now 5" in error
    assert main(["sweep", str(write(axes={"seed": [1]}, search="random")), "--out", "out"]) == 2
    assert "mode 'grid'" in capsys.readouterr().err.splitlines()[-1]
    assert (Path("out") / "sweep.json").read_bytes() == before
    Path("other").mkdir()
    (Path("other") / "mine.txt").write_text("x")
    assert main(["sweep", str(write(axes=axes)), "--out", "other"]) == 2
    assert [path.name for path in Path("other").iterdir()] == ["mine.txt"]


def test_the_board_of_a_large_sweep_fits_on_the_terminal():
    board = Board([], Console(height=12, width=100, force_terminal=True, file=io.StringIO()))
    for number in range(30):
        board.add(f"run {number}")
    board.entries[29].state, board.entries[28].state = "running", "failed"
    table = board.table()
    assert table.row_count == 8
    shown = list(table.columns[0].cells)
    assert [str(name) for name in shown[-2:]] == ["run 28", "run 29"]
    assert table.caption == "and 22 runs more"
    del board.entries[8:]
    assert (board.table().row_count, board.table().caption) == (8, None)


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
        run["ended"] = False
    Path("out/sweep.json").write_text(json.dumps(manifest))
    assert main(["sweep", str(path), "--lr-limits", "--out", "out"]) == 0
    assert sorted(trained()) == sorted(run["name"] for run in manifest["runs"][3:])
    assert read_json(Path("out/lr_limits.json"))["rows"] == rows


# Real trainings


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


def vocabulary(run: Path) -> int:
    config = yaml.safe_load((run / "config.yaml").read_text())
    return read_json(Path(config["data"]["dir"]) / "meta.json")["vocab_size"]


def test_an_interrupted_sweep_goes_on_and_past_a_run_that_fails(write, tmp_path):
    axes = {"train.max_steps": [3, 100_000], "optimizer.lr": [0.1]}
    settings = {"rule": "sgd", "optimizer.grad_clip": 0.0, "optimizer.warmup_steps": 0}
    path = write(settings=settings, axes=axes)
    command = [sys.executable, "-m", "nanogpt_bench.cli", "sweep", str(path), "--out", "out", "--workers", "2"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    short, endless = (f"sgd-max_steps={steps}-lr=0.1-seed=42" for steps in (3, 100_000))
    try:
        end = time.monotonic() + 60
        while not (Path("out") / short / "summary.json").exists() or not _begun(Path("out") / endless):
            assert time.monotonic() < end, "nothing happened in time"
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 75, stderr
    assert stdout.strip().splitlines()[-1] == str(Path("out") / "report.html")
    runs = runs_of(Path("out"))
    assert (runs[short]["ended"], runs[short]["status"]) == (True, "finished")
    assert runs[endless]["ended"] is False
    assert read_json(Path("out") / endless / "summary.json")["status"] == "stopped"
    kept = (Path("out") / short / "summary.json").stat().st_mtime_ns
    # Started again, with the endless run taken out of the plan: the one that had ended is not trained again.
    path = write(settings=settings, axes={"train.max_steps": [3], "optimizer.lr": [0.1, 1e30]})
    assert main(["sweep", str(path), "--out", "out"]) == 0
    runs = runs_of(Path("out"))
    assert (Path("out") / short / "summary.json").stat().st_mtime_ns == kept
    wild = runs["sgd-max_steps=3-lr=1e+30-seed=42"]
    assert (wild["status"], wild["failure"], wild["final_val_loss"]) == ("failed", "nan", None)
    assert endless in runs


def _begun(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 3
