"""A backward pass in which parameters step, followed until it has ended.

With `step_in_backward` each parameter steps as soon as its gradient is known. Whether a
step was skipped is then a fact of the whole pass, and is reported once for it.

Autograd has no object for a pass, only runs of its engine, of which a pass may have
several, nested in each other (as gradient checkpointing does). A run calls a function that
was queued when it ends normally, and drops it uncalled when an exception ends it::

    hook of a parameter -> BackwardPass.join() -> _Run queues an _Ending
    run ends            -> the engine calls the _Ending        -> has_ended
    run fails           -> the engine frees it, uncalled       -> has_failed

`_in_backward` makes the passes, and the optimizer those of `step_parameter`. Both ask them,
and `_triton_step` where a GPU's verdict is counted.
"""

import weakref
from typing import Any, Final

import torch
from torch.autograd import Variable

_ENGINE: Final[Any] = Variable._execution_engine


class _Ending:
    """The function that autograd calls at the end of a run.

    It is not called where an exception ends the run. Only the run keeps it alive.
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

    A step by sums of gradients, which no run of autograd takes, has one as well.

    Attributes:
        is_skipped: True once a step of the pass was left out.
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
