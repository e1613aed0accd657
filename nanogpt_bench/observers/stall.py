"""Bit stall: the share of weights that wanted to move and stayed where they were, and what became of the others.

On grid and fp8 storage the optimizer hands over each parameter before, as requested and after the write-back. With
master weights the write-back never loses anything; there the share with a nonzero update whose *code* did not change
counts. Under an unbiased write-back neither says anything, and what counts is how much of the movement arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import ZERO_GRADIENT_ZONE, Metric
from nanogpt_bench.config.schema import ROUNDED
from nanogpt_bench.observers.capture import Capture
from nanogpt_bench.observers.figures import ALL, Figures, Monitor, Turns
from nanogpt_bench.observers.updates import Update
from nanogpt_bench.setup.layers import forward_weight, is_rounded
from nanogpt_bench.training.points import Observer, Step

_OF_ALL, _ON_GRID = (metrics.UPDATE_ULPS, metrics.MOVE_PROBABILITY), (metrics.UPDATE_LOST, metrics.UPDATE_SUCCESS)


class Stall(Observer):
    """Records the stall every `interval` steps and the rest every `detail` steps: per layer and over all layers."""

    def __init__(
        self,
        layers: Mapping[str, fm.QuantizedLinear],
        storage: str,
        interval: int,
        detail: int,
        turns: Turns = ALL,
    ) -> None:
        self.interval = interval
        self._detail, self._turns = detail, turns
        self._grid = storage in ROUNDED
        self._metric = metrics.UPDATE_LOST if self._grid else metrics.CODE_UNCHANGED
        self._sizes = {name: layer.weight.numel() for name, layer in layers.items()}
        self._start = {name: _Start(layer) for name, layer in layers.items()}
        self._figures = Figures(turns, interval)
        self._moved: dict[str, fm.monitor.Arrival] = {}
        self._stall, self._arrived = _Mean(), _Mean()
        #: whether the step at hand has shown an update, and whether the last look had none to see
        self._seen, self._unseen = False, False

    @property
    def metric(self) -> str:
        """Name of the figure that is the stall."""
        return self._metric.name

    @property
    def mean(self) -> float | None:
        """Mean of the stall over the steps observed, None before the first."""
        return self._stall.value

    @property
    def arrived(self) -> float | None:
        """Mean over the steps observed of the share of the requested movement that arrived.

        None with a master copy, and where the last step to be looked at moved no weight at all.
        """
        return None if self._unseen else self._arrived.value

    def state(self) -> dict[str, Any]:
        start = {name: first.state() for name, first in self._start.items()}
        more: dict[str, Any] = self._figures.state()
        if more:
            more["moved"] = {name: (found.projected, found.requested) for name, found in self._moved.items()}
        return {**self._stall.state(), "arrived": self._arrived.state(), "unseen": self._unseen, "start": start, **more}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._stall.load_state(state)
        self._arrived.load_state(state["arrived"])
        self._unseen = state["unseen"]
        for name, first in self._start.items():
            first.load_state(state["start"][name])
        self._figures.load_state(state)
        self._moved = {name: fm.monitor.Arrival(*sums) for name, sums in state.get("moved", {}).items()}

    def takes(self, step: Step, name: str) -> bool:
        """Whether it is this layer's turn to be looked at, or to be looked at closely."""
        return any(self._turns.takes(step, interval, name) for interval in (self.interval, self._detail))

    def see(self, step: Step, update: Update) -> None:
        self._seen = True
        if self._turns.takes(step, self._detail, update.name):
            self._see_all(step, update)
        elif self._grid:
            self._note(metrics.UPDATE_LOST, update, fm.monitor.update_lost(update.before, update.target, update.after))
        if self._grid:
            self._see_movement(update)
        if update.codes is not None:
            share = fm.monitor.code_unchanged(update.codes, update.codes_after, update.before, update.after)
            self._note(metrics.CODE_UNCHANGED, update, share)

    def _see_movement(self, update: Update) -> None:
        found = fm.monitor.update_arrived(update.before, update.target, update.after)
        self._note(metrics.ARRIVED, update, found.share)
        if found.share is not None and math.isfinite(found.share):
            self._moved[update.name] = found
        else:
            self._moved.pop(update.name, None)

    def _see_all(self, step: Step, update: Update) -> None:
        states = (update.before, update.target, update.after)
        found = fm.monitor.stall_figures(*states, update.format, update.scale)
        for metric in (*_OF_ALL, *(_ON_GRID if self._grid else ())):
            self._note(metric, update, getattr(found, metric.figure))
        state: dict[str, Any] = step.optimizer.state.get(update.layer.weight, {})
        if self._grid and (residual := state.get("residual")) is not None:
            saturated = fm.monitor.residual_saturation(residual)
            self._note(metrics.RESIDUAL_SATURATION, update, saturated)
        self._note(metrics.CODE_DRIFT, update, self._start[update.name].drift(update))

    def _note(self, metric: Metric, update: Update, value: float | None) -> None:
        self._figures.add(metric, update.name, value, self._sizes[update.name])

    def finish(self, step: Step) -> None:
        self._unseen = not self._seen and any(self.takes(step, name) for name in self._sizes)
        self._seen = False
        arrivals, found = metrics.ARRIVED in self._figures, self._metric in self._figures
        self._figures.write(step)
        if arrivals:
            # Of all layers together, not a mean of shares: one that hardly asked for anything says little.
            moved = sum(self._moved.values(), fm.monitor.Arrival(0.0, 0.0))
            step.record[metrics.ARRIVED.name] = moved.share
            self._arrived.add(moved.share)
        if self._turns.count == 1:
            self._moved.clear()
        if found:
            self._stall.add(step.record[self.metric] or 0.0)


class _Mean:
    """A sum and a count, not the figures themselves: what a checkpoint holds does not grow with the run."""

    def __init__(self) -> None:
        self._total, self._looks = 0.0, 0

    @property
    def value(self) -> float | None:
        return self._total / self._looks if self._looks else None

    def add(self, figure: float | None) -> None:
        if figure is not None:
            self._total, self._looks = self._total + figure, self._looks + 1

    def state(self) -> dict[str, Any]:
        return {"total": self._total, "looks": self._looks}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._total, self._looks = state["total"], state["looks"]


class _Start:
    """A layer's codes at the beginning, and their scale."""

    def __init__(self, layer: fm.QuantizedLinear) -> None:
        self._codes, self._scale = layer.weight_codes(), layer.weight_scale().detach().clone()

    def drift(self, update: Update) -> float:
        """Mean distance of the codes from the first ones; at another scale, that of the values they stand for."""
        fmt, scale = update.format, update.scale
        if scale.shape == self._scale.shape and bool((scale == self._scale).all()):
            return fm.monitor.code_drift(self._codes, update.codes_after, fmt)
        return fm.monitor.chart_distance(self._values(fmt), forward_weight(update.layer), fmt, scale)

    def state(self) -> dict[str, Any]:
        return {"codes": self._codes, "scale": self._scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._codes, self._scale = state["codes"], state["scale"]

    def _values(self, fmt: fm.FloatFormat) -> Tensor:
        return fm.decode(self._codes, fmt) * self._scale


#: tokens whose outputs are compared: the time grows with them
ROWS = 16


class Zones(Monitor):
    """Records `stall/zero_gradient_zone` every `interval` steps, on some tokens spread over the batch."""

    def __init__(
        self, layers: Mapping[str, fm.QuantizedLinear], capture: Capture, interval: int, turns: Turns = ALL
    ) -> None:
        super().__init__(interval, turns)
        self._layers, self._capture = layers, capture

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.due(self.interval) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            inputs, fmt = self._capture.inputs.get(name), layer.weight_format
            if inputs is None or fmt is None or not is_rounded(layer):
                continue
            rows = layer.quantized_input(inputs).reshape(-1, inputs.shape[-1])
            some = rows[:: max(1, len(rows) // ROWS)][:ROWS].float()
            share = fm.monitor.zero_gradient_zone(
                forward_weight(layer),
                some,
                fmt,
                layer.weight_scale().detach(),
                output=self._capture.output_dtypes[name],
                bias=layer.bias,
            )
            self._figures.add(ZERO_GRADIENT_ZONE, name, share, layer.weight.numel())
