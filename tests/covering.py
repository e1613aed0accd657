"""Covering samples: few of many cases, in which every value still occurs.

With strength 2 every two values occur together that do so in any case. A matrix of
tests that would take too long runs such a sample.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """Return the places of cases that cover all combinations of `strength` values.

    The next case of the sample is always the one with the most combinations that are
    not covered yet, the first of several. Cases of fewer values than `strength` are
    compared whole.

    >>> cases = [{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 2}]
    >>> covering(cases, 1), covering(cases, 2)
    ({0, 3}, {0, 1, 2, 3})
    """
    strength = min(strength, len(cases[0]))
    uncovered = [_combinations(case, strength) for case in cases]
    sample: set[int] = set()
    while any(uncovered):
        richest = max(range(len(uncovered)), key=lambda place: len(uncovered[place]))
        sample.add(richest)
        covered = uncovered[richest]
        uncovered = [combinations - covered for combinations in uncovered]
    return sample


def _combinations(
    case: Mapping[str, Hashable], strength: int
) -> set[tuple[tuple[str, Hashable], ...]]:
    """Return every `strength` of a case's names with their values."""
    items = sorted(case.items(), key=lambda item: item[0])
    return set(itertools.combinations(items, strength))
