"""A sweep that goes on.

What is left when it is started again, or was interrupted, and what it shows meanwhile.
"""

import csv
import os
import shutil
import signal
from pathlib import Path

import forked
import pytest
from bench_runs import wait_until
from sweep_runs import read_json, runs_of, trained

from nanogpt_bench.checkpoint import steps
from nanogpt_bench.cli import main
from nanogpt_bench.config.schema import TrainConfig
from nanogpt_bench.data.text import prepare_text
from nanogpt_bench.sweep import workers as pool_module
from nanogpt_bench.sweep.workers import cores, serve


@pytest.mark.usefixtures("_stub_workers")
def test_failures_are_recorded_and_only_what_is_left_is_done_again(write, capsys, monkeypatch):
    def swept(*rates):
        path = write(axes={"optimizer.lr": [*rates]}, settings={"rule": "sgd"})
        return main(["sweep", str(path), "--out", "out", "--workers", "1"])

    monkeypatch.setenv("STUB_MEMORY", "too little")
    assert swept(0.1, 0.2, 13, 0.4) == 1
    out, names = Path("out"), [f"sgd-lr={lr}-seed=42" for lr in ("0.1", "0.2", "13", "0.4")]
    assert [name for name in names if name != names[2]] == trained()
    runs = runs_of(out)
    assert list(runs) == names
    assert [runs[name]["status"] for name in names] == ["finished", "finished", "failed", "failed"]
    assert [runs[name]["failure"] for name in names] == [None, None, "crash", "nan"]
    assert runs[names[3]]["failures"] == ["divergence", "nan"]
    assert "out of memory" in read_json(out / names[2] / "summary.json")["failure"]["message"]
    output = capsys.readouterr()
    assert output.out.strip().splitlines()[-1] == str(out / "report.html")
    assert "runs that did not end: 1; the same command continues" in output.err
    # A failure of the training stays, a crash is tried again.
    assert swept(0.1, 0.2, 0.4) == 0
    assert trained() == []
    monkeypatch.setenv("STUB_MEMORY", "enough")
    assert swept(0.1, 0.2, 13, 0.4) == 0
    assert trained() == [names[2]]
    assert runs_of(out)[names[2]]["status"] == "finished"
    # One run was cut off, and the axis has grown: these two are done, the others left
    # as they are.
    (out / names[1] / "summary.json").unlink()
    assert swept(0.1, 0.2, 13, 0.4, 0.05) == 0
    assert sorted(trained()) == ["sgd-lr=0.05-seed=42", names[1]]
    assert len(runs_of(out)) == 5


@pytest.mark.usefixtures("_stub_workers")
def test_a_crash_is_recorded_where_the_file_does_not_say_how_many_steps(write, monkeypatch):
    monkeypatch.setenv("STUB_MEMORY", "too little")
    path = write(
        axes={"optimizer.lr": [0.1, 13]}, settings={"rule": "sgd", "train": {"batch_size": 2}}
    )
    assert main(["sweep", str(path), "--out", "out", "--workers", "1"]) == 1
    summary = read_json(Path("out/sgd-lr=13-seed=42/summary.json"))
    assert "out of memory" in summary["failure"]["message"]
    assert summary["steps_planned"] == TrainConfig().max_steps


@pytest.mark.usefixtures("_stub_workers")
def test_a_run_whose_folder_was_deleted_is_trained_again(write, monkeypatch):
    axes = {"optimizer.lr": [0.1, 0.2], "seed": [1, 2]}
    command = [
        "sweep",
        str(write(axes=axes, settings={"rule": "sgd"})),
        "--out",
        "out",
        "--workers",
        "1",
    ]
    assert main(command) == 0
    trained()
    old_runs, gone = runs_of(Path("out")), "sgd-lr=0.2-seed=2"
    shutil.rmtree(Path("out") / gone)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "SERVE", lambda job: os._exit(1))
        assert main(command) == 1
        assert [run["ended"] for run in runs_of(Path("out")).values()] == [True, True, True, False]
    assert main(command) == 0
    assert trained() == [gone]
    assert runs_of(Path("out")) == old_runs
    assert {
        row["seeds"] for row in csv.DictReader(Path("out/results.csv").read_text().splitlines())
    } == {"2"}


@pytest.mark.usefixtures("_stub_workers")
def test_other_settings_under_the_same_names_are_refused(write, capsys):
    axes = {"optimizer.lr": [0.1]}
    assert main(["sweep", str(write(axes=axes)), "--out", "out"]) == 0
    old_manifest = (Path("out") / "sweep.json").read_bytes()
    assert main(["sweep", str(write(axes=axes)), "--out", "out", "--train.max_steps", "5"]) == 2
    assert "train.max_steps 4, but now it would be 5" in capsys.readouterr().err.splitlines()[-1]
    assert main(["sweep", str(write(axes={"seed": [1]}, search="random")), "--out", "out"]) == 2
    assert "mode 'grid'" in capsys.readouterr().err.splitlines()[-1]
    assert (Path("out") / "sweep.json").read_bytes() == old_manifest
    Path("other").mkdir()
    (Path("other") / "mine.txt").write_text("x")
    assert main(["sweep", str(write(axes=axes)), "--out", "other"]) == 2
    assert [path.name for path in Path("other").iterdir()] == ["mine.txt"]


@pytest.mark.usefixtures("_forked_workers", "_no_figures")
def test_a_corpus_prepared_anew_is_refused(write, working_folder, corpus_dir, capsys):
    text = shutil.copytree(corpus_dir, working_folder / "text")
    lines = [
        [
            "sweep",
            str(write(axes={"seed": seeds}, settings={"rule": "sgd"})),
            "--out",
            "out",
            "--data.dir",
            str(text),
        ]
        for seeds in ([1], [1, 2])
    ]
    assert main(lines[0]) == 0
    old_manifest = (working_folder / "out" / "sweep.json").read_bytes()
    shutil.rmtree(text)
    assert (
        main(["prepare", "text", "--input", __file__, "--tokenizer", "byte", "--out", str(text)])
        == 0
    )
    assert main(lines[1]) == 2
    assert "'sgd-seed=1' in 'out' was trained on (its sha256 differs)" in capsys.readouterr().err
    assert (working_folder / "out" / "sweep.json").read_bytes() == old_manifest


def train_and_replace(job):
    """Train, and have another text prepared in the folder of the first one meanwhile."""
    ended = serve(job)
    if not Path("kept").exists():
        shutil.copytree("text", "kept")
        prepare_text(Path("other.txt"), Path("text"), "char", replace=True)
    return ended


@pytest.mark.usefixtures("_forked_workers", "_no_figures")
@pytest.mark.parametrize("key", ["data.dir", "eval.also"])
def test_a_corpus_replaced_while_a_sweep_runs_ends_it(
    key, write, working_folder, text_file, capsys
):
    text, original = working_folder / "text", working_folder / "kept"
    prepare_text(text_file, text, "char")
    other_text = working_folder / "other.txt"
    other_text.write_text(text_file.read_text().replace("dogs", "gods"))
    line = ["sweep", str(write(axes={"seed": [1, 2, 3]}, settings={"rule": "sgd"}))]
    line += ["--out", "out", "--workers", "1", f"--{key}", str(text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "SERVE", train_and_replace)
        assert main(line) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"{str(text)!r} has changed since this sweep began (its sha256 differs)" in message
    assert "1 of 3 runs in 'out' have ended on the text as it was" in message
    assert [run["ended"] for run in runs_of(Path("out")).values()] == [True, False, False]
    assert [path.parent.name for path in Path("out").glob("*/metrics.jsonl")] == ["sgd-seed=1"]
    shutil.rmtree(text)
    shutil.copytree(original, text)
    assert main(line) == 0
    assert [run["status"] for run in runs_of(Path("out")).values()] == ["finished"] * 3


@pytest.mark.usefixtures("_forked_workers")
@pytest.mark.skipif(cores() < 2, reason="two runs at a time need two cores")
def test_an_interrupted_sweep_goes_on_and_past_a_run_that_fails(write, tmp_path):
    axes = {"train.max_steps": [3, 100_000], "optimizer.lr": [0.1]}
    settings = {"rule": "sgd", "optimizer.grad_clip": 0.0, "optimizer.warmup_steps": 0}
    line = ["sweep", str(write(settings=settings, axes=axes)), "--out", "out", "--workers", "2"]
    group = forked.start(tmp_path, lambda: main(line), own_group=True)
    short, endless = (f"sgd-max_steps={steps}-lr=0.1-seed=42" for steps in (3, 100_000))
    records = Path("out") / endless / "metrics.jsonl"
    try:
        wait_until(
            lambda: (
                (Path("out") / short / "summary.json").exists()
                and records.exists()
                and records.read_bytes().count(b"\n") > 3
            )
        )
        os.killpg(group, signal.SIGINT)
        assert forked.finish(group) == 75, forked.output_of(tmp_path)
    finally:
        forked.kill_group(group)
    assert forked.output_of(tmp_path).strip().splitlines()[-1] == str(Path("out") / "report.html")
    runs = runs_of(Path("out"))
    assert (runs[short]["ended"], runs[short]["status"]) == (True, "finished")
    assert runs[endless]["ended"] is False
    assert read_json(Path("out") / endless / "summary.json")["status"] == "stopped"
    assert steps(
        Path("out") / endless
    )  # the signal went to the whole group, and its worker has put the run by
    written_at = (Path("out") / short / "summary.json").stat().st_mtime_ns
    # Started again, with the endless run taken out of the plan: the one that had ended
    # is not trained again.
    path = write(settings=settings, axes={"train.max_steps": [3], "optimizer.lr": [0.1, 1e30]})
    assert main(["sweep", str(path), "--out", "out"]) == 0
    runs = runs_of(Path("out"))
    assert (Path("out") / short / "summary.json").stat().st_mtime_ns == written_at
    wild = runs["sgd-max_steps=3-lr=1e+30-seed=42"]
    assert (wild["status"], wild["failure"], wild["final_val_loss"]) == ("failed", "nan", None)
    assert endless in runs
