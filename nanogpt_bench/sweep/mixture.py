"""The mixture of formats with the smallest loss in as many bytes as are given, by what each costs alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: parts that a budget is cut into; what a choice takes is rounded up to one
PARTS = 2000
#: a format's name, what it adds to the loss, and its bytes
Choice = tuple[str, float, float]


def best_mixture(choices: Mapping[str, Sequence[Choice]], budget: float) -> dict[str, str] | None:
    """Return the format of every pattern whose gaps add up to the least among those that fit into the budget.

    None where the smallest of all takes more. That gaps add up holds where each is small. By dynamic programming over
    the bytes.

    >>> best_mixture({"attn": [("E4M3", 0.2, 1), ("none", 0.0, 4)], "mlp": [("E4M3", 0.1, 1), ("none", 0.0, 4)]}, 5)
    {'attn': 'none', 'mlp': 'E4M3'}
    """
    spare = budget - sum(min(size for _, _, size in each) for each in choices.values())
    if spare < 0:
        return None
    best: dict[int, tuple[float, dict[str, str]]] = {0: (0.0, {})}
    for pattern, each in choices.items():
        least, following = min(size for _, _, size in each), dict[int, tuple[float, dict[str, str]]]()
        for used, (loss, chosen) in best.items():
            for name, gap, size in each:
                more = (
                    math.ceil((size - least) * PARTS / spare) if size > least and spare else (size > least) * 2 * PARTS
                )
                if used + more <= PARTS and loss + gap < following.get(used + more, (math.inf, {}))[0]:
                    following[used + more] = (loss + gap, {**chosen, pattern: name})
        best = following
    return min(best.values(), key=lambda found: found[0])[1]
