"""The charts of the metrics: one coordinate per value, in which the metric is flat.

A chart works in units of the scale.  It is symmetric, strictly increasing and has four maps: ``stiffness`` (the
derivative of its inverse), ``forward``, ``inverse`` and ``shift`` (``inverse(forward(x) + t)`` without the rounding
of large coordinates).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fp8manifold._checks import check_choice
from fp8manifold._float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat

__all__ = ["METRICS", "Chart", "Metric", "UlpChart", "chart_of"]

METRICS: Final = ("ulp", "log", "euclidean")

Metric = str | Callable[[Tensor, FloatFormat], Any]
"""``ulp``, ``log``, ``euclidean``, or a positive function S(x, fmt)."""


class Chart(Protocol):
    """What a metric has to offer."""

    def stiffness(self, x: Tensor) -> Tensor:
        """One step in value at ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        """Steps from zero to ``x``."""

    def inverse(self, c: Tensor) -> Tensor:
        """The value ``c`` steps from zero."""

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """The value ``steps`` away from ``x``."""


@dataclass(frozen=True)
class UlpChart:
    """Piecewise linear: one step is one ulp, ``2^(e - M)`` with the exponent held in ``[lowest, highest]``.

    ``lowest = emin`` is the format's own chart.  A higher ``lowest`` or a finite ``highest`` bounds the stiffness from
    below or above by a power of two and leaves the chart closed-form: it is the chart of a format with other ends.
    """

    mantissa_bits: int
    lowest: int
    highest: int

    def stiffness(self, x: Tensor) -> Tensor:
        """``2^(e - M)``."""
        return self._power(x) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """``sign(x) [(e - lowest) 2^M + |x| / 2^(e - M)]``."""
        power = self._power(x)
        steps = x.abs() / (power * 2.0**-self.mantissa_bits)
        return torch.copysign(self._codes_below(power) + steps, x)

    def inverse(self, c: Tensor) -> Tensor:
        """``sign(c) (|c| - b 2^M) 2^(lowest + b - M)`` with ``b`` the binade that holds ``c``."""
        per_binade = 2.0**self.mantissa_bits
        magnitude = c.abs()
        index = ((magnitude.detach() / per_binade).floor() - 1).clamp(0, self.highest - self.lowest)
        fields = float_bits(c.dtype)
        exponent = index.nan_to_num(0.0).to(fields.integer) + (self.lowest - self.mantissa_bits + fields.bias)
        spacing = (exponent << fields.mantissa_bits).view(c.dtype)
        return torch.copysign((magnitude - index * per_binade) * spacing, c)

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """Move by ``steps``: whole steps are counted in integers, so only the fraction is rounded."""
        power = self._power(x)
        position = x.abs() / (power * 2.0**-self.mantissa_bits)
        whole = position.detach().floor()
        outward = steps * torch.copysign(torch.ones_like(x), x)
        fraction = (position - whole) + outward
        moved = fraction.detach().floor()
        start = self._codes_below(power) + whole + moved
        value, neighbour = self.inverse(start), self.inverse(start + 1)
        shifted = value + (fraction - moved) * (neighbour - value)
        return shifted * torch.copysign(torch.ones_like(x), x)

    def _power(self, x: Tensor) -> Tensor:
        power = binade(x.detach(), self.lowest)
        return power.clamp(max=2.0**self.highest)

    def _codes_below(self, power: Tensor) -> Tensor:
        """``(e - lowest) 2^M``: the steps below the binade, short of those its own mantissa counts."""
        fields = float_bits(power.dtype)
        index = (power.view(fields.integer) >> fields.mantissa_bits) - (fields.bias + self.lowest)
        return (index << self.mantissa_bits).to(power.dtype)


@dataclass(frozen=True)
class LogChart:
    """Smooth: ``S = max(|x|, 2^emin) 2^-M``, so that a step multiplies; linear below the smallest normal."""

    mantissa_bits: int
    lowest: int

    def stiffness(self, x: Tensor) -> Tensor:
        """``max(|x|, 2^emin) 2^-M``."""
        return x.abs().clamp(min=2.0**self.lowest) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """``2^M (1 + ln(|x| / 2^emin))`` above the smallest normal, ``2^M |x| / 2^emin`` below."""
        ratio = x.abs() * 2.0**-self.lowest
        return torch.copysign((ratio.clamp(max=1.0) + ratio.clamp(min=1.0).log()) * 2.0**self.mantissa_bits, x)

    def inverse(self, c: Tensor) -> Tensor:
        """``2^emin exp(|c| / 2^M - 1)``, linear below one."""
        ratio = c.abs() * 2.0**-self.mantissa_bits
        return torch.copysign(ratio.clamp(max=1.0) * (ratio.clamp(min=1.0) - 1).exp() * 2.0**self.lowest, c)

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """Through the coordinate."""
        return self.inverse(self.forward(x) + steps)


class EuclideanChart:
    """The identity: one step is one unit of the scale."""

    def stiffness(self, x: Tensor) -> Tensor:
        """One everywhere."""
        return x * 0 + 1

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        return x

    def inverse(self, c: Tensor) -> Tensor:
        """``c``."""
        return c

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """``x + steps``."""
        return x + steps


class TabulatedChart:
    """The chart of any positive function: its value midway between two neighbours of the grid holds between them.

    That makes every law of the manifold exact, whatever the function; beyond the largest value the last gap goes on.
    """

    def __init__(self, function: Callable[[Tensor, FloatFormat], Any], fmt: FloatFormat) -> None:
        self._function, self._format = function, fmt

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Knots, coordinates of the knots, stiffness of the gap above each knot, in float64."""
        knots = torch.tensor([v for v in self._format.values if v >= 0], dtype=torch.float64).unique()
        middle = (knots[1:] + knots[:-1]) / 2
        gaps = torch.as_tensor(self._function(middle, self._format), dtype=torch.float64).expand(middle.shape)
        if not bool((gaps.isfinite() & (gaps > 0)).all()):
            bad = gaps[~(gaps.isfinite() & (gaps > 0))][0].item()
            raise ValueError(f"metric function gave a stiffness of {bad}: it must be finite and positive everywhere")
        coordinates = torch.cat([gaps.new_zeros(1), (knots.diff() / gaps).cumsum(0)])
        return knots[:-1], coordinates[:-1], gaps.clone()

    def stiffness(self, x: Tensor) -> Tensor:
        """The function's value at the middle of the gap that holds ``x``."""
        knots, _, gaps = self._tables(x)
        return gaps[_gap(knots, x)]

    def forward(self, x: Tensor) -> Tensor:
        """The sum of gap widths over their stiffness."""
        knots, coordinates, gaps = self._tables(x)
        gap = _gap(knots, x)
        return torch.copysign(coordinates[gap] + (x.abs() - knots[gap]) / gaps[gap], x)

    def inverse(self, c: Tensor) -> Tensor:
        """The way back through the table."""
        knots, coordinates, gaps = self._tables(c)
        gap = _gap(coordinates, c)
        return torch.copysign(knots[gap] + (c.abs() - coordinates[gap]) * gaps[gap], c)

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """Through the coordinate."""
        return self.inverse(self.forward(x) + steps)

    def _tables(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(table.to(device=like.device, dtype=like.dtype) for table in self._table)


def chart_of(fmt: FloatFormat, metric: Metric) -> Chart:
    """The chart of a metric over a format, in units of the scale."""
    if callable(metric):
        return TabulatedChart(metric, fmt)
    check_choice("metric", metric, METRICS)
    if metric == "ulp":
        return UlpChart(fmt.mantissa_bits, fmt.emin, fmt.emax)
    return LogChart(fmt.mantissa_bits, fmt.emin) if metric == "log" else EuclideanChart()


def _gap(knots: Tensor, x: Tensor) -> Tensor:
    return (torch.searchsorted(knots, x.detach().abs().contiguous(), right=True) - 1).clamp(0, len(knots) - 1)
