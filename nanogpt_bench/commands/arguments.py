"""Types of command-line arguments: from a word to a value, or one line that says what is allowed."""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nanogpt_bench.system.errors import not_known


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Return what reads one of some words.

    >>> one_of(["today"])("today")
    'today'

    Raises:
        argparse.ArgumentTypeError: what is returned, of any other; names the nearest one.
    """

    def read(word: str) -> str:
        if word not in (known := list(choices)):
            raise argparse.ArgumentTypeError(not_known(word, known))
        return word

    return read


def braced(words: Iterable[str]) -> str:
    """Return words as the usage of a command shows a choice.

    >>> braced(["a", "b"])
    '{a,b}'
    """
    return "{" + ",".join(words) + "}"


def tokenizer(word: str) -> str:
    """Return a tokenizer's name: one of the bench's own, `bpe-N`, or what names a model, whose own is meant then.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if word.startswith("bpe-") or "/" in word or word.endswith(".gguf") or Path(word).is_dir():
        return word
    return one_of(("byte", "char", "gpt2", "bpe-N"))(word)


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


def add_executor(parser: Any) -> None:
    """Add where the runs of several are trained."""
    parser.add_argument(
        "--executor",
        default="local",
        metavar="local|ray",
        help="where runs train: processes of this machine (default), or of a Ray cluster",
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="ray: a running cluster (default: one of these cores)")
