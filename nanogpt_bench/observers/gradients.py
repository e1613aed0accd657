"""The weights' gradients before clipping: norms, signal to noise, zeros, dead weights, and the noise of rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.observers.figures import ALL, Monitor, Turns
from nanogpt_bench.observers.updates import Update
from nanogpt_bench.setup.layers import plain
from nanogpt_bench.training.points import Step

_FIGURES = (metrics.GRAD_L2, metrics.GRAD_LINF, metrics.GRAD_SNR, metrics.GRAD_ZERO)


class Gradients(Monitor):
    """Records `grad/FIGURE/LAYER` every `monitor.interval` steps; runs of dead gradients grow every `dead_interval`."""

    def __init__(self, layers: dict[str, nn.Linear], monitor: MonitorConfig, turns: Turns = ALL) -> None:
        super().__init__(monitor.interval, turns)
        self._layers, self._monitor = layers, monitor
        self._dead = {name: fm.monitor.DeadRuns(monitor.dead_steps, monitor.dead_threshold) for name in layers}

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.at_last_micro_step:
            return
        every = self._monitor.dead_interval
        counted = step.number % every == 0
        for name, layer in self._layers.items():
            if layer.weight.grad is None or not (counted or self.takes(step, name)):
                continue
            gradient = plain(layer.weight.grad)
            if counted:
                self._dead[name].update(gradient, every)
            if self.takes(step, name):
                self._measure(step, name, gradient)

    def see(self, step: Step, update: Update) -> None:
        """Compare what a step asked for with the noise that rounding it adds."""
        ratio = fm.monitor.update_to_noise(update.before, update.target, update.format, update.scale)
        self._figures.add(metrics.UPDATE_TO_NOISE, update.name, ratio, update.before.numel())

    def state(self) -> dict[str, Any]:
        return {"dead": {name: runs.state_dict() for name, runs in self._dead.items()}, **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, runs in self._dead.items():
            runs.load_state_dict(state["dead"][name])
        super().load_state(state)

    def _measure(self, step: Step, name: str, gradient: torch.Tensor) -> None:
        found = fm.monitor.gradient_figures(gradient)
        for metric in _FIGURES:
            self._figures.add(metric, name, getattr(found, metric.figure), found.size)
        self._figures.add(metrics.GRAD_DEAD, name, self._dead[name].dead, found.size)
        if step.due(self._monitor.histogram_interval):
            for spread, histogram in (
                (metrics.MAGNITUDES, fm.monitor.magnitude_histogram(gradient)),
                (metrics.DEAD_RUNS, self._dead[name].lengths()),
            ):
                step.add_histogram(spread.of(name), list(histogram.counts), edges=list(histogram.edges))
