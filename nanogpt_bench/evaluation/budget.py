"""The best mixture of formats in a budget of bytes, exactly.

Every layer pattern takes one of its choices; the sum of losses is to be least, and the
sum of bytes within the budget. It is solved by dynamic programming, pattern by pattern:

- A state is a partial solution of the first patterns: (bytes, loss). A state that
  another one beats in both is dropped. Bytes are whole numbers, so nothing is rounded.
- What keeps the states few are two bounds from the linear relaxation of the remaining
  patterns, in which a pattern may be in two formats at once. The least loss that it
  reaches in the remaining bytes is a lower bound of every solution that begins with the
  state. Its corners, in which no pattern is in two formats, are solutions of their own,
  and so give an upper bound.
- A state whose lower bound exceeds the least upper bound of all is dropped.
- At the end, the chain of parents of the best state gives the formats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
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

    def __getitem__(self, index: Any) -> "_States":
        return _States(self.size[index], self.loss[index], self.parent[index], self.choice[index])


@dataclass(frozen=True)
class _Relaxation:
    """The least loss of the remaining patterns, by their bytes.

    It is a convex chain of corners, linear between them.
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
    """Return a format for every pattern, with the least loss within `budget` bytes.

    None if even the smallest formats take more. Every choice is a format, what it adds
    to the loss (finite), and its bytes (a whole number). Of two mixtures of the same
    loss the smaller one is taken. That losses add up is an approximation for small
    ones.

    >>> choices = {
    ...     "attn": [("E4M3", 0.2, 1), ("none", 0.0, 4)],
    ...     "mlp": [("E4M3", 0.1, 1), ("none", 0.0, 4)],
    ... }
    >>> best_mixture(choices, 5)
    {'attn': 'none', 'mlp': 'E4M3'}
    """
    patterns = [_undominated(pattern_choices) for pattern_choices in choices.values()]
    relaxations = _relaxations(patterns)
    if relaxations[0].size[0] > budget:
        return None
    # Sums of losses differ in their last bits by the order of the terms.
    slack = 1e-12 * sum(abs(choice.loss) for choice in chain.from_iterable(patterns))
    zero = np.zeros(1, dtype=np.int64)
    states = _States(size=zero, loss=np.zeros(1), parent=zero, choice=zero)
    stages = []
    for pattern, relaxation in zip(patterns, relaxations[1:], strict=True):
        states = _extended(states, pattern)
        room = np.floor(budget - states.size).astype(np.int64)
        fits = room >= relaxation.size[0]
        states = states[fits]
        room = room[fits]
        least = np.min(states.loss + relaxation.upper(room))
        states = states[states.loss + relaxation.lower(room) <= least + slack]
        stages.append(states)
    place = int(np.argmin(states.loss))
    formats = []
    for pattern, stage in zip(reversed(patterns), reversed(stages), strict=True):
        formats.append(pattern[stage.choice[place]].format)
        place = int(stage.parent[place])
    return dict(zip(choices, reversed(formats), strict=True))


def _undominated(choices: Sequence[tuple[str, float, int]]) -> list[Choice]:
    """Return the choices that no other beats in bytes and loss, smallest first."""
    named = [Choice(*choice) for choice in choices]
    undominated: list[Choice] = []
    for choice in sorted(named, key=lambda choice: (choice.size, choice.loss)):
        if not undominated or choice.loss < undominated[-1].loss:
            undominated.append(choice)
    return undominated


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the corners of the lower convex hull of undominated choices."""
    corners: list[Choice] = []
    for choice in choices:
        while len(corners) > 1 and _slope(corners[-1], choice) <= _slope(*corners[-2:]):
            corners.pop()
        corners.append(choice)
    return corners


def _slope(small: Choice, large: Choice) -> float:
    """Return the loss that each further byte adds; it is below 0."""
    return (large.loss - small.loss) / (large.size - small.size)


class _Edge(NamedTuple):
    """An edge of a hull; in order, the steepest one comes first."""

    slope: float
    size: int
    loss: float


def _relaxations(patterns: Sequence[Sequence[Choice]]) -> list[_Relaxation]:
    """Return the relaxation of all patterns, of all but the first, ... of none."""
    size, loss = 0, 0.0
    edges: list[_Edge] = []
    relaxations = [_Relaxation(np.zeros(1), np.zeros(1))]
    for pattern in reversed(patterns):
        corners = _hull(pattern)
        size += corners[0].size
        loss += corners[0].loss
        for small, large in pairwise(corners):
            slope = _slope(small, large)
            edges.append(_Edge(slope, large.size - small.size, large.loss - small.loss))
        edges.sort()
        sizes = np.cumsum([size, *(edge.size for edge in edges)], dtype=np.float64)
        losses = np.cumsum([loss, *(edge.loss for edge in edges)])
        relaxations.append(_Relaxation(sizes, losses))
    return relaxations[::-1]


def _extended(states: _States, pattern: Sequence[Choice]) -> _States:
    """Return every state with every choice, without those that another one beats."""
    state_count, choice_count = len(states.size), len(pattern)
    size = np.add.outer(states.size, np.array([choice.size for choice in pattern])).ravel()
    loss = np.add.outer(states.loss, np.array([choice.loss for choice in pattern])).ravel()
    parent = np.repeat(np.arange(state_count), choice_count)
    choice_index = np.tile(np.arange(choice_count), state_count)
    order = np.lexsort((loss, size))
    extended = _States(size, loss, parent, choice_index)[order]
    least_so_far = np.minimum.accumulate(extended.loss)
    is_better = np.concatenate([[True], extended.loss[1:] < least_so_far[:-1]])
    return extended[is_better]
