"""Results as one file: what is exported is what the tables and the page are drawn from."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr
from sweep_runs import train_here

from nanogpt_bench.cli import main
from nanogpt_bench.report import build
from nanogpt_bench.report.results_file import read_export
from nanogpt_bench.runs.environment import commit, cpu_model
from nanogpt_bench.runs.load import Run


@pytest.fixture(scope="module")
def study(tmp_path_factory, corpus_dir):
    """A sweep that has tuned and confirmed two rules, its table, and what was exported of it; the folders are gone."""
    folder = tmp_path_factory.mktemp("study")
    settings = {
        "data.dir": str(corpus_dir),
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "format": "E4M3"},
        "train": {"max_steps": 4, "batch_size": 4, "precision": "float32"},
        "eval": {"interval": 2, "batches": 3},
        "optimizer.warmup_steps": 1,
        "runtime.threads": 1,
    }
    content = {
        "settings": settings,
        "axes": {"rule": ["fp32", "stochastic"]},
        "tune": {"seeds": [1], "steps": 2, "span": 2},
        "confirm": {"seeds": [3, 4]},
        "reference": "fp32",
    }
    (folder / "my.yaml").write_text(json.dumps(content))
    patch = pytest.MonkeyPatch()
    train_here(patch)
    assert main(["sweep", str(folder / "my.yaml"), "--out", str(folder / "out"), "--workers", "1"]) == 0
    assert main(["results", "export", str(folder / "out"), "--out", str(folder / "my.json")]) == 0
    tables = {name: (folder / "out" / name).read_text() for name in ("table.md", "results.csv")}
    shutil.rmtree(folder / "out")
    yield folder / "my.json", tables
    patch.undo()


def test_tables_and_page_are_drawn_without_the_run_folders(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "write_figures", lambda *_: None)
    file, tables = study
    for form, name in (("markdown", "table.md"), ("csv", "results.csv")):
        assert main(["results", "show", str(file), "--table", form]) == 0
        assert capsys.readouterr().out == tables[name]
    assert main(["results", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(tables["table.md"])
    assert "| tuned |" in out
    assert main(["report", str(file), "--out", str(tmp_path / "page")]) == 0
    assert {name: (tmp_path / "page" / name).read_text() for name in tables} == tables
    page = (tmp_path / "page" / "report.html").read_text()
    assert 'id="tuned"' in page
    assert 'id="loss"' in page


def test_the_file_is_small_and_has_what_a_result_depends_on(study):
    file, _ = study
    content = json.loads(file.read_text())
    assert file.stat().st_size < 30_000
    assert [row["label"] for row in content["rows"]] == ["fp32", "E4M3 stochastic"]
    assert [[run["seed"] for run in row["runs"]] for row in content["rows"]] == [[3, 4], [3, 4]]
    assert content["settings"]["train"]["max_steps"] == 4
    tried = [trial["values"]["optimizer.lr"] for trial in content["tuning"]["rows"][1]["trials"]]
    assert (content["settings"]["optimizer"] | content["rows"][1]["settings"]["optimizer"])["lr"] in tried
    (environment,) = content["environments"]
    assert set(environment["libraries"]) >= {"torch", "fp8manifold"}
    assert environment["corpus"]["splits"]["train"]["sha256"]
    assert "commit" in environment
    assert [point[0] for point in content["rows"][0]["runs"][0]["curve"]] == [0, 2, 4]


def test_another_reference_may_be_named(study, capsys):
    file, _ = study
    assert main(["results", "show", str(file), "--reference", "E4M3 stochastic"]) == 0
    assert "gap to E4M3 stochastic" in capsys.readouterr().out
    assert main(["results", "show", str(file), "--reference", "fp23"]) == 2
    assert "did you mean 'fp32'" in capsys.readouterr().err


def test_a_row_is_made_again_to_the_bit_or_refused(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, _ = study
    content = json.loads(file.read_text())
    (run,) = [run for run in content["rows"][1]["runs"] if run["seed"] == 3]
    command = ["results", "rerun", "my.json", "--row", "E4M3 stochastic", "--seed", "3", "--out", "again"]

    def again(changed, *options):
        Path("my.json").write_text(json.dumps(changed))
        code, said = main([*command, *options]), capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = again(content)
    assert code == 0
    assert [line.split("|")[2:6] for line in out.splitlines()[2:5]] == [
        [f" {cell} " for cell in (f"{step:>4.0f}", f"{loss:.6f}", f"{loss:.6f}", " +0.000000")]
        for step, loss in ((point[0], point[3]) for point in run["curve"])
    ]
    assert "E4M3 stochastic: the recorded number to three decimals, to the bit" in out
    other = json.loads(json.dumps(content))  # what was trained in "again" is there from here on
    other["rows"][1]["runs"][0]["final_val_loss"] += 0.01
    assert again(other)[0] == 1
    (environment,) = other["environments"]
    environment["libraries"]["torch"], environment["commit"] = "1.0", "deadbeef"
    code, _, err = again(other)
    assert code == 2
    assert re.search(r"not the same row: torch was 1\.0, is 2.*; --anyway", err)
    code, out, err = again(other, "--anyway")
    assert (code, "NOT the recorded number" in out, "differs: commit was deadbeef" in err) == (1, True, True)
    environment["corpus"]["splits"]["val"]["sha256"] = "0" * 64
    assert "SHA-256 of its validation tokens) was 000000000000…" in again(other)[2]


def curves(content):
    """Seeds and validations of all runs that count."""
    return [(run["seed"], [point[:-1] for point in run["curve"]]) for row in content["rows"] for run in row["runs"]]


def test_a_sweep_takes_from_a_file_what_it_has_and_trains_the_rest(study, tmp_path, monkeypatch, capsys):
    """All of it is taken: nothing is trained, and its export is the file. Without one run: that one is, to the bit."""
    monkeypatch.chdir(tmp_path)
    file, _ = study
    content = json.loads(file.read_text())
    sweep = ["sweep", str(file.with_suffix(".yaml")), "--workers", "1", "--from"]

    def exported(source, folder, *others):
        assert main([*sweep, str(source), *others, "--out", folder]) == 0
        said = capsys.readouterr().err
        assert main(["results", "export", folder, "--out", f"{folder}.json"]) == 0
        return said, json.loads(Path(f"{folder}.json").read_text())

    trials = sum(len(row["runs"]) for row in content["trials"]["rows"])
    assert trials == content["tuning"]["rows"][0]["cost"]["runs"] * 2 == 8
    monkeypatch.setattr("sweep_runs.run", None)
    said, again = exported(file, "again")
    assert f"{trials + 4} of the {trials + 4} runs of {file} were taken from there" in " ".join(said.split())
    assert {key: again[key] for key in again if key != "command"} == {
        key: content[key] for key in content if key != "command"
    }
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    train_here(monkeypatch)
    fewer = json.loads(file.read_text())
    fewer["rows"][1]["runs"], fewer["environments"][0]["commit"] = fewer["rows"][1]["runs"][:1], "deadbeef"
    Path("fewer.json").write_text(json.dumps(fewer))
    said, again = exported("fewer.json", "trained")
    assert f"{trials + 3} of the {trials + 3} runs of fewer.json were taken from there" in said
    assert "fewer.json: commit was deadbeef" in said
    assert curves(again) == curves(content)
    rest = json.loads(file.read_text())
    rest["rows"], rest["trials"]["rows"] = rest["rows"][1:], []
    Path("rest.json").write_text(json.dumps(rest))
    monkeypatch.setattr("sweep_runs.run", None)
    said, again = exported("fewer.json", "both", "rest.json")
    assert f"{trials + 3} of the {trials + 3} runs of fewer.json were taken from there" in said
    assert "1 of the 2 runs of rest.json were taken from there" in said
    assert curves(again) == curves(content)


def test_runs_of_two_texts_are_told_apart_by_their_digests(study, tmp_path, monkeypatch, capsys):
    """The same rows of another text beside those of the first, first in the file: each is taken for its own."""
    monkeypatch.chdir(tmp_path)
    file, _ = study
    content = json.loads(file.read_text())
    other = json.loads(json.dumps(content))
    environment = json.loads(json.dumps(content["environments"][0]))
    environment["corpus"]["splits"]["train"]["sha256"] = "0" * 64
    content["environments"].append(environment)
    for row in other["rows"]:
        row["label"] += " other"
        for run in row["runs"]:
            run |= {"environment": 1, "final_val_loss": 9.0}
    content["rows"] = other["rows"] + content["rows"]
    Path("my.json").write_text(json.dumps(content))
    monkeypatch.setattr("sweep_runs.run", None)
    sweep = ["sweep", str(file.with_suffix(".yaml")), "--workers", "1", "--from", "my.json", "--out", "out"]
    assert main(sweep) == 0
    assert "12 of the 16 runs of my.json were taken from there" in capsys.readouterr().err
    assert main(["results", "export", "out", "--out", "again.json"]) == 0
    losses = [
        run["final_val_loss"] for row in json.loads(Path("again.json").read_text())["rows"] for run in row["runs"]
    ]
    assert len(losses) == 4
    assert max(losses) < 9


def test_runs_of_another_torch_or_text_are_not_taken(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train_here(monkeypatch)
    file, _ = study
    sweep = ["sweep", str(file.with_suffix(".yaml")), "--workers", "1", "--from", "my.json", "--out", "out"]
    content = json.loads(file.read_text())
    content["environments"][0]["corpus"]["splits"]["train"]["sha256"] = "0" * 64
    Path("my.json").write_text(json.dumps(content))
    assert main(sweep) == 0
    assert re.search(
        r"0 of the 12 runs .*my\.json: text \(SHA-256 of its training tokens\) was 0+…",
        capsys.readouterr().err,
        re.DOTALL,
    )
    content["environments"][0]["libraries"]["torch"] = "1.0"
    Path("my.json").write_text(json.dumps(content))
    assert main(sweep) == 2
    assert "--from 'my.json': torch was 1.0, is 2." in capsys.readouterr().err
    assert main([*sweep[:-4], "--from", "my.yaml"]) == 2
    assert "'my.yaml' does not exist" in capsys.readouterr().err


def test_monitors_tell_of_the_final_gap_or_why_they_do_not(study, tmp_path, monkeypatch, capsys):
    """Runs are made up of two real ones: one figure goes with the gap, one does not, and the loss says nothing."""
    content = json.loads(study[0].read_text())
    assert main(["results", "monitors", str(study[0])]) == 2
    assert "too few runs" in capsys.readouterr().err
    reference, other = (row["runs"][0] for row in content["rows"])
    names = ["train/loss_smoothed", "grad/norm", "quant/kurtosis/weight", "stall/arrived"]

    def made(run, seed, figures, **changes):
        return {**run, "seed": seed, "steps_planned": 40, "looks": {"4": figures, "40": figures}, **changes}

    losses = [3.0, 3.2, 3.1, 3.4, 3.3, 3.0, 3.2, 3.1]
    content["monitors"] = names
    content["rows"][0]["runs"] = [made(reference, seed, [3.0, 1.0, 3.0, None], final_val_loss=2.0) for seed in range(8)]
    runs = [
        made(other, seed, [loss, float(seed % 3), seed + 3.0, 0.5], final_val_loss=2.0 + 0.015 * (seed - 2))
        for seed, loss in enumerate(losses)
    ]
    runs[-1] |= {"status": "failed", "final_val_loss": None}
    row = content["rows"][1]
    settings = [row["settings"] | {"optimizer": row["settings"]["optimizer"] | {"lr": 0.001 + at}} for at in range(8)]
    content["rows"][1:] = [
        {**row, "label": f"row {at}", "runs": [run], "settings": settings[at]} for at, run in enumerate(runs)
    ]
    (path := tmp_path / "many.json").write_text(json.dumps(content))
    assert main(["results", "monitors", str(path), str(path)]) == 0  # what both hold counts once
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if line}
    order = [*range(7), 8]  # of the gaps, the failed run's last
    of_loss = f"{spearmanr(losses, order).statistic:+.2f}"
    pairs = [(late > early) + (late == early) / 2 for late in losses[4:] for early in losses[:4]]
    assert rows["quant/kurtosis/weight"][:4] == ["8", "+1.00", "[+1.00, +1.00]", of_loss]
    assert rows["quant/kurtosis/weight"][4:6] == ["1.00", f"{sum(pairs) / len(pairs):.2f}"]
    assert float(rows["quant/kurtosis/weight"][-1]) < 0.05 < float(rows["grad/norm"][-1])
    assert "stall/arrived" not in rows  # the same everywhere
    assert rows["training loss"][:2] == ["8", of_loss]


@pytest.mark.parametrize("rows", [["x"], [{"start": {"lr": 1}, "trials": 5}], [{"start": 3, "cost": []}]])
def test_what_was_tuned_is_left_out_where_it_says_nothing(study, tmp_path, capsys, rows):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(json.loads(study[0].read_text()) | {"tuning": {"rows": rows}}))
    assert main(["results", "show", str(path)]) == 0
    assert "fp32" in capsys.readouterr().out


def test_no_label_commands_the_terminal(study, tmp_path, capsys):
    content = json.loads(study[0].read_text())
    content["rows"][1]["label"] = "E4M3 \x1b]0;title\x07"
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    assert main(["results", "show", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_commit_is_that_of_the_checkout():
    here = Path(__file__).parent
    said = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if said.returncode or not commit():
        pytest.skip("not a checkout")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", commit())
    assert commit().rstrip("+") == said.stdout.strip()


STUDY = Path(__file__).parents[3] / "study" / "results"


@pytest.mark.slow
def test_a_row_of_the_study_is_made_again(tmp_path, monkeypatch, capsys):
    """Of the study's results the shortest run of this torch and processor on the standard library's prose."""
    monkeypatch.chdir(tmp_path)
    files = sorted(STUDY.glob("*.json"))
    there = [(file, row, run) for file in files for row in read_export(file).rows for run in row.runs]
    same = [found for found in there if _could_be_made_here(found[2])]
    if not same:
        here = f"torch {torch.__version__}, {cpu_model()} and this Python's prose"
        pytest.skip(f"of {len(there)} runs of the study none is of {here}")
    file, row, run = min(same, key=lambda found: found[2].number("steps"))
    train_here(monkeypatch)
    assert main(["results", "rerun", str(file), "--row", row.label, "--seed", str(run.seed), "--out", "again"]) == 0
    assert "the recorded number to three decimals" in capsys.readouterr().out


def _could_be_made_here(run: Run) -> bool:
    source = run.environment["corpus"]["source"]
    here = (torch.__version__, cpu_model(), "stdlib", platform.python_version())
    of_run = (run.environment["libraries"]["torch"], run.environment["cpu"], source["kind"], source.get("python"))
    return run.status == "finished" and run.environment["gpu"] is None and of_run == here
