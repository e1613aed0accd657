"""Results as one file: what is exported is what the tables and the page are drawn from."""

import json
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from run_folders import write_metrics, write_run
from sweep_runs import small, train_here

from nanogpt_bench.cli import main
from nanogpt_bench.monitors.shadow import COSINE
from nanogpt_bench.report.merged import merged_rows
from nanogpt_bench.report.results import FIGURES
from nanogpt_bench.report.results_file import flat_run, read_export
from nanogpt_bench.runs.environment import source_commit
from nanogpt_bench.runs.load import load_run


@pytest.fixture(scope="module")
def study(tmp_path_factory, corpus_dir):
    """A sweep that has tuned and confirmed two rules, and its table.

    Also what was exported of it; the folders are gone.
    """
    folder = tmp_path_factory.mktemp("study")
    settings_of_study = {
        "model.format": "E4M3",
        "train.max_steps": 4,
        "eval.interval": 2,
        "eval.batches": 3,
    }
    settings = small(corpus_dir, settings_of_study | {"optimizer.warmup_steps": 1})
    content = {"settings": settings, "axes": {"rule": ["fp32", "stochastic"]}, "reference": "fp32"}
    content |= {"tune": {"seeds": [1], "steps": 2, "span": 2}, "confirm": {"seeds": [3, 4]}}
    (folder / "my.yaml").write_text(json.dumps(content))
    patch = pytest.MonkeyPatch()
    train_here(patch)
    assert (
        main(["sweep", str(folder / "my.yaml"), "--out", str(folder / "out"), "--workers", "1"])
        == 0
    )
    assert main(["results", "export", str(folder / "out"), "--out", str(folder / "my.json")]) == 0
    tables = {name: (folder / "out" / name).read_text() for name in ("table.md", "results.csv")}
    shutil.rmtree(folder / "out")
    yield folder / "my.json", tables
    patch.undo()


@pytest.mark.parametrize(("form", "name"), [("markdown", "table.md"), ("csv", "results.csv")])
def test_a_table_is_written_without_the_run_folders(study, capsys, form, name):
    file, tables = study
    assert main(["results", "show", str(file), "--table", form]) == 0
    assert capsys.readouterr().out == tables[name]


@pytest.mark.usefixtures("_no_figures")
def test_tables_and_page_are_drawn_without_the_run_folders(study, tmp_path, capsys):
    file, tables = study
    assert main(["results", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(tables["table.md"])
    assert "| tuned |" in out
    assert main(["report", str(file), "--out", str(tmp_path / "page")]) == 0
    assert {name: (tmp_path / "page" / name).read_text() for name in tables} == tables
    page = (tmp_path / "page" / "report.html").read_text()
    assert 'id="tuned"' in page
    assert 'id="loss"' in page
    assert 'id="failures"' not in page  # the first step has no training loss, which is no NaN


def test_the_file_is_a_list_of_flat_runs_with_what_a_result_depends_on(study):
    file, _ = study
    content = json.loads(file.read_text())
    runs = [entry for entry in content if entry["kind"] == "run"]
    assert [(run["label"], run["seed"]) for run in runs] == [
        *(("fp32", 3), ("fp32", 4)),
        *(("E4M3 stochastic", 3), ("E4M3 stochastic", 4)),
    ]
    assert [run["reference"] for run in runs] == [True, True, False, False]
    searches = {entry["label"]: entry for entry in content if entry["kind"] == "search"}
    for run in runs:
        assert run["config.train.max_steps"] == 4
        assert run["config.optimizer.lr"] == run["lr"]
        assert set(run["environment.libraries"]) >= {"torch", "fp8manifold"}
        assert run["environment.corpus"]["splits"]["train"]["sha256"]
        assert "environment.commit" in run
        assert run["curve.step"] == [0, 2, 4]
        assert run["curve.val/loss"][-1] == run["final_val_loss"]
        (search,) = (plan for plan in searches.values() if run["label"] in plan["rows"])
        assert run["lr"] == search["best.optimizer.lr"] in search["trial.optimizer.lr"]
        assert search["trial.loss"] == search["trial.loss.1"]


def test_another_reference_may_be_named_and_no_label_commands_the_terminal(study, tmp_path, capsys):
    file, _ = study
    assert main(["results", "show", str(file), "--reference", "E4M3 stochastic"]) == 0
    assert "gap to E4M3 stochastic" in capsys.readouterr().out
    assert main(["results", "show", str(file), "--reference", "fp23"]) == 2
    assert "did you mean 'fp32'" in capsys.readouterr().err
    content = json.loads(file.read_text())
    content[-1]["label"] = content[0]["label"] = "E4M3 \x1b]0;title\x07"
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert main(["results", "show", str(tmp_path / "other.json")]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "search", [{"start.lr": 1, "trial.loss": 5}, {"start": 3, "cost": []}, {"trial.loss": [1]}]
)
def test_what_was_tuned_is_left_out_where_it_says_nothing(study, tmp_path, capsys, search):
    path = tmp_path / "other.json"
    content = [entry for entry in json.loads(study[0].read_text()) if entry["kind"] == "run"]
    path.write_text(json.dumps([*content, {"kind": "search", **search}]))
    assert main(["results", "show", str(path)]) == 0
    assert "fp32" in capsys.readouterr().out


def test_the_commit_is_that_of_the_checkout():
    checkout = Path(__file__).parent
    shown = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if shown.returncode or not source_commit():
        pytest.skip("not a checkout")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", source_commit())
    assert source_commit().rstrip("+") == shown.stdout.strip()


@pytest.mark.parametrize("names", [["whole", "partial"], ["partial", "whole"]], ids=" ".join)
def test_a_run_that_is_missing_stays_missing_beside_another_file_with_its_label(
    study, tmp_path, names
):
    """Both files have a row of one label, of other lengths.

    A seed that one lacks is not the other's.
    """
    content = json.loads(study[0].read_text())
    files = {"whole": content, "partial": json.loads(study[0].read_text())}
    for entry in files["partial"]:
        if entry["kind"] == "run":
            entry |= {"config.train.max_steps": 8, "steps_planned": 8, "steps": 8}
            if (entry["rule"], entry["seed"]) == ("stochastic", 4):
                entry["kind"] = "missing"
    for name, entries in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(entries))
    rows = merged_rows([], [read_export(tmp_path / f"{name}.json") for name in names])
    assert [(row.rule, row.missing, len(row.runs)) for row in rows if row.missing] == [
        ("stochastic", (4,), 1)
    ]


def test_a_mean_cosine_is_exported_and_shown(tmp_path):
    run_dir = write_run(tmp_path / "one", rule="nearest", fmt="E4M3")
    write_metrics(run_dir, {COSINE.name: lambda step: 0.5 - step / 800}, interval=200)
    (entry,) = [flat_run("nearest", load_run(run_dir))]
    (tmp_path / "one.json").write_text(json.dumps([entry | {"reference": False}]))
    cosine = FIGURES["cosine"](load_run(run_dir))
    assert 0 < cosine < 1
    assert FIGURES["cosine"](read_export(tmp_path / "one.json").rows[0].runs[0]) == cosine


def test_settings_changed_at_a_resumption_are_exported(tmp_path):
    history = [{"step": 3, "changed": {"optimizer.lr": [0.1, 0.2]}}]
    run_dir = write_run(tmp_path / "one", rule="fp32", config_history=history)
    entry = flat_run("fp32", load_run(run_dir)) | {"reference": False}
    (tmp_path / "one.json").write_text(json.dumps([entry]))
    (run,) = read_export(tmp_path / "one.json").rows[0].runs
    assert [note.partition(";")[0] for note in run.notes] == [
        "settings were changed after step 3: optimizer.lr was 0.1, is now 0.2"
    ]


def test_a_search_goes_on_behind_the_trials_of_its_export(study, tmp_path, monkeypatch, capsys):
    """A sweep whose folder is gone trains only the runs of the rows again.

    They end as they did.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "study")
    train_here(monkeypatch)
    file, out = study[0], tmp_path / "out"
    old_entries = json.loads(file.read_text())
    searches = [entry for entry in old_entries if entry["kind"] == "search"]
    trial_count = sum(len(search["trial.loss"]) for search in searches)
    assert import_module("resume").put_back(file.with_suffix(".yaml"), file, out) == trial_count
    assert main(["sweep", str(file.with_suffix(".yaml")), "--out", str(out), "--workers", "1"]) == 0
    assert f"4 runs, {trial_count} done already" in capsys.readouterr().err
    assert main(["results", "export", str(out), "--out", str(tmp_path / "again.json")]) == 0
    new_entries = json.loads((tmp_path / "again.json").read_text())
    for key in ("kind", "label", "final_val_loss", "best.optimizer.lr", "trial.loss"):
        assert [entry.get(key) for entry in new_entries] == [
            entry.get(key) for entry in old_entries
        ], key
