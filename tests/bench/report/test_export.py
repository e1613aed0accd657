"""Results files: the runs of a folder that is not finished, and files of the same runs."""

import csv
import json

import pytest
from bench_runs import summary_of
from run_folders import write_run

from nanogpt_bench.cli import main


@pytest.fixture
def unfinished(tmp_path):
    """A sweep of four rows and two seeds.

    Three runs ended, one half done, two not begun; one row was given up.
    """
    folder = tmp_path / "study"
    entries = []
    for rule, seed, final in (
        ("fp32", 3, 2.0),
        ("fp32", 4, 2.1),
        ("nearest", 3, 2.3),
        ("nearest", 4, 2.4),
    ):
        write_run(
            folder / f"{rule}-{seed}",
            rule=rule,
            fmt=FORMATS.get(rule, "none"),
            final=final,
            seed=seed,
        )
        entries.append({"name": f"{rule}-{seed}", "label": rule, "rule": rule, "seed": seed})
    (folder / "nearest-4" / "summary.json").unlink()
    order = ["fp32", "nearest", "stochastic", "sgd"]
    manifest = {"order": order, "baseline": "fp32", "mode": "tune", "runs": entries}
    (folder / "sweep.json").write_text(json.dumps(manifest))
    searches = [
        {
            "rows": [rule],
            "rule": rule,
            "format": FORMATS.get(rule, "none"),
            "over": rule != "stochastic",
        }
        | (
            {"best": None, "cost": {"runs": 3}}
            if rule in ("sgd", "stochastic")
            else {"best": {"optimizer.lr": 1e-3}}
        )
        for rule in order
    ]
    (folder / "tuning.json").write_text(
        json.dumps({"confirm": {"seeds": [3, 4]}, "rows": searches})
    )
    return folder


FORMATS = {"nearest": "E4M3", "stochastic": "E4M3"}


@pytest.mark.usefixtures("_no_figures")
def test_a_sweep_that_is_not_finished_says_how_much_of_it_there_is(tmp_path, unfinished, capsys):
    file = tmp_path / "new" / "partial.json"
    assert main(["results", "export", str(unfinished), "--out", str(file)]) == 0
    assert "3 runs of 6; 3 are missing" in capsys.readouterr().err
    content = [entry for entry in json.loads(file.read_text()) if entry["kind"] != "search"]
    assert [(entry["label"], entry["kind"], entry.get("seed")) for entry in content] == [
        *(("fp32", "run", 3), ("fp32", "run", 4)),
        *(("nearest", "run", 3), ("nearest", "missing", 4)),
        *(("stochastic", "missing", 3), ("stochastic", "missing", 4)),
        ("sgd", "given up", None),
    ]
    tables = {}
    for form in ("markdown", "csv"):
        assert main(["results", "show", str(file), "--table", form]) == 0, form
        tables[form] = capsys.readouterr().out
        assert "3 of 6 runs" in tables[form], form
    lines = {line.split()[1]: line for line in tables["markdown"].splitlines()}
    assert "+0.300, one seed: a hint" in lines["nearest"] or "one seed: a hint)" in lines["run"]
    assert "not run" in lines["stochastic"]
    assert "failed: none of 3 trials ended with a loss" in lines["sgd"]
    assert main(["report", str(file), "--out", str(tmp_path / "page")]) == 0
    assert "3 of 6 runs" in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize(
    "names",
    [
        ["before.json", "after.json"],
        ["after.json", "before.json"],
        ["before.json", "study"],
        ["after.json", "after.json", "study"],
    ],
    ids=" ".join,
)
def test_what_several_files_hold_counts_once(tmp_path, unfinished, names):
    old_file, new_file = tmp_path / "before.json", tmp_path / "after.json"
    assert main(["results", "export", str(unfinished), "--out", str(old_file)]) == 0
    write_run(tmp_path / "again", rule="nearest", fmt="E4M3", final=2.4, seed=4)
    (tmp_path / "again" / "summary.json").rename(unfinished / "nearest-4" / "summary.json")
    summary = summary_of(unfinished / "nearest-4") | {"name": "nearest-4"}
    (unfinished / "nearest-4" / "summary.json").write_text(json.dumps(summary))
    assert main(["results", "export", str(unfinished), "--out", str(new_file)]) == 0
    files = [str(tmp_path / name) for name in names]
    out = tmp_path / "page"
    assert main(["report", *files, "--out", str(out), "--reference", "fp32"]) == 0
    lines = {
        line["run"]: line for line in csv.DictReader((out / "results.csv").read_text().splitlines())
    }
    seeds = {label: line["seeds"] for label, line in lines.items() if line["seeds"] != "0"}
    assert seeds == {"fp32": "2", "E4M3 nearest": "2"}
    assert float(lines["E4M3 nearest"]["difference"]) == pytest.approx(0.3)
    assert lines["sgd"]["verdict"].startswith("failed: none of 3 trials")
    assert [line.get("partial") for line in lines.values()] == ["4 of 6 runs"] * 4
