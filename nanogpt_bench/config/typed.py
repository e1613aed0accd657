"""The type of every setting, checked by jsonargparse: once for a key and a value, however many runs share them."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import jsonargparse

#: pairs of a key and a value that are remembered; a sweep has some hundred of them, whatever the number of its runs
MOST = 10_000


@dataclass(frozen=True)
class _Given:
    """A setting as given; two are the same when what they would be written as is."""

    key: str
    hint: Any
    text: str
    value: Any = field(compare=False)


def typed(key: str, hint: Any, value: Any) -> Any:
    """Return the value of a setting as its type `hint` has it, such as 1.0 for 1 where a float is meant.

    Raises:
        TypeError: it is of no such type.

    >>> typed("optimizer.lr", float | None, 1)
    1.0
    """
    return copy.deepcopy(_parsed(_Given(key, hint, repr(value), copy.deepcopy(value))))


@functools.lru_cache(maxsize=MOST)
def _parsed(given: _Given) -> Any:
    try:
        return _parser(given.hint).parse_object({"value": given.value}).value
    except jsonargparse.ArgumentError:
        raise TypeError(f"{given.key}: {given.text} is not allowed") from None


@functools.cache
def _parser(hint: Any) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser
