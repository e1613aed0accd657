"""Results as one file: what is exported is what the tables and the page are drawn from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanogpt_bench.cli import main
from nanogpt_bench.report import build
from nanogpt_bench.runs.environment import commit


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
    patch.setattr(build, "write_figures", lambda *_: None)
    assert main(["sweep", str(folder / "my.yaml"), "--out", str(folder / "out"), "--workers", "1"]) == 0
    assert main(["results", "export", str(folder / "out"), "--out", str(folder / "my.json")]) == 0
    tables = {name: (folder / "out" / name).read_text() for name in ("table.md", "table.tex", "results.csv")}
    shutil.rmtree(folder / "out")
    yield folder / "my.json", tables
    patch.undo()


def test_tables_and_page_are_drawn_without_the_run_folders(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "write_figures", lambda *_: None)
    file, tables = study
    for form, name in (("markdown", "table.md"), ("latex", "table.tex"), ("csv", "results.csv")):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "else"}, "holds no results"),
        ({"version": 99}, "is of version 99"),
        ({"rows": 3}, "can't be read"),
        ({"environments": []}, "can't be read"),
        ({"environments": ["x", "y", "z"]}, "can't be read"),
        ({"tuning": {"rows": 3}}, "can't be read"),
    ],
)
def test_a_file_that_is_none_is_refused_in_a_line(study, tmp_path, capsys, change, message):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(json.loads(study[0].read_text()) | change))
    assert main(["results", "show", str(path)]) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "."], "--out is missing"),
        (["export", ".", "--out", "x.json"], "holds no results"),
        (["export", ".", "--out", "x.txt"], "ends in .json"),
        (["show", "x.json", "--out", "y.json"], "--out goes with results export"),
        (["show", "x.json"], "can't be read"),
    ],
)
def test_words_and_options_that_do_not_go_together_are_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["results", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_commit_is_that_of_the_checkout():
    here = Path(__file__).parent
    said = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if said.returncode or not commit():
        pytest.skip("not a checkout")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", commit())
    assert commit().rstrip("+") == said.stdout.strip()
