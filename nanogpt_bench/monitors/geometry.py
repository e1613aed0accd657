"""Geometry: the grid's spacing at the weights, and distances from grid and manifolds.

The manifolds are geoopt's, on which weights are constrained.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, LARGEST, LINEAR, LOG, MEAN, SHARE, Metric
from nanogpt_bench.model.weights import constrained_weights, dequantized, forward_weight, is_rounded
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Monitor, Scale, Step, clamp_to_format, scaled_pieces

_geometry = partial(Metric, monitor="geometry", over=MEAN)
STIFFNESS_MEAN = _geometry(
    "geometry/stiffness_mean",
    "Mean stiffness",
    "S",
    "Mean over the weights of the spacing at each, in value.",
    chart=LOG,
)
OFF_GRID = _geometry(
    "geometry/off_grid",
    "Off the grid",
    SHARE,
    "Weights that are not on their grid; must stay 0.",
    bad=ABOVE,
    chart=LINEAR,
)
_constraint_metric = partial(_geometry, unit="distance", over=LARGEST, bad=ABOVE, chart=LOG)
_ORTHONORMAL = "|Q^T Q - I| of weights on geoopt's manifold."
ORTHOGONALITY = _constraint_metric(
    "geometry/orthogonality", "Off the Stiefel manifold", meaning=_ORTHONORMAL
)
OFF_SPHERE = _constraint_metric(
    "geometry/off_sphere", "Off the sphere", meaning="Largest |length of a row - 1|."
)
_ROUNDED = "The same distances of these weights rounded to their formats."
CONSTRAINT_ROUNDED = _constraint_metric(
    "geometry/constraint_rounded", "Constraints, rounded", meaning=_ROUNDED
)


@torch.no_grad()
def geometry_figures(w: Tensor, fmt: fm.FloatFormat, scale: Scale = 1.0) -> dict[Metric, float]:
    """Return the mean spacing S at the weights, and the share of weights off the grid.

    The spacing is in value. NaN or Inf makes the mean NaN and is off the grid. For an
    empty tensor both are 0.

    >>> fmt = fm.FloatFormat.from_string("E4M3")
    >>> list(geometry_figures(torch.tensor([1.0, 2.0, 4.0, 8.1]), fmt).values())
    [0.46875, 0.25]
    """
    sums = []
    for scales, part in scaled_pieces(scale, w):
        units = part / scales
        near = clamp_to_format(units, fmt)
        # NaN for NaN and Inf
        ulps = fm.ulp(near, fmt).add_(units * 0)
        # Compared in value and in the weights' dtype: a grid point times the scale,
        # divided by the scale again, need not be the grid point.
        nearest = near.div_(ulps).round_().mul_(ulps).mul_(scales).to(w.dtype)
        spacings = (ulps * scales).sum().double()
        off_grid = (nearest.to(part.dtype) != part).sum().double()
        sums.append(torch.stack([spacings, off_grid]))
    stiffness, off_grid_count = torch.stack(sums).sum(0).tolist()
    n = max(w.numel(), 1)
    return {STIFFNESS_MEAN: stiffness / n, OFF_GRID: off_grid_count / n}


@torch.no_grad()
def orthogonality(q: Tensor) -> float:
    """Return |Q^T Q - I| of a matrix: how far its columns are from orthonormal.

    If there are fewer rows than columns, it is the distance of the rows. NaN gives NaN,
    an empty matrix 0.

    >>> orthogonality(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    3.0
    """
    q = (q.mT if q.shape[-2] < q.shape[-1] else q).double()
    if q.numel() == 0:
        return 0.0
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float(torch.linalg.matrix_norm(q.mT @ q - identity).amax())


def row_length_error(weight: Tensor) -> float:
    """Return the largest distance of a row's length from 1.

    >>> row_length_error(torch.tensor([[0.0, 1.0], [3.0, 4.0]]))
    4.0
    """
    lengths = weight.double().norm(dim=-1)
    return float((lengths - 1).abs().max()) if lengths.numel() else 0.0


class Geometry(Monitor):
    """Records `geometry/FIGURE/LAYER` of the weights that the forward pass uses."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers = watched.quantized
        self._constrained = constrained_weights(watched.model)

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not self.is_measured(step) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            if self.takes(step, name):
                self._measure_grid(name, layer)
        for name, parameter in self._constrained.items():
            self._measure_constraint(name, parameter)

    def _measure_grid(self, name: str, layer: fm.QuantizedLinear) -> None:
        fmt = layer.weight_format
        assert fmt is not None
        weight = forward_weight(layer)
        figures = geometry_figures(weight, fmt, layer.weight_scale().detach())
        # A master copy's scale may be no power of two, with which no grid is exact.
        # Continuous weights need not be on the grid.
        if layer.storage == "master" or not is_rounded(layer):
            del figures[OFF_GRID]
        for metric, value in figures.items():
            self._figures.add(metric, name, value, weight.numel())

    def _measure_constraint(self, name: str, parameter: Any) -> None:
        """Measure a weight's distance from its manifold, and the rounded weight's.

        The rounded weight is the one by which the layer multiplies.
        """
        # a weight is constrained, so it is imported
        import geoopt

        on_sphere = isinstance(parameter.manifold, geoopt.Sphere)
        metric = OFF_SPHERE if on_sphere else ORTHOGONALITY
        distance = row_length_error if on_sphere else orthogonality
        size = parameter.numel()
        self._figures.add(metric, name, distance(dequantized(parameter)), size)
        layer = self._layers.get(name.removesuffix(".weight"))
        if layer is not None and layer.weight_scaler is not None:
            rounded_distance = distance(forward_weight(layer))
            self._figures.add(CONSTRAINT_ROUNDED, name, rounded_distance, size)


def build(watched: Watched) -> Geometry | None:
    """Return the monitor of a run whose weights have formats or constraints."""
    return Geometry(watched) if watched.quantized or constrained_weights(watched.model) else None
