"""Bit stall: the share of weights that wanted to move and stayed where they were.

On grid and fp8 storage the optimizer hands over each parameter before, as requested and after the write-back. With
master weights the write-back never loses anything; there the share with a nonzero update whose *code* did not change
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config import ROUNDED
from nanogpt_bench.observers.base import Observer, Step

LOST = "stall/update_lost"
UNCHANGED = "stall/code_unchanged"


class StallObserver(Observer):
    """Records the stall every `interval` steps and at the last: per layer, and over all layers weighted by size."""

    def __init__(self, layers: dict[str, fm.QuantizedLinear], storage: str, interval: int) -> None:
        self._layers = layers
        self._interval = interval
        self._grid = storage in ROUNDED
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._shares: dict[str, float] = {}
        self._seen: list[float] = []

    @property
    def metric(self) -> str:
        """Name of the figure recorded."""
        return LOST if self._grid else UNCHANGED

    @property
    def mean(self) -> float | None:
        """Mean over the steps observed, None before the first."""
        return sum(self._seen) / len(self._seen) if self._seen else None

    def before_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        self._shares = {}
        if self._grid:
            _observe(step.optimizer, self._see)
        else:
            self._before = {name: _codes_and_weight(layer) for name, layer in self._layers.items()}

    def after_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        if self._grid:
            _observe(step.optimizer, None)
        else:
            self._compare_codes()
        if self._shares:
            self._write(step)

    def _see(self, view: Any) -> None:
        name = self._names.get(id(view.parameter))
        if name is not None:
            self._shares[name] = fm.monitor.update_lost(view.before, view.target, view.after)

    def _compare_codes(self) -> None:
        for name, layer in self._layers.items():
            codes, weight = self._before[name]
            self._shares[name] = fm.monitor.code_unchanged(codes, layer.weight_codes(), weight, layer.weight.detach())
        self._before = {}

    def _write(self, step: Step) -> None:
        sizes = {name: self._layers[name].weight.numel() for name in self._shares}
        step.add(self.metric, self._shares, sizes)
        self._seen.append(step.record[self.metric] or 0.0)


def _codes_and_weight(layer: fm.QuantizedLinear) -> tuple[Tensor, Tensor]:
    return layer.weight_codes().clone(), layer.weight.detach().clone()


def _observe(optimizer: Any, see: Callable[[Any], None] | None) -> None:
    optimizer.observer = see
