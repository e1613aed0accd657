"""`compare` and `sweep` interrupted.

The same command again has the same bits as without the interruption.
"""

import argparse
import csv
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from forked import finish, output_of, start
from small_runs import BASE, differences, traces

from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.cli import main, parse
from nanogpt_bench.commands import compare as command
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.loop.train import run
from nanogpt_bench.runs.load import drop_checkpoints
from nanogpt_bench.sweep import workers as pool
from nanogpt_bench.sweep.comparison import comparison as comparison_of
from nanogpt_bench.sweep.comparison import read_overrides
from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import plan_sweep
from nanogpt_bench.system.signals import RESUMABLE

#: time enough for a signal to reach a worker
STEPS = 400
SMALL = {
    **{key: value for key, value in BASE.items() if key.startswith("model.")},
    "train.batch_size": 2,
    "eval.batches": 1,
    # So that there are final weights to be compared, and no other checkpoint beside
    # them.
    "checkpoint.last": True,
    "checkpoint.keep": 1,
}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Reports without their pictures and workers that find torch imported.

    These take most of the time, and no part in this.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanogpt_bench.report.write_figures", lambda *_: None)
        patch.setattr(pool, "CONTEXT", "fork")
        patch.setattr(pool, "most_workers", lambda *_: 1)
        yield


#: runs that take a second or two, one after the other
ROWS = {"formats": ["E4M3"], "rules": ["stochastic", "nearest"], "max_steps": STEPS}


def words(settings):
    return [f"--{key}={json.dumps(value)}" for key, value in settings.items()]


def await_that(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.01)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def taken_up_at(run_dir):
    return [entry["step"] for entry in read_json(run_dir / "environment.json").get("resumed", [])]


def table(folder):
    return [*csv.DictReader((folder / "results.csv").read_text(encoding="utf-8").splitlines())]


@pytest.fixture(scope="module")
def interrupted(small_corpus, tmp_path_factory):
    """A folder where a comparison was stopped in its second run.

    It was gone on with, and started a third time.
    """
    folder = tmp_path_factory.mktemp("compare")
    out, going = folder / "again" / "out", comparison(small_corpus)
    pid = start(folder / "again", going)
    metrics = out / "E4M3-stochastic-seed=42" / "metrics.jsonl"
    await_that(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 30)
    os.kill(pid, signal.SIGTERM)
    assert finish(pid) == RESUMABLE, output_of(folder / "again")
    os.rename(folder / "again" / "output.txt", folder / "first.txt")
    statuses = {path.parent.name: read_json(path)["status"] for path in out.glob("*/summary.json")}
    assert statuses == {"bf16-mixed-seed=42": "finished", "E4M3-stochastic-seed=42": "stopped"}
    old_traces = traces(out / "bf16-mixed-seed=42")
    assert finish(start(folder / "again", going)) == 0, output_of(folder / "again")
    assert differences(old_traces, traces(out / "bf16-mixed-seed=42")) == []
    return folder


def comparison(corpus, **settings):
    options = {"data_dir": corpus, "out": Path("out"), "overrides": words(SMALL | settings), **ROWS}
    return lambda: compared(**options)


def compared(**options):
    return command.main(argparse.Namespace(**{**vars(parse(["compare"])), **options}))


def planned_of(corpus, **settings):
    return plan_sweep(
        comparison_of(**ROWS, data_dir=corpus, settings=read_overrides(words(SMALL | settings)))
    )


def test_an_interrupted_comparison_goes_on_and_ends_with_the_same_bits(interrupted, small_corpus):
    out = interrupted / "again" / "out"
    planned = planned_of(small_corpus)
    for one in planned:
        run(build_config(one.settings), interrupted / one.name)
        assert differences(traces(interrupted / one.name), traces(out / one.name)) == [], one.name
        assert step_file(out / one.name, STEPS).is_file()
    assert [taken_up_at(out / one.name) != [] for one in planned] == [False, True, False]
    assert 30 <= taken_up_at(out / planned[1].name)[0] < STEPS
    assert [line["run"] for line in table(out)] == ["bf16-mixed", "E4M3 stochastic", "E4M3 nearest"]
    assert {run["status"] for run in read_json(out / "sweep.json")["runs"]} == {"finished"}
    assert "2 runs, 1 done already" in output_of(interrupted / "again")


def test_a_finished_comparison_is_only_reported_again(interrupted, small_corpus):
    out = interrupted / "again" / "out"
    old_times = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    expected = table(out)
    (out / "results.csv").unlink()
    assert finish(start(interrupted / "again", comparison(small_corpus))) == 0
    assert (
        output_of(interrupted / "again").splitlines()[0]
        == "all runs of out have ended; there is nothing to train"
    )
    assert "running" not in output_of(interrupted / "again")
    assert {path: path.stat().st_mtime_ns for path in old_times} == old_times
    assert table(out) == expected


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("max_steps", 7, f"train.max_steps {STEPS}, but now it would be 7"),
        ("data_dir", Path("again/out"), "data.dir"),
    ],
    ids=["max_steps", "data_dir"],
)
def test_settings_that_changed_are_refused(interrupted, small_corpus, option, value, named):
    out = interrupted / "again" / "out"
    old_manifest = (out / "sweep.json").read_bytes()
    settings = {"data_dir": small_corpus, "overrides": words(SMALL), **ROWS, "out": out}
    settings[option] = interrupted / value if option == "data_dir" else value
    with pytest.raises(ValueError, match=rf"with {named}.*; give a new folder"):
        compared(**settings)
    assert (out / "sweep.json").read_bytes() == old_manifest


@pytest.mark.parametrize("content", ["[1", "{}"])
def test_a_record_that_can_not_be_read_is_refused(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ValueError, match="can't be read"):
        compared(out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


#: steps taken in the backward pass, whose hooks have to outlive what a checkpoint does
#: to the optimizer
IN_BACKWARD = {"train.step_in_backward": True, "optimizer.grad_clip": 0.0, "shadow.enabled": False}


def await_checkpoint(run_dir):
    await_that(lambda: any((run_dir / "checkpoints").glob("step-*.safetensors")))


def test_a_command_that_is_killed_takes_its_workers_along(small_corpus, tmp_path):
    saving = {"checkpoint.every": 5}
    first = planned_of(small_corpus, **saving)[0]
    pid, run_dir = (
        start(tmp_path, comparison(small_corpus, **saving)),
        tmp_path / "out" / first.name,
    )
    await_checkpoint(run_dir)
    os.kill(pid, signal.SIGKILL)
    assert finish(pid) == -signal.SIGKILL
    await_that((run_dir / "summary.json").is_file)
    assert read_json(run_dir / "summary.json")["stop"]["kind"] == "signal"
    await_that(
        lambda: not os.path.exists(run_dir / ".lock")
    )  # so that the same command can have the folder
    assert finish(start(tmp_path, comparison(small_corpus, **saving))) == 0, output_of(tmp_path)
    assert 5 <= taken_up_at(run_dir)[0] < STEPS


def test_a_run_whose_worker_is_killed_is_left_for_the_same_command(small_corpus, tmp_path):
    settings = {**SMALL, "data.dir": str(small_corpus), "rule": "stochastic", "runtime.threads": 1}
    settings |= {"checkpoint.every": 5, "train.max_steps": STEPS, **IN_BACKWARD}
    path, out = tmp_path / "my.yaml", tmp_path / "out"
    path.write_text(
        yaml.safe_dump({"settings": settings, "axes": {"model.format": ["E4M3", "E5M2"]}})
    )
    first, second = plan_sweep(read_sweep(path))
    words = ["sweep", str(path), "--out", "out", "--workers", "1"]
    pid = start(tmp_path, lambda: main(words))
    await_checkpoint(out / first.name)
    (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)  # as the OOM killer does
    assert finish(pid) == 1, output_of(tmp_path)
    assert "runs that did not end: 1; the same command continues them" in output_of(tmp_path)
    assert "its process was killed" in output_of(tmp_path)
    assert [entry["ended"] for entry in read_json(out / "sweep.json")["runs"]] == [False, True]
    summary = read_json(out / first.name / "summary.json")
    assert (summary["status"], summary["failure"], summary["stop"]["kind"]) == (
        "stopped",
        None,
        "killed",
    )
    assert read_json(out / second.name / "summary.json")["status"] == "finished"
    assert finish(start(tmp_path, lambda: main(words))) == 0, output_of(tmp_path)
    assert 5 <= taken_up_at(out / first.name)[0] < STEPS
    assert taken_up_at(out / second.name) == []
    run(build_config(first.settings), tmp_path / first.name)
    assert differences(traces(tmp_path / first.name), traces(out / first.name)) == []


@pytest.mark.parametrize(
    ("status", "settings", "is_kept"),
    [
        *(
            ("finished", settings, bool(settings))
            for settings in ({}, {"checkpoint.last": True}, {"checkpoint.best": True})
        ),
        *((status, {}, True) for status in ("failed", "stopped", None)),
    ],
)
def test_a_run_among_many_keeps_no_checkpoint_once_it_has_finished(
    status, settings, is_kept, tmp_path
):
    (tmp_path / "checkpoints" / "step-6").mkdir(parents=True)
    if status is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
    drop_checkpoints(tmp_path, settings)
    assert (tmp_path / "checkpoints").exists() is is_kept
    (tmp_path / ".checkpoints.removed" / "step-6").mkdir(parents=True)  # as a kill leaves it
    drop_checkpoints(tmp_path, settings)
    assert (tmp_path / ".checkpoints.removed").exists() is is_kept
