"""Geometry: the stiffness field, distances in ULPs and the warp of the chart; constraints of geoopt's own manifolds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import geoopt
import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config import metrics
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.observers.figures import ALL, Monitor, Turns
from nanogpt_bench.observers.updates import Update
from nanogpt_bench.setup.constraints import constrained_weights
from nanogpt_bench.setup.layers import forward_weight, is_rounded, plain
from nanogpt_bench.training.points import Step

_FIELD = (
    metrics.STIFFNESS_MEAN,
    metrics.GRADIENT_STIFFNESS,
    metrics.METRIC_MIN,
    metrics.WARP_SPREAD,
    metrics.WARP_SLOPE,
)


class Geometry(Monitor):
    """Records `geometry/FIGURE/LAYER` every `monitor.interval` steps.

    The field is that of the weights as the forward pass uses them. Path length and displacement are those of what the
    optimizer steps, the master copy where there is one; looked at every `interval` steps, the length is a lower bound.
    """

    def __init__(self, layers: Mapping[str, fm.QuantizedLinear], monitor: MonitorConfig, turns: Turns = ALL) -> None:
        super().__init__(monitor.interval, turns)
        self._layers, self._monitor = layers, monitor
        self._paths = {
            name: fm.monitor.PathTracker(plain(layer.weight).float(), layer.weight_format)
            for name, layer in layers.items()
            if layer.weight_format is not None
        }

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.due(self.interval) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            if not self.takes(step, name):
                continue
            gradient = None if layer.weight.grad is None else plain(layer.weight.grad).float()
            self._measure(step, name, layer, gradient)
        for name, parameter in constrained_weights(step.model).items():
            self._measure_constraint(name, parameter)

    def _measure(self, step: Step, name: str, layer: fm.QuantizedLinear, gradient: Tensor | None) -> None:
        fmt, scale, weight = layer.weight_format, layer.weight_scale().detach(), forward_weight(layer)
        assert fmt is not None
        found = fm.monitor.geometry_figures(weight, fmt, scale, gradient)
        # a copy's scale is no power of two: its grid is not exact
        exact = layer.storage != "master" and is_rounded(layer)
        for metric in (*_FIELD, metrics.OFF_GRID) if exact else _FIELD:
            self._figures.add(metric, name, getattr(found, metric.figure), found.size)
        if step.due(self._monitor.histogram_interval):
            self._write_histograms(step, name, layer, weight)

    def _measure_constraint(self, name: str, parameter: geoopt.ManifoldParameter) -> None:
        """Measure how far a weight is off its manifold, and how far off it what the layer multiplies by is."""
        on_sphere, size = isinstance(parameter.manifold, geoopt.Sphere), parameter.numel()
        distance = _row_length_error if on_sphere else _orthogonality
        self._figures.add(metrics.OFF_SPHERE if on_sphere else metrics.ORTHOGONALITY, name, distance(parameter), size)
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.weight_scaler is not None:
            self._figures.add(metrics.CONSTRAINT_ROUNDED, name, distance(forward_weight(layer)), size)

    def _write_histograms(self, step: Step, name: str, layer: fm.QuantizedLinear, weight: Tensor) -> None:
        fmt, scale = layer.weight_format, layer.weight_scale().detach()
        assert fmt is not None
        field = fm.monitor.stiffness_histogram(weight, fmt, scale)
        step.add_histogram(metrics.STIFFNESS_FIELD.of(name), list(field.counts), edges=list(field.edges))
        if layer.storage == "master":
            between = fm.monitor.residual_histogram(plain(layer.weight), fmt, scale)
            step.add_histogram(metrics.WEIGHT_RESIDUALS.of(name), list(between.counts), edges=list(between.edges))

    def see(self, step: Step, update: Update) -> None:
        """Measure how the chart bends along a step, and how far the weight has come."""
        warp = fm.monitor.warp_figures(update.before, update.target, update.format, update.scale)
        path = self._paths[update.name]
        path.update(update.after, update.scale)
        for metric, value in (
            (metrics.WARP_CROSSINGS, warp.warp_crossings),
            (metrics.WARP_DISTORTION, warp.warp_distortion),
            (metrics.PATH_LENGTH, path.length),
            (metrics.DISPLACEMENT, path.displacement),
        ):
            self._figures.add(metric, update.name, value, warp.size)

    def state(self) -> dict[str, Any]:
        return {"paths": {name: path.state_dict() for name, path in self._paths.items()}, **super().state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, path in self._paths.items():
            path.load_state_dict(state["paths"][name])
        super().load_state(state)


def _orthogonality(weight: Tensor) -> float:
    """How far the columns are from orthonormal, or the rows where there are fewer of these."""
    matrix = plain(weight)
    return fm.monitor.orthogonality(matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix)


def _row_length_error(weight: Tensor) -> float:
    """The largest distance of a row's length from 1."""
    lengths = plain(weight).double().norm(dim=-1)
    return float((lengths - 1).abs().max()) if lengths.numel() else 0.0
