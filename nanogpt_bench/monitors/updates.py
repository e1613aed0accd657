"""What a step did to every watched weight: where it was, where it was asked to go, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.model.weights import plain
from nanogpt_bench.monitors.figures import Monitor, Turns
from nanogpt_bench.monitors.points import Observer, Step


@dataclass(frozen=True)
class Update:
    """One layer's weight in one step: plain tensors, in value, that are not to be changed."""

    name: str
    layer: fm.QuantizedLinear
    before: Tensor
    #: what the step asked for, before the write-back; where nothing is rounded, what came of it
    target: Tensor
    after: Tensor
    #: uint8 codes before the step, where the weight is a master copy
    codes: Tensor | None
    format: fm.FloatFormat
    scale: Tensor

    @cached_property
    def codes_after(self) -> Tensor:
        """uint8 codes of the weight as it is now."""
        return self.layer.weight_codes()


class UpdateMonitor(Monitor):
    """A monitor that looks at updates."""

    def see(self, step: Step, update: Update) -> None:
        """Take one layer's update; the tensors are gone afterwards."""
        raise NotImplementedError

    def finish(self, step: Step) -> None:
        """Nothing: what updates have shown is written with the others."""


class UpdateObserver(Observer):
    """Shows quantised weights' updates in the steps of a look to those that watch them; otherwise it costs nothing.

    On grid and fp8 storage the optimizer itself hands over what it asked for. With an ULP residual these are the
    values that the residual stands for.
    """

    def __init__(
        self, layers: Mapping[str, fm.QuantizedLinear], storage: str, watching: Sequence[UpdateMonitor], turns: Turns
    ) -> None:
        self._layers, self._watching, self._turns = layers, watching, turns
        self._rounded, self._coded = storage in ROUNDED, storage == "master"
        self._names = {id(layer.weight): name for name, layer in layers.items()}
        self._before: dict[str, tuple[Tensor, Tensor | None]] = {}

    def before_step(self, step: Step) -> None:
        if not step.due(self._turns.interval):
            return
        if self._rounded:
            _watch(step.optimizer, lambda view: self._hand_over(step, view), lambda weight: self._sees(step, weight))
        else:
            self._before = {
                name: self._state(layer) for name, layer in self._layers.items() if self._turns.takes(step, name)
            }

    def after_step(self, step: Step) -> None:
        if not step.due(self._turns.interval):
            return
        if self._rounded:
            _watch(step.optimizer, None, None)
        else:
            self._compare(step)
        for monitor in self._watching:
            monitor.finish(step)

    def _sees(self, step: Step, weight: Tensor) -> bool:
        name = self._names.get(id(weight))
        return name is not None and self._turns.takes(step, name)

    def _state(self, layer: fm.QuantizedLinear) -> tuple[Tensor, Tensor | None]:
        return plain(layer.weight).clone(), layer.weight_codes() if self._coded else None

    def _hand_over(self, step: Step, view: Any) -> None:
        name = self._names.get(id(view.parameter))
        if name is not None:
            self._show(step, name, view.before, view.target, view.after, None)

    def _compare(self, step: Step) -> None:
        for name, (before, codes) in self._before.items():
            after = plain(self._layers[name].weight)
            self._show(step, name, before, after, after, codes)
        self._before = {}

    @torch.no_grad()
    def _show(self, step: Step, name: str, before: Tensor, target: Tensor, after: Tensor, codes: Tensor | None) -> None:
        layer = self._layers[name]
        assert layer.weight_format is not None
        update = Update(name, layer, before, target, after, codes, layer.weight_format, layer.weight_scale().detach())
        for monitor in self._watching:
            monitor.see(step, update)


def _watch(optimizer: Any, see: Any, observes: Any) -> None:
    optimizer.observer, optimizer.observes = see, observes
