"""Patterns over dotted names: which a name takes, and what to say of one that matches nothing."""

import difflib
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from fp8manifold.nn._spec import LayerSpec

__all__ = ["check_matched", "literal", "matches", "parts_of_name", "patterns_chosen"]

_WILD: Final = frozenset("*?[")


def patterns_chosen(
    specs: Mapping[str, LayerSpec], names: Sequence[str], left: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The pattern that every layer takes, by name; ``left`` says why layers are left that can't be quantised.

    Raises:
        ValueError: a pattern that matches no layer, or none that can be quantised.
    """
    parts = {name: parts_of_name(name) for name in names}
    chosen: dict[str, str] = {}
    for pattern in sorted(specs, key=lambda p: len(literal(p))):
        matched = [name for name in names if matches(pattern, parts[name])]
        if not matched or (left.keys() >= set(matched) and not specs[pattern].quantizes_nothing):
            raise ValueError(_no_match(pattern, names, {name: left[name] for name in matched}, left))
        chosen.update(dict.fromkeys(matched, pattern))
    return chosen


def check_matched(what: str, pattern: str, matched: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a pattern of an option called ``what`` that matches none of the parameters there are."""
    if not matched:
        raise ValueError(
            f"{what}: pattern {pattern!r} matches none of the {len(names)} parameters of two or more dimensions that "
            f"no pattern of formats has taken{_nearest(pattern, names)}"
        )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    parts = sorted({part for name in names for part in parts_of_name(name)})
    nearest = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.0)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def literal(pattern: str) -> str:
    """What of a pattern stands for itself."""
    return pattern.replace("*", "").replace("?", "")


def _no_match(pattern: str, names: Sequence[str], matched: Mapping[str, str], left: Collection[str]) -> str:
    """What to say of a pattern that quantises nothing."""
    count = sum(name not in left for name in names)
    if matched:
        name, reason = next(iter(matched.items()))
        return (
            f"pattern {pattern!r} matches none of the {count} linear layers that can be quantised, but {name!r}, which "
            f"is left: {reason}"
        )
    return f"pattern {pattern!r} matches none of the {count} linear layers{_nearest(pattern, names)}"


def parts_of_name(name: str) -> list[str]:
    """Every run of whole dotted parts of a name."""
    words = name.split(".")
    return [".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]


def matches(pattern: str, parts: Sequence[str]) -> bool:
    return pattern in parts or (
        not _WILD.isdisjoint(pattern) and any(fnmatch.fnmatchcase(part, pattern) for part in parts)
    )
