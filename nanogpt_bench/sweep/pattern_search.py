"""Pattern search on a logarithmic grid: full steps until the best point is inside, then half steps around it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

#: a point of the grid: for every key, how many half steps it lies from the start
Place = tuple[int, ...]
FULL, HALF = 2, 1


def next_places(losses: Mapping[Place, float], keys: int, reach: int) -> list[Place]:
    """Return the places to try next, all at once, none when the search is over.

    `losses` has those of all places tried, infinite where a run diverged; `reach` is how many half steps from the start
    a key may go. First come the start and its neighbours, a full step to either side on every key; then, as long as
    the best place is not amid neighbours that were tried, those that were not; last those half a step from it.

    >>> next_places({}, keys=1, reach=16)
    [(0,), (-2,), (2,)]
    >>> next_places({(0,): 1.0, (-2,): 2.0, (2,): 0.5}, keys=1, reach=16)
    [(4,)]
    >>> next_places({(0,): 1.0, (-2,): 2.0, (2,): 0.5, (4,): 0.7}, keys=1, reach=16)
    [(1,), (3,)]
    """
    start = (0,) * keys
    full = {place: loss for place, loss in losses.items() if not any(index % FULL for index in place)}
    centre = best_place(full) if full else start
    for step in (FULL, HALF):
        around = [place for place in neighbours(centre, step) if max(map(abs, place)) <= reach]
        if left := [place for place in (centre, *around) if place not in losses]:
            return left
    return []


def neighbours(place: Place, step: int) -> Iterator[Place]:
    """Yield the places `step` half steps below and above on every key, one key at a time."""
    for key in range(len(place)):
        for way in (-step, step):
            yield (*place[:key], place[key] + way, *place[key + 1 :])


def best_place(losses: Mapping[Place, float]) -> Place:
    """Return the place of the lowest loss; of several the lowest one, which is where training is the most stable.

    >>> best_place({(0,): 1.0, (2,): 1.0, (4,): math.inf})
    (0,)
    """
    return min(losses, key=lambda place: (losses[place], place))


def is_inside(losses: Mapping[Place, float], key: int) -> bool:
    """Return whether values of a key below and above that of the best place were tried."""
    tried: Iterable[int] = [place[key] for place in losses]
    best = best_place(losses)[key]
    return math.isfinite(losses[best_place(losses)]) and min(tried) < best < max(tried)
