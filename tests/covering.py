"""Covering samples: of many cases few, in which every value still occurs, or every two
values together.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """Return the places of cases that have together every `strength` values that any
    has; always the richest next.

    Cases of fewer values than that are all in the sample.
    """
    strength = min(strength, len(cases[0]))
    left = [
        set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), strength))
        for case in cases
    ]
    sample: set[int] = set()
    while any(left):
        best = max(range(len(left)), key=lambda index: len(left[index]))
        sample.add(best)
        left = [combinations - left[best] for combinations in left]
    return sample
