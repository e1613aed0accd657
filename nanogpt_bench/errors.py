"""The one exception that the command line turns into a single line and exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BenchError(ValueError):
    """Something the user asked for can't be done; `str(error)` is one line that says what and how to fix it."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known spelling closest to `word`, or None when nothing is close.

    >>> nearest("train.max_stps", ["train.max_steps", "seed"])
    'train.max_steps'
    """
    by_folded = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def unknown(kind: str, word: object, known: Iterable[str]) -> BenchError:
    """Return the error for an unknown `word`: names it, the nearest valid spelling and everything allowed.

    >>> str(unknown("rule", "nearset", ["nearest", "stochastic"]))
    "unknown rule 'nearset'; did you mean 'nearest'? allowed: nearest, stochastic"
    """
    names = list(known)
    guess = nearest(str(word), names)
    hint = f"; did you mean {guess!r}?" if guess else ";"
    return BenchError(f"unknown {kind} {str(word)!r}{hint} allowed: {', '.join(names)}")


def one_line(error: BaseException | str) -> str:
    """Return a message, or an exception's, with every run of white space, line breaks included, as one blank."""
    return " ".join(str(error).split())
