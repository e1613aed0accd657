"""The commands of `nanogpt-bench`, one module each, and argument types.

A module has `TEXTS`, `add_options` and `main`. `main` returns the exit code, or raises
`BenchError`. Modules that import torch are imported inside it, so that help and errors
of options come at once. An argument type turns a word into a value, or raises a line
that says what is allowed.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from nanogpt_bench.data.tokenizer_kind import TOKENIZERS, chosen_kind
from nanogpt_bench.system.errors import not_known
from nanogpt_bench.system.untrusted import is_beyond_floats


def one_of(choices: Iterable[str]) -> Callable[[str], str]:
    """Return an argument type that takes one of some words.

    >>> one_of(["today"])("today")
    'today'
    """

    def parse(word: str) -> str:
        known = list(choices)
        if word not in known:
            raise argparse.ArgumentTypeError(not_known(word, known))
        return word

    return parse


def braced(words: Iterable[str]) -> str:
    """Return words as a choice in the usage of a command.

    >>> braced(["a", "b"])
    '{a,b}'
    """
    return "{" + ",".join(words) + "}"


def tokenizer(word: str) -> str:
    """Return a tokenizer's name: one of the bench's, `bpe-N`, or that of a model.

    A model's name means its tokenizer.
    """
    if chosen_kind(word) is None:
        raise argparse.ArgumentTypeError(not_known(word, TOKENIZERS))
    return word


def parse_names(text: str) -> list[str]:
    """Return the names in a text with commas between them.

    >>> parse_names("E4M3, E7M0")
    ['E4M3', 'E7M0']
    """
    parts = [name.strip() for name in text.split(",")]
    listed = [name for name in parts if name]
    if not listed:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no name in it; give names with commas between them"
        )
    return listed


def number(
    kind: Callable[[str], Any], is_allowed: Callable[[Any], bool], allowed: str
) -> Callable[[str], Any]:
    """Return an argument type that takes a number of a kind.

    >>> positive("3")
    3
    """

    def parse(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            # 1e-400 would be taken as 0, without a word.
            if is_allowed(value) and not is_beyond_floats(text):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give {allowed}")

    return parse


positive = number(int, lambda value: 1 <= value < 2**63, "a whole number >= 1")
natural = number(int, lambda value: 0 <= value < 2**63, "a whole number >= 0")
at_least_0 = number(float, lambda value: 0.0 <= value < math.inf, "a number >= 0")
above_0 = number(float, lambda value: 0.0 < value < math.inf, "a number > 0")


def add_executor(parser: Any) -> None:
    """Add the options of a command that trains several runs: where it trains them."""
    parser.add_argument(
        "--executor",
        default="local",
        metavar="local|ray",
        help="where runs train: processes on this machine (default), or a Ray cluster",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="with --executor ray: address of a running cluster (default: one on this machine's "
        "cores)",
    )
