"""How long a comparison or a sweep will still take, by how long its steps have taken so far."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One run as far as it is known: its size beside the others', and what has been done of it in how many seconds."""

    #: of the whole run, in any unit that all runs share
    size: float = 1.0
    #: share of its steps that are over
    done: float = 0.0
    #: that they took
    seconds: float = 0.0
    running: bool = False
    ended: bool = False


def seconds_left(runs: Sequence[Work], workers: int) -> float | None:
    """Return about how many seconds `workers` need for what is left, None before the first step of any run.

    A run that goes on keeps its own pace. One that waits takes its size times the mean seconds a unit of all that has
    been done, on the worker that is free first, the largest ones first.

    >>> first, second = Work(done=1.0, seconds=60.0, ended=True), Work(done=0.5, seconds=40.0, running=True)
    >>> seconds_left([first, second, Work()], workers=1), seconds_left([Work()], workers=1)
    (106.66666666666667, None)
    """
    done = sum(run.size * run.done for run in runs)
    if done <= 0.0:
        return None
    pace = sum(run.seconds for run in runs if run.done > 0.0) / done
    free = [_rest(run, pace) for run in runs if run.running and not run.ended]
    free += [0.0] * (workers - len(free))
    heapq.heapify(free)
    waiting = (run.size for run in runs if not (run.running or run.ended))
    for size in sorted(waiting, reverse=True):
        heapq.heapreplace(free, free[0] + size * pace)
    return max(free)


def _rest(run: Work, pace: float) -> float:
    return run.seconds / run.done * (1.0 - run.done) if run.done > 0.0 else run.size * pace
