"""Workers, each of which trains one run at a time, and how many of them fit the cores.

    Session --- jobs ---> Pool --- job ---> Worker      a process, prepared once
            <-- events --      <-- end ---  `serve`     trains one run after another
                               <-- records -----------  metrics.jsonl, read by the pool

An executor says where workers are: `Local` on this machine, `RayCluster` on a cluster.
A local worker is alone in a `ProcessPoolExecutor`, so that its end breaks no other.
Jobs and their ends are plain mappings (`Job`, `JobEnd`), since they go from process to
process.
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
from enum import StrEnum
from importlib.util import find_spec
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from nanogpt_bench.config import metrics
from nanogpt_bench.config.endings import StopKind
from nanogpt_bench.config.keys import FIELDS
from nanogpt_bench.runs.read import METRICS_FILE
from nanogpt_bench.system.errors import BenchError, counted, one_line, shortened, unknown
from nanogpt_bench.system.signals import SIGNALS, stop_requests_once

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Job(TypedDict, total=False):
    """A run to be trained."""

    #: by dotted key
    settings: Mapping[str, Any]
    run_dir: str
    #: the command that was typed
    argv: list[str]
    resume: bool
    #: digests of the corpora that have to be there, by their folders
    texts: Mapping[str, Any]


class JobEnd(TypedDict, total=False):
    """How a job ended, which its event has as data."""

    #: `done` or `failed`
    kind: str
    #: kind and message of a failed one, and its traceback, "" for an error of the bench
    error: Mapping[str, str]


def prepare_process(threads: int, output: str) -> None:
    """Prepare a worker's process: threads, output, imports.

    SIGTERM ends it; Ctrl-C is left to its parent.
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
    # Imported now, so that the first job starts at once.
    from nanogpt_bench.loop import train  # noqa: F401


def _end_with_parent() -> None:
    """Send SIGTERM to this process when its parent has ended.

    It then saves its run and ends.
    """
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def serve(job: Job, numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> JobEnd:
    """Train a job's run and return how it ended; the signals `numbers` stop it."""
    from nanogpt_bench.config.settings import build_config
    from nanogpt_bench.loop.train import run

    # environment.json has to record the command that was typed.
    sys.argv = list(job["argv"])
    try:
        with stop_requests_once(numbers) as stop:
            summary = run(
                build_config(job["settings"]),
                Path(job["run_dir"]),
                resume=job.get("resume", False),
                stop=stop,
                texts=job.get("texts"),
            )
    # Any error ends only this run.
    except Exception as error:
        end = failed(str(error), type(error).__name__)
        trace = "" if isinstance(error, BenchError) else traceback.format_exc()
        return {**end, "error": {**end["error"], "traceback": trace}}
    finally:
        parent = parent_process()
        if parent is not None and not parent.is_alive():
            # The parent has ended, and nobody takes the result.
            os._exit(128 + SIGNALS[0])
    # A run ended by a full disk or a signal counts as failed, and is resumed at the
    # next start.
    stopped_by = summary["stop"] or {}
    if stopped_by.get("kind") in (StopKind.DISK, StopKind.SIGNAL):
        return {"kind": "failed", "error": stopped_by}
    return {"kind": "done"}


def failed(message: str, kind: str = StopKind.KILLED.value) -> JobEnd:
    """Return the end of a job that failed."""
    return {"kind": "failed", "error": {"kind": kind, "message": message}}


# Tests replace these two.
#: how processes are started
CONTEXT = "spawn"
#: the function that trains a job
SERVE = serve
#: seconds that workers have to end, when nothing is left to train or after an error,
#: before they are killed
SECONDS_TO_STOP = 10.0


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_threads() -> int:
    """Return the threads with which torch would compute in this process.

    They are OMP_NUM_THREADS, or torch's choice.
    """
    import torch

    return torch.get_num_threads()


def check_workers(
    workers: int | None, source: str, threads: int | None = None, core_count: int | None = None
) -> None:
    """Refuse more runs at a time than the cores can give `threads` (None: one) each."""
    core_count = cores() if core_count is None else core_count
    limit = most_workers(threads, core_count)
    if workers is not None and workers > limit:
        threads_of_run = "" if threads in (None, 1) else f" with runtime.threads {threads}"
        take = "takes" if core_count == 1 else "take"
        raise BenchError(
            f"{source}: {workers} is more runs at a time than the {counted(core_count, 'core')} "
            f"{take}{threads_of_run}; give at most {limit}"
        )


class Division(NamedTuple):
    """How many workers there are, and how many threads each of them has."""

    workers: int
    threads: int


def divide(
    workers: int | None,
    runs: int,
    threads: int | None,
    most_threads: int,
    core_count: int | None = None,
) -> Division:
    """Divide the cores among workers, of which there are at most `runs`.

    A run gets the `threads` of its settings; without any its share of the cores, at
    most `most_threads`. Without `workers` there are as many as the cores can give their
    threads.
    """
    core_count = cores() if core_count is None else core_count
    count = max(1, min(workers or most_workers(threads, core_count), runs))
    share = max(1, min(core_count // count, most_threads))
    return Division(count, threads or share)


def most_workers(threads: int | None, core_count: int) -> int:
    """Return how many runs of `threads` each fit the cores at a time; at least one."""
    return max(1, core_count // (threads or 1))


class JobEventKind(StrEnum):
    """What happened to a job; the data of the event goes with it."""

    STARTED = "started"
    #: the values that `NewRecords.new` returns
    PROGRESS = "progress"
    #: a `JobEnd`
    DONE = "done"
    #: a `JobEnd`
    FAILED = "failed"
    #: nothing happened, to no job
    TICK = "tick"


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job, which is given by its index."""

    job: int | None
    #: an `JobEventKind`
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """A process of this machine that trains one run at a time."""

    def __init__(self, threads: int = 1) -> None:
        # The file lives as long as the process.
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        other_processes = set(multiprocessing.active_children())
        self._executor = ProcessPoolExecutor(
            1,
            multiprocessing.get_context(CONTEXT),
            initializer=prepare_process,
            initargs=(threads, self._output.name),
        )
        # Any task starts the process.
        self._executor.submit(os.getpid)
        (self._process,) = set(multiprocessing.active_children()) - other_processes

    def submit(self, job: Job) -> Future[JobEnd]:
        """Queue a job.

        The future has what `serve` returns, or an error if the worker ends first.
        """
        try:
            return self._executor.submit(SERVE, job)
        except BrokenProcessPool as error:
            # The process has died since its last job.
            future: Future[JobEnd] = Future()
            future.set_exception(error)
            return future

    def end_by(self, error: BaseException) -> JobEnd:
        """Return the end of a job whose future has an error.

        It is a kill, or a crash with its last line of output.
        """
        if not isinstance(error, BrokenProcessPool):
            return failed(f"{type(error).__name__}: {one_line(error)}", "crash")
        self._executor.shutdown()
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return failed("its process was killed, as systems do when memory runs out")
        lines = Path(self._output.name).read_text("utf-8", errors="replace").strip().splitlines()
        last_line = f": {lines[-1]}" if lines else ""
        return failed(f"worker process ended with exit code {code}{last_line}", "crash")

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self, deadline: float | None) -> None:
        """Wait for the process until `deadline` (monotonic seconds), then kill it.

        None is no deadline.
        """
        self._executor.shutdown(wait=False, cancel_futures=True)
        if not connection.wait([self._process.sentinel], _seconds_until(deadline)):
            self._process.kill()
        self._executor.shutdown()
        self._output.close()


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Local:
    """An executor, which starts workers; this one has them on this machine."""

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
    # Its C++ part writes to standard error itself, such as how it waits for a node.
    "RAY_BACKEND_LOG_LEVEL": "fatal",
}
#: bytes of Ray's object store, in which there are only small objects
_OBJECT_STORE_BYTES = 80 * 2**20


def check_executor(name: str, address: str | None) -> None:
    """Refuse an unknown executor, and an address without ray."""
    if name not in EXECUTORS:
        raise unknown("--executor", name, EXECUTORS)
    if address is not None and name != "ray":
        raise BenchError(f"--address {address!r} needs --executor ray")


@contextmanager
def executor_of(name: str, address: str | None, folder: Path) -> Iterator[Local]:
    """Yield the executor called `name`.

    Runs are written below `folder`, which all workers have to see.
    """
    check_executor(name, address)
    if name == "local":
        yield Local()
        return
    if find_spec("ray") is None:
        raise BenchError(
            "--executor ray needs the package ray; get it with pip install 'fp8manifold[ray]'"
        )
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    import ray

    # Without an address a cluster is started on this machine.
    resources = {} if address else {"num_cpus": cores(), "object_store_memory": _OBJECT_STORE_BYTES}
    try:
        # Ray prints advice on how a cluster is secured.
        with contextlib.redirect_stderr(io.StringIO()):
            ray.init(
                address,
                **resources,
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
            )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        option = f"--address {address!r}" if address else "--executor ray"
        reason = shortened(one_line(error), _LONGEST_REASON)
        raise BenchError(
            f"{option}: no Ray cluster answers ({type(error).__name__}: {reason})"
        ) from None
    marker = folder.resolve() / f".ray-{secrets.token_hex(8)}"
    try:
        yield RayCluster(ray, marker)
    finally:
        marker.unlink(missing_ok=True)
        ray.shutdown()


class RayCluster(Local):
    """The executor of a Ray cluster.

    A node that sees the file `marker` sees the folder of the runs.
    """

    def __init__(self, ray: Any, marker: Path) -> None:
        self.ray = ray
        self.marker = marker

    def cores(self) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def check_device(self, wanted: str) -> None:
        from nanogpt_bench.setup.runtime import CUDA, no_device

        if wanted == CUDA and not self.ray.cluster_resources().get("GPU"):
            raise no_device("any node of the cluster")

    def worker(self, threads: int) -> RayWorker:
        # Not earlier: until sweep.json is in the folder, a file in it could be
        # anybody's.
        self.marker.touch()
        return RayWorker(self.ray, threads, self.marker)


class RayWorker(Worker):
    """A worker that runs one task of the cluster at a time.

    Ray cancels a task, and so ends its run, by SIGINT.
    """

    def __init__(self, ray: Any, threads: int, marker: Path) -> None:
        self._ray = ray
        self._marker = str(marker)
        self._working_folder = os.getcwd()
        self._task: Any = None
        self._future: Future[JobEnd] | None = None
        # No retries: the next start of the sweep resumes the run from its folder.
        self._serve = ray.remote(_serve_on_node).options(num_cpus=threads, max_retries=0)

    def submit(self, job: Job) -> Future[JobEnd]:
        self._task = self._serve.remote(dict(job), self._marker, self._working_folder)
        future: Future[JobEnd] = self._task.future()
        self._future = future
        return future

    def end_by(self, error: BaseException) -> JobEnd:
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.WorkerCrashedError | exceptions.NodeDiedError):
            return failed("its Ray worker was lost: its node failed, or it was killed")
        reason = shortened(one_line(error), _LONGEST_REASON)
        return failed(f"{type(error).__name__}: {reason}", "crash")

    def terminate(self, *, force: bool = False) -> None:
        if self._future is not None and not self._future.done():
            self._ray.cancel(self._task, force=force)

    def kill(self) -> None:
        self.terminate(force=True)

    def close(self, deadline: float | None) -> None:
        if self._future is not None:
            wait([self._future], _seconds_until(deadline))
            self.kill()


def _serve_on_node(job: Job, marker: str, working_folder: str) -> JobEnd:
    """Train a job's run on a node, in the folder in which the command was started."""
    try:
        os.stat(marker)
        os.chdir(working_folder)
    except OSError:
        runs_folder = str(Path(marker).parent)
        return failed(
            f"--executor ray: a node does not see the folder {runs_folder!r}; give an --out and a "
            "working folder on storage that all nodes share",
            "BenchError",
        )
    return serve(job, (signal.SIGTERM, signal.SIGINT))


class Pool:
    """A context with workers; leaving it stops those that still run.

    By default each worker has one thread: two workers on two cores don't compete, and
    numbers do not depend on cores.
    """

    def __init__(self, size: int, threads: int = 1, executor: Local | None = None) -> None:
        self._size = size
        self._threads = threads
        self._executor = executor or Local()
        self._workers: list[Worker] = []

    def __enter__(self) -> Pool:
        for _ in range(self._size):
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, *, patient: bool = False) -> None:
        """Terminate the workers, which save their runs, and wait until all have ended.

        Those that take longer than `SECONDS_TO_STOP` are killed, unless `patient`.
        """
        for worker in self._workers:
            worker.terminate()
        deadline = None if patient else time.monotonic() + SECONDS_TO_STOP
        for worker in self._workers:
            worker.close(deadline)
        self._workers = []

    def kill(self) -> None:
        """Kill all workers at once."""
        for worker in self._workers:
            worker.kill()

    def run(
        self, jobs: Sequence[Job], order: Iterable[int], tick: float = 0.5
    ) -> Iterator[JobEvent]:
        """Train the jobs in `order`; yield events until all have ended.

        After `tick` s without an event there is one that nothing happened. Between
        events the caller may append to `jobs` and, if it is a deque, to `order`. Idle
        workers take the next.
        """
        waiting = order if isinstance(order, deque) else deque(order)
        idle = list(self._workers)
        running: dict[Future[JobEnd], _Running] = {}
        while running or waiting:
            while waiting and (idle or len(self._workers) < self._size):
                worker = idle.pop(0) if idle else self._start()
                job = waiting.popleft()
                running[worker.submit(jobs[job])] = _Running(job, worker, NewRecords(jobs[job]))
                yield JobEvent(job, JobEventKind.STARTED)
            ended, _ = wait(running, tick, FIRST_COMPLETED)
            events = []
            for task in running.values():
                values = task.records.new()
                if values:
                    events.append(JobEvent(task.job, JobEventKind.PROGRESS, values))
            for future in ended:
                task = running.pop(future)
                end = self._end(future, task.worker)
                if task.worker in self._workers:
                    idle.append(task.worker)
                events.append(JobEvent(task.job, JobEventKind(end["kind"]), end))
            yield from events or [JobEvent(None, JobEventKind.TICK)]

    def _end(self, future: Future[JobEnd], worker: Worker) -> JobEnd:
        """Return how a job ended; take the worker out of the pool if it was lost."""
        try:
            return future.result()
        except Exception as error:
            end = worker.end_by(error)
            self._workers.remove(worker)
            worker.close(time.monotonic())
            return end

    def _start(self) -> Worker:
        worker = self._executor.worker(self._threads)
        self._workers.append(worker)
        return worker


class _Running(NamedTuple):
    """A job that a worker trains, by its index."""

    job: int
    worker: Worker
    records: NewRecords


#: how many new bytes are read of a file at first: its last ones
FIRST_WINDOW = 1 << 16
#: names in an event of the metrics in a record
_VALUES = {
    "train_loss": metrics.TRAIN_LOSS.name,
    "val_loss": metrics.VAL_LOSS.name,
    "lr": metrics.LR.name,
    "tokens_per_s": metrics.SPEED.name,
    "elapsed_s": metrics.ELAPSED.name,
}


class NewRecords:
    """The records of one job's run, read while it trains."""

    def __init__(self, job: Job) -> None:
        self._path = Path(job.get("run_dir", "")) / METRICS_FILE
        steps = job.get("settings", {}).get("train.max_steps", FIELDS["train.max_steps"].default)
        #: the newest values
        self._values: dict[str, Any] = {"max_steps": steps}
        #: bytes of the file that were read
        self._read_bytes = 0

    def new(self) -> dict[str, Any] | None:
        """Return the newest values; None without new records."""
        try:
            size = self._path.stat().st_size
            # A run that goes on has cut its file back.
            first_new = self._read_bytes if self._read_bytes <= size else 0
            lines, whole = self._last_lines(first_new, size)
        except OSError:
            return None
        if size == self._read_bytes or not whole:
            return None
        is_last_whole = lines[-1].endswith(b"\n")
        self._read_bytes = size if is_last_whole else size - len(lines[-1])
        for line in whole:
            record = json.loads(line)
            self._values["step"] = record["step"]
            for name, metric in _VALUES.items():
                if record.get(metric) is not None:
                    self._values[name] = record[metric]
        return dict(self._values)

    def _last_lines(self, first_new: int, size: int) -> tuple[list[bytes], list[bytes]]:
        """Return the last lines, and the whole records among them.

        Many records are not read, if there are many new ones. One may be longer than the
        first window: monitors of a model with many layers have a figure for each.
        """
        window = FIRST_WINDOW
        with self._path.open("rb") as file:
            while True:
                start = max(first_new, size - window)
                file.seek(start)
                lines = file.read().splitlines(keepends=True)
                whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
                if whole or start == first_new:
                    return lines, whole
                window *= 2
