"""Curves made fit to draw: smoothed where every step is noisy, thinned to a number of points a page can carry."""

from __future__ import annotations

from collections.abc import Sequence

MAX_POINTS = 500


def decimate(count: int, limit: int = MAX_POINTS) -> list[int]:
    """Indices of at most `limit` of `count` points, evenly spread, the first and the last among them.

    >>> decimate(5, 3), decimate(2, 3)
    ([0, 2, 4], [0, 1])

    Raises:
        ValueError: `limit` is below 2.
    """
    if limit < 2:
        raise ValueError(f"limit = {limit!r}: expected at least 2, the first and the last point")
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Exponential moving average over about `window` points, unbiased from the first; None stays None.

    s_t = sum_i a^(t-i) y_i / sum_i a^(t-i) with a = 1 - 2/(window+1), over the points that are known.

    >>> smooth([2.0, None, 2.0], 10)
    [2.0, None, 2.0]
    """
    keep = 1 - 2 / (window + 1)
    total = weight = 0.0
    averaged: list[float | None] = []
    for value in values:
        if value is None:
            averaged.append(None)
            continue
        total, weight = keep * total + value, keep * weight + 1
        averaged.append(total / weight)
    return averaged


def smoothing_window(count: int) -> int:
    """The window for a training loss of `count` steps: a fortieth of it, 1 to 50 steps.

    >>> smoothing_window(400)
    10
    """
    return min(50, max(1, count // 40))
