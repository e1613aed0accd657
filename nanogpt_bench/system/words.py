"""Counts, times and lines for a reader."""

from __future__ import annotations

import sys

from nanogpt_bench.system.errors import printable


def counted(number: int, what: str) -> str:
    """Return how many there are of what; `what` is one of them.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def rough_time(seconds: float) -> str:
    """Return an estimated time, to one or two digits.

    >>> [rough_time(seconds) for seconds in (4, 42, 100, 1800, 9000)]
    ['some seconds', 'about 40 s', 'about 2 min', 'about 30 min', 'about 2 h 30 min']
    """
    if seconds < 10:
        return "some seconds"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


def say(line: str) -> None:
    """Print a line beside the results, on standard error."""
    print(printable(line), file=sys.stderr, flush=True)
