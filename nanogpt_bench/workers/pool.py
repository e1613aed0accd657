"""A pool of worker processes over a list of jobs, its executor and workers, and the number that the cores take."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Protocol

from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.words import counted

Messages = queue.SimpleQueue[tuple[Any, dict[str, Any] | None]]
"""(a worker, what it says), and (the worker, None) when it has ended."""
WORKER = (sys.executable, "-m", "nanogpt_bench.workers.worker")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: seconds before a worker that has nothing to save, or was left by an error, is killed
SECONDS_TO_STOP = 10.0


class AnyWorker(Protocol):
    """A worker process, wherever it is."""

    #: the job that it runs
    job: int | None

    def give(self, job: int, content: Mapping[str, Any]) -> None:
        """Hand over a job."""

    def ended(self) -> dict[str, str]:
        """Return the end of the process: `kind` and `message`."""

    def terminate(self) -> None:
        """Tell it to end, its run writing down what it has."""

    def kill(self) -> None:
        """End it at once."""

    def close(self, deadline: float | None) -> None:
        """Wait for its end, until `deadline` (monotonic seconds) if there is one, then end it."""


class Executor(Protocol):
    """Starts workers."""

    def cores(self) -> int:
        """Return how many threads there are cores for."""

    def check_device(self, wanted: str) -> None:
        """Refuse a device that no worker has."""

    def worker(self, messages: Messages, threads: int) -> AnyWorker:
        """Start a worker that computes with so many threads."""


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_asked() -> int:
    """Return the threads that this process would compute with: OMP_NUM_THREADS, or what torch makes of the machine."""
    import torch

    return torch.get_num_threads()


def check_workers(workers: int | None, source: str, threads: int | None = None, there: int | None = None) -> None:
    """Refuse more runs at a time than there are cores, or than have the `threads` each that their settings ask for.

    `there` are the cores; those of this machine without.

    Raises:
        BenchError: names `source`, which asks for them, and how many there can be.

    >>> check_workers(1, "--workers"), check_workers(None, "--workers")
    (None, None)
    """
    there = cores() if there is None else there
    most = most_workers(threads, there)
    if workers is not None and workers > most:
        each = "" if threads in (None, 1) else f" with runtime.threads {threads}"
        take = "takes" if there == 1 else "take"
        raise BenchError(
            f"{source}: {workers} is more than the {counted(there, 'core')} {take}{each}; give at most {most}"
        )


def divide(
    workers: int | None, runs: int, threads: int | None, asked: int, there: int | None = None
) -> tuple[int, int]:
    """Return (workers, threads of each): the cores shared out among as many workers as have something to do.

    A run gets the `threads` that the settings give; otherwise its share of the cores, and no more than `asked`, which
    is what this process computes with. Without `workers` there is one for every so many cores.

    >>> divide(1, 10, None, asked=1)
    (1, 1)
    """
    there = cores() if there is None else there
    count = max(1, min(workers or most_workers(threads, there), runs))
    return count, threads or max(1, min(there // count, asked))


def most_workers(threads: int | None, there: int) -> int:
    """Return how many runs of so many threads each the cores take at a time, at least one."""
    return max(1, there // (threads or 1))


@dataclass(frozen=True)
class Event:
    """Something a job did: `kind` is started, progress, done or failed; `tick` (job None) when nothing happened."""

    job: int | None
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Worker:
    """One worker process; `messages` gets (this worker, message), and (this worker, None) when it has ended."""

    def __init__(self, messages: Messages, threads: int = 1) -> None:
        self.job: int | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads)),
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=self._listen, args=(messages,), daemon=True).start()

    def _listen(self, messages: Messages) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a process killed while it wrote
                messages.put((self, json.loads(line)))
        messages.put((self, None))

    def give(self, job: int, content: Mapping[str, Any]) -> None:
        """Hand over a job; a process that has died meanwhile is noticed by its end of file."""
        self.job = job
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()

    def ended(self) -> dict[str, str]:
        """Return the end of the process: killed from outside, or a crash, with the last line of its stderr."""
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return {"kind": "killed", "message": "its process was killed, as a system does that runs out of memory"}
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return {"kind": "crash", "message": f"worker process ended with exit code {code}{last}"}

    def terminate(self) -> None:
        """Tell the process to end, its run writing down what it has."""
        self.process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def close(self, deadline: float | None) -> None:
        """Wait for the process, until `deadline` (monotonic seconds) if there is one, then end it."""
        try:
            self.process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread job may still be in the buffer
                    pipe.close()


class Local:
    """Workers on this machine."""

    def cores(self) -> int:
        """Return the cores that this process may use."""
        return cores()

    def check_device(self, wanted: str) -> None:
        """Refuse a device that this machine does not have.

        Raises:
            BenchError: says so.
        """
        from nanogpt_bench.setup.runtime import check_device

        check_device(wanted)

    def worker(self, messages: Messages, threads: int) -> AnyWorker:
        """Start a process."""
        return Worker(messages, threads)


class Pool:
    """Worker processes from entry to exit; leaving stops whatever still runs.

    One thread a worker unless told otherwise: two workers on two cores don't fight, and a run's arithmetic does not
    depend on the machine.
    """

    def __init__(self, size: int, threads: int = 1, executor: Executor | None = None) -> None:
        self._messages: Messages = queue.SimpleQueue()
        self._size, self._threads = size, threads
        self._executor = executor or Local()
        self._workers: list[AnyWorker] = []

    def __enter__(self) -> Pool:
        for _ in range(self._size):
            self._workers.append(self._executor.worker(self._messages, self._threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, *, patient: bool = False) -> None:
        """Tell every worker to end, its run writing down what it has, and wait until all are gone.

        However long that takes if `patient`: a step may take minutes, and its checkpoint is worth them.
        """
        for worker in self._workers:
            worker.terminate()
        deadline = None if patient else time.monotonic() + SECONDS_TO_STOP
        for worker in self._workers:
            worker.close(deadline)
        self._workers = []

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self._workers:
            worker.kill()

    def run(self, jobs: Sequence[Mapping[str, Any]], order: Iterable[int], tick: float = 0.5) -> Iterator[Event]:
        """Work through the jobs in `order`; yields events until all have ended, a tick when none came in `tick` s.

        Whoever takes the events may append to `jobs` and, where it is a deque, to `order`: every worker with nothing to
        do takes one.
        """
        waiting = order if isinstance(order, deque) else deque(order)
        yield from self._hand_out(jobs, waiting)
        while any(worker.job is not None for worker in self._workers):
            try:
                worker, message = self._messages.get(timeout=tick)
            except queue.Empty:
                yield Event(None, "tick")
                continue
            yield from self._handle(worker, message, waiting)
            yield from self._hand_out(jobs, waiting)

    def _hand_out(self, jobs: Sequence[Mapping[str, Any]], waiting: deque[int]) -> Iterator[Event]:
        for worker in self._workers:
            if worker.job is None and waiting:
                job = waiting.popleft()
                worker.give(job, jobs[job])
                yield Event(job, "started")

    def _handle(self, worker: AnyWorker, message: dict[str, Any] | None, waiting: deque[int]) -> Iterator[Event]:
        job = worker.job
        if message is None:
            self._workers.remove(worker)
            failure = worker.ended()
            worker.close(time.monotonic())
            if job is not None:
                yield Event(job, "failed", {"error": failure})
            if waiting:
                self._workers.append(self._executor.worker(self._messages, self._threads))
            return
        yield Event(job, message["kind"], message)
        if message["kind"] in ("done", "failed"):
            worker.job = None
