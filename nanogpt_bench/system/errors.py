"""`BenchError`, which the command line prints as one line with exit code 2, and helpers
for its messages.

Any function of the bench may raise it; docstrings have `Raises` for other exceptions
only.
"""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: characters of a word that are compared to find its nearest spelling
LONGEST_WORD = 200
#: the most characters of an error's message, which may quote a file
LONGEST_MESSAGE = 4000
#: errors of a disk: full, over a quota or a limit, or not to be written (any more)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class BenchError(ValueError):
    """An error of use; `str(error)` is one line that says what is wrong and how to fix
    it.
    """

    def __init__(self, message: object) -> None:
        super().__init__(shortened(printable(str(message)), LONGEST_MESSAGE))


class DiskError(BenchError):
    """An error of the disk and not of use; the exit code is 1."""


def refused(what: str, error: OSError) -> BenchError:
    """Return the error of an operation that the system refused; a `DiskError` where the
    reason is the disk.

    >>> refused("--out 'a' can't be written", OSError(errno.ENOSPC, "No space left on device"))
    DiskError("--out 'a' can't be written: No space left on device")
    """
    return (DiskError if error.errno in _DISK else BenchError)(f"{what}: {error.strerror or error}")


@contextmanager
def refusals(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into BenchErrors that begin with `what`; without
    kinds, do so with BenchErrors.

    >>> with refusals("--out", OSError):
    ...     raise OSError("no")
    Traceback (most recent call last):
    nanogpt_bench.system.errors.BenchError: --out: no
    """
    caught = kinds or (BenchError,)
    try:
        yield
    except caught as error:
        if kinds and isinstance(error, BenchError):
            raise
        raise BenchError(
            f"{what}: {error if isinstance(error, BenchError) else one_line(error)}"
        ) from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None if none is close.

    >>> nearest("train.max_stps", ["train.max_steps", "seed"])
    'train.max_steps'
    """
    folded, by_folded = word.lower()[:LONGEST_WORD], {name.lower(): name for name in known}
    once = next((name for name in by_folded if _one_edit_apart(folded, name)), None)
    matches = [once] if once else difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def _one_edit_apart(word: str, other: str) -> bool:
    """Return whether two words differ by one letter added, left out or changed, or by
    two neighbours swapped.
    """
    short, long = sorted((word, other), key=len)
    if len(short) < 3 or len(long) - len(short) > 1:
        return False
    same = next(
        (place for place, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]),
        len(short),
    )
    a, b = short[same:], long[same:]
    if len(a) < len(b):
        return a == b[1:]
    return a[1:] == b[1:] or (a[1::-1] == b[:2] and a[2:] == b[2:])


def unknown(kind: str, word: object, known: Iterable[str]) -> BenchError:
    """Return the error of an unknown `word`: it names the nearest known word and all
    known words.

    >>> str(unknown("rule", "nearset", ["nearest", "stochastic"]))
    "unknown rule 'nearset'; did you mean 'nearest'? allowed: nearest, stochastic"
    """
    return BenchError(f"unknown {kind} {str(word)!r}{_allowed(word, list(known))}")


def not_known(word: object, known: Iterable[str]) -> str:
    """Return a message that `word` is not known, with the nearest known word and all
    known words.

    >>> not_known("yesterdya", ["today", "yesterday"])
    "'yesterdya' is not known; did you mean 'yesterday'? allowed: today, yesterday"
    """
    return f"{word!r} is not known{_allowed(word, list(known))}"


def _allowed(word: object, known: list[str]) -> str:
    guess = nearest(str(word), known)
    return (f"; did you mean {guess!r}?" if guess else ";") + f" allowed: {', '.join(known)}"


def one_line(error: BaseException | str) -> str:
    """Return a message, or an exception's, with all white space and line breaks turned
    into single spaces.
    """
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """Return a text on one line, with characters that would control a terminal replaced
    by their escapes.

    >>> printable("a\\x1b[31m\\u202eb")
    'a\\\\x1b[31m\\\\u202eb'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shortened(text: str, most: int) -> str:
    """Return a text cut to at most `most` characters by leaving out its middle.

    >>> shortened("abcdefghij", 7)
    'ab … ij'
    """
    side = (most - 3) // 2
    return text if len(text) <= most else f"{text[:side]} … {text[-side:]}"


def disk_failure(error: OSError) -> str | None:
    """Return the message of an error of the disk; None for any other error.

    >>> disk_failure(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"))
    "'runs/a/metrics.jsonl' can't be written: No space left on device"
    """
    if error.errno not in _DISK:
        return None
    what = "a file" if error.filename is None else repr(str(error.filename))
    return one_line(f"{what} can't be written: {error.strerror}")


#: beginnings of a text that a spreadsheet takes for a formula, and computes when the
#: file is opened
BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural unless it is one; `what` is the
    singular.

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
    """Print a line to standard error, since results go to standard output."""
    print(printable(line), file=sys.stderr, flush=True)


def cell(value: object) -> object:
    """Return a value for a spreadsheet's cell: empty for None, and an apostrophe before
    a text like a formula.

    Numbers stay as they are, also negative ones and those given as text.

    >>> cell("=1+1"), cell("-x"), cell(-0.178), cell("-0.178"), cell("E4M3 nearest"), cell(None)
    ("'=1+1", "'-x", -0.178, '-0.178', 'E4M3 nearest', '')
    """
    if isinstance(value, str) and value.startswith(BEGINS_A_FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
        return value if value.strip() == value else f"'{value}"
    return "" if value is None else value
