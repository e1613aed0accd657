"""Waiting for a call no longer than a given time: name resolution, for one, obeys no timeout of a client's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return `call()`, or raise TimeoutError after `seconds`; what the call raises is raised here.

    The call goes on in a daemon thread when time is up, so it must not hold anything that has to be closed.

    >>> within(5.0, lambda: 2 + 2)
    4
    """
    outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((True, call()))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        done, value = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not done:
        raise value
    result: T = value
    return result
