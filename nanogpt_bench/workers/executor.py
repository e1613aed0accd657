"""The interface of a pool to its workers and to the executor that starts them, local or remote."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any, Protocol

Messages = queue.SimpleQueue[tuple[Any, dict[str, Any] | None]]
"""(a worker, what it says), and (the worker, None) when it has ended."""


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

    def worker(self, messages: Messages, threads: int) -> AnyWorker:
        """Start a worker that computes with so many threads."""
