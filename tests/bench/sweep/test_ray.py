"""Sweeps in a Ray cluster.

The same runs, and nothing lost or left running when something of it dies.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from bench_runs import summary_of, wait_until
from sweep_runs import small

from nanogpt_bench.checkpoint import steps
from nanogpt_bench.cli import main
from nanogpt_bench.sweep.workers import Pool, RayCluster, executor_of

pytestmark = [pytest.mark.extra("ray"), pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with executor_of("ray", None, tmp_path_factory.mktemp("shared")) as executor:
        yield executor


def job(run_dir, corpus_dir, steps):
    settings = small(corpus_dir, {"train.max_steps": steps, "rule": "fp32", "checkpoint.every": 10})
    return {
        "settings": settings,
        "run_dir": str(run_dir),
        "argv": ["test"],
        "resume": run_dir.exists(),
    }


def processes(kind, is_one):
    """Return the processes with a file /proc/ID/`kind` for which `is_one` holds."""
    ids = []
    for path in Path("/proc").glob(f"[0-9]*/{kind}"):
        with suppress(OSError):
            if is_one(path):
                ids.append(int(path.parts[2]))
    return ids


def workers_of(run_dir):
    """The worker processes that have a run's folder locked."""
    return processes("fd/*", lambda path: os.readlink(path) == str(run_dir / ".lock"))


def loss_of(run_dir):
    return summary_of(run_dir)["final_val_loss"]


def test_what_dies_loses_its_run_alone_and_that_goes_on(cluster, corpus_dir, tmp_path):
    runs = [tmp_path / "long", tmp_path / "short"]
    jobs = [job(runs[0], corpus_dir, 100_000), job(runs[1], corpus_dir, 3)]
    ended = {}
    struck = False
    with Pool(1, executor=cluster) as pool:
        for event in pool.run(jobs, [0, 1]):
            if event.job == 0 and event.kind == "progress" and steps(runs[0]) and not struck:
                (pid,) = workers_of(runs[0])
                os.kill(pid, signal.SIGKILL)
                struck = True
            if event.job is not None and event.kind in ("done", "failed"):
                ended[event.job] = event
    assert ended[0].data["error"]["kind"] == "killed"
    assert ended[1].kind == "done"
    wait_until(lambda: not workers_of(runs[0]), 30)
    step = max(steps(runs[0]))
    assert step >= 10
    with Pool(1, executor=cluster) as pool:
        again = job(runs[0], corpus_dir, 100_000)
        for event in pool.run([again], [0]):
            if event.kind == "progress":
                assert event.data["step"] >= step  # and not from the beginning
                break
    wait_until(lambda: not workers_of(runs[0]), 30)


def test_a_folder_that_a_node_does_not_see_is_named(cluster, corpus_dir, tmp_path):
    assert isinstance(cluster, RayCluster)
    worker = cluster.worker(1)
    cluster.marker.unlink()
    message = worker.submit(job(tmp_path / "run", corpus_dir, 3)).result()["error"]["message"]
    assert message.startswith(
        f"--executor ray: a node does not see the folder {str(cluster.marker.parent)!r}; give an "
        f"--out"
    )


def sweep_file(folder, corpus_dir, steps, **settings):
    content = {
        "settings": small(corpus_dir, {"train.max_steps": steps, **settings}),
        "axes": {"rule": ["fp32", "sgd"], "seed": [1]},
    }
    (folder / "runs.yaml").write_text(json.dumps(content))
    return folder / "runs.yaml"


def command(*words):
    return [sys.executable, "-m", "nanogpt_bench", "sweep", *words]


def test_a_sweep_has_the_same_losses_there_and_leaves_nothing_running(corpus_dir, tmp_path):
    path = sweep_file(tmp_path, corpus_dir, 8)
    words = [str(path), "--workers", "1", "--executor"]
    env = os.environ | {"MARKER": str(tmp_path)}
    on_ray = command(*words, "ray", "--out", str(tmp_path / "ray"))
    process = subprocess.run(on_ray, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert main(["sweep", *words, "local", "--out", str(tmp_path / "local")]) == 0
    for run in ("fp32-seed=1", "sgd-seed=1"):
        assert loss_of(tmp_path / "ray" / run) == loss_of(tmp_path / "local" / run), run
    assert not list((tmp_path / "ray").glob(".ray-*"))
    wait_until(lambda: not marked(tmp_path), 30)


def marked(folder, word=b""):
    """Return the processes that descend from a command.

    They are found by a variable of its environment and by how their words begin.
    """
    marker = f"MARKER={folder}\0".encode()

    def is_one(path):
        return (
            marker in path.read_bytes()
            and word in path.with_name("cmdline").read_bytes()[:80].lower()
        )

    return processes("environ", is_one)


@pytest.mark.slow
@pytest.mark.parametrize("with_what", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_dies_leaves_no_process_and_the_same_one_goes_on(
    with_what, corpus_dir, tmp_path
):
    path = sweep_file(tmp_path, corpus_dir, 600, **{"checkpoint.every": 20})
    words = [str(path), "--workers", "1", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command(*words, "--executor", "ray"), env=os.environ | {"MARKER": str(tmp_path)}
    )
    wait_until(lambda: list((tmp_path / "out").glob("*/checkpoints/step-*.safetensors")))
    process.send_signal(with_what)
    process.wait(120)
    assert process.returncode == (75 if with_what is signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not marked(tmp_path, b"worker"), 30)
    wait_until(lambda: not marked(tmp_path), 150)  # two agents of Ray's own notice later
    assert main(["sweep", *words]) == 0
    whole = sweep_file(tmp_path, corpus_dir, 600, **{"checkpoint.every": 20})
    assert main(["sweep", str(whole), "--workers", "1", "--out", str(tmp_path / "whole")]) == 0
    for run in ("fp32-seed=1", "sgd-seed=1"):
        assert loss_of(tmp_path / "out" / run) == loss_of(tmp_path / "whole" / run), run


@pytest.mark.slow  # Ray takes its time to give up
def test_a_cluster_that_is_not_there_is_one_line(tmp_path):
    code = "from pathlib import Path; from nanogpt_bench.sweep.workers import executor_of\n"
    code += "with executor_of('ray', '127.0.0.1:1', Path('.')): pass"
    env = os.environ | {
        "RAY_gcs_rpc_server_connect_timeout_s": "1",
        "RAY_NUM_REDIS_GET_RETRIES": "1",
    }
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert (
        "BenchError: --address '127.0.0.1:1': no Ray cluster answers"
        in process.stderr.splitlines()[-1]
    )
