"""Types of command-line arguments: from a word to a value, or one line that says what is allowed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from nanogpt_bench.system.errors import BenchError


class Tokenizers(tuple[str, ...]):
    """The tokenizers by name, `bpe-N`, and whatever names a model, whose own is meant then."""

    def __contains__(self, word: object) -> bool:
        return (
            super().__contains__(word)
            or str(word).startswith("bpe-")
            or "/" in str(word)
            or str(word).endswith(".gguf")
            or Path(str(word)).is_dir()
        )


def names(text: str) -> list[str]:
    """Return the names in a list with commas.

    Raises:
        argparse.ArgumentTypeError: a list without a name.

    >>> names("E4M3, E7M0")
    ['E4M3', 'E7M0']
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; give names with commas between them")
    return found


def positive(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    return _whole(text, 1)


def natural(text: str) -> int:
    """Return a whole number of at least 0, below 2^63.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a whole number >= {least}")
    return value


def positives(text: str) -> list[int]:
    """Return the whole numbers in a list with commas, in increasing order, each once.

    >>> positives("32,8,16,8")
    [8, 16, 32]
    """
    return sorted({positive(name) for name in names(text)})


def at_least_0(text: str) -> float:
    """Return a finite number of at least 0.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    return _number(text, lambda value: 0.0 <= value < math.inf, "a number >= 0")


def above_0(text: str) -> float:
    """Return a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    return _number(text, lambda value: 0.0 < value < math.inf, "a number > 0")


def _number(text: str, is_allowed: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {what}")
    return value


def refuse_repeated(words: Sequence[str]) -> None:
    """Refuse an option that a command line gives twice, since only the last one would count.

    Raises:
        BenchError: names the option.
    """
    options = [word.partition("=")[0] for word in words]
    for place, option in enumerate(options):
        if option.startswith("--") and option in options[:place]:
            raise BenchError(f"{option} is given twice; keep one")
