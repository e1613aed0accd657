"""Ranges: overflow, underflow, moments and scales of weights, activations, gradients and residual outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import Metric, MonitorConfig
from nanogpt_bench.observers.capture import Capture, Operand, flowing, of_weight
from nanogpt_bench.observers.figures import ALL, Monitor, Turns
from nanogpt_bench.observers.updates import Update
from nanogpt_bench.setup.layers import plain
from nanogpt_bench.training.points import Step

_SHARES = (metrics.OVERFLOW, metrics.UNDERFLOW, metrics.SUBNORMAL, metrics.CLAMPED)
_MOMENTS = (metrics.AMAX, metrics.AMAX_OVER_STD, metrics.KURTOSIS, metrics.LOG2_STD, metrics.LOG2_SKEWNESS)


class Ranges(Monitor):
    """Records `quant/FIGURE/OPERAND/LAYER` every `monitor.interval` steps.

    Weights on a grid are measured as the step asked for them, before the write-back; master copies as they are.
    Gradients are those that arrive at the layers' outputs. What has no format is measured without one.
    """

    def __init__(
        self, layers: Mapping[str, nn.Linear], capture: Capture, monitor: MonitorConfig, turns: Turns = ALL
    ) -> None:
        super().__init__(monitor.interval, turns)
        self._layers, self._capture, self._monitor = layers, capture, monitor
        self._scales: dict[tuple[str, str], Tensor] = {}
        self._seen: set[str] = set()

    def see(self, step: Step, update: Update) -> None:
        """Measure a weight as the step asked for it."""
        self._measure(of_weight(update.name, update.layer, update.target))
        self._seen.add(update.name)

    def after_backward(self, step: Step) -> None:
        if step.due(self.interval) and step.at_last_micro_step:
            for operand in flowing(self._layers, self._capture, self._monitor):
                self._measure(operand)

    def written(self, step: Step) -> None:
        if not step.number or not step.due(self.interval):
            return
        for name, layer in self._layers.items():
            if name not in self._seen and self.takes(step, name):
                self._measure(of_weight(name, layer, plain(layer.weight)))
        self._seen.clear()
        super().written(step)

    def state(self) -> dict[str, Any]:
        return {"scales": self._scales, **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._scales = state["scales"]
        super().load_state(state)

    @torch.no_grad()
    def _measure(self, operand: Operand) -> None:
        found = fm.monitor.range_figures(operand.values, operand.format, operand.scale)
        for metric in _MOMENTS if operand.format is None else (*_SHARES, *_MOMENTS):
            self._note(operand, metric, getattr(found, metric.figure))
        if operand.quantized:
            self._note(operand, metrics.SCALE, found.scale)
            self._note_changes(operand)

    def _note_changes(self, operand: Operand) -> None:
        """How many scales differ from the last look; those of a tensor of another shape can't be compared."""
        scale = torch.as_tensor(operand.scale).detach().clone()
        before = self._scales.get((operand.kind, operand.layer))
        if before is not None and before.shape == scale.shape:
            self._note(operand, metrics.SCALE_CHANGES, fm.monitor.scale_changes(before, scale))
        self._scales[operand.kind, operand.layer] = scale

    def _note(self, operand: Operand, metric: Metric, value: float | None) -> None:
        self._figures.add(metric.by(operand.kind), operand.layer, value, operand.values.numel())
