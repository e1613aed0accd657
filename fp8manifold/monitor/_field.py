"""Sums over a tensor of weights that the figures of its stiffness field are made of."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold._numerics.float_bits import float_bits
from fp8manifold.formats import FloatFormat
from fp8manifold.monitor._position import inside, spacing

__all__ = ["FieldSums", "Line"]

_TINY = 2.0**-126
_ROUNDING = 2.0**-20  # a variance, relative to the mean square, that float32 leaves of a constant


@dataclass(frozen=True)
class Line:
    """The straight line fitted to log S over log|x|; None where one of them is constant."""

    slope: float | None = None
    correlation: float | None = None


class FieldSums:
    """Of the stiffness, and of its logarithm jointly with that of weights and gradients, block by block."""

    def __init__(self, fmt: FloatFormat, dtype: torch.dtype) -> None:
        self._format, self._dtype = fmt, dtype
        self._field: list[Tensor] = []
        self._joint: tuple[list[Tensor], list[Tensor]] = [], []
        self._anchor: Tensor | None = None

    def add(self, w: Tensor, scales: Tensor, gradient: Tensor | None) -> None:
        """Take in a block of weights and of their gradient."""
        if not w.numel():
            return
        units = w / scales
        near = inside(units, self._format)
        ulps = spacing(near, self._format).add_(units * 0)  # NaN of NaN and Inf
        stiffness, logarithm = ulps * scales, _exponent(ulps).add_(scales.log2()).add_(units * 0)
        if self._anchor is None:
            self._anchor = logarithm[0].clone()
        logarithm -= self._anchor  # a constant field sums to zero exactly
        # in value and in the weights' own dtype: dividing by the scale need not undo the multiplication
        nearest = near.div_(ulps).round_().mul_(ulps).mul_(scales).to(self._dtype)
        off_grid = (nearest.to(w.dtype) != w).sum()
        moments = logarithm.sum(), torch.dot(logarithm, logarithm)
        self._field.append(_stacked(stiffness.sum(), off_grid, *moments, stiffness.amax()))
        self._joint[0].append(_joint_sums(w, logarithm))
        if gradient is not None:
            self._joint[1].append(_joint_sums(gradient, logarithm))

    def stiffness(self, n: int) -> tuple[float, float]:
        """The mean over ``n`` weights, and the largest."""
        total, *_, largest = self._sums()
        return total / max(n, 1), largest

    def off_grid(self, n: int) -> float:
        """Share of ``n`` weights that are no value of the format."""
        return self._sums()[1] / max(n, 1)

    def spread(self, n: int) -> float:
        """Standard deviation of log2 S over ``n`` weights."""
        _, _, first, second, _ = self._sums()
        mean = first / max(n, 1)
        variance = second / max(n, 1) - mean * mean
        return math.sqrt(max(variance, 0.0)) if not math.isnan(variance) else math.nan

    def over_weights(self) -> Line:
        """log S over log|w|."""
        return _fitted(self._joint[0])

    def over_gradients(self) -> Line:
        """log S over log|g|."""
        return _fitted(self._joint[1])

    def _sums(self) -> list[float]:
        if not self._field:
            return [0.0] * 5
        table = torch.stack(self._field)
        return [*table[:, :-1].sum(0).tolist(), table[:, -1].amax().item()]


def _exponent(power: Tensor) -> Tensor:
    """The exponent of powers of two, as floats."""
    fields = float_bits(power.dtype)
    return ((power.view(fields.integer) >> fields.mantissa_bits) - fields.bias).to(power.dtype)


def _joint_sums(x: Tensor, y: Tensor) -> Tensor:
    """Number, sums, squares and product of log2|x| and y where x is not zero."""
    magnitude = x.abs()
    there = torch.gt(magnitude, 0.0, out=torch.empty_like(magnitude))
    first, second = magnitude.clamp_(min=_TINY).log2_().mul_(there), y * there
    products = torch.dot(first, first), torch.dot(first, second), torch.dot(second, second)
    return _stacked(there.sum(), first.sum(), second.sum(), *products)


def _stacked(*values: Tensor) -> Tensor:
    return torch.stack([value.double() for value in values])


def _fitted(blocks: list[Tensor]) -> Line:
    if not blocks:
        return Line()
    n, x, y, xx, xy, yy = torch.stack(blocks).sum(0).tolist()
    if not n or not math.isfinite(xx + xy + yy):
        return Line()
    covariance = xy / n - x * y / n**2
    var_x, var_y = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2
    if var_x <= _ROUNDING * xx / n:
        return Line()
    slope = covariance / var_x
    if var_y <= _ROUNDING * yy / n:
        return Line(slope=slope)
    return Line(slope, max(-1.0, min(1.0, covariance / math.sqrt(var_x * var_y))))
