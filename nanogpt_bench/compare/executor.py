"""Where the workers of a comparison or a sweep run: as processes of this machine, or in a Ray cluster."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from nanogpt_bench.compare.cores import cores
from nanogpt_bench.system.errors import BenchError, unknown

EXECUTORS = ("local", "ray")

Messages = queue.SimpleQueue[tuple[Any, dict[str, Any] | None]]
"""(a worker, what it says), and (the worker, None) when it has ended."""


class AnyWorker(Protocol):
    """A worker process, wherever it is."""

    #: what it is doing
    job: int | None

    def give(self, job: int, content: Mapping[str, Any]) -> None:
        """Hand over a job."""

    def ended(self) -> dict[str, str]:
        """How the process ended: `kind` and `message`."""

    def terminate(self) -> None:
        """Tell it to end, its run writing down what it has."""

    def kill(self) -> None:
        """End it at once."""

    def close(self, deadline: float | None) -> None:
        """Wait for its end, until `deadline` (monotonic seconds) if there is one, then end it."""


class Executor(Protocol):
    """What makes workers."""

    def cores(self) -> int:
        """Return how many threads there are cores for."""

    def worker(self, messages: Messages, threads: int) -> AnyWorker:
        """Start a worker that computes with so many threads."""


class Local:
    """Workers on this machine."""

    def cores(self) -> int:
        """Return the cores that this process may use."""
        return cores()

    def worker(self, messages: Messages, threads: int) -> AnyWorker:
        """Start a process."""
        from nanogpt_bench.compare.pool import Worker

        return Worker(messages, threads)


def check_executor(name: str, address: str | None) -> None:
    """Refuse an executor that there is not, and an address that means nothing to it.

    Raises:
        BenchError: says so.
    """
    if name not in EXECUTORS:
        raise unknown("--executor", name, EXECUTORS)
    if address is not None and name != "ray":
        raise BenchError(f"--address {address!r} goes with --executor ray")


@contextmanager
def executor_of(name: str, address: str | None, folder: Path) -> Iterator[Executor]:
    """Yield the executor called `name`; runs are written below `folder`, which all its workers have to see.

    Raises:
        BenchError: as `check_executor`; the package ray is missing, or no cluster answers.
    """
    check_executor(name, address)
    if name == "local":
        yield Local()
        return
    from nanogpt_bench.compare.ray_cluster import RayCluster

    with RayCluster(address, folder) as cluster:
        yield cluster
