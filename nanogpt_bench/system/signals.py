"""SIGTERM and SIGINT as requests to stop.

The first signal asks a command to stop where nothing is lost, a second one ends it at
once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

#: exit code of a command that a signal ended and that can be resumed
RESUMABLE = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: seconds within which signals count as one: some wrappers signal a process and then
#: its whole group
SAME_REQUEST_SECONDS = 0.1


class StopRequest:
    """The request to stop that a signal made.

    A command checks it where stopping loses nothing.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        #: time of the first signal
        self._time = 0.0

    @property
    def asked(self) -> bool:
        return self._signal is not None

    @property
    def number(self) -> int:
        """The number of the first signal, 0 before one has come."""
        return 0 if self._signal is None else int(self._signal)

    @property
    def name(self) -> str:
        """The name of the first signal, "" before one has come."""
        return "" if self._signal is None else self._signal.name

    def note(self, number: int) -> bool:
        """Note a signal; return whether the command goes on to its next place to stop.

        False for a second signal, unless it repeats the first within
        `SAME_REQUEST_SECONDS`.
        """
        now = time.monotonic()
        if self._signal is None:
            self._signal = signal.Signals(number)
            self._time = now
            return True
        return now - self._time < SAME_REQUEST_SECONDS


@contextmanager
def stop_requests(before_exit: Callable[[], None] = lambda: None) -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT into a request, and exit at the second.

    The exit code is 128 + the signal's number; `before_exit` is called first. The
    former handlers are restored on leaving. Outside of the main thread, where Python
    allows none, no request comes.
    """

    def end(number: int) -> None:
        before_exit()
        # No clean-up, which could take long: files on disk are whole at any time.
        os._exit(128 + number)

    with _requests(SIGNALS, end) as request:
        yield request


def stop_requests_once(
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,),
) -> AbstractContextManager[StopRequest]:
    """Turn the first of these signals into a request and ignore later ones.

    Other signals keep their handlers. For a worker: its parent may signal it, and then
    its whole group.
    """
    return _requests(numbers, lambda _: None)


@contextmanager
def _requests(
    numbers: tuple[signal.Signals, ...], on_second: Callable[[int], None]
) -> Iterator[StopRequest]:
    request = StopRequest()

    def handle(number: int, _: Any) -> None:
        if not request.note(number):
            on_second(number)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    former_handlers = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
