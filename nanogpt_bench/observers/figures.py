"""Collecting the figures of a step by metric and layer, until its record is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nanogpt_bench.observers.turns import ALL, Turns
from nanogpt_bench.step.points import Step

#: how the figures of all layers make one, where that is not their mean
Over = Callable[[Iterable[float]], float]


class Figures:
    """Figures by metric and layer with the sizes they are weighted by.

    Under `turns` the figure over all layers is that of the latest figure of each.

    >>> figures = Figures()
    >>> figures.add("quant/overflow/weight", "a", 0.5, size=10)
    """

    def __init__(self, over: Mapping[str, Over] | None = None, turns: Turns = ALL, interval: int = 1) -> None:
        self._over, self._turns, self._interval = over or {}, turns, interval
        self._values: dict[str, dict[str, float | None]] = defaultdict(dict)
        self._sizes: dict[str, int] = {}
        self._latest: dict[str, dict[str, tuple[float | None, int]]] = defaultdict(dict)

    def __contains__(self, metric: str) -> bool:
        """Whether a figure of that name was taken in since the last record."""
        return metric in self._values

    def add(self, metric: str, layer: str, value: float | None, size: int) -> None:
        """Take a figure in."""
        self._values[metric][layer] = value
        self._sizes[f"{metric}/{layer}"] = size

    def write(self, step: Step) -> None:
        """Move everything into the step's record; `over` is looked up by the part of the metric that names it."""
        if self._turns.takes_all(step, self._interval):
            self._latest.clear()
        for metric, values in self._values.items():
            name = next((part for part in metric.split("/") if part in self._over), None)
            latest = self._latest[metric]
            latest |= {layer: (value, self._sizes[f"{metric}/{layer}"]) for layer, value in values.items()}
            of_all = {layer: value for layer, (value, _) in latest.items()}
            sizes = {layer: size for layer, (_, size) in latest.items()}
            step.add(metric, values, sizes, self._over[name] if name else None, of_all)
        self._values.clear()
        self._sizes.clear()

    def latest(self, metric: str) -> list[float]:
        """Return the latest figure of every layer that has one."""
        return [value for value, _ in self._latest[metric].values() if value is not None]

    def state(self) -> dict[str, Any]:
        """Return what later figures over all layers are of; nothing where every look takes all layers."""
        return (
            {"latest": {metric: dict(found) for metric, found in self._latest.items()}} if self._turns.count > 1 else {}
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave, if it gave anything."""
        self._latest = defaultdict(dict, {metric: dict(found) for metric, found in state.get("latest", {}).items()})
