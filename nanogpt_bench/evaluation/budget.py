"""The best mixture of formats in a budget of bytes, exactly.

Every layer pattern takes one of its choices. A partial solution of the first patterns
is a pair (bytes, loss), and only pairs that no other one beats in both are kept. The
bytes are whole numbers, so nothing is rounded. What keeps the pairs few is the linear
relaxation of the patterns that are left, which may be in two formats at once: the least
loss that it reaches in the bytes that are left is a lower bound of every solution that
begins with the pair. Its corners, in which no pattern is in two formats, are solutions
of their own, hence an upper bound. A pair whose lower bound exceeds the least upper
bound is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Choice(NamedTuple):
    """A format of a layer pattern: what it adds to the loss, and its bytes."""

    format: str
    loss: float
    size: int


@dataclass(frozen=True)
class _States:
    """Partial solutions, each with the one that it extends and its last choice."""

    size: NDArray[np.int64]
    loss: NDArray[np.float64]
    parent: NDArray[np.int64]
    choice: NDArray[np.int64]

    def __getitem__(self, kept: Any) -> "_States":
        return _States(self.size[kept], self.loss[kept], self.parent[kept], self.choice[kept])


@dataclass(frozen=True)
class _Relaxation:
    """The least loss of the patterns that are left, by their bytes: a convex chain of
    corners, linear between them.
    """

    size: NDArray[np.float64]
    loss: NDArray[np.float64]

    def lower(self, room: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a loss that no solution in `room` bytes goes below."""
        bounds: NDArray[np.float64] = np.interp(room, self.size, self.loss)
        return bounds

    def upper(self, room: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the loss of a solution in `room` bytes."""
        corner = np.searchsorted(self.size, room, side="right") - 1
        losses: NDArray[np.float64] = self.loss[corner]
        return losses


def bytes_within(budget: float, parameters: int) -> int:
    """Return the most bytes whose quotient by `parameters` is at most `budget`.

    >>> bytes_within(0.57, 100), 0.57 * 100
    (57, 56.99999999999999)
    """
    size = round(budget * parameters)
    while size / parameters > budget:
        size -= 1
    return size


def best_mixture(
    choices: Mapping[str, Sequence[tuple[str, float, int]]], budget: float
) -> dict[str, str] | None:
    """Return a format for every pattern, with the least sum of losses that fits into
    `budget` bytes.

    None if even the smallest formats take more. Every choice is a format, what it adds
    to the loss (finite), and its bytes (a whole number). Of two mixtures of the same
    loss the smaller one is taken. That losses add up is an approximation for small
    ones.

    >>> best_mixture({"attn": [("E4M3", 0.2, 1), ("none", 0.0, 4)], "mlp": [("E4M3", 0.1, 1), ("none", 0.0, 4)]}, 5)
    {'attn': 'none', 'mlp': 'E4M3'}
    """
    useful = [_undominated(pattern) for pattern in choices.values()]
    relaxations = _relaxations(useful)
    if relaxations[0].size[0] > budget:
        return None
    # sums of losses differ in their last bits by the order of the terms
    slack = 1e-12 * sum(abs(choice.loss) for pattern in useful for choice in pattern)
    nothing = np.zeros(1, dtype=np.int64)
    states = _States(size=nothing, loss=np.zeros(1), parent=nothing, choice=nothing)
    stages = []
    for pattern, rest in zip(useful, relaxations[1:], strict=True):
        states = _extended(states, pattern)
        room = np.floor(budget - states.size).astype(np.int64)
        fits = room >= rest.size[0]
        states, room = states[fits], room[fits]
        least = np.min(states.loss + rest.upper(room))
        states = states[states.loss + rest.lower(room) <= least + slack]
        stages.append(states)
    place = int(np.argmin(states.loss))
    formats = []
    for pattern, stage in zip(reversed(useful), reversed(stages), strict=True):
        formats.append(pattern[stage.choice[place]].format)
        place = int(stage.parent[place])
    return dict(zip(choices, reversed(formats), strict=True))


def _undominated(choices: Sequence[tuple[str, float, int]]) -> list[Choice]:
    """The choices that no other one beats in bytes and loss, the smallest one first."""
    kept: list[Choice] = []
    by_size = sorted((Choice(*given) for given in choices), key=lambda one: (one.size, one.loss))
    for choice in by_size:
        if not kept or choice.loss < kept[-1].loss:
            kept.append(choice)
    return kept


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The corners of the lower convex hull of undominated choices."""
    corners: list[Choice] = []
    for choice in choices:
        while len(corners) > 1 and _slope(corners[-1], choice) <= _slope(*corners[-2:]):
            corners.pop()
        corners.append(choice)
    return corners


def _slope(one: Choice, other: Choice) -> float:
    """The loss that each further byte adds; below 0."""
    return (other.loss - one.loss) / (other.size - one.size)


def _relaxations(patterns: Sequence[Sequence[Choice]]) -> list[_Relaxation]:
    """Return the relaxation of all patterns, of all but the first, and so on to none."""
    size, loss = 0, 0.0
    # edges of the hulls as (slope, bytes, loss), the steepest one first
    edges: list[tuple[float, int, float]] = []
    found = [_Relaxation(np.zeros(1), np.zeros(1))]
    for pattern in reversed(patterns):
        corners = _hull(pattern)
        size += corners[0].size
        loss += corners[0].loss
        for one, other in pairwise(corners):
            edges.append((_slope(one, other), other.size - one.size, other.loss - one.loss))
        edges.sort()
        sizes = np.cumsum([size, *(edge[1] for edge in edges)], dtype=np.float64)
        losses = np.cumsum([loss, *(edge[2] for edge in edges)])
        found.append(_Relaxation(sizes, losses))
    return found[::-1]


def _extended(states: _States, pattern: Sequence[Choice]) -> _States:
    """Return every state with every choice, without those that another one beats."""
    count, number = len(states.size), len(pattern)
    size = np.add.outer(states.size, np.array([choice.size for choice in pattern])).ravel()
    loss = np.add.outer(states.loss, np.array([choice.loss for choice in pattern])).ravel()
    parent = np.repeat(np.arange(count), number)
    chosen = np.tile(np.arange(number), count)
    order = np.lexsort((loss, size))
    made = _States(size, loss, parent, chosen)[order]
    before = np.minimum.accumulate(made.loss)
    better = np.concatenate([[True], made.loss[1:] < before[:-1]])
    return made[better]
