"""Collecting the figures of a step by metric and layer, until its record is written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from nanogpt_bench.observers.base import Step

#: how the figures of all layers make one, where that is not their mean
Over = Callable[[Iterable[float]], float]


class Figures:
    """Figures by metric and layer with the sizes they are weighted by.

    >>> figures = Figures()
    >>> figures.add("quant/overflow/weight", "a", 0.5, size=10)
    """

    def __init__(self, over: Mapping[str, Over] | None = None) -> None:
        self._over = over or {}
        self._values: dict[str, dict[str, float | None]] = defaultdict(dict)
        self._sizes: dict[str, int] = {}

    def add(self, metric: str, layer: str, value: float | None, size: int) -> None:
        """Take a figure in."""
        self._values[metric][layer] = value
        self._sizes[f"{metric}/{layer}"] = size

    def write(self, step: Step) -> None:
        """Move everything into the step's record; `over` is looked up by the part of the metric that names it."""
        for metric, values in self._values.items():
            name = next((part for part in metric.split("/") if part in self._over), None)
            sizes = {layer: self._sizes[f"{metric}/{layer}"] for layer in values}
            step.add(metric, values, sizes, self._over[name] if name else None)
        self._values.clear()
        self._sizes.clear()
