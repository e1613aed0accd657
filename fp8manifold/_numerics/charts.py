"""The charts of the metrics: one coordinate per value, in which the metric is flat.

A chart works in units of the scale; it is symmetric and strictly increasing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat

METRICS: Final = ("ulp", "log", "euclidean")
Metric = str | Callable[[Tensor, FloatFormat], Any]
"""``ulp``, ``log``, ``euclidean``, or a positive function S(x, fmt)."""
Retraction = Literal["exponential", "euclidean"]
"""Along the chart, ``exp_x(u)``, or along its tangent in value, ``x + u``."""
RETRACTIONS: Final = get_args(Retraction)


class Chart:
    """The identity, the chart of the euclidean metric: one step is one unit of the
    scale.
    """

    def stiffness(self, x: Tensor) -> Tensor:
        """One step in value at ``x``: the derivative of the inverse."""
        return x * 0 + 1

    def forward(self, x: Tensor) -> Tensor:
        """Steps from zero to ``x``."""
        return x

    def inverse(self, c: Tensor) -> Tensor:
        """The value ``c`` steps from zero."""
        return c

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """The value ``steps`` away from ``x``."""
        return self.inverse(self.forward(x) + steps)


@dataclass(frozen=True)
class UlpChart(Chart):
    """Piecewise linear: one step is one ulp, ``2^(e - M)`` with the exponent held in
    ``[lowest, highest]``.

    ``lowest = emin`` is the format's own chart. A higher ``lowest`` or a finite
    ``highest`` bounds the stiffness from below or above by a power of two and leaves
    the chart closed-form: it is the chart of a format with other ends. The ends may be
    int tensors that broadcast against the points, with one entry per channel.
    """

    mantissa_bits: int
    lowest: int | Tensor
    highest: int | Tensor

    def stiffness(self, x: Tensor) -> Tensor:
        """``2^(e - M)``."""
        return self._power(x) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """``sign(x) [(e - lowest) 2^M + |x| / 2^(e - M)]``."""
        power, sign = self._power(x), sign_of(x)
        steps = x * sign / (power * 2.0**-self.mantissa_bits)
        return (self._codes_below(power) + steps) * sign

    def inverse(self, c: Tensor) -> Tensor:
        """``sign(c) (|c| - b 2^M) 2^(lowest + b - M)`` with ``b`` the binade that holds
        ``c``.
        """
        per_binade, sign = 2.0**self.mantissa_bits, sign_of(c)
        magnitude = c * sign
        index = ((magnitude.detach() / per_binade).floor() - 1).clamp(min=0)
        index = torch.clamp(index, max=self.highest - self.lowest)
        fields = float_bits(c.dtype)
        exponent = index.to(fields.integer) + (self.lowest - self.mantissa_bits + fields.bias)
        spacing = (exponent << fields.mantissa_bits).view(c.dtype)
        return (magnitude - index * per_binade) * spacing * sign

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """The value ``steps`` away: whole steps are counted in integers, so only the
        fraction is rounded.
        """
        power, sign = self._power(x), sign_of(x)
        position = x * sign / (power * 2.0**-self.mantissa_bits)
        whole = position.detach().floor()
        fraction = (position - whole) + steps * sign
        moved = fraction.detach().floor()
        start = self._codes_below(power) + whole + moved
        value, neighbour = self.inverse(start), self.inverse(start + 1)
        return (value + (fraction - moved) * (neighbour - value)) * sign

    def _power(self, x: Tensor) -> Tensor:
        power = binade(x.detach(), self.lowest)
        highest = self.highest
        if isinstance(highest, Tensor):
            fields = float_bits(power.dtype)
            return torch.minimum(
                power, fields.power_of_two(highest.to(fields.integer)).view(power.dtype)
            )
        return power.clamp(max=2.0**highest)

    def _codes_below(self, power: Tensor) -> Tensor:
        """``(e - lowest) 2^M``: the steps up to the binade, minus the ``2^M`` that
        ``|x| / S`` counts again.
        """
        fields = float_bits(power.dtype)
        index = (power.view(fields.integer) >> fields.mantissa_bits) - (fields.bias + self.lowest)
        return (index << self.mantissa_bits).to(power.dtype)


@dataclass(frozen=True)
class LogChart(Chart):
    """Smooth: ``S = max(|x|, 2^emin) 2^-M``, so that a step multiplies; linear below
    the smallest normal.
    """

    mantissa_bits: int
    lowest: int

    def stiffness(self, x: Tensor) -> Tensor:
        """``max(|x|, 2^emin) 2^-M``."""
        return x.abs().clamp(min=2.0**self.lowest) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """``2^M (1 + ln(|x| / 2^emin))`` above the smallest normal,
        ``2^M |x| / 2^emin`` below.
        """
        sign = sign_of(x)
        ratio = x * sign * 2.0**-self.lowest
        # clamp on both sides of 1 would count the derivative at 1 twice
        steps = torch.where(ratio > 1, 1 + torch.where(ratio > 1, ratio, 1.0).log(), ratio)
        return steps * sign * 2.0**self.mantissa_bits

    def inverse(self, c: Tensor) -> Tensor:
        """``2^emin exp(|c| / 2^M - 1)``, linear below one."""
        sign = sign_of(c)
        ratio = c * sign * 2.0**-self.mantissa_bits
        value = torch.where(ratio > 1, (torch.where(ratio > 1, ratio, 1.0) - 1).exp(), ratio)
        return value * sign * 2.0**self.lowest


class TabulatedChart(Chart):
    """The chart of any positive function: its value midway between two neighbours is
    the stiffness of the gap.
    """

    def __init__(self, function: Callable[[Tensor, FloatFormat], Any], fmt: FloatFormat) -> None:
        self._function, self._format = function, fmt

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Knots, coordinates of the knots, stiffness of the gap above each knot, in
        float64.
        """
        knots = torch.tensor(
            [v for v in self._format.values if v >= 0], dtype=torch.float64
        ).unique()
        at = torch.cat([(knots[1:] + knots[:-1]) / 2, knots[-1:]])
        gaps = _checked_gaps(self._function(at.clone(), self._format), at)
        coordinates = torch.cat([gaps.new_zeros(1), (knots.diff() / gaps[:-1]).cumsum(0)])
        return knots, coordinates, gaps

    def stiffness(self, x: Tensor) -> Tensor:
        """The function's value at the middle of the gap that holds ``x``."""
        knots, _, gaps = self._tables(x)
        return gaps[_gap(knots, x)]

    def forward(self, x: Tensor) -> Tensor:
        """The sum of gap widths over their stiffness."""
        knots, coordinates, gaps = self._tables(x)
        gap, sign = _gap(knots, x), sign_of(x)
        return (coordinates[gap] + (x * sign - knots[gap]) / gaps[gap]) * sign

    def inverse(self, c: Tensor) -> Tensor:
        knots, coordinates, gaps = self._tables(c)
        gap, sign = _gap(coordinates, c), sign_of(c)
        return (knots[gap] + (c * sign - coordinates[gap]) * gaps[gap]) * sign

    def _tables(self, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(table.to(device=like.device, dtype=like.dtype) for table in self._table)


def chart_of(fmt: FloatFormat, metric: Metric) -> Chart:
    """The chart of a metric over a format, in units of the scale."""
    if callable(metric):
        return TabulatedChart(metric, fmt) if metric.__hash__ is None else _tabulated(metric, fmt)
    if not isinstance(metric, str):
        raise TypeError(
            f"metric must be a name or a function S(x, fmt), not {type(metric).__name__}: "
            f"{metric!r}"
        )
    check_choice("metric", metric, METRICS)
    if metric == "ulp":
        return UlpChart(fmt.mantissa_bits, fmt.emin, fmt.emax)
    return LogChart(fmt.mantissa_bits, fmt.emin) if metric == "log" else Chart()


_tabulated = lru_cache(maxsize=64)(
    TabulatedChart
)  #: One table for each function, not for each step of an optimizer.


def clamp_to_ends(x: Tensor, limit: float) -> Tensor:
    """``clamp(x, -limit, limit)``, with derivative 1 at the ends themselves: releases
    of torch differ there.
    """
    return torch.where(x.abs() > limit, x.detach().clamp(-limit, limit), x)


def _gap(knots: Tensor, x: Tensor) -> Tensor:
    return (torch.searchsorted(knots, x.detach().abs().contiguous(), right=True) - 1).clamp(
        0, len(knots) - 1
    )


def sign_of(x: Tensor) -> Tensor:
    """+-1 by the sign bit, a constant to autograd: ``abs`` and ``copysign`` have derivative 0 at zero, a chart 1/S."""
    fields = float_bits(x.dtype)
    return ((x.detach().view(fields.integer) & fields.sign_mask) | fields.power_of_two(0)).view(
        x.dtype
    )


def _checked_gaps(given: Any, at: Tensor) -> Tensor:
    if not isinstance(given, Tensor | int | float):
        raise TypeError(
            f"metric function gave a {type(given).__name__}: it must give a tensor or a number"
        )
    gaps = torch.as_tensor(given, dtype=torch.float64).detach()
    if gaps.shape not in (at.shape, ()):
        raise ValueError(
            f"metric function gave shape {tuple(gaps.shape)} for x of shape {tuple(at.shape)}"
        )
    if not bool((gaps.isfinite() & (gaps > 0)).all()):
        bad = gaps[~(gaps.isfinite() & (gaps > 0))][0].item() if gaps.ndim else gaps.item()
        raise ValueError(
            f"metric function gave a stiffness of {bad}: it must be finite and positive everywhere"
        )
    return gaps.expand(at.shape).clone()
