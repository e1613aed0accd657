"""Workers, each of which trains one run at a time; their jobs; and how many of them fit
the cores.

A worker is a process on this machine, alone in a `ProcessPoolExecutor`, or runs tasks
on a Ray cluster. It is prepared once and then trains one run after another. A job is
{"settings": {dotted key: value}, "run_dir": path, "argv": [...], "resume": bool,
"texts": {folder: digests of the corpus that has to be there}}.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from nanogpt_bench.config import metrics
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.system.errors import BenchError, counted, one_line, shortened, unknown
from nanogpt_bench.system.signals import SIGNALS, stop_requests_once

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def begin(threads: int, output: str) -> None:
    """Prepare a worker's process: threads, output, imports; SIGTERM ends it, Ctrl-C is
    left to its parent.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.flush()
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", message="`torch.jit.script`")
    from nanogpt_bench.loop import train  # noqa: F401  (imported now, so that the first job starts at once)


def _end_with_parent() -> None:
    """Send SIGTERM to this process when its parent has ended, so that it saves its run
    and ends.
    """
    if (parent := parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(
    job: Mapping[str, Any], numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)
) -> dict[str, Any]:
    """Train a job's run and return how it ended: {"kind": "done"}, or {"kind":
    "failed", "error": {...}}.
    """
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.loop.train import run

    sys.argv = list(job["argv"])  # environment.json has to record the command that was typed
    try:
        with stop_requests_once(numbers) as stop:
            config, run_dir = build_config(job["settings"]), Path(job["run_dir"])
            summary = run(
                config,
                run_dir,
                resume=job.get("resume", False),
                stop=stop,
                texts=job.get("texts"),
            )
            ended = summary["stop"] or {}
    except Exception as error:  # any error ends only this run
        trace = "" if isinstance(error, BenchError) else traceback.format_exc()
        return {
            "kind": "failed",
            "error": {"kind": type(error).__name__, "message": str(error), "traceback": trace},
        }
    finally:
        if (parent := parent_process()) is not None and not parent.is_alive():
            os._exit(128 + SIGNALS[0])
    # A run ended by a full disk or a signal counts as failed, and is resumed at the
    # next start.
    return (
        {"kind": "failed", "error": ended}
        if ended.get("kind") in ("disk", "signal")
        else {"kind": "done"}
    )


def failed(message: str, kind: str = "killed") -> dict[str, Any]:
    """Return the end of a run that its worker could not report."""
    return {"kind": "failed", "error": {"kind": kind, "message": message}}


#: how processes are started, and the function that trains a job; tests replace them
CONTEXT, SERVE = "spawn", serve
#: seconds that workers have to end, when nothing is left to train or after an error,
#: before they are killed
SECONDS_TO_STOP = 10.0


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_asked() -> int:
    """Return the threads with which torch would compute in this process:
    OMP_NUM_THREADS, or torch's choice.
    """
    import torch

    return torch.get_num_threads()


def check_workers(
    workers: int | None, source: str, threads: int | None = None, there: int | None = None
) -> None:
    """Refuse more runs at a time than the cores can give `threads` each, or one each if
    None.
    """
    there = cores() if there is None else there
    most = most_workers(threads, there)
    if workers is not None and workers > most:
        each = "" if threads in (None, 1) else f" with runtime.threads {threads}"
        take = "takes" if there == 1 else "take"
        raise BenchError(
            f"{source}: {workers} is more than the {counted(there, 'core')} {take}{each}; give at "
            f"most {most}"
        )


def divide(
    workers: int | None, runs: int, threads: int | None, asked: int, there: int | None = None
) -> tuple[int, int]:
    """Return (workers, threads of each): the cores divided among the workers, of which
    there are at most `runs`.

    A run gets the `threads` of its settings; without any its share of the cores, at
    most `asked`, the threads of this process. Without `workers` there are as many as
    the cores can give their threads.
    """
    there = cores() if there is None else there
    count = max(1, min(workers or most_workers(threads, there), runs))
    return count, threads or max(1, min(there // count, asked))


def most_workers(threads: int | None, there: int) -> int:
    """Return how many runs of `threads` each fit the cores at a time; at least one."""
    return max(1, there // (threads or 1))


@dataclass(frozen=True)
class Event:
    """Something that happened to a job: `kind` is started, progress, done or failed; or
    `tick` (job None): nothing.
    """

    job: int | None
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """A process that trains one run at a time, alone in an executor, so that its end
    breaks no other worker.
    """

    def __init__(self, threads: int = 1) -> None:
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  (lives as long as the process)
        before = set(multiprocessing.active_children())
        context = multiprocessing.get_context(CONTEXT)
        self._executor = ProcessPoolExecutor(
            1, context, initializer=begin, initargs=(threads, self._output.name)
        )
        self._executor.submit(os.getpid)  # any task starts the process
        (self._process,) = set(multiprocessing.active_children()) - before

    def submit(self, job: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Queue a job; the future has what `serve` returns, or an error if the worker
        ends first.
        """
        try:
            return self._executor.submit(SERVE, job)
        except BrokenProcessPool as error:  # the process has died since its last job
            future: Future[dict[str, Any]] = Future()
            future.set_exception(error)
            return future

    def why(self, error: BaseException) -> dict[str, Any]:
        """Return the end of a job whose future has an error: a kill, or a crash with
        its last line of output.
        """
        if not isinstance(error, BrokenProcessPool):
            return failed(f"{type(error).__name__}: {one_line(error)}", "crash")
        self._executor.shutdown()
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return failed("its process was killed, as a system does that runs out of memory")
        lines = Path(self._output.name).read_text("utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return failed(f"worker process ended with exit code {code}{last}", "crash")

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self, deadline: float | None) -> None:
        """Wait for the process, at most until `deadline` (monotonic seconds) if there
        is one, then kill it.
        """
        self._executor.shutdown(wait=False, cancel_futures=True)
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not connection.wait([self._process.sentinel], seconds):
            self._process.kill()
        self._executor.shutdown()
        self._output.close()


class Local:
    """The executor of this machine, which starts workers."""

    def cores(self) -> int:
        return cores()

    def check_device(self, wanted: str) -> None:
        """Refuse a device that this machine does not have."""
        from nanogpt_bench.setup.runtime import check_device

        check_device(wanted)

    def worker(self, threads: int) -> Worker:
        return Worker(threads)


EXECUTORS = ("local", "ray")
_LONGEST_REASON = 200
#: environment variables for Ray: no usage reports, no advice, no log among the results
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ part writes to standard error itself, such as how it waits for a node
}
#: bytes of Ray's object store, in which there are only small objects
_OBJECTS = 80 * 2**20


def check_executor(name: str, address: str | None) -> None:
    """Refuse an unknown executor, and an address without ray."""
    if name not in EXECUTORS:
        raise unknown("--executor", name, EXECUTORS)
    if address is not None and name != "ray":
        raise BenchError(f"--address {address!r} goes with --executor ray")


@contextmanager
def executor_of(name: str, address: str | None, folder: Path) -> Iterator[Local]:
    """Yield the executor called `name`; runs are written below `folder`, which all
    workers have to see.
    """
    check_executor(name, address)
    if name == "local":
        yield Local()
        return
    if find_spec("ray") is None:
        raise BenchError(
            "--executor ray needs the package ray; get it with pip install 'fp8manifold[ray]'"
        )
    os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
    import ray

    own = {} if address else {"num_cpus": cores(), "object_store_memory": _OBJECTS}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # advice on how a cluster is secured
            ray.init(
                address,
                **own,
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
            )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"--address {address!r}" if address else "--executor ray"
        reason = shortened(one_line(error), _LONGEST_REASON)
        raise BenchError(
            f"{where}: no Ray cluster answers ({type(error).__name__}: {reason})"
        ) from None
    marker = folder.resolve() / f".ray-{secrets.token_hex(8)}"
    try:
        yield RayCluster(ray, marker)
    finally:
        marker.unlink(missing_ok=True)
        ray.shutdown()


class RayCluster(Local):
    """The executor of a Ray cluster; a node that sees the file `marker` sees the folder
    of the runs.
    """

    def __init__(self, ray: Any, marker: Path) -> None:
        self.ray, self.marker = ray, marker

    def cores(self) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def check_device(self, wanted: str) -> None:
        from nanogpt_bench.setup.runtime import CUDA, no_device

        if wanted == CUDA and not self.ray.cluster_resources().get("GPU"):
            raise no_device("any node of the cluster")

    def worker(self, threads: int) -> RayWorker:
        # Not earlier: until sweep.json is in the folder, a file in it could be
        # anybody's
        self.marker.touch()
        return RayWorker(self.ray, threads, self.marker)


class RayWorker(Worker):
    """A worker that runs one task of the cluster at a time; Ray cancels a task, and so
    ends its run, by SIGINT.
    """

    def __init__(self, ray: Any, threads: int, marker: Path) -> None:
        self._ray, self._given = ray, (str(marker), os.getcwd())
        self._task: Any = None
        self._future: Future[dict[str, Any]] | None = None
        # No retries: the next start of the sweep resumes the run from its folder.
        self._serve = ray.remote(_serve_there).options(num_cpus=threads, max_retries=0)

    def submit(self, job: Mapping[str, Any]) -> Future[dict[str, Any]]:
        self._task = self._serve.remote(dict(job), *self._given)
        self._future = self._task.future()
        return self._future

    def why(self, error: BaseException) -> dict[str, Any]:
        if isinstance(
            error, self._ray.exceptions.WorkerCrashedError | self._ray.exceptions.NodeDiedError
        ):
            return failed("its Ray worker was lost, with its node or by a kill")
        return failed(
            f"{type(error).__name__}: {shortened(one_line(error), _LONGEST_REASON)}", "crash"
        )

    def terminate(self, *, force: bool = False) -> None:
        if self._future is not None and not self._future.done():
            self._ray.cancel(self._task, force=force)

    def kill(self) -> None:
        self.terminate(force=True)

    def close(self, deadline: float | None) -> None:
        if self._future is not None:
            wait(
                [self._future], None if deadline is None else max(0.0, deadline - time.monotonic())
            )
            self.kill()


def _serve_there(job: dict[str, Any], marker: str, folder: str) -> dict[str, Any]:
    """Train a job's run on a node, in the folder in which the command was started."""
    runs = str(Path(marker).parent)
    try:
        os.stat(marker)
        os.chdir(folder)
    except OSError:
        what = f"--executor ray: a node does not see the folder {runs!r}; give an --out, and a working folder, on "
        return failed(f"{what}storage that all nodes share", "BenchError")
    return serve(job, (signal.SIGTERM, signal.SIGINT))


class Pool:
    """A context with workers; leaving it stops those that still run.

    By default each worker has one thread: two workers on two cores don't compete, and
    numbers do not depend on cores.
    """

    def __init__(self, size: int, threads: int = 1, executor: Local | None = None) -> None:
        self._size, self._threads = size, threads
        self._executor = executor or Local()
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        for _ in range(self._size):
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, *, patient: bool = False) -> None:
        """Terminate the workers, which save their runs, and wait until all have ended;
        `patient`: without a limit.
        """
        for worker in self._workers:
            worker.terminate()
        deadline = None if patient else time.monotonic() + SECONDS_TO_STOP
        for worker in self._workers:
            worker.close(deadline)
        self._workers = []

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def run(
        self, jobs: Sequence[Mapping[str, Any]], order: Iterable[int], tick: float = 0.5
    ) -> Iterator[Event]:
        """Train the jobs in `order`; yield events until all have ended, and a tick
        after `tick` s without an event.

        The caller may append to `jobs` between events and, if it is a deque, to
        `order`; idle workers take the next.
        """
        waiting = order if isinstance(order, deque) else deque(order)
        idle, running = list(self._workers), dict[Future[dict[str, Any]], _Running]()
        while running or waiting:
            while waiting and (idle or len(self._workers) < self._size):
                worker, job = idle.pop(0) if idle else self._start(), waiting.popleft()
                running[worker.submit(jobs[job])] = _Running(job, worker, NewRecords(jobs[job]))
                yield Event(job, "started")
            ended, _ = wait(running, tick, FIRST_COMPLETED)
            events = [
                Event(one.job, "progress", found)
                for one in running.values()
                if (found := one.records.new())
            ]
            for future in ended:
                one = running.pop(future)
                try:
                    end = future.result()
                    idle.append(one.worker)
                except Exception as error:  # the worker was lost
                    end = one.worker.why(error)
                    self._workers.remove(one.worker)
                    one.worker.close(time.monotonic())
                events.append(Event(one.job, end["kind"], end))
            yield from events or [Event(None, "tick")]

    def _start(self) -> Worker:
        self._workers.append(self._executor.worker(self._threads))
        return self._workers[-1]


class _Running(NamedTuple):
    job: int
    worker: Worker
    records: NewRecords


#: the most new bytes that are read of a file: its last ones
MOST_BYTES = 1 << 16
_NAMES = {
    "train_loss": metrics.TRAIN_LOSS.name,
    "val_loss": metrics.VAL_LOSS.name,
    "lr": metrics.LR.name,
    "tokens_per_s": metrics.SPEED.name,
    "elapsed_s": metrics.ELAPSED.name,
}


class NewRecords:
    """The records of one job's run, read while it trains."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._path = Path(job.get("run_dir", "")) / "metrics.jsonl"
        steps = job.get("settings", {}).get("train.max_steps", FIELDS["train.max_steps"].default)
        self._known: dict[str, Any] = {"max_steps": steps}
        self._read = 0

    def new(self) -> dict[str, Any] | None:
        """Return the newest values; None without new records."""
        try:
            size = self._path.stat().st_size
            with self._path.open("rb") as file:
                file.seek(max(self._read if self._read <= size else 0, size - MOST_BYTES))
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return None
        whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
        if size == self._read or not whole:
            return None
        self._read = size - (0 if lines[-1].endswith(b"\n") else len(lines[-1]))
        for line in whole:
            record = json.loads(line)
            found = {name: record.get(key) for name, key in _NAMES.items()}
            self._known |= {
                "step": record["step"],
                **{name: x for name, x in found.items() if x is not None},
            }
        return dict(self._known)
