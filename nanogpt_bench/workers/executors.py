"""The executors by name: processes of this machine, or those of a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanogpt_bench.system.errors import BenchError, one_line, shortened, unknown
from nanogpt_bench.workers.pool import Local, Worker, cores, failed, serve

EXECUTORS = ("local", "ray")
_LONGEST_REASON = 200
#: environment of Ray: no usage reports, no advice, no log among the results
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ part writes to standard error itself, such as how it waits for a node
}
#: bytes that Ray keeps for objects, of which there are none but small ones
_OBJECTS = 80 * 2**20


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
def executor_of(name: str, address: str | None, folder: Path) -> Iterator[Local]:
    """Yield the executor called `name`; runs are written below `folder`, which all its workers have to see.

    Raises:
        BenchError: as `check_executor`; the package ray is missing, or no cluster answers.
    """
    check_executor(name, address)
    if name == "local":
        yield Local()
        return
    if find_spec("ray") is None:
        raise BenchError("--executor ray needs the package ray; get it with pip install 'fp8manifold[ray]'")
    os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
    import ray

    own = {} if address else {"num_cpus": cores(), "object_store_memory": _OBJECTS}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # advice on how a cluster is secured
            ray.init(address, **own, log_to_driver=False, configure_logging=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"--address {address!r}" if address else "--executor ray"
        reason = shortened(one_line(error), _LONGEST_REASON)
        raise BenchError(f"{where}: no Ray cluster answers ({type(error).__name__}: {reason})") from None
    marker = folder.resolve() / f".ray-{secrets.token_hex(8)}"
    try:
        yield RayCluster(ray, marker)
    finally:
        marker.unlink(missing_ok=True)
        ray.shutdown()


class RayCluster(Local):
    """The nodes of a cluster; `marker` is the file by which a node proves that it sees the folder of the runs."""

    def __init__(self, ray: Any, marker: Path) -> None:
        self.ray, self.marker = ray, marker

    def cores(self) -> int:
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def check_device(self, wanted: str) -> None:
        from nanogpt_bench.setup.runtime import CUDA, no_device

        if wanted == CUDA and not self.ray.cluster_resources().get("GPU"):
            raise no_device("any node of the cluster")

    def worker(self, threads: int) -> RayWorker:
        self.marker.touch()  # in the folder by now is what says whose it is
        return RayWorker(self.ray, threads, self.marker)


class RayWorker(Worker):
    """One task of the cluster at a time; a run is told to end as Ray cancels a task, by SIGINT."""

    def __init__(self, ray: Any, threads: int, marker: Path) -> None:
        self._ray, self._given = ray, (str(marker), os.getcwd())
        self._task: Any = None
        self._future: Future[dict[str, Any]] | None = None
        # Runs resume themselves: what Ray would repeat is a run that has a folder already.
        self._serve = ray.remote(_serve_there).options(num_cpus=threads, max_retries=0)

    def submit(self, job: Mapping[str, Any]) -> Future[dict[str, Any]]:
        self._task = self._serve.remote(dict(job), *self._given)
        self._future = self._task.future()
        return self._future

    def why(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, self._ray.exceptions.WorkerCrashedError | self._ray.exceptions.NodeDiedError):
            return failed("its Ray worker was lost, with its node or by a kill")
        return failed(f"{type(error).__name__}: {shortened(one_line(error), _LONGEST_REASON)}", "crash")

    def terminate(self) -> None:
        self._cancel(force=False)

    def kill(self) -> None:
        self._cancel(force=True)

    def _cancel(self, *, force: bool) -> None:
        if self._future is not None and not self._future.done():
            self._ray.cancel(self._task, force=force)

    def close(self, deadline: float | None) -> None:
        if self._future is not None:
            wait([self._future], None if deadline is None else max(0.0, deadline - time.monotonic()))
            self.kill()


def _serve_there(job: dict[str, Any], marker: str, folder: str) -> dict[str, Any]:
    """Train a run on a node, in the folder where the command was given."""
    runs = str(Path(marker).parent)
    try:
        os.stat(marker)
        os.chdir(folder)
    except OSError:
        what = f"--executor ray: a node does not see the folder {runs!r}; give an --out, and a working folder, on "
        return failed(f"{what}storage that all nodes share", "BenchError")
    return serve(job, (signal.SIGTERM, signal.SIGINT))
