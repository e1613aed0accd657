"""The one exception that the command line turns into a line and exit code 2, and the words of such lines.

Any function of the harness may raise it; a docstring has `Raises` for other exceptions only.
"""

import difflib
import errno
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: of a word whose nearest spelling is looked for
LONGEST_WORD = 200
#: of an error's message, which may quote what a file holds
LONGEST_MESSAGE = 4000
#: by which a system says that a disk is full, a quota or a limit reached, or that it can't be written (any more)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class BenchError(ValueError):
    """Something that the user asked for can't be done; `str(error)` is one line that says what and how to fix it."""

    def __init__(self, message: object) -> None:
        super().__init__(shortened(printable(str(message)), LONGEST_MESSAGE))


class DiskError(BenchError):
    """A refusal by a disk: nothing that the user gave was wrong, and the exit code is 1."""


def refused(what: str, error: OSError) -> BenchError:
    """Return the error for what a system refused, `what` and its reason: a `DiskError` where that is the disk's.

    >>> refused("--out 'a' can't be written", OSError(errno.ENOSPC, "No space left on device"))
    DiskError("--out 'a' can't be written: No space left on device")
    """
    return (DiskError if error.errno in _DISK else BenchError)(f"{what}: {error.strerror or error}")


@contextmanager
def refusals(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Make refusals of errors of some kinds, each beginning with `what`; without kinds, of other refusals.

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
        raise BenchError(f"{what}: {error if isinstance(error, BenchError) else one_line(error)}") from None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known spelling closest to `word`, or None when nothing is close.

    >>> nearest("train.max_stps", ["train.max_steps", "seed"])
    'train.max_steps'
    """
    folded, by_folded = word.lower()[:LONGEST_WORD], {name.lower(): name for name in known}
    once = next((name for name in by_folded if _one_edit_apart(folded, name)), None)
    matches = [once] if once else difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def _one_edit_apart(word: str, other: str) -> bool:
    """Return whether one letter too many, too few or another, or two neighbours swapped, make one into the other."""
    short, long = sorted((word, other), key=len)
    if len(short) < 3 or len(long) - len(short) > 1:
        return False
    same = next((place for place, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short))
    a, b = short[same:], long[same:]
    if len(a) < len(b):
        return a == b[1:]
    return a[1:] == b[1:] or (a[1::-1] == b[:2] and a[2:] == b[2:])


def unknown(kind: str, word: object, known: Iterable[str]) -> BenchError:
    """Return the error for an unknown `word`: names it, the nearest valid spelling and everything allowed.

    >>> str(unknown("rule", "nearset", ["nearest", "stochastic"]))
    "unknown rule 'nearset'; did you mean 'nearest'? allowed: nearest, stochastic"
    """
    return BenchError(f"unknown {kind} {str(word)!r}{_allowed(word, list(known))}")


def not_known(word: object, known: Iterable[str]) -> str:
    """Return in words that a word is not one of those allowed, the nearest of them, and all.

    >>> not_known("yesterdya", ["today", "yesterday"])
    "'yesterdya' is not known; did you mean 'yesterday'? allowed: today, yesterday"
    """
    return f"{word!r} is not known{_allowed(word, list(known))}"


def _allowed(word: object, known: list[str]) -> str:
    guess = nearest(str(word), known)
    return (f"; did you mean {guess!r}?" if guess else ";") + f" allowed: {', '.join(known)}"


def one_line(error: BaseException | str) -> str:
    """Return a message, or an exception's, with every run of white space, line breaks included, as one blank."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """Return a text on one line, with what a terminal obeys as numbers: escape sequences, marks of direction.

    >>> printable("a\\x1b[31m\\u202eb")
    'a\\\\x1b[31m\\\\u202eb'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, the middle of a longer one left out.

    >>> shortened("abcdefghij", 7)
    'ab … ij'
    """
    side = (most - 3) // 2
    return text if len(text) <= most else f"{text[:side]} … {text[-side:]}"


def disk_failure(error: OSError) -> str | None:
    """Return what a disk refused as one line, None for an error that is not the disk's.

    >>> disk_failure(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"))
    "'runs/a/metrics.jsonl' can't be written: No space left on device"
    """
    if error.errno not in _DISK:
        return None
    what = "a file" if error.filename is None else repr(str(error.filename))
    return one_line(f"{what} can't be written: {error.strerror}")


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
    if isinstance(value, str) and value.startswith(BEGINS_A_FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
        return value if value.strip() == value else f"'{value}"
    return "" if value is None else value
