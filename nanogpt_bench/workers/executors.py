"""The executors by name: processes of this machine, or the same processes in a Ray cluster, held by an actor of a node.

Training inside Ray's own processes is not done: signals are Ray's there, and a run has to answer to them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from nanogpt_bench.system.errors import BenchError, one_line, shortened, unknown
from nanogpt_bench.workers.pool import SECONDS_TO_STOP, Executor, Local, Messages, Worker, cores

EXECUTORS = ("local", "ray")
#: seconds that a node may take to start its first process
SECONDS_TO_START = 120.0
_LONGEST_REASON = 200
#: environment of Ray: no usage reports, no advice, no log among the results
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its C++ part writes to standard error itself, such as how it waits for a node
}
#: bytes that Ray keeps for objects, of which there are none but lines of text
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


class HeldWorker:
    """The actor: a worker process on its node, whose messages wait until they are fetched.

    Several calls are answered at once: one of them waits for the next message all the time.
    """

    def __init__(self) -> None:
        self._messages: Messages = queue.SimpleQueue()
        self._worker: Worker | None = None

    def start(self, threads: int, marker: str, folder: str) -> None:
        """Start the process in the folder where the command was given.

        Raises:
            FileNotFoundError: this node does not see that folder, or the marker in that of the runs.
        """
        os.stat(marker)
        os.chdir(folder)
        self._worker = Worker(self._messages, threads)

    def next(self) -> str:
        """Return the next message as JSON; null when the process has ended."""
        return json.dumps(self._messages.get()[1])

    def call(self, name: str, *arguments: str) -> str:
        """Call a method of the worker, arguments and result as JSON."""
        assert self._worker is not None
        return json.dumps(getattr(self._worker, name)(*map(json.loads, arguments)))

    def close(self, seconds: float | None) -> None:
        """Wait so long for the process, then end it."""
        if self._worker is not None:
            self._worker.close(None if seconds is None else time.monotonic() + seconds)


class RayWorker:
    """A worker process on some node; `messages` as those of a local one.

    Raises:
        BenchError: its node does not see the folder of the runs.
    """

    def __init__(self, cluster: RayCluster, messages: Messages, threads: int) -> None:
        import ray

        self.job: int | None = None
        self._ray, self._lost = ray, False
        # Runs resume themselves: what Ray would repeat is a run that has a folder already.
        options = {"num_cpus": threads, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
        self._actor = ray.remote(HeldWorker).options(**options).remote()
        started = self._actor.start.remote(threads, str(cluster.marker), os.getcwd())
        try:
            ray.get(started, timeout=SECONDS_TO_START)
        except FileNotFoundError:  # as which Ray raises what the actor raised
            raise BenchError(
                f"--executor ray: a node does not see the folder {str(cluster.folder)!r}; give an --out, and a working "
                "folder, on storage that all nodes share"
            ) from None
        except ray.exceptions.RayError as error:
            reason = shortened(one_line(error), _LONGEST_REASON)
            what = f"no worker starts on the cluster ({type(error).__name__}: {reason})"
            raise BenchError(f"--executor ray: {what}") from None
        threading.Thread(target=self._listen, args=(messages,), daemon=True).start()

    def _listen(self, messages: Messages) -> None:
        message: dict[str, Any] | None = {}
        while message is not None:
            try:
                message = json.loads(self._ray.get(self._actor.next.remote()))
            except self._ray.exceptions.RayError:
                self._lost, message = True, None
            messages.put((self, message))

    def give(self, job: int, content: Mapping[str, Any]) -> None:
        """Hand over a job; an actor that has died meanwhile is noticed by its silence."""
        self.job = job
        self._call("give", job, content)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of the worker's method; None of an actor that is gone."""
        try:
            return json.loads(self._ray.get(self._actor.call.remote(name, *map(json.dumps, arguments))))
        except self._ray.exceptions.RayError:
            self._lost = True
            return None

    def ended(self) -> dict[str, str]:
        """Return the end of the process as a local worker does; its actor or its node may be gone too."""
        found: dict[str, str] | None = None if self._lost else self._call("ended")
        return found or {"kind": "killed", "message": "its Ray actor was lost, with its node or by a kill"}

    def terminate(self) -> None:
        """Tell the process to end, its run writing down what it has."""
        self._call("terminate")

    def kill(self) -> None:
        """End the process at once."""
        self._call("kill")

    def close(self, deadline: float | None) -> None:
        """Wait for the process, until `deadline` if there is one, then end it and the actor."""
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(self._ray.exceptions.RayError):
            patience = None if seconds is None else seconds + SECONDS_TO_STOP
            self._ray.get(self._actor.close.remote(seconds), timeout=patience)
        self._ray.kill(self._actor)


class RayCluster:
    """A cluster from entry to exit: that at `address`, or one of this machine's own cores.

    Raises:
        BenchError: the package is missing, or no cluster answers.
    """

    def __init__(self, address: str | None, folder: Path) -> None:
        self.address, self.folder = address, folder.resolve()
        #: file by which a node proves that it sees the folder
        self.marker = self.folder / f".ray-{secrets.token_hex(8)}"

    def __enter__(self) -> RayCluster:
        if find_spec("ray") is None:
            raise BenchError("--executor ray needs the package ray; get it with pip install 'fp8manifold[ray]'")
        os.environ.update({key: value for key, value in _QUIET.items() if key not in os.environ})
        import ray

        own = {} if self.address else {"num_cpus": cores(), "object_store_memory": _OBJECTS}
        quiet = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # advice on how a cluster is secured
                ray.init(self.address, **own, **quiet)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = f"--address {self.address!r}" if self.address else "--executor ray"
            reason = shortened(one_line(error), _LONGEST_REASON)
            raise BenchError(f"{where}: no Ray cluster answers ({type(error).__name__}: {reason})") from None
        self._ray = ray
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.marker.unlink(missing_ok=True)
        self._ray.shutdown()

    def cores(self) -> int:
        """Return the cores of all nodes."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def check_device(self, wanted: str) -> None:
        """Refuse a GPU where no node has one.

        Raises:
            BenchError: says so.
        """
        from nanogpt_bench.setup.runtime import CUDA, no_device

        if wanted == CUDA and not self._ray.cluster_resources().get("GPU"):
            raise no_device("any node of the cluster")

    def worker(self, messages: Messages, threads: int) -> RayWorker:
        """Start a worker on a node with so many cores free, where the folder is seen."""
        self.marker.touch()  # in the folder by now is what says whose it is
        return RayWorker(self, messages, threads)
