"""Counts, times and lines for a reader, and cells of a CSV file for a spreadsheet."""

from __future__ import annotations

import sys

from nanogpt_bench.system.errors import printable

#: with which a spreadsheet takes a text for a formula, to be computed when the file is opened
BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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


def cell(value: object) -> object:
    """The value as it goes into a cell: nothing for None, a text that could be a formula behind an apostrophe.

    Numbers stay as they are, negative ones and those given as text too.

    >>> cell("=1+1"), cell("-x"), cell(-0.178), cell("-0.178"), cell("E4M3 nearest"), cell(None)
    ("'=1+1", "'-x", -0.178, '-0.178', 'E4M3 nearest', '')
    """
    if isinstance(value, str) and value.startswith(BEGINS_A_FORMULA) and not _is_number(value):
        return "'" + value
    return "" if value is None else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip() == text
