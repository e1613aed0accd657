"""Backward passes in which parameters step: when one has ended, whether an exception
ended it, and whether it left out a step.
"""

import weakref
from typing import Any, Final

import torch
from torch.autograd import Variable

_ENGINE: Final[Any] = Variable._execution_engine


class _Ending:
    """The function that autograd calls at the end of a run, and does not where an
    exception ends it.

    Only the run keeps it alive.
    """

    def __init__(self, run: "_Run") -> None:
        self._run = run

    def __call__(self) -> None:
        self._run.has_ended = True


class _Run:
    """A run of autograd's engine, which is under way when this is made."""

    def __init__(self) -> None:
        self.has_ended = False
        ending = _Ending(self)
        self._ending = weakref.ref(ending)
        _ENGINE.queue_callback(ending)

    @property
    def is_under_way(self) -> bool:
        return not self.has_ended and self._ending() is not None

    @property
    def has_failed(self) -> bool:
        return not self.has_ended and self._ending() is None


class BackwardPass:
    """A backward pass, with the runs of autograd inside it, and its verdict.

    ``is_skipped`` is true once a step of it was left out. A step by sums, which no run
    of autograd takes, has one as well.
    """

    def __init__(self) -> None:
        self.is_skipped = False
        self._runs: dict[int, _Run] = {}

    def join(self) -> None:
        """Add the run of autograd that calls this."""
        run = torch._C._current_graph_task_id()
        if run >= 0 and run not in self._runs:
            self._runs[run] = _Run()

    @property
    def is_under_way(self) -> bool:
        return any(run.is_under_way for run in self._runs.values())

    @property
    def has_failed(self) -> bool:
        """True if an exception ended it."""
        return any(run.has_failed for run in self._runs.values())
