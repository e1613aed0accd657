"""`BenchError`, which ends a command with one line, and helpers for messages.

The exit code is 2. Any function of the bench may raise it. Docstrings have `Raises` for
other exceptions only.
"""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: characters of a word that are compared to find its nearest spelling
LONGEST_COMPARED_WORD = 200
#: the most characters of an error's message, which may quote a file
LONGEST_ERROR = 4000
#: errors of a disk: full, over a quota or a limit, or not to be written (any more)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class BenchError(ValueError):
    """An error of use; `str(error)` is one line: what is wrong, and how to fix it."""

    def __init__(self, message: object) -> None:
        super().__init__(shortened(printable(str(message)), LONGEST_ERROR))


class DiskError(BenchError):
    """An error of the disk and not of use; the exit code is 1."""


def refused(operation: str, error: OSError) -> BenchError:
    """Return the error of an operation that the system refused.

    It is a `DiskError` where the reason is the disk.

    >>> refused("'a' can't be written", OSError(28, "No space left on device"))
    DiskError("'a' can't be written: No space left on device")
    """
    message = f"{operation}: {error.strerror or error}"
    return DiskError(message) if error.errno in _DISK_ERRORS else BenchError(message)


@contextmanager
def refusals(subject: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into BenchErrors that begin with `subject`.

    Without kinds, BenchErrors get this beginning. With kinds they stay as they are.

    >>> with refusals("--out", OSError):
    ...     raise OSError("no")
    Traceback (most recent call last):
    nanogpt_bench.system.errors.BenchError: --out: no
    """
    try:
        yield
    except BenchError as error:
        if kinds:
            raise
        raise BenchError(f"{subject}: {error}") from None
    except kinds as error:
        raise BenchError(f"{subject}: {one_line(error)}") from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None if none is close.

    >>> nearest("train.max_stps", ["train.max_steps", "seed"])
    'train.max_steps'
    """
    folded = word.lower()[:LONGEST_COMPARED_WORD]
    spellings = {name.lower(): name for name in known}
    for candidate in spellings:
        if _one_edit_apart(folded, candidate):
            return spellings[candidate]
    matches = difflib.get_close_matches(folded, spellings, n=1, cutoff=0.6)
    return spellings[matches[0]] if matches else None


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether two words differ by one edit.

    An edit is a letter added, left out or changed, or two neighbours swapped.
    """
    short, long = sorted((a, b), key=len)
    if len(short) < 3 or len(long) - len(short) > 1:
        return False
    same = 0
    while same < len(short) and short[same] == long[same]:
        same += 1
    short, long = short[same:], long[same:]
    if len(short) < len(long):
        return short == long[1:]
    is_changed = short[1:] == long[1:]
    # `short[1::-1]` are the first two letters, swapped.
    is_swapped = short[1::-1] == long[:2] and short[2:] == long[2:]
    return is_changed or is_swapped


def unknown(kind: str, word: object, known: Iterable[str]) -> BenchError:
    """Return the error of an unknown `word`, with the nearest and all known words.

    >>> str(unknown("rule", "nearset", ["nearest", "stochastic"]))
    "unknown rule 'nearset'; did you mean 'nearest'? allowed: nearest, stochastic"
    """
    return BenchError(f"unknown {kind} {str(word)!r}{_allowed(word, list(known))}")


def not_known(word: object, known: Iterable[str]) -> str:
    """Return a message that `word` is not known, with the nearest and all known words.

    >>> not_known("yesterdya", ["today", "yesterday"])
    "'yesterdya' is not known; did you mean 'yesterday'? allowed: today, yesterday"
    """
    return f"{word!r} is not known{_allowed(word, list(known))}"


def _allowed(word: object, known: list[str]) -> str:
    guess = nearest(str(word), known)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    return f"{hint} allowed: {', '.join(known)}"


def one_line(error: BaseException | str) -> str:
    """Return a message with all white space and line breaks as single spaces."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    r"""Return a text on one line, its control characters as their escapes.

    >>> printable("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    characters = []
    for character in text:
        characters.append(character if character.isprintable() else ascii(character)[1:-1])
    return "".join(characters)


def shortened(text: str, limit: int) -> str:
    """Return a text cut to at most `limit` characters by leaving out its middle.

    >>> shortened("abcdefghij", 7)
    'ab … ij'
    """
    if len(text) <= limit:
        return text
    side = (limit - 3) // 2
    return f"{text[:side]} … {text[-side:]}"


def disk_failure(error: OSError) -> str | None:
    """Return the message of an error of the disk; None for any other error.

    >>> disk_failure(OSError(errno.ENOSPC, "No space left on device", "runs/a"))
    "'runs/a' can't be written: No space left on device"
    """
    if error.errno not in _DISK_ERRORS:
        return None
    file = "a file" if error.filename is None else repr(str(error.filename))
    return one_line(f"{file} can't be written: {error.strerror}")


#: beginnings of a text that a spreadsheet takes for a formula, and computes when the
#: file is opened
BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, given in the singular.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rough_time(seconds: float) -> str:
    """Return an estimated time, to one or two digits.

    >>> [rough_time(seconds) for seconds in (4, 42, 100, 1800, 9000)]
    ['a few seconds', 'about 40 s', 'about 2 min', 'about 30 min', 'about 2 h 30 min']
    """
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min"
    return f"about {minutes // 60} h {minutes % 60} min"


def say(line: str) -> None:
    """Print a line to standard error, since results go to standard output."""
    print(printable(line), file=sys.stderr, flush=True)


def cell(value: object) -> object:
    """Return a value for a spreadsheet's cell.

    None is empty. A text like a formula gets an apostrophe before it. Numbers stay as
    they are, also negative ones and those given as text.

    >>> cell("=1+1"), cell("-x"), cell(-0.178), cell("-0.178"), cell(None)
    ("'=1+1", "'-x", -0.178, '-0.178', '')
    """
    if isinstance(value, str) and value.startswith(BEGINS_A_FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
        # `float` ignores white space around a number.
        return value if value.strip() == value else f"'{value}"
    return "" if value is None else value
