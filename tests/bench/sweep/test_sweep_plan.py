"""Sweeps: what a file plans, its labels and references, and what is refused of it."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from bench_runs import refusal
from sweep_runs import train_here

import fp8manifold as fm
from nanogpt_bench.cli import main
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.model.gpt import GPT
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep import session as session_module
from nanogpt_bench.sweep import workers as workers_module
from nanogpt_bench.sweep.axes import Axis, Range, grid_points, random_points
from nanogpt_bench.sweep.file import SWEEPS_FOLDER, find_sweep, read_sweep
from nanogpt_bench.sweep.plan import check_inputs, plan_point, plan_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.sensitivity import plan_study
from nanogpt_bench.sweep.tuning import Tuning
from nanogpt_bench.sweep.workers import check_workers, divide, torch_threads

ON_GRID = {"rule": "nearest", "model.format": "E4M3", "model.storage": "grid"}


def test_a_grid_is_every_combination():
    axes = (
        Axis("rule", ("a", "b")),
        Axis("optimizer.lr", Range(1.0, 100.0, points=3)),
        Axis("seed", (1, 2)),
    )
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
    few_points, many_points = (list(random_points(axes, samples, seed=3)) for samples in (5, 40))
    assert many_points[:10] == few_points
    assert list(random_points(axes, 5, seed=4)) != few_points
    lrs = [point["optimizer.lr"] for point in many_points]
    assert all(1e-4 <= lr <= 1e-1 for lr in lrs)
    assert 10 < sum(lr < 3e-3 for lr in lrs) < 70  # about half lies below the geometric mean
    assert {type(point["train.batch_size"]) for point in many_points} == {int}
    assert {point["rule"] for point in many_points} == {"a", "b"}
    assert [point["seed"] for point in many_points] == [1, 2] * 40
    assert many_points[0] | {"seed": 2} == many_points[1]  # a point is trained at every seed


def test_any_setting_is_an_axis_and_float_rules_stand_once(write):
    axes = {
        "model.format": ["e4m3", "E7M0"],
        "rule": ["fp32", "nearest"],
        "optimizer.lr": ["1e-3", 0.002],
    }
    axes |= {"train.batch_size": [2, 3], "seed": [7, 8]}
    planned = plan_sweep(read_sweep(write(axes=axes, reference={"rule": "sgd"})))
    assert {run.label for run in planned[:4]} == {
        "sgd batch_size=2",
        "sgd batch_size=3",
    }  # a reference for each
    assert [run.label for run in planned[4:]].count(
        "fp32 lr=0.001 batch_size=2"
    ) == 2  # once a seed, not once a format
    assert len(planned) == 4 + 2 * (4 + 8)
    assert len({run.name for run in planned}) == len(planned)
    run = next(
        run
        for run in planned
        if run.label == "E7M0 nearest lr=0.001 batch_size=3" and run.seed == 8
    )
    assert run.name == "E7M0-nearest-lr=0.001-batch_size=3-seed=8"
    config = resolve(build_config(run.settings))
    assert (config.rule, config.optimizer.lr, config.train.batch_size, config.seed) == (
        "nearest",
        0.001,
        3,
        8,
    )
    assert config.model.formats == {"*": "E7M0"}
    assert config.train.max_steps == 4


def test_planning_reads_every_format_once_and_builds_no_model_however_many_runs_have_it(
    write, monkeypatch
):
    reads, built = [], []
    check, init = fm.files.check_formats, GPT.__init__
    monkeypatch.setattr(
        fm.files,
        "check_formats",
        lambda *arguments, **options: reads.append(arguments) or check(*arguments, **options),
    )
    monkeypatch.setattr(
        GPT, "__init__", lambda self, shape: built.append(shape) or init(self, shape)
    )
    axes = {
        "model.format": ["E3M2", "E7M0"],
        "optimizer.lr": [0.011, 0.012, 0.013],
        "seed": list(range(900, 912)),
    }
    planned = plan_sweep(
        read_sweep(write(axes=axes, settings={"rule": "nearest", "model.n_layer": 3}))
    )
    check_inputs(planned)
    assert len(planned) == 2 * 3 * 12
    assert len(reads) == 2  # once for each format, whatever its seed
    assert not built


@pytest.mark.parametrize("section", ["settings", "axes"])
def test_a_rule_without_a_second_rate_does_without(write, section):
    words = {
        "settings": {},
        "axes": {"rule": ["fp32", "muon", "stochastic"], "model.format": ["E4M3"]},
    }
    words[section] |= {"optimizer.float_lr": [1e-3, 3e-3] if section == "axes" else 1e-3}
    planned = plan_sweep(read_sweep(write(**words)))
    rates = [(run.rule, run.settings.get("optimizer.float_lr")) for run in planned]
    muons = [("muon", 1e-3), *([("muon", 3e-3)] if section == "axes" else [])]
    assert rates == [("fp32", None), *muons, ("stochastic", None)]
    alone = read_sweep(
        write(settings={"rule": "fp32", "optimizer.float_lr": 1e-3}, axes={"seed": [1]})
    )
    with refusal(r"float_lr: 0\.001 is not an option of adamw"):
        plan_sweep(alone)


def test_granularities_of_a_float_rule_are_one_point(write):
    axes = {
        "rule": ["fp32", "nearest"],
        "model.granularity": ["tensor", "channel"],
        "model.format": ["E4M3", "E7M0"],
    }
    planned = plan_sweep(read_sweep(write(axes=axes)))
    assert [run.rule for run in planned].count("fp32") == 1
    assert len(planned) == 1 + 4
    shared = {"model.granularity": "tensor", "model.formats.lm_head": "E5M2"}
    with refusal(r"model\.granularity: 'tensor' has no effect with rule 'fp32'"):
        plan_sweep(
            read_sweep(
                write(settings={"rule": "fp32", "model.granularity": "tensor"}, axes={"seed": [1]})
            )
        )
    axes = {"rule": ["fp32", "nearest"], "model.format": ["E4M3"]}
    settings = [run.settings for run in plan_sweep(read_sweep(write(settings=shared, axes=axes)))]
    assert ["model.granularity" in one for one in settings] == [False, True]


STUDIES = sorted((Path(__file__).parents[3] / "study" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize(
    "path", [*sorted(SWEEPS_FOLDER.glob("*.yaml")), *STUDIES], ids=lambda path: path.name
)
def test_shipped_sweeps_and_the_studys_can_be_planned(path, tmp_path):
    sweep = read_sweep(path)
    if sweep.tune is not None:
        tuning = Tuning(sweep, SweepRecord(tmp_path, "tune"))
        # at least a trial and a run that counts for each combination of the axes
        runs_of_search = len(sweep.tune.seeds) + len(sweep.confirm.seeds)
        assert len(tuning.runs_to_check()) >= len(tuning.searches) * runs_of_search > 0
    elif path.name == "sensitivity.yaml":
        study = plan_study(sweep)
        assert len(study.planned) == 1 + len(study.patterns) * len(study.formats) == 1 + (6 + 4) * 5
    else:
        planned = plan_sweep(sweep)
        assert len({run.name for run in planned}) == len(planned) > 1
        for axis in sweep.axes:
            if not isinstance(axis.values, Range):
                assert set(axis.values) == {
                    run.axes[axis.key] for run in planned if axis.key in run.axes
                }
    if path.parent == SWEEPS_FOLDER:
        assert find_sweep(f"sweeps/{path.name}") == path
    else:  # found by its path alone
        assert not (SWEEPS_FOLDER / path.name).exists()
        assert find_sweep(str(path)) == path


LR, SEED, FORMAT = "optimizer.lr", {"seed": [1]}, {"model.format": ["E4M3"]}
#: axes, what else a file has, the options beside it, and what is said, its parts apart
#: by " & "
WRONG = [
    (None, {"axs": {}}, "", "axs & did you mean 'axes'"),
    (None, {}, "", "my.yaml has no axes"),
    ({"optimizer.l": [1]}, {}, "", "optimizer.l & 'optimizer.lr'"),
    ({LR: []}, {}, "", "axes.optimizer.lr & list of values"),
    ({LR: [1, 1]}, {}, "", "axes.optimizer.lr & twice"),
    ({LR: {"min": 1}}, {}, "", "axes.optimizer.lr.max & None"),
    ({LR: {"min": 0, "max": 1}}, {}, "", "axes.optimizer.lr & log scale"),
    ({LR: {"min": 1, "mx": 2}}, {}, "", "mx & did you mean 'max'"),
    ({LR: {"min": 1, "max": 2}}, {}, "", "axes.optimizer.lr & points"),
    ({LR: [1, -1]}, {}, "", "optimizer.lr & -1 & > 0"),
    ({"rule": ["nearst"], **FORMAT}, {}, "", "nearst & 'nearest'"),
    ({"model.format": ["E4M33"]}, {}, "", "E4M33 & E4M3"),
    ({"rule": ["nearest"]}, {}, "", "nearest & model.format & (at rule 'nearest')"),
    ({"model.formats.mlp.fcc": ["E4M3"]}, {}, "", "mlp.fcc & did you mean 'mlp.fc'"),
    (
        {"model.granularity": ["block"]},
        {"settings": ON_GRID},
        "",
        "model.formats & granularity & block",
    ),
    (SEED, {"search": "gird"}, "", "gird & did you mean 'grid'"),
    (SEED, {"samples": 0, "search": "random"}, "", "samples & 0 & >= 1"),
    (SEED, {"sample_seed": 3}, "", "sample_seed in my.yaml is for search: random"),
    (SEED, {"sensitivity": {"block": 2}}, "", "block & did you mean 'blocks'"),
    (SEED, {"settings": {"data.dir": "gone"}}, "", "gone & prepare"),
    (SEED, {"config": "e4m4.yaml"}, "", "e4m4.yaml & e4m3.yaml"),
    (SEED, {}, "--seed=3", "--seed & axis"),
    (SEED, {}, "--train.max_stps 3", "train.max_stps & train.max_steps"),
    (SEED, {}, "--sensitivit", "did you mean '--sensitivity'"),
    (SEED, {}, "--workers 0", "--workers & >= 1"),
    (SEED, {}, "--sensitivity", "model.format"),
    ({**FORMAT, "rule": ["nearest"]}, {}, "--sensitivity", "rule & settings"),
    (
        FORMAT,
        {"sensitivity": {"patterns": ["mlp.fcc"]}},
        "--sensitivity",
        "mlp.fcc & did you mean 'mlp.fc'",
    ),
    (
        FORMAT,
        {"sensitivity": {"operand": "wight"}},
        "--sensitivity",
        "wight & did you mean 'weight'",
    ),
]


@pytest.mark.parametrize(("axes", "base", "options", "message"), WRONG)
def test_a_wrong_file_is_one_line_and_leaves_nothing(
    write, axes, base, options, message, refused, tmp_path
):
    path = write(**({} if axes is None else {"axes": axes}), **base)
    line = refused("sweep", path, "--out", "out", *options.split())
    assert [part for part in message.split(" & ") if part not in line] == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.yaml"]


@pytest.mark.parametrize(
    ("workers", "runs", "threads", "divided"),
    [
        (None, 1000, None, (4, 1)),
        (None, 1, None, (1, 4)),
        (3, 1000, None, (3, 1)),
        (None, 1000, 2, (2, 2)),
        # What the settings say belongs to the run.
        (None, 1000, 40, (1, 40)),
        (3, 1000, 2, (3, 2)),
    ],
)
def test_cores_are_divided_among_workers(workers, runs, threads, divided, monkeypatch):
    monkeypatch.setattr(workers_module, "cores", lambda: 4)
    assert divide(workers, runs, threads, 4) == divided


@pytest.mark.parametrize(
    ("own_threads", "workers", "threads"),
    [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 2), (2, 2, 2), (2, 4, 1)],
)
def test_workers_have_no_more_threads_than_this_process(own_threads, workers, threads, monkeypatch):
    monkeypatch.setattr(workers_module, "cores", lambda: 4)
    old_threads = torch.get_num_threads()
    try:
        # as OMP_NUM_THREADS does
        torch.set_num_threads(own_threads)
        assert divide(workers, 1000, None, torch_threads()) == (workers, threads)
    finally:
        torch.set_num_threads(old_threads)


@pytest.mark.usefixtures("_stub_workers")
def test_the_runs_of_a_sweep_get_the_torch_threads_for(write, monkeypatch, capsys):
    monkeypatch.setattr(workers_module, "cores", lambda: 4)
    monkeypatch.setattr(session_module, "torch_threads", lambda: 2)
    path = write(axes={"optimizer.lr": [0.1]})
    path.write_text(path.read_text().replace("  runtime.threads: 1\n", ""))
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    assert "1 at a time, 2 threads each" in capsys.readouterr().err
    assert json.loads(next(Path("out").glob("*/summary.json")).read_text())["threads"] == 2


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        (
            {},
            ["--workers", "9"],
            "--workers: 9 is more runs at a time than the 4 cores take; give at most 4",
        ),
        (
            {"workers": 5},
            [],
            "workers: 5 is more runs at a time than the 4 cores take; give at most 4",
        ),
        (
            {"settings": {"runtime.threads": 2}},
            ["--workers", "3"],
            "cores take with runtime.threads 2; give at most 2",
        ),
    ],
)
def test_more_runs_at_a_time_than_cores_are_refused(
    write, monkeypatch, refused, file, options, message
):
    monkeypatch.setattr(workers_module, "cores", lambda: 4)
    assert refused(
        "sweep", write(axes={"optimizer.lr": [0.1]}, **file), "--out", "out", *options
    ).endswith(message)
    assert not Path("out").exists()
    with refusal("2 is more runs at a time than the 1 core takes; give at most 1"):
        check_workers(2, "--workers", core_count=1)


def test_one_seed_of_every_row_comes_before_the_next_whatever_a_run_costs():
    points = []
    for seed in (2, 1):
        for rule, steps in (("fp32", 10), ("stochastic-8bit", 100), ("stochastic", 1)):
            settings = {"rule": rule, "train.max_steps": steps, "seed": seed}
            points.append(plan_point({"model.format": "E4M3"}, settings))
    assert len({point.cost for point in points}) == 3
    by_turn = sorted(points, key=session_module._turn)
    assert [(point.seed, point.rule) for point in by_turn] == list(
        product((1, 2), ("stochastic-8bit", "fp32", "stochastic"))
    )
    trial = replace(points[0], is_trial=True)
    assert min([*points, trial], key=session_module._turn) is trial


def test_formats_of_all_layers_and_of_one_are_told_apart(write):
    axes = {"rule": ["fp32", "nearest"], "model.format": ["E4M3", "e7m0"]}
    axes |= {f"model.formats.{key}": ["none", "E5M2"] for key in ("lm_head", "*.activation")}
    planned = plan_sweep(read_sweep(write(axes=axes)))
    assert len({run.label for run in planned}) == len(planned) == 1 + 8
    assert {run.label for run in planned} >= {
        "E4M3 nearest lm_head=E5M2 activation=none",
        "E7M0 nearest lm_head=none activation=E5M2",
    }
    for run in planned[1:]:
        formats = resolve(build_config(run.settings)).model.formats
        assert run.label.startswith(formats["*"]["weight"])


def test_close_numbers_are_written_in_full_and_formats_under_a_rule_without_any_refused(write):
    axes = {"optimizer.lr": [0.001, 0.00100000001], "rule": ["fp32"]}
    labels = [run.label for run in plan_sweep(read_sweep(write(axes=axes)))]
    assert labels == ["fp32 lr=0.001", "fp32 lr=0.00100000001"]
    with refusal(r"axes\.model\.format: rule 'fp32' trains float weights"):
        plan_sweep(
            read_sweep(write(axes={"model.format": ["E4M3", "E7M0"]}, settings={"rule": "fp32"}))
        )


def test_a_point_that_is_the_reference_is_trained_once_and_one_of_its_name_stays_another(write):
    content = {
        "axes": {"rule": ["fp32", "nearest"], "train.max_steps": [3, 4]},
        "settings": {"model.format": "E4M3"},
    }
    points = {run.name for run in plan_sweep(read_sweep(write(**content)))}
    runs = plan_sweep(read_sweep(write(**content, reference={"rule": "fp32"})))
    assert {run.name for run in runs} == points
    assert len(runs) == 4
    runs = plan_sweep(
        read_sweep(write(**content, reference={"rule": "fp32", "optimizer.weight_decay": 0.5}))
    )
    references = [run.label for run in runs if run.name not in points]
    assert references == [f"fp32 max_steps={steps} (reference)" for steps in (3, 4)]
    assert len({run.name for run in runs}) == 6


OWN = {"optimizer.lr": 5e-5, "optimizer.weight_decay": 0.0}


@pytest.mark.parametrize(
    ("reference", "warned"),
    [({"rule": "fp32"}, True), ("E4M3 stochastic", False), ({"rule": "fp32"} | OWN, False)],
    ids=["rule", "label", "rule and settings"],
)
def test_what_a_reference_does_without_is_said(write, capsys, monkeypatch, reference, warned):
    """The file's rate is the rules' on its axis.

    A reference that is given as settings has its own.
    """
    train_here(monkeypatch)
    settings = {"model.format": "E4M3", "train.max_steps": 2}
    sentence = "the reference is trained with its own rule's optimizer.lr, "
    sentence += "optimizer.weight_decay, not with the file's; to change that, set them"
    path = write(axes={"rule": ["stochastic"]}, settings=settings | OWN, reference=reference)
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    assert (sentence in capsys.readouterr().err) == warned


def test_a_reference_is_trained_as_long_and_on_the_same_tokens_as_each_row(tmp_path):
    lengths = [
        {"data.train_tokens": 1000, "train.max_steps": 10},
        {"data.train_tokens": 2000, "train.max_steps": 20},
    ]
    rows = [{"rule": "nearest", "model.format": "E4M3", **length} for length in lengths]
    content = {"reference": {"rule": "fp32"}, "rows": rows, "axes": {"seed": [1, 2]}}
    (tmp_path / "rows.yaml").write_text(json.dumps(content))
    planned = [run for run in plan_sweep(read_sweep(tmp_path / "rows.yaml")) if run.rule == "fp32"]
    planned_lengths = [
        ({key: run.settings[key] for key in lengths[0]}, run.seed) for run in planned
    ]
    assert planned_lengths == list(product(lengths, (1, 2)))


@pytest.mark.parametrize(
    ("content", "seeds"),
    [
        ({"axes": {"rule": ["sgd"]}}, "42"),
        ({"axes": {"rule": ["sgd"], "seed": [1, 2]}}, "1, 2"),
        ({"axes": {"seed": [2, 1]}, "rows": [{"rule": "sgd"}]}, "1, 2"),
    ],
    ids=["one seed", "axis", "rows"],
)
def test_a_reference_with_a_seed_of_its_own_is_refused(content, seeds, write):
    path = write(**content, reference={"rule": "fp32", "seed": 7})
    with refusal(f"reference: fp32 has seed 7, but the runs .* have {seeds}; leave its seed out"):
        plan_sweep(read_sweep(path))


def test_a_reference_of_a_sensitivity_with_a_seed_of_its_own_is_refused(write):
    path = write(axes={"model.format": ["E4M3"]}, reference={"rule": "fp32", "seed": 7})
    with refusal("reference: fp32 has seed 7"):
        plan_study(read_sweep(path))


def test_one_folder_spelt_in_two_ways_is_one_text(write, corpus_dir, working_folder):
    (working_folder / "text").symlink_to(corpus_dir)
    same = {"axes": {"data.dir": ["text", "./text", "text/"]}, "settings": {"rule": "sgd"}}
    (run,) = plan_sweep(read_sweep(write(**same)))
    assert run.settings["data.dir"] == "text"


@pytest.mark.parametrize("spelling", ["its whole path", "where its link leads"])
def test_one_folder_under_two_names_is_refused(spelling, write, corpus_dir, working_folder):
    link = working_folder / "text"
    link.symlink_to(corpus_dir)
    folder = str(link if spelling == "its whole path" else corpus_dir)
    axes = {"data.dir": ["text", folder]}
    planned = plan_sweep(read_sweep(write(axes=axes, settings={"rule": "sgd"})))
    with refusal(f"data.dir: 'text' and {folder!r} are the same folder"):
        check_inputs(planned)
