"""Numbers of things in words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """Return how many there are of what; `what` is one of them.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")
