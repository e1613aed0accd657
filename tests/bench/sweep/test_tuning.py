"""Tuning: what is tried, what it ends at, and the runs that follow from it."""

import csv
import json
import math
import os
import shutil
from itertools import chain
from pathlib import Path

import pytest
import yaml
from bench_runs import refusal
from sweep_runs import read_json, runs_of, train_here, trained

from nanogpt_bench.cli import main
from nanogpt_bench.report.tables import tuning_table
from nanogpt_bench.runs.load import find_runs
from nanogpt_bench.sweep import workers as pool_module
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.tuning import Tuning, best_place, is_inside, next_places

#: loss: a bowl over the logarithms of lr and float_lr, a little apart by seed; above a
#: limit it diverges
BEST = {"fp32": 0.006, "sgd": 0.1, "muon": 0.03}


def stub(job):
    """Write what a training in the bowl would have found; above 2.5 times the best rate it fails."""
    settings, folder = job["settings"], Path(job["run_dir"])
    rule, lr, seed, steps = (
        settings[key] for key in ("rule", "optimizer.lr", "seed", "train.max_steps")
    )
    if seed == 2 and "STUB_DIES" in os.environ:
        os._exit(9)
    folder.mkdir(parents=True)
    best = 1e-12 if settings.get("optimizer.beta2") == 0.5 else BEST[rule]
    loss = 2.0 + math.log2(lr / best) ** 2 / 10 + seed / 1000 - steps / 1000
    loss += math.log2(settings.get("optimizer.float_lr", 0.001) / 0.001) ** 2 / 20
    bad = lr > 2.5 * best
    summary = {
        "name": folder.name,
        "rule": rule,
        "format": "none",
        "seed": seed,
        "steps": steps,
        "seconds": 2.0,
    }
    summary |= {"status": "failed" if bad else "finished", "final_val_loss": None if bad else loss}
    summary |= {
        "failure": {"kind": "nan", "message": "train/loss is nan", "step": 3} if bad else None,
        "lr": lr,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with open("done.txt", "a") as log:
        print(job["run_dir"].split("/", 1)[1], file=log)
    return {"kind": "done"}


def on_lists(job):
    """As `stub`; the loss also falls with more weight decay and with a warmup closer to 200 steps."""
    settings, path, end = job["settings"], Path(job["run_dir"]) / "summary.json", stub(job)
    summary = read_json(path)
    if summary["final_val_loss"] is not None:
        summary["final_val_loss"] += 0.1 * (settings["optimizer.weight_decay"] - 0.3) ** 2
        summary["final_val_loss"] += abs(settings["optimizer.warmup_steps"] - 200) / 1e4
        path.write_text(json.dumps(summary))
    return end


TUNE = {"seeds": [1, 2], "steps": 4}
CONFIRM = {"seeds": [5, 6, 7], "steps": 8}


@pytest.fixture
def _bowl(monkeypatch, _forked_workers, _no_figures):
    monkeypatch.setattr(pool_module, "SERVE", stub)


@pytest.mark.parametrize("optimum", [(0.0,), (3.2,), (-9.0,), (100.0,), (0.9, -4.1), (-5.0, 6.5)])
def test_the_search_ends_around_the_optimum_or_at_its_span(optimum):
    losses, reach, rounds = {}, 16, 0
    while places := next_places(losses, len(optimum), lambda place: max(map(abs, place)) <= reach):
        assert not set(places) & set(losses)
        losses |= {
            place: sum((value - best) ** 2 for value, best in zip(place, optimum, strict=True))
            for place in places
        }
        rounds += 1
    best = best_place(losses)
    for key, (value, expected) in enumerate(zip(best, optimum, strict=True)):
        assert abs(value - min(expected, reach)) <= 1, key
        assert is_inside(losses, key) == (expected <= reach), key
    assert rounds <= 7 * len(optimum) + 4
    assert max(map(abs, chain.from_iterable(losses))) <= reach


@pytest.mark.usefixtures("_bowl")
def test_listed_values_are_searched_after_the_rates_and_not_beyond_their_list(write, monkeypatch):
    monkeypatch.setattr(pool_module, "SERVE", on_lists)
    choices = {
        "optimizer.warmup_steps": [0, 50, 100, 200],
        "optimizer.weight_decay": [0.0, 0.1, 0.2],
    }
    settings = {"optimizer.warmup_steps": 100, "optimizer.weight_decay": 0.1}
    path = write(
        axes={"rule": ["fp32"]},
        tune=TUNE | {"choices": choices},
        confirm=CONFIRM,
        settings=settings,
    )
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    (row,) = read_json(Path("out/tuning.json"))["rows"]
    assert row["best"]["optimizer.warmup_steps"] == 200
    assert row["best"]["optimizer.weight_decay"] == 0.2
    assert all(row["inside"].values())
    tried = [trial["values"] for trial in row["trials"]]
    for key, values in choices.items():
        assert {trial[key] for trial in tried} <= {*values}, key
    first_rates = [
        values
        for values in tried
        if (values["optimizer.warmup_steps"], values["optimizer.weight_decay"]) == (100, 0.1)
    ]
    assert len(first_rates) >= 3  # the rate is searched before a list is
    assert not any(
        values["optimizer.warmup_steps"] == 0 for values in tried
    )  # no neighbour of a best place
    confirmed = next(
        entry["settings"] for entry in runs_of(Path("out")).values() if entry["label"] == "fp32"
    )
    assert {key: confirmed[key] for key in row["best"]} == row["best"]


def test_a_diverged_place_is_worse_than_all():
    losses = {(0,): math.inf, (-2,): math.inf, (2,): math.inf}
    assert next_places(losses, 1, lambda _: True) == [(-4,)]  # where nothing is stable, lower
    losses[-4,] = 3.0
    assert next_places(losses, 1, lambda _: True) == [(-6,)]
    assert not is_inside({(0,): math.inf, (-2,): math.inf, (2,): math.inf}, 0)


@pytest.mark.usefixtures("_bowl")
def test_every_rule_is_tuned_and_confirmed_on_other_seeds(write, capsys):
    axes = {"rule": ["fp32", "muon", "sgd"], "model.format": ["E4M3", "E5M2"]}
    tune = TUNE | {
        "keys": ["optimizer.lr", "optimizer.float_lr"],
        "start": {"optimizer.float_lr": 0.004},
    }
    path = write(axes=axes, tune=tune, confirm=CONFIRM, reference="fp32")
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    content = read_json(Path("out/tuning.json"))
    best = {row["label"].split()[0]: row["best"] for row in content["rows"]}
    assert list(best) == ["fp32", "muon", "sgd"]  # float weights stand once
    assert list(best["fp32"]) == list(best["sgd"]) == ["optimizer.lr"]  # which have no second rate
    for rule, optimum in {"fp32": 0.006, "muon": 0.03, "sgd": 0.1}.items():
        assert abs(math.log2(best[rule]["optimizer.lr"] / optimum)) <= 0.26, rule
    assert abs(math.log2(best["muon"]["optimizer.float_lr"] / 0.001)) <= 0.26
    runs = trained()
    assert len(runs) == len(set(runs))
    for row in content["rows"]:
        assert row["over"]
        assert all(row["inside"].values())
        assert row["cost"]["runs"] == sum(len(trial["runs"]) for trial in row["trials"])
        assert row["cost"]["steps"] == 4 * row["cost"]["runs"]
        assert row["cost"]["seconds"] == 2.0 * row["cost"]["runs"]
        assert [set(trial["losses"]) for trial in row["trials"]] == [{"1", "2"}] * len(
            row["trials"]
        )
    trials = chain.from_iterable(row["trials"] for row in content["rows"])
    diverged = [trial for trial in trials if None in trial["losses"].values()]
    assert diverged
    assert all(trial["loss"] is None and "failed" in trial["status"].values() for trial in diverged)
    # The table has only the confirmed runs, at the best rates and the length that was
    # set.
    lines = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [(line["run"], line["seeds"]) for line in lines] == [
        ("fp32", "3"),
        ("muon", "3"),
        ("sgd", "3"),
    ]
    entries = {entry["label"]: entry for entry in runs_of(Path("out")).values()}
    assert entries["muon"]["settings"]["train.max_steps"] == 8
    assert {key: entries["muon"]["settings"][key] for key in best["muon"]} == best["muon"]
    out = capsys.readouterr()
    assert "| muon max_steps=4 | optimizer.float_lr |" in out.out
    assert "gap to fp32" in out.out
    assert "best at optimizer.lr" in out.err
    # Trials lie apart: a report of the folder is one of what counts.
    assert len(find_runs([Path("out")])) == 9
    assert len(find_runs([Path("out/trials")])) == len(runs) - 9
    assert "What was tuned" in Path("out/report.html").read_text()


@pytest.mark.usefixtures("_bowl")
def test_a_rule_none_of_whose_trials_comes_to_its_end_has_a_row_that_says_so(write, capsys):
    axes = {"rule": ["fp32"], "optimizer.beta2": [0.5, 0.99]}
    path = write(axes=axes, tune=TUNE | {"span": 4}, confirm=CONFIRM, reference="fp32 beta2=0.99")
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 0
    failed = "failed: none of 10 trials ended with a loss"
    lines = list(csv.DictReader(Path("out/results.csv").read_text().splitlines()))
    assert [(line["run"], line["seeds"], line["verdict"]) for line in lines] == [
        ("fp32 beta2=0.5", "0", failed),
        ("fp32 beta2=0.99", "3", "reference"),
    ]
    assert "failed: none of 10 trials" in capsys.readouterr().out  # the rest is in the line below
    assert main(["report", "out", "--out", "page"]) == 0
    assert failed in Path("page/table.md").read_text()


@pytest.mark.usefixtures("_bowl")
def test_it_goes_on_where_it_was(write):
    path = write(axes={"rule": ["fp32", "sgd"]}, tune=TUNE, confirm=CONFIRM)
    command = ["sweep", str(path), "--out", "out", "--workers", "1"]
    assert main(command) == 0
    whole, everything = read_json(Path("out/tuning.json")), trained()
    # As if it had been killed: some runs are gone, one of the first round among them,
    # and so is what was found.
    gone = [everything[1], *everything[5:]]
    for name in gone:
        (Path("out") / name / "summary.json").unlink()
    Path("out/tuning.json").unlink()
    assert main(command) == 0
    assert sorted(trained()) == sorted(gone)
    assert read_json(Path("out/tuning.json")) == whole
    assert main(command) == 0
    assert trained() == []
    assert read_json(Path("out/tuning.json")) == whole


@pytest.mark.usefixtures("_bowl")
def test_nothing_follows_from_a_trial_that_was_ended_from_outside(write, monkeypatch):
    path = write(axes={"rule": ["sgd"]}, tune=TUNE, confirm=CONFIRM)
    command = ["sweep", str(path), "--out", "out", "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setenv("STUB_DIES", "yes")
        assert main(command) == 1
    assert [name.partition("/")[0] for name in trained()] == [
        "trials"
    ] * 3  # the first round, of one seed
    assert main(command) == 0
    assert sum(not name.startswith("trials/") for name in trained()) == 3


@pytest.mark.parametrize(("steps", "searches"), [(4, 1), (None, 3)])
@pytest.mark.usefixtures("_bowl")
def test_lengths_share_a_search_or_have_each_their_own(steps, searches, write):
    axes = {"rule": ["sgd"], "train.max_steps": [4, 8, 16]}
    sweep = read_sweep(
        write(axes=axes, tune={"seeds": [1], "steps": steps}, confirm={"seeds": [2]})
    )
    tuning = Tuning(sweep, SweepRecord(Path(f"out{searches}"), "tune"))
    assert len(tuning.searches) == searches
    runs = []
    for search in tuning.searches:
        runs += tuning.confirmations(search, search.first_values)
    assert [run.settings["train.max_steps"] for run in runs] == [4, 8, 16]
    assert {run.settings["train.max_steps"] for run in tuning.first_trials()} == (
        {4} if steps else {4, 8, 16}
    )


SGD = {"axes": {"rule": ["sgd"]}}


@pytest.mark.parametrize(
    ("content", "tune", "message"),
    [
        ({"confirm": None}, {}, "needs confirm"),
        ({"tune": None}, {}, "needs tune"),
        ({"confirm": {"seeds": [3, 2]}}, {}, "confirm.seeds: 2 is one of tune.seeds"),
        ({"tune": {"steps": 3}}, {}, "tune.seeds: missing"),
        ({}, {"seeds": [1, 1]}, "tune.seeds: 1 is given twice"),
        ({}, {"seeds": [1.5]}, "give a list of whole numbers"),
        ({}, {"factor": 1.0}, "tune.factor: 1.0 is out of range"),
        ({}, {"seed": [1]}, "did you mean 'seeds'"),
        ({}, {"start": {"optimizer.lr": -1}}, "numbers above 0"),
        # axes and keys that do not go together
        ({"axes": {"rule": ["fp32"], "seed": [1]}}, {}, "axes.seed .* leave one of them out"),
        (
            {"axes": {"rule": ["fp32"], "train.max_steps": [3]}},
            {},
            "axes.train.max_steps .*confirm.steps",
        ),
        ({}, {"keys": ["optimizer.lrr"]}, "did you mean 'optimizer.lr'"),
        ({}, {"keys": ["train.max_steps"]}, "not a number that can be multiplied"),
        ({}, {"keys": ["optimizer.float_lr"]}, "fp32.* takes none of optimizer.float_lr"),
        ({}, {"start": {"optimizer.float_lr": 1.0}}, "not one of tune.keys"),
        (SGD, {"settings": {"train.max_steps": 3}}, "tune.steps sets train.max_steps"),
        (SGD, {"settings": {"optimizer.lr": 3.0}}, "tune.keys sets optimizer.lr"),
        (SGD, {"keys": ["optimizer.weight_decay"]}, "a search begins above 0"),
        ({"search": "random"}, {}, "leave search: random out"),
        (
            {"reference": {"rule": "fp32", "seed": 7}},
            {},
            "reference: tune.seeds and confirm.seeds set its seed; leave the seed out there",
        ),
        ({"reference": "fp31"}, {}, "reference .*fp31.*did you mean 'fp32'"),
        # lists of values that can't be searched
        ({}, {"choices": {"optimizer.weight_decay": [0.1]}}, "give two or more rising numbers"),
        (
            {},
            {"choices": {"optimizer.weight_decay": [0.2, 0.1]}},
            "give two or more rising numbers",
        ),
        ({}, {"choices": {"optimizer.weight_decay": [0.0, 0.2]}}, "is 0.1 for fp32"),
        ({}, {"choices": {"optimizer.lr": [0.1, 0.2]}}, "one of tune.keys too"),
        ({}, {"choices": {"data.dir": [0.1, 0.2]}}, "is not a number"),
        # A section is named once.
        ({}, {"settings": 5}, "^tune.settings: 5 is not allowed"),
        ({}, {"choices": 5}, "^tune.choices: 5 .* give a mapping of key to list of values$"),
    ],
)
def test_a_file_whose_search_contradicts_itself_is_refused(write, content, tune, message):
    whole = {"axes": {"rule": ["fp32"]}, "tune": TUNE | tune, "confirm": CONFIRM, **content}
    path = write(**{key: value for key, value in whole.items() if value is not None})
    with refusal(message):
        Tuning(read_sweep(path), SweepRecord(Path("out"), "tune"))


def test_the_table_says_where_the_best_was_not_inside():
    trial = {"values": {"optimizer.lr": 0.1}}
    row = {
        "label": "sgd",
        "start": {"optimizer.lr": 0.1},
        "best": {"optimizer.lr": 0.1},
        "over": True,
    }
    row |= {
        "inside": {"optimizer.lr": False},
        "trials": [trial],
        "cost": {"runs": 1, "steps": 4, "seconds": 2.0},
    }
    assert "| sgd | optimizer.lr | 0.1 | 0.1 to 0.1, best at an end | 1 | 4 | 2 |" in tuning_table(
        [row]
    )
    nothing = row | {"best": None, "trials": []}
    assert "| sgd | optimizer.lr | - | - |" in tuning_table([json.loads(json.dumps(nothing))])


STUDIES = sorted((Path(__file__).parents[3] / "study" / "sweeps").glob("*.yaml"))


@pytest.mark.usefixtures("_forked_workers")
@pytest.mark.parametrize(
    "path",
    [
        path if index == 0 else pytest.param(path, marks=pytest.mark.slow)
        for index, path in enumerate(STUDIES)
    ],
    ids=lambda path: path.name,
)
def test_the_smoke_version_of_every_study_runs(working_folder, corpus_dir, monkeypatch, path):
    train_here(monkeypatch)
    for name in ("stdlib", "stdlib_pairs", "packages"):
        shutil.copytree(corpus_dir, f"data/{name}")
    option = ["--sensitivity"] if "--sensitivity" in path.read_text() else []
    assert main(["sweep", str(path), "--smoke", "--workers", "1", *option]) == 0
    (out,) = Path("runs").glob("*/*-smoke")
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert (out.name == "tune-smoke") == ("tune" in yaml.safe_load(path.read_text()))
    if out.name == "tune-smoke":
        assert len(rows) == sum(len(row["rows"]) for row in read_json(out / "tuning.json")["rows"])
        assert {row["seeds"] for row in rows} == {"2"}
    assert rows
    assert main(["results", "export", str(out), "--out", "study.json"]) == 0


def test_a_search_goes_no_further_than_its_setting(write, tmp_path):
    """A value beyond counts as diverged: the search ends inside, and the sweep goes on."""
    tune = {"keys": ["optimizer.min_lr_ratio"], "seeds": [1], "span": 64}
    sweep = read_sweep(write(axes={"rule": ["sgd"]}, tune=tune, confirm={"seeds": [2]}))
    (search,) = Tuning(sweep, SweepRecord(tmp_path / "out", "tune", [])).searches
    tried = []
    while runs := search.next_round():
        for run in runs:
            tried.append(run.settings["optimizer.min_lr_ratio"])
            search.record_end(
                run, lambda run: 2.0 - run.settings["optimizer.min_lr_ratio"]
            )  # the more the better
    assert tried == [0.1, 0.05, 0.2, 0.4, 0.8, 0.5657]
    assert search.best == {"optimizer.min_lr_ratio": 0.8}


def test_a_study_shrinks_by_its_section_smoke_alone(write):
    smoke = {"axes": {"rule": ["sgd"]}, "tune": {"steps": 1}, "settings": {"train.max_steps": 2}}
    path = write(
        axes={"rule": ["fp32"], "model.n_layer": [1, 2]}, tune=TUNE, confirm=CONFIRM, smoke=smoke
    )
    whole, small = (read_sweep(path, smoke=smoke) for smoke in (False, True))
    assert [axis.values for axis in whole.axes] == [("fp32",), (1, 2)]
    assert [axis.values for axis in small.axes] == [("sgd",), (1, 2)]
    assert (whole.tune.steps, small.tune.steps, small.tune.seeds) == (4, 1, [1, 2])
    assert (whole.base["train.max_steps"], small.base["train.max_steps"]) == (4, 2)
    with refusal(r"--smoke: my\.yaml has no section smoke"):
        read_sweep(write(axes={"rule": ["fp32"]}), smoke=True)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"axis": {}}, "did you mean 'axes'"),
        ({"tune": 3}, "smoke.tune"),
        (3, "smoke in my.yaml"),
    ],
    ids=["a misspelt key", "a number for a section", "a number for all"],
)
def test_a_wrong_section_smoke_is_refused(section, message, write):
    with refusal(message):
        read_sweep(write(axes={"rule": ["fp32"]}, smoke=section))
