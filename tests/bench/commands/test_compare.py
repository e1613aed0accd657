"""The main job end to end on a few steps, and what it does when something goes wrong."""

import csv
import json
import os
import re
import signal
import sys
from collections import deque
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from bench_runs import flags, refusal, summary_of, wait_until

from nanogpt_bench.cli import main
from nanogpt_bench.config.rules import RULES, ExtraPackage, Rule
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.report import report
from nanogpt_bench.sweep import session
from nanogpt_bench.sweep import workers as pool_module
from nanogpt_bench.sweep.comparison import choose_rows, comparison, label, shipped
from nanogpt_bench.sweep.file import find_sweep, read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.sweep.workers import Pool


@pytest.fixture
def run_cli(working_folder, capsys):
    """Return a function that runs the command in an empty folder.

    It returns the exit code, what was printed, and the errors.
    """
    return lambda *arguments: (main(["compare", *arguments]), *capsys.readouterr())


SMALL = flags({"model.n_layer": 1, "model.n_embd": 32, "model.block_size": 16})


def read_table(folder):
    return list(csv.DictReader((folder / "results.csv").read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize(("executor", "workers"), [("local", 2), ("ray", 8)])
def test_a_cluster_takes_as_many_runs_as_it_has_cores(run_cli, monkeypatch, executor, workers):
    """The file's two workers are for a small machine."""
    taken = []

    @contextmanager
    def with_eight_cores(*_):
        yield SimpleNamespace(cores=lambda: 8)

    def sweep_grid(_sweep, _folder, count, *_, **__):
        taken.append(count)
        return 0

    monkeypatch.setattr(pool_module, "executor_of", with_eight_cores)
    monkeypatch.setattr(session, "sweep_grid", sweep_grid)
    assert run_cli("--executor", executor)[0] == 0
    assert taken == [workers]


def test_formats_cross_rules_and_the_reference_comes_first():
    assert ", ".join(map(label, choose_rows(None, None))) == (
        "bf16-mixed, fp32, muon, E4M3 master, E4M3 nearest, E4M3 stochastic, E4M3 stochastic-8bit, "
        "E4M3 stiffness-anneal, E4M3 muon-stochastic, E2M5 muon-stochastic, E7M0 nearest, E7M0 "
        "stochastic"
    )
    rows = choose_rows(["e4m3", "E7M0", "E4M3"], ["nearest", "fp32", "stochastic"])
    crossed = ["E4M3 nearest", "E4M3 stochastic", "E7M0 nearest", "E7M0 stochastic"]
    assert [*map(label, rows)] == ["bf16-mixed", "fp32", *crossed]


def test_all_leaves_out_what_is_not_installed_and_naming_it_says_so(monkeypatch):
    monkeypatch.setitem(
        RULES,
        "absent",
        Rule("float32", "adamw", 1e-3, needs=ExtraPackage("no_such_package", "fisher")),
    )
    assert "absent" not in {row["rule"] for row in choose_rows(None, ["all"])}
    with refusal("needs no_such_package"):
        choose_rows(None, ["all", "absent"])


ENDS = ("done", "failed")


def stub(job):
    if job.get("die"):
        os.write(2, b"out of memory\n")
        os._exit(9)
    if job.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"kind": "done", "pid": os.getpid()}


@pytest.fixture
def _stub_workers(monkeypatch, _forked_workers):
    monkeypatch.setattr(pool_module, "SERVE", stub)


@pytest.mark.usefixtures("_stub_workers")
def test_workers_are_used_again_and_all_jobs_end():
    with Pool(2) as pool:
        events = [
            event
            for event in pool.run([{} for _ in range(6)], [5, 0, 1, 2, 3, 4])
            if event.job is not None
        ]
    assert [event.job for event in events if event.kind == "started"] == [5, 0, 1, 2, 3, 4]
    assert sorted(event.job for event in events if event.kind == "done") == list(range(6))
    assert len({event.data["pid"] for event in events if event.kind == "done"}) <= 2


@pytest.mark.usefixtures("_stub_workers")
def test_jobs_that_follow_from_one_are_shared_by_all_workers():
    """A search that ends with one trial, and the runs that wait for it.

    A worker that had nothing to do takes part.
    """
    jobs, waiting, busy, most_busy = [{}], deque([0]), set(), 0
    with Pool(2) as pool:
        for event in pool.run(jobs, waiting):
            if event.kind == "started":
                busy.add(event.job)
                most_busy = max(most_busy, len(busy))
            elif event.kind in ENDS:
                busy.remove(event.job)
                if event.job == 0:
                    jobs += [{} for _ in range(4)]
                    waiting += range(1, 5)
    assert (most_busy, len(jobs), busy) == (2, 5, set())


@pytest.mark.usefixtures("_stub_workers")
def test_a_worker_that_dies_or_is_killed_fails_its_job_and_no_other():
    jobs = [{}, {"die": True}, {}, {"killed": True}, {}]
    with Pool(1) as pool:
        ends = {event.job: event for event in pool.run(jobs, range(5)) if event.kind in ENDS}
    assert [ends[job].kind for job in range(5)] == ["done", "failed", "done", "failed", "done"]
    assert (
        ends[1].data["error"]["message"] == "worker process ended with exit code 9: out of memory"
    )
    assert ends[3].data["error"]["kind"] == "killed"


@pytest.mark.usefixtures("_forked_workers")
def test_a_comparison_from_start_to_report(run_cli, tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(
        "nanogpt_bench.data.text.prepare_stdlib",
        lambda folder, **_: prepare_text(text_file, folder, "byte"),
    )
    options = ("--rules", "fp32,nearest", "--max-steps", "6", "--seeds", "2", "--out", "out")
    code, printed, errors = run_cli(*options, *SMALL)
    assert code == 0, errors
    out = tmp_path / "out"
    assert printed.strip().splitlines()[-1] == str(Path("out") / "report.html")
    runs = product(("bf16-mixed", "fp32", "E4M3-nearest"), (42, 43))
    assert {path.name for path in out.iterdir()} == {
        *(f"{name}-seed={seed}" for name, seed in runs),
        *("figures", "sweep.json", "report.html", "results.csv", "table.md"),
    }
    table = read_table(out)
    assert [(line["run"], line["seeds"]) for line in table] == [
        ("bf16-mixed", "2"),
        ("fp32", "2"),
        ("E4M3 nearest", "2"),
    ]
    assert table[0]["verdict"] == "reference"
    assert 0 <= float(table[2]["stall"]) <= 1
    bytes_of_rows = [float(line["bytes_per_parameter"]) for line in table]
    assert bytes_of_rows == pytest.approx(
        [12.0, 12.0, 9.99], abs=0.01
    )  # measured; embeddings and norms stay floats
    manifest = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert (manifest["mode"], manifest["baseline"]) == ("compare", "bf16-mixed")
    assert {run["status"] for run in manifest["runs"]} == {"finished"}
    # The folder alone tells the same story again.
    monkeypatch.setattr("nanogpt_bench.report.write_figures", lambda *_: None)
    report([out], out=tmp_path / "again")
    again, first = (
        (folder / "results.csv").read_text().splitlines() for folder in (tmp_path / "again", out)
    )
    assert sorted(again) == sorted(first)
    # And against another row: nothing is trained again.
    code, _, errors = run_cli(*options, *SMALL, "--reference", "fp23")
    assert (code, "did you mean 'fp32'" in errors) == (2, True)
    assert run_cli(*options, *SMALL, "--reference", "fp32")[0] == 0
    bf16, fp32, nearest = read_table(out)
    assert (fp32["verdict"], fp32["gap"], bf16["difference_seeds"]) == ("reference", "0.0", "2")
    losses = [float(row["final_val_loss"]) for row in (nearest, fp32)]
    assert float(nearest["difference"]) == pytest.approx(losses[0] - losses[1])
    assert json.loads((out / "sweep.json").read_text(encoding="utf-8"))["baseline"] == "fp32"
    assert "gap to fp32" in (out / "table.md").read_text(encoding="utf-8")
    # And as one file, whose page is that of the folder.
    assert main(["results", "export", "out", "--out", "results.json"]) == 0
    content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [entry["label"] for entry in content] == ["bf16-mixed"] * 2 + ["fp32"] * 2 + [
        "E4M3 nearest"
    ] * 2
    assert main(["report", "results.json", "--out", "of_file"]) == 0
    columns = ("run", "seeds", "gap", "final_val_loss", "verdict")

    def compared(folder):
        return [[line[column] for column in columns] for line in read_table(folder)]

    assert compared(tmp_path / "of_file") == compared(out)


@pytest.mark.usefixtures("_forked_workers", "_no_figures")
def test_every_row_takes_two_steps_on_every_processor(run_cli, tmp_path, corpus_dir, products):
    code, _, errors = run_cli(
        "--data.dir", str(corpus_dir), *SMALL, "--max-steps", "2", "--out", "out"
    )
    assert code == 0, errors
    runs = json.loads((tmp_path / "out" / "sweep.json").read_text(encoding="utf-8"))["runs"]
    assert [run["status"] for run in runs] == ["finished"] * len(choose_rows(None, None))


@pytest.mark.usefixtures("_forked_workers")
def test_ctrl_c_stops_the_workers_and_reports_what_there_is(tmp_path, corpus_dir):
    line = [
        "compare",
        "--data.dir",
        str(corpus_dir),
        *SMALL,
        "--max-steps",
        "100000",
        "--out",
        "out",
    ]
    group = forked.start(tmp_path, lambda: main(line), own_group=True)
    try:
        metrics = tmp_path / "out" / "bf16-mixed-seed=42" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
        os.killpg(group, signal.SIGINT)  # as a terminal does: to the whole group
        assert forked.finish(group) == 75, forked.output_of(tmp_path)
        assert (
            str(Path("out") / "report.html") in forked.output_of(tmp_path).strip().splitlines()[-2:]
        )
        assert summary_of(tmp_path / "out" / "bf16-mixed-seed=42")["status"] == "stopped"
        table = {line["run"]: line for line in read_table(tmp_path / "out")}
        assert re.fullmatch(r"stopped: SIG\w+ after step \d+", table["bf16-mixed"]["verdict"])
        assert table["E7M0 stochastic"]["verdict"] == "not run"
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)  # nobody of the group is left
    finally:
        forked.kill_group(group)


def test_the_command_that_goes_on_says_where(run_cli, monkeypatch):
    """Without --out the same command would begin anew.

    The folder's name has the time.
    """
    questions = []
    monkeypatch.setattr(
        session, "sweep_grid", lambda *_, **options: questions.append(options["again"]) or 0
    )
    monkeypatch.setattr(sys, "argv", ["nanogpt-bench", "compare", "--formats", "E4M3"])
    assert run_cli("--formats", "E4M3")[0] == 0
    assert run_cli("--formats", "E4M3", "--out", "out")[0] == 0
    assert questions[0].startswith("nanogpt-bench compare --formats E4M3 --out runs/compare-")
    assert questions[1] is None


def test_the_shipped_sweep_is_the_comparison(tmp_path):
    planned, shipped = plan_sweep(comparison()), plan_sweep(read_sweep(find_sweep("compare.yaml")))
    assert [(run.label, run.settings) for run in shipped] == [
        (run.label, run.settings) for run in planned
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("rows: 3", "give a list"),
        ("rows: [{model.format: E4M3}]", "has no rule"),
        ("rows: [{rule: fp32}]\naxes: {rule: [fp32]}", "its rows set it already"),
    ],
)
def test_wrong_rows_are_refused(content, words, tmp_path):
    (tmp_path / "my.yaml").write_text(content)
    with refusal(words):
        read_sweep(tmp_path / "my.yaml")


def test_rows_of_a_file_differ_in_their_settings(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "rows: [{rule: sgd, optimizer.momentum: 0.5}, {rule: sgd, optimizer.momentum: 0.9}]"
    )
    assert [run.label for run in plan_sweep(read_sweep(path))] == [
        "sgd momentum=0.5",
        "sgd momentum=0.9",
    ]
    with refusal("sets it in its rows"):
        read_sweep(path, ["--optimizer.momentum", "0.1"])
    assert main(["sweep", str(path), "--sensitivity", "--out", str(tmp_path / "out")]) == 2


def test_a_file_of_its_name_in_the_working_folder_changes_no_comparison(working_folder):
    first_comparison = comparison()
    shipped.cache_clear()
    (working_folder / "compare.yaml").write_text("settings: {rule: fp32}\naxes: {seed: [1]}\n")
    assert comparison() == first_comparison
