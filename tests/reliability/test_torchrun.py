"""Runs in several processes of torchrun.

Stopped, killed, gone on with by as many or others, and refused.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import small_runs

from nanogpt_bench.checkpoint import step_file, steps
from nanogpt_bench.cli import main
from nanogpt_bench.system.ranks import LOST
from nanogpt_bench.system.signals import RESUMABLE

#: seconds within which a killed process has to end the run
WITHIN_S = 10.0
PATIENCE_S = 180.0
ENDLESS = 100_000


def words(corpus, **overrides):
    settings = {
        "checkpoint.every": 3,
        "shadow.enabled": False,
        "train.parallel": "ddp",
        "model.dropout": 0.1,
    }
    return small_runs.words(
        "codes residual8",
        corpus,
        settings | {k.replace("__", "."): v for k, v in overrides.items()},
    )


@contextmanager
def started(folder, words, processes):
    """A command that goes on, with its output in output.txt.

    Nothing of it is left afterwards.
    """
    folder.mkdir(exist_ok=True)
    ranks = (
        f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
        if processes > 1
        else []
    )
    command = [sys.executable, *ranks, "-m", "nanogpt_bench", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "output.txt").open("ab") as output:
        child = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        yield child
    finally:
        if child.poll() is None:
            for process in (*children_of(child), child.pid):
                os.kill(process, signal.SIGKILL)
        child.wait()


def finished(folder, words, processes):
    with started(folder, words, processes) as child:
        return child.wait(PATIENCE_S)


def output_of(folder):
    """The command's own lines, without torchrun's about it."""
    return [
        line
        for line in (folder / "output.txt").read_text().splitlines()
        if line.startswith("nanogpt-bench")
    ]


def children_of(child):
    return [
        int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    ]


def ranks_of(child):
    """The processes that torchrun has started, in the order of their ranks."""
    ranks = {}
    for pid in children_of(child):
        words = dict(
            word.partition("=")[::2]
            for word in Path(f"/proc/{pid}/environ").read_text().split("\0")
        )
        if "TORCHELASTIC_RUN_ID" in words:
            ranks[int(words["RANK"])] = pid
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_step(child, run_dir, step):
    deadline = time.monotonic() + PATIENCE_S
    while not step_file(run_dir, step).exists():
        assert child.poll() is None, (run_dir.parent.parent / "output.txt").read_text()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def without_peaks(content):
    if isinstance(content, dict):
        return {key: without_peaks(value) for key, value in content.items() if key != "peak_bytes"}
    return [without_peaks(value) for value in content] if isinstance(content, list) else content


@pytest.fixture(scope="module")
def whole(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    assert finished(folder, words(small_corpus), 2) == 0, (folder / "output.txt").read_text()
    assert main(["verify", str(folder / "runs" / "r")]) == 0
    return without_peaks(small_runs.traces(folder / "runs" / "r"))


@pytest.mark.parametrize(
    "signal_name", ["torchrun", pytest.param("a rank", marks=pytest.mark.slow)]
)
def test_a_signal_stops_all_and_as_many_go_on_to_the_bit(
    small_corpus, tmp_path, whole, signal_name
):
    run_dir = tmp_path / "runs" / "r"
    with started(tmp_path, words(small_corpus), 2) as child:
        wait_for_step(child, run_dir, 6)
        if signal_name == "torchrun":
            child.terminate()
        else:
            os.kill(ranks_of(child)[1], signal.SIGTERM)
        child.wait(PATIENCE_S)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stop"]["kind"] == "signal", (tmp_path / "output.txt").read_text()
    assert step_file(run_dir, summary["steps"]).is_file()
    assert (
        signal_name == "torchrun"
        or f"exitcode  : {RESUMABLE}" in (tmp_path / "output.txt").read_text()
    )
    assert main(["verify", str(run_dir)]) == 0
    assert finished(tmp_path, words(small_corpus), 2) == 0
    run_traces = without_peaks(small_runs.traces(run_dir))
    gone = [
        name for name in small_runs.differences(run_traces, whole) if not name.startswith("config")
    ]
    assert {name.partition("/")[0] for name in gone} <= {"checkpoints"}, (
        gone
    )  # the stop's own, and what it displaced
    gone_on, undisturbed = (
        contents["checkpoints/step-24.safetensors"] for contents in (run_traces, whole)
    )
    weights = [name for name in undisturbed if name.startswith("model/")]
    assert [gone_on[name] for name in weights] == [undisturbed[name] for name in weights] != []


@pytest.mark.parametrize(("dying", "resumed"), [(1, 1), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run_and_others_go_on(small_corpus, tmp_path, dying, resumed):
    run_dir = tmp_path / "runs" / "r"
    with started(
        tmp_path, words(small_corpus, train__max_steps=ENDLESS, train__batch_size=6), 2
    ) as child:
        wait_for_step(child, run_dir, 6)
        start = time.monotonic()
        os.kill(ranks_of(child)[dying], signal.SIGKILL)
        assert child.wait(PATIENCE_S) == 1
        assert time.monotonic() - start < WITHIN_S
    assert output_of(tmp_path) == [LOST], (tmp_path / "output.txt").read_text()[-4000:]
    assert main(["verify", str(run_dir)]) == 0
    step = max(steps(run_dir))
    overrides = {"train__max_steps": ENDLESS, "train__max_seconds": 1e-9, "train__batch_size": 6}
    if resumed == 1:
        overrides["train__parallel"] = None
    if resumed == 3:
        (tmp_path / "output.txt").unlink()
    assert finished(tmp_path, words(small_corpus, **overrides), resumed) == 0
    records = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [*range(step + 2)]
    output = (tmp_path / "output.txt").read_text()
    assert f"processes was 2, is now {resumed if resumed > 1 else None}" in output
    assert main(["verify", str(run_dir)]) == 0


@pytest.mark.parametrize(
    ("processes", "settings", "line"),
    [
        (
            2,
            {"train__parallel": "null"},
            "torchrun started this process, but train.parallel is null; give",
        ),
        (
            1,
            {"train__parallel": "ddp"},
            "train.parallel: 'ddp' needs several processes; start them with torchrun",
        ),
        (
            2,
            {"train__batch_size": 5},
            "train.batch_size: 5 sequences can't be divided evenly among 2 processes; give a mult",
        ),
    ],
)
def test_one_line_and_nothing_on_the_disk(small_corpus, tmp_path, processes, settings, line):
    code = finished(tmp_path, words(small_corpus, **settings), processes)
    (only,) = output_of(tmp_path)
    assert only.startswith(f"nanogpt-bench: error: {line}")
    assert code == (2 if processes == 1 else 1)
    assert processes == 1 or (tmp_path / "output.txt").read_text().count("exitcode  : 2 ") == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_other_commands_take_one_process(tmp_path):
    assert finished(tmp_path, ["compare"], 2) == 1
    assert output_of(tmp_path) == [
        "nanogpt-bench: error: torchrun works with run only; compare takes one process, so start it without "
        "torchrun"
    ]
