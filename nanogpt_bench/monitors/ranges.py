"""Ranges: overflow, underflow and moments of operands.

The operands are weights, activations, gradients and residual outputs.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fp8manifold as fm
from nanogpt_bench.config.metrics import ABOVE, LARGEST, LINEAR, LOG, MEAN, OPERANDS, SHARE, Metric
from nanogpt_bench.model.weights import dequantized
from nanogpt_bench.monitors.capture import (
    Operand,
    Update,
    UpdateMonitor,
    Watched,
    captured_operands,
    weight_operand,
)
from nanogpt_bench.monitors.points import Scale, Step, pieces, unit_pieces

_ranges = partial(Metric, monitor="ranges", over=MEAN, operands=OPERANDS)
OVERFLOW = _ranges(
    "quant/overflow",
    "Overflow",
    SHARE,
    "Values that round beyond the format.",
    bad=ABOVE,
    chart=LINEAR,
)
UNDERFLOW = _ranges(
    "quant/underflow",
    "Underflow",
    SHARE,
    "Values other than zero that round to zero.",
    bad=ABOVE,
    chart=LINEAR,
)
KURTOSIS = _ranges(
    "quant/kurtosis",
    "Kurtosis",
    "raw, normal = 3",
    "Largest kurtosis of the layers.",
    over=LARGEST,
    bad=ABOVE,
    chart=LOG,
)
LOG2_STD = _ranges(
    "quant/log2_std",
    "Spread of the logarithms",
    "binades, normal = 1.6",
    "Standard deviation of log2 of the magnitudes.",
)
LOG2_SKEWNESS = _ranges(
    "quant/log2_skewness",
    "Skewness of the logarithms",
    "normal = -1.54",
    "0 where magnitudes are log-normal.",
)
CLAMPED = _ranges(
    "quant/clamped",
    "Clamped",
    SHARE,
    "Values beyond the format's largest, by any amount.",
    bad=ABOVE,
)
AMAX = _ranges("quant/amax", "Largest magnitude", "value", "Of the finite values.", over=LARGEST)

#: the variance that rounding in float32 can give a constant, relative to its square
_CONSTANT_VARIANCE = 2.0**-44
#: factor by which rounding of a tensor's own scale may put its largest value beyond the
#: format's
_SCALE_ROUNDING = 1 + 2.0**-20
#: the largest count that a float32 holds exactly
_LARGEST_EXACT_COUNT = 2**24


@torch.no_grad()
def range_figures(
    x: Tensor, fmt: fm.FloatFormat | None = None, scale: Scale = 1.0
) -> dict[Metric, float | None]:
    """Return the shares of values that a format can't hold, and moments of the values.

    A value overflows if rounding to nearest with an unbounded exponent would exceed the
    format's largest. It is clamped if it is beyond the largest by any amount. Without a
    format there are no shares. Kurtosis is the fourth central moment over the squared
    variance. Inf overflows, NaN is not counted. Moments are those of the finite
    elements, None without variance. For an empty tensor shares and `amax` are 0.

    >>> fmt = fm.FloatFormat.from_string("E4M3")
    >>> figures = range_figures(torch.tensor([1.0, 450.0, 500.0, 0.004, 0.0]), fmt)
    >>> figures[OVERFLOW], figures[CLAMPED], figures[UNDERFLOW], figures[AMAX]
    (0.2, 0.4, 0.0, 500.0)

    Source: IEEE 754-2019, section 7.4, for overflow.
    """
    moments = _moments(x)
    if not math.isfinite(moments.amax):
        moments = _moments(x[x.isfinite()])
    logs = _spread_of_logs(x)
    figures: dict[Metric, float | None] = {}
    if fmt is not None:
        figures.update(_shares_out_of_range(x, fmt, scale))
    figures[AMAX] = moments.amax
    figures[KURTOSIS] = moments.fourth / moments.variance**2 if moments.variance else None
    figures[LOG2_STD] = logs.std
    figures[LOG2_SKEWNESS] = logs.skewness
    return figures


class _Moments(NamedTuple):
    """The largest magnitude, and central moments of the values over it.

    Fourth powers of the values themselves could overflow float32.
    """

    amax: float
    variance: float
    fourth: float


def _moments(x: Tensor) -> _Moments:
    n = x.numel()
    if n == 0:
        return _Moments(0.0, 0.0, 0.0)
    rows = []
    for (part,) in pieces(x):
        rows.append(torch.stack([part.abs().amax().double(), part.sum().double()]))
    tops, totals = torch.stack(rows).unbind(1)
    amax = tops.amax()
    mean = totals.sum() / n
    unit = amax.clamp(min=2.0**-1000)
    powers = [_central_powers(part, mean, unit) for (part,) in pieces(x)]
    largest, variance, fourth = torch.cat([amax.view(1), torch.stack(powers).sum(0) / n]).tolist()
    # in units of amax, whose square is 1
    if variance > _CONSTANT_VARIANCE:
        return _Moments(largest, variance, fourth)
    return _Moments(largest, 0.0, 0.0)


def _central_powers(part: Tensor, mean: Tensor, unit: Tensor) -> Tensor:
    centred = (part - mean.to(part.dtype)) / unit.to(part.dtype)
    squares = centred.mul_(centred)
    return torch.stack([squares.sum(), torch.dot(squares, squares)]).double()


class _LogSpread(NamedTuple):
    """Standard deviation and skewness of logarithms; None where they are undefined."""

    std: float | None
    skewness: float | None


def _spread_of_logs(x: Tensor) -> _LogSpread:
    """Return standard deviation and skewness of log2 |x| over finite elements but 0."""
    sums = [_powers_of_logs(part) for (part,) in pieces(x)]
    n, first, second, third = torch.stack(sums).sum(0).tolist()
    if not n:
        return _LogSpread(None, None)
    mean = first / n
    square = second / n
    variance = square - mean**2
    if variance <= _CONSTANT_VARIANCE * square:
        return _LogSpread(0.0, None)
    central = third / n - 3 * mean * variance - mean**3
    return _LogSpread(math.sqrt(variance), central / variance**1.5)


def _powers_of_logs(part: Tensor) -> Tensor:
    logs = part.abs().log2_().double()
    # not those of zeros, Inf and NaN
    is_finite = logs.isfinite()
    logs = logs.where(is_finite, 0.0)
    squares = logs.square()
    count = is_finite.sum().double()
    return torch.stack([count, logs.sum(), squares.sum(), torch.dot(squares, logs)])


def _shares_out_of_range(x: Tensor, fmt: fm.FloatFormat, scale: Scale) -> dict[Metric, float]:
    # Halfway between the largest value and the next one of an unbounded exponent. The
    # tie itself goes to the even code.
    tie = fmt.max + fmt.ulp_max / 2
    tie_overflows = bool(fmt.max_code % 2)
    rows = []
    for _, units in unit_pieces(scale, x):
        magnitude = units.abs_()
        overflow_limit = _next_below(tie, magnitude.dtype) if tie_overflows else tie
        # above them: overflow, clamped, not zero, not rounded to zero
        limits = (overflow_limit, fmt.max * _SCALE_ROUNDING, 0.0, fmt.ulp_min / 2)
        scratch = torch.empty_like(magnitude)
        dtype = torch.float64 if magnitude.numel() > _LARGEST_EXACT_COUNT else None
        counts = []
        for limit in limits:
            # A comparison into floats costs a quarter of one into a mask.
            above = torch.gt(magnitude, limit, out=scratch)
            counts.append(above.sum(dtype=dtype).double())
        rows.append(torch.stack(counts))
    overflowing, clamped, nonzero, represented = torch.stack(rows).sum(0).tolist()
    n = max(x.numel(), 1)
    return {
        OVERFLOW: overflowing / n,
        UNDERFLOW: (nonzero - represented) / n,
        CLAMPED: clamped / n,
    }


def _next_below(value: float, dtype: torch.dtype) -> float:
    """Return the next smaller float: `x >` it is `x >= value`."""
    return torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(0.0, dtype=dtype)).item()


class Ranges(UpdateMonitor):
    """Records `quant/FIGURE/OPERAND/LAYER`.

    Weights on a grid are measured before the write-back; master copies as they are.
    Gradients are those with respect to the layers' outputs. An operand without a format
    gets moments only.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._layers = watched.layers
        self._capture = watched.capture
        self._settings = watched.config.monitor
        #: layers whose weight was measured in this step, before its write-back
        self._updated_layers: set[str] = set()

    def measure_update(self, step: Step, update: Update) -> None:
        """Measure a weight before its write-back."""
        self._measure(weight_operand(update.name, update.layer, update.requested))
        self._updated_layers.add(update.name)

    def after_backward(self, step: Step) -> None:
        if self.is_measured(step) and step.at_last_micro_step:
            for operand in captured_operands(self._layers, self._capture, self._settings):
                self._measure(operand)

    def complete_record(self, step: Step) -> None:
        if not step.number or not self.is_measured(step):
            return
        for name, layer in self._layers.items():
            if name not in self._updated_layers and self.takes(step, name):
                self._measure(weight_operand(name, layer, dequantized(layer.weight)))
        self._updated_layers.clear()
        super().complete_record(step)

    def _measure(self, operand: Operand) -> None:
        size = operand.values.numel()
        figures = range_figures(operand.values, operand.format, operand.scale)
        for metric, value in figures.items():
            self._figures.add(metric.part(operand.kind), operand.layer, value, size)


#: returns the monitor of a run
build = Ranges
