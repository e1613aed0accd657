"""Layers in turn: a look may take some of them only, the next look the next ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanogpt_bench.training.points import Observer, Step


class Turns(Observer):
    """Says which layers a look takes: one in `count`, in turn; all at the first.

    The names of each of `lists` are shared out in their order, neighbours together. Looks of different `intervals` are
    counted apart. A first look that meets something not finite is followed by another one. It comes after the
    observers that ask it.

    >>> import torch
    >>> turns = Turns(2, [["a", "b", "c"]], [10])
    >>> steps = [Step(number, torch.nn.Identity(), None) for number in (10, 20, 30)]
    >>> for step in steps:
    ...     print([name for name in "abc" if turns.takes(step, 10, name)])
    ...     turns.written(step)
    ['a', 'b', 'c']
    ['a', 'b']
    ['c']
    """

    def __init__(self, count: int = 1, lists: Iterable[Iterable[str]] = (), intervals: Iterable[int] = ()) -> None:
        self.count, self._intervals = count, frozenset(intervals)
        self._part: dict[str, tuple[int, int]] = {}
        for names in map(list, lists):
            parts = min(count, len(names))
            self._part |= {name: (index * parts // len(names), parts) for index, name in enumerate(names)}
        self._begun: set[int] = set()

    def takes_all(self, step: Step, interval: int) -> bool:
        """Whether a look in this step takes all layers."""
        return self.count == 1 or interval not in self._begun

    def takes(self, step: Step, interval: int, name: str) -> bool:
        """Whether what looks every `interval` steps, and at the last, looks at this layer in this one."""
        if not step.due(interval):
            return False
        if self.takes_all(step, interval):
            return True
        part, parts = self._part[name]
        return step.number // interval % parts == part

    def written(self, step: Step) -> None:
        if step.number and step.anomaly is None:
            self._begun |= {interval for interval in self._intervals if step.due(interval)}

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "begun": sorted(self._begun)} if self.count > 1 else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on in turn; a run that took other turns begins with a look at all layers."""
        self._begun = set(state["begun"]) if state["count"] == self.count else set()


#: every look takes all layers
ALL = Turns()
