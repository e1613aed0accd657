"""Holm's method: p-values of several tests, adjusted for how many they are.

Of many tests some have a small p-value by chance. Sort the m p-values. The smallest
counts m times, the next m - 1 times, and so on, and none becomes smaller than the one
before it (Holm 1979, Scandinavian Journal of Statistics 6).
"""

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's method, in their order.

    >>> holm([0.01, 0.04, 0.03, 0.005])
    [0.03, 0.06, 0.06, 0.02]
    """
    ordinary = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(ordinary, kind="stable")
    tests_left = np.arange(len(ordinary), 0, -1)
    scaled = ordinary[order] * tests_left
    adjusted = np.empty_like(ordinary)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()
