"""How a tensor fills the range of a format."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.monitor._passes import ScaleLike, blocks, count_above, fitting, one_scale, plain, unit_blocks
from fp8manifold.scaling import ROUNDING_OF_SCALES

__all__ = ["RangeFigures", "range_figures", "scale_changes"]

_ROUNDING = 2.0**-44  # a variance, relative to amax squared, that float32 leaves of a constant


@dataclass(frozen=True)
class RangeFigures:
    """What :func:`range_figures` finds; the shares are of all elements."""

    size: int
    """Elements."""
    nonfinite: float
    """Share of NaN and Inf."""
    overflow: float | None
    """Share beyond the largest value by so much that rounding with an unbounded exponent would exceed it."""
    clamped: float | None
    """Share beyond the largest value at all, what a saturating cast moves there."""
    underflow: float | None
    """Share that is not zero and rounds to zero."""
    subnormal: float | None
    """Share that rounds to a subnormal value."""
    amax: float
    """The largest finite magnitude, in value."""
    amax_over_std: float | None
    """That over the standard deviation; None where it is 0."""
    kurtosis: float | None
    """Fourth central moment over the squared variance; 3 for a normal distribution, None where the variance is 0."""
    log2_std: float | None
    """Standard deviation of log2 of the magnitudes other than 0, in binades; 1.60 for a normal distribution around 0,
    None where there are none."""
    log2_skewness: float | None
    """Their third central moment over the cubed standard deviation, -1.54 for a normal distribution around 0 and
    0 for a log-normal one; None where that is 0."""
    scale: float
    """Geometric mean of the scales."""


@torch.no_grad()
def range_figures(x: Tensor, fmt: FormatLike | None = None, scale: ScaleLike = 1.0) -> RangeFigures:
    """Shares of a tensor that a format can't hold, and the moments that say why.

    .. math:: overflow = \\frac1n \\#\\{|x| / s > max + S(max) / 2\\}, \\quad
              clamped = \\frac1n \\#\\{|x| / s > max\\}, \\quad
              kurtosis = \\frac{\\overline{(x - \\bar x)^4}}{\\overline{(x - \\bar x)^2}^2}, \\quad
              log2\\_std^2 = \\overline{(\\log_2 |x| - \\overline{\\log_2 |x|})^2}_{x \\ne 0}

    Rounding is to nearest: a tie at either end goes where its even code is.

    Args:
        x: float tensor of any shape.
        fmt: a format or its name; None leaves out the four shares that need one.
        scale: positive, broadcasting against ``x``.

    Returns:
        A :class:`RangeFigures`.  Inf overflows; NaN counts as ``nonfinite`` only, and moments are those of the finite
        elements; -0 is 0, which no format underflows.  Of an empty tensor shares and ``amax`` are 0, and there are no
        moments.

    Raises:
        TypeError: ``x`` is not a float tensor.
        ValueError: a scale that does not fit ``x`` or is not positive.

    Example:
        >>> found = range_figures(torch.tensor([1.0, 450.0, 500.0, 0.004, 0.0]), "E4M3")
        >>> found.overflow, found.clamped, found.underflow, found.subnormal, found.amax
        (0.2, 0.4, 0.0, 0.2, 500.0)

    Source: IEEE 754-2019, section 7.4, for overflow.
    """
    x = plain(x)
    fitted = fitting(scale, x)
    moments = _moments(x)
    nonfinite = 0
    if not math.isfinite(moments[0]):
        finite = x[x.isfinite()]
        moments, nonfinite = _moments(finite), x.numel() - finite.numel()
    amax, variance, fourth = moments
    spread, skewness = _spread_of_logs(x)
    n = max(x.numel(), 1)
    shares = _out_of_range(x, as_format(fmt), fitted) if fmt is not None else {}
    return RangeFigures(
        size=x.numel(),
        nonfinite=nonfinite / n,
        **{name: shares.get(name) for name in ("overflow", "clamped", "underflow", "subnormal")},
        amax=amax,
        amax_over_std=1 / math.sqrt(variance) if variance else None,
        kurtosis=fourth / variance**2 if variance else None,
        log2_std=spread,
        log2_skewness=skewness,
        scale=one_scale(fitted),
    )


def scale_changes(before: ScaleLike, after: ScaleLike) -> float:
    """Share of the scales that two moments of training differ in.

    .. math:: \\frac1n \\#\\{i : before_i \\ne after_i\\}

    Args:
        before, after: numbers, or tensors of one shape.

    Returns:
        A number in [0, 1]; 0 for an empty tensor.  A NaN differs from everything, Inf from all but Inf, -0 is 0.

    Raises:
        ValueError: shapes that differ.

    Example:
        >>> scale_changes(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        0.5
    """
    first, second = torch.as_tensor(before).detach(), torch.as_tensor(after).detach()
    if first.shape != second.shape:
        raise ValueError(f"before has shape {tuple(first.shape)}, after {tuple(second.shape)}: they must be one")
    return int((first != second).sum()) / max(first.numel(), 1)


def _moments(x: Tensor) -> tuple[float, float, float]:
    """The largest magnitude; second and fourth central moments of ``x`` divided by it.

    Divided first: fourth powers leave the range of float32 soon.
    """
    n = x.numel()
    if n == 0:
        return 0.0, 0.0, 0.0
    first = [torch.stack([part.abs().amax().double(), part.sum().double()]) for (part,) in blocks(x)]
    ends = torch.stack(first)
    amax, mean = ends[:, 0].amax(), ends[:, 1].sum() / n
    unit = amax.clamp(min=2.0**-1000)
    powers = [_powers(part, mean, unit) for (part,) in blocks(x)]
    largest, second, fourth = torch.cat([amax.view(1), torch.stack(powers).sum(0) / n]).tolist()
    return (largest, second, fourth) if second > _ROUNDING else (largest, 0.0, 0.0)


def _powers(part: Tensor, mean: Tensor, unit: Tensor) -> Tensor:
    centred = (part - mean.to(part.dtype)) / unit.to(part.dtype)
    squares = centred.mul_(centred)
    return torch.stack([squares.sum(), torch.dot(squares, squares)]).double()


def _spread_of_logs(x: Tensor) -> tuple[float | None, float | None]:
    """Standard deviation and skewness of log2 |x| over what is finite and not 0."""
    sums = [_powers_of_logs(part) for (part,) in blocks(x)]
    n, first, second, third = torch.stack(sums).sum(0).tolist()
    if not n:
        return None, None
    mean, square = first / n, second / n
    variance = square - mean**2
    if variance <= _ROUNDING * square:
        return 0.0, None
    central = third / n - 3 * mean * variance - mean**3
    return math.sqrt(variance), central / variance**1.5


def _powers_of_logs(part: Tensor) -> Tensor:
    logs = part.abs().log2_().double()
    there = logs.isfinite()
    logs = logs.where(there, 0.0)
    squares = logs.square()
    return torch.stack([there.sum().double(), logs.sum(), squares.sum(), torch.dot(squares, logs)])


def _out_of_range(x: Tensor, fmt: FloatFormat, scale: Tensor) -> dict[str, float]:
    limits = _limits(fmt, scale.dtype)
    found = []
    for _, units in unit_blocks(scale, x):
        magnitude = units.abs_()
        scratch = torch.empty_like(magnitude)
        found.append(torch.stack([count_above(magnitude, limit, scratch) for limit in limits]))
    n = max(x.numel(), 1)
    overflow, clamped, nonzero, kept, normal = torch.stack(found).sum(0).tolist()
    counts = {"overflow": overflow, "clamped": clamped, "underflow": nonzero - kept, "subnormal": kept - normal}
    return {name: count / n for name, count in counts.items()}


def _limits(fmt: FloatFormat, dtype: torch.dtype) -> tuple[float, ...]:
    """What a magnitude exceeds: to overflow, to be clamped, to be nonzero, to round to nonzero, to a normal value."""
    tie, smallest = fmt.max + fmt.ulp_max / 2, fmt.ulp_min / 2
    overflow = _below(tie, dtype) if fmt.max_code % 2 else tie
    normal = _below(fmt.min_normal - smallest, dtype) if fmt.mantissa_bits else smallest
    return overflow, fmt.max * ROUNDING_OF_SCALES, 0.0, smallest, normal


def _below(value: float, dtype: torch.dtype) -> float:
    """The float below, in whose place ``>`` says ``>=`` of the value itself."""
    return torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(0.0, dtype=dtype)).item()
