"""The executors by name: processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanogpt_bench.system.errors import BenchError, unknown
from nanogpt_bench.workers.executor import Executor
from nanogpt_bench.workers.pool import Local
from nanogpt_bench.workers.ray_cluster import RayCluster

EXECUTORS = ("local", "ray")


def check_executor(name: str, address: str | None) -> None:
    """Refuse an unknown executor, and an address without ray.

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
    with RayCluster(address, folder) as cluster:
        yield cluster
