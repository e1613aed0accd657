"""Where weights are on the format's manifold, how warped it is there, and how far they have come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8manifold._base.checks import check_entries, check_number
from fp8manifold._base.float_bits import float_bits
from fp8manifold._numerics.charts import UlpChart
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.monitor._passes import (
    ScaleLike,
    chart_steps,
    check_shapes,
    fitting,
    inside,
    plain,
    scaled_blocks,
    spacing,
    unit_blocks,
)

__all__ = [
    "GeometryFigures",
    "PathTracker",
    "WarpFigures",
    "chart_distance",
    "geometry_figures",
    "metric_min_eigenvalue",
    "orthogonality",
    "warp_figures",
]


_TINY = 2.0**-126
_ROUNDING = 2.0**-20  # a variance, relative to the mean square, that float32 leaves of a constant


@dataclass(frozen=True)
class GeometryFigures:
    """What :func:`geometry_figures` finds."""

    size: int
    """Weights."""
    stiffness_mean: float
    """Mean of S, in value."""
    off_grid: float
    """Share of the weights that are no value of the format; 0 wherever weights are stored on its grid."""
    metric_min_eigenvalue: float
    """The smallest eigenvalue of the bounded metric, relative to that of the mean stiffness."""
    gradient_stiffness_correlation: float | None
    """Of log|g| with log S; None without a gradient, or where one of them is constant."""
    warp_spread: float
    """Standard deviation of log2 S."""
    warp_slope: float | None
    """Slope of log S over log|w|, fitted to the weights; 0 on a uniform grid, 1 on a logarithmic one."""


@torch.no_grad()
def geometry_figures(
    w: Tensor,
    fmt: FormatLike,
    scale: ScaleLike = 1.0,
    gradient: Tensor | None = None,
    *,
    damping: float = 2.0**-8,
    clip: float = 2.0**4,
) -> GeometryFigures:
    """The stiffness field of a tensor of weights in a few numbers.

    .. math:: spread = \\mathrm{std}(\\log_2 S), \\qquad
              slope = \\frac{\\mathrm{cov}(\\log |w|, \\log S)}{\\mathrm{var}(\\log |w|)}, \\qquad
              \\lambda_{min} = \\min_i \\left( \\frac{\\bar S}{\\mathrm{clamp}(S_i, damping\\,\\bar S, clip\\,\\bar S)}
              \\right)^2

    Args:
        w: float tensor of any shape.
        fmt: a format or its name.
        scale: positive, broadcasting against ``w``.
        gradient: of the shape of ``w``; zeros in it are left out of the correlation.
        damping, clip: bounds of S over its mean, those of the optimizers.

    Returns:
        A :class:`GeometryFigures`; the slope is that of the weights that are not zero.  NaN or Inf in ``w`` makes
        its figures NaN or None, -0 is 0; of an empty tensor all is 0 but the smallest eigenvalue, which is 1, and what
        is None.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ, bounds out of range, or a scale that does not fit ``w`` or is not positive.

    Example:
        >>> found = geometry_figures(torch.tensor([1.0, 2.0, 4.0, 8.1]), "E4M3")
        >>> found.off_grid, found.warp_spread, round(found.warp_slope, 2), found.stiffness_mean
        (0.25, 1.118033988749895, 0.99, 0.46875)
    """
    w, fmt = plain(w, "w"), as_format(fmt)
    check_number("damping", damping, 0.0, 1.0)
    check_number("clip", clip, 1.0)
    fitted = fitting(scale, w)
    tensors = {"w": w} if gradient is None else {"w": w, "gradient": plain(gradient, "gradient")}
    check_shapes(**tensors)
    sums, n = FieldSums(fmt, w.dtype), w.numel()
    for scales, part, *more in scaled_blocks(fitted, *tensors.values()):
        sums.add(part, scales, more[0] if more else None)
    mean, largest = sums.stiffness(n)
    return GeometryFigures(
        size=n,
        stiffness_mean=mean,
        off_grid=sums.off_grid(n),
        metric_min_eigenvalue=(mean / min(max(largest, damping * mean), clip * mean)) ** 2 if n else 1.0,
        gradient_stiffness_correlation=sums.over_gradients().correlation,
        warp_spread=sums.spread(n),
        warp_slope=sums.over_weights().slope,
    )


@dataclass(frozen=True)
class WarpFigures:
    """What :func:`warp_figures` finds in one step."""

    size: int
    """Weights."""
    warp_crossings: float
    """Share of the weights whose step ends at another stiffness, in another binade."""
    warp_distortion: float
    """Mean distance of exp_x(u) from x + u, in ULPs at x."""


@torch.no_grad()
def warp_figures(before: Tensor, target: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0) -> WarpFigures:
    """How far a step departs from a straight line: the warp of the chart along it.

    .. math:: crossings = \\frac1n \\#\\{S(target) \\ne S(before)\\}, \\qquad
              distortion = \\overline{|\\exp_x(u) - (x + u)| / S(x)}, \\quad x = before, \\; x + u = target

    Args:
        before: weights before the step.
        target: weights the step asked for, before rounding; of the same shape.
        fmt: a format or its name.
        scale: positive, broadcasting against the weights.

    Returns:
        A :class:`WarpFigures`; 0 for an empty tensor.  NaN makes the distortion NaN and counts as a crossing; +0 and -0
        are one point.  What lies beyond the range, Inf included, is taken to its end.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ, or a scale that does not fit them or is not positive.

    Example:
        >>> warp_figures(torch.tensor([1.0, 1.75]), torch.tensor([1.25, 2.25]), "E4M3")
        WarpFigures(size=2, warp_crossings=0.5, warp_distortion=1.0)
    """
    before, target = plain(before, "before"), plain(target, "target")
    check_shapes(before=before, target=target)
    fmt, sums = as_format(fmt), []
    for _, x, y in unit_blocks(fitting(scale, before), before, target):
        start, end = inside(x, fmt), inside(y, fmt)
        ulps = spacing(start, fmt)
        crosses = spacing(end, fmt) != ulps
        bends = crosses | (torch.sign(start) * torch.sign(end) < 0)  # elsewhere the chart is a straight line
        sums.append(torch.stack([crosses.sum().double(), _distortion(start[bends], end[bends], fmt)]))
    crossings, distortion_sum = torch.stack(sums).sum(0).tolist()
    n = max(before.numel(), 1)
    return WarpFigures(before.numel(), crossings / n, distortion_sum / n)


@torch.no_grad()
def chart_distance(a: Tensor, b: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0) -> float:
    """Mean number of representable steps between two tensors of weights.

    .. math:: \\overline{|\\varphi(a / s) - \\varphi(b / s)|}

    Args:
        a, b: float tensors of one shape.
        fmt: a format or its name.
        scale: positive, broadcasting against them.

    Returns:
        ULPs; 0 for an empty tensor.  NaN gives NaN; values beyond the range, Inf included, count as its end; +0 and -0
        are one point.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that differ, or a scale that does not fit them or is not positive.

    Example:
        >>> chart_distance(torch.tensor([1.0, -1.0]), torch.tensor([1.25, -2.5]), "E4M3")
        6.0
    """
    a, b = plain(a, "a"), plain(b, "b")
    check_shapes(a=a, b=b)
    fmt = as_format(fmt)
    steps = [chart_steps(x, y, fmt).sum().double() for _, x, y in unit_blocks(fitting(scale, a), a, b)]
    return float(torch.stack(steps).sum()) / max(a.numel(), 1)


class PathTracker:
    """How far a tensor of weights has walked, and how far it has come, in ULPs a weight.

    .. math:: length = \\sum_t \\overline{d(w_t, w_{t-1})}, \\qquad displacement = \\overline{d(w_t, w_0)}, \\qquad
              d(a, b) = |\\varphi(a / s) - \\varphi(b / s)|

    Two copies of the weights are kept.  Looked at every few steps only, the length is a lower bound.  NaN makes both
    NaN; values beyond the range, Inf included, count as its end; +0 and -0 are one point; both are 0 for an empty
    tensor.

    Args:
        start: the weights at the beginning.
        fmt: a format or its name.

    Raises:
        TypeError: ``start`` is not a float tensor.

    Example:
        >>> path = PathTracker(torch.tensor([1.0]), "E4M3")
        >>> path.update(torch.tensor([1.5]))
        >>> path.update(torch.tensor([1.25]))
        >>> path.length, path.displacement
        (6.0, 2.0)
    """

    def __init__(self, start: Tensor, fmt: FormatLike) -> None:
        self.format: FloatFormat = as_format(fmt)
        self._start = plain(start, "start").clone()
        self._last = self._start
        self.length = 0.0
        self.displacement = 0.0

    def update(self, w: Tensor, scale: ScaleLike = 1.0) -> None:
        """Add the distance from the last look, measured at the present scale.

        Args:
            w: the weights now, of the first ones' shape.
            scale: positive, broadcasting against ``w``.

        Raises:
            TypeError: ``w`` is not a float tensor.
            ValueError: another shape than the first one's, or a scale that does not fit it or is not positive.
        """
        w = plain(w, "w")
        self.length += chart_distance(self._last, w, self.format, scale)
        self.displacement = chart_distance(self._start, w, self.format, scale)
        self._last = w.clone()

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes: the tensors ``start`` and ``last``, and both distances."""
        return {
            "start": self._start,
            "last": self._last,
            "length": self.length,
            "displacement": self.displacement,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was called; the tensors are held, not copied.

        Args:
            state: what :meth:`state_dict` gave.

        Raises:
            ValueError: an entry is missing, or tensors of another shape than those of this tracker.
        """
        check_entries("state", state, ("start", "last", "length", "displacement"))
        for name in ("start", "last"):
            if state[name].shape != self._start.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)}, but the weights are of {tuple(self._start.shape)}"
                )
        self._start, self._last = state["start"], state["last"]
        self.length, self.displacement = float(state["length"]), float(state["displacement"])


@torch.no_grad()
def metric_min_eigenvalue(metric: Tensor, damping: float = 0.0) -> float:
    """The smallest eigenvalue of a damped metric.

    .. math:: \\lambda_{min}(F) + damping

    Args:
        metric: a symmetric matrix (n, n), or the entries (n,) of a diagonal one.
        damping: added to every eigenvalue.

    Returns:
        The eigenvalue, computed in float64; infinite for an empty metric, NaN where an entry is NaN or Inf; -0 is 0.

    Raises:
        TypeError: ``metric`` is not a float tensor.
        ValueError: ``metric`` is neither a vector nor a square matrix.

    Example:
        >>> metric_min_eigenvalue(torch.tensor([2.0, 0.5]), damping=0.25)
        0.75
    """
    metric = plain(metric, "metric").double()
    if metric.dim() not in (1, 2) or metric.shape[0] != metric.shape[-1]:
        raise ValueError(f"metric has shape {tuple(metric.shape)}: (n,) or (n, n) is needed")
    if metric.numel() == 0:
        return math.inf
    if not bool(metric.isfinite().all()):
        return math.nan
    values = metric if metric.dim() == 1 else torch.linalg.eigvalsh(metric)
    return float(values.amin()) + damping


@torch.no_grad()
def orthogonality(q: Tensor) -> float:
    """How far the columns of a matrix are from orthonormal.

    .. math:: |Q^T Q - I|_F

    Args:
        q: (..., n, p) with n >= p, such as a parameter constrained by geoopt to its Stiefel manifold.

    Returns:
        The largest norm among the matrices; 0 for an empty tensor.  NaN gives NaN, Inf gives Inf or NaN, -0 is 0.

    Raises:
        TypeError: ``q`` is not a float tensor.
        ValueError: fewer than two dimensions, or more columns than rows.

    Example:
        >>> orthogonality(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        3.0
    """
    q = plain(q, "q").double()
    if q.dim() < 2 or q.shape[-1] > q.shape[-2]:
        raise ValueError(f"q has shape {tuple(q.shape)}: (..., n, p) with n >= p is needed")
    if q.numel() == 0:
        return 0.0
    identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return float(torch.linalg.matrix_norm(q.mT @ q - identity).amax())


def _distortion(start: Tensor, end: Tensor, fmt: FloatFormat) -> Tensor:
    """The sum of ``|exp_x(u) - (x + u)| / S(x)``, in float64."""
    chart = UlpChart(fmt.mantissa_bits, fmt.emin, fmt.emax)
    start, end = start.double(), end.double()
    ulps = spacing(start, fmt)
    moved = inside(chart.shift(start, (end - start) / ulps), fmt)
    return (moved - end).abs_().div_(ulps).sum()


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
