"""Charts of the metrics: one coordinate per value, in which the metric is flat.

The stiffness ``S(x)`` is the length in value of one step at ``x``. The chart counts steps
from zero, ``phi(x) = integral of dx / S(x)``, so that equal steps in the coordinate are
equal lengths under the metric. For ``ulp``, whose step is the spacing of the format, the
coordinate of a code is the code itself::

    E4M3             binade       binade           binade
    value     0 ..  [1, 2)        [2, 4)           [4, 8)        448
    S             1/8             1/4              1/2
    chart     0 ..  56 57 .. 63   64 65 .. 71      72 73 .. 79   126

    1.0625 is half way from code 56 (1.0) to code 57 (1.125): its coordinate is 56.5

``log`` is the smooth version of it, ``euclidean`` the identity, and any positive function
``S(x, fmt)`` is tabulated over the gaps between values. A chart works in units of the
scale. It is symmetric (``phi(-x) = -phi(x)``) and strictly increasing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat


class MetricName(StrEnum):
    """A metric that has a name; options and manifolds have the plain word."""

    #: the spacing of the format
    ULP = "ulp"
    #: the magnitude, and a constant below a bound
    LOG = "log"
    #: 1
    EUCLIDEAN = "euclidean"


METRICS: Final = tuple(name.value for name in MetricName)
Metric = str | Callable[[Tensor, FloatFormat], Any]
"""``ulp``, ``log``, ``euclidean``, or a positive function S(x, fmt)."""
Retraction = Literal["exponential", "euclidean"]
"""Along the chart, ``exp_x(u)``, or along its tangent in value, ``x + u``."""
RETRACTIONS: Final = get_args(Retraction)


class Chart:
    """The identity: the chart of the euclidean metric, one step of which is one unit."""

    def stiffness(self, x: Tensor) -> Tensor:
        """Return the length in value of a step at ``x``: the derivative of the inverse."""
        # NaN stays NaN
        return x * 0 + 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the steps from zero to ``x``."""
        return x

    def inverse(self, c: Tensor) -> Tensor:
        """Return the value ``c`` steps from zero."""
        return c

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """Return the value ``steps`` away from ``x``."""
        return self.inverse(self.forward(x) + steps)


@dataclass(frozen=True)
class UlpChart(Chart):
    """A piecewise linear chart: one step is one ulp, ``2^(e - M)``.

    The exponent ``e`` of a value is clamped to ``[lowest, highest]``. The chart of a
    format has ``lowest = emin`` and ``highest = emax``. Other ends bound the stiffness
    by powers of two, and the chart stays closed-form: it is that of a format with these
    ends. Ends may be int tensors that broadcast against the points, with one entry per
    channel.
    """

    mantissa_bits: int
    lowest: int | Tensor
    highest: int | Tensor

    def stiffness(self, x: Tensor) -> Tensor:
        """Return ``2^(e - M)``."""
        return self._power(x) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """Return ``sign(x) [(e - lowest) 2^M + |x| / 2^(e - M)]``."""
        power = self._power(x)
        sign = sign_of(x)
        steps = x * sign / (power * 2.0**-self.mantissa_bits)
        return (self._codes_below(power) + steps) * sign

    def inverse(self, c: Tensor) -> Tensor:
        """Return ``sign(c) (|c| - b 2^M) 2^(lowest + b - M)``.

        The index ``b`` counts binades from the lowest one. Binade 0 has twice as many
        steps as the others: the subnormal ones are spaced alike.
        """
        steps_per_binade = 2.0**self.mantissa_bits
        sign = sign_of(c)
        magnitude = c * sign
        index = ((magnitude.detach() / steps_per_binade).floor() - 1).clamp(min=0)
        index = torch.clamp(index, max=self.highest - self.lowest)
        fields = float_bits(c.dtype)
        exponent = index.to(fields.integer) + (self.lowest - self.mantissa_bits + fields.bias)
        spacing = (exponent << fields.mantissa_bits).view(c.dtype)
        return (magnitude - index * steps_per_binade) * spacing * sign

    def shift(self, x: Tensor, steps: Tensor) -> Tensor:
        """Return the value ``steps`` away from ``x``.

        Whole steps are counted apart from the fraction of one. Their floats are exact,
        so that only the fraction is rounded.
        """
        power = self._power(x)
        sign = sign_of(x)
        position = x * sign / (power * 2.0**-self.mantissa_bits)
        whole = position.detach().floor()
        fraction = (position - whole) + steps * sign
        whole_of_fraction = fraction.detach().floor()
        code = self._codes_below(power) + whole + whole_of_fraction
        value = self.inverse(code)
        next_value = self.inverse(code + 1)
        return (value + (fraction - whole_of_fraction) * (next_value - value)) * sign

    def _power(self, x: Tensor) -> Tensor:
        """Return ``2^e``."""
        power = binade(x.detach(), self.lowest)
        highest = self.highest
        if isinstance(highest, Tensor):
            fields = float_bits(power.dtype)
            highest_bits = fields.power_of_two(highest.to(fields.integer))
            return torch.minimum(power, highest_bits.view(power.dtype))
        return power.clamp(max=2.0**highest)

    def _codes_below(self, power: Tensor) -> Tensor:
        """Return ``(e - lowest) 2^M``.

        The ``2^M`` steps from 0 to ``2^lowest`` are not among them: in every binade
        ``|x| / S`` counts from ``2^M`` up.
        """
        fields = float_bits(power.dtype)
        index = (power.view(fields.integer) >> fields.mantissa_bits) - (fields.bias + self.lowest)
        return (index << self.mantissa_bits).to(power.dtype)


@dataclass(frozen=True)
class LogChart(Chart):
    """A smooth chart, ``S = max(|x|, 2^emin) 2^-M``: a step multiplies a value.

    It is linear below the smallest normal number.
    """

    mantissa_bits: int
    lowest: int

    def stiffness(self, x: Tensor) -> Tensor:
        """Return ``max(|x|, 2^emin) 2^-M``."""
        return x.abs().clamp(min=2.0**self.lowest) * 2.0**-self.mantissa_bits

    def forward(self, x: Tensor) -> Tensor:
        """Return ``2^M (1 + ln r)`` for ``r = |x| / 2^emin`` above 1, else ``2^M r``."""
        sign = sign_of(x)
        ratio = x * sign * 2.0**-self.lowest
        # The inner where keeps the logarithm off small ratios, whose infinite derivative
        # would become NaN. A clamp instead would count the derivative at 1 twice.
        steps = torch.where(ratio > 1, 1 + torch.where(ratio > 1, ratio, 1.0).log(), ratio)
        return steps * sign * 2.0**self.mantissa_bits

    def inverse(self, c: Tensor) -> Tensor:
        """Return ``2^emin exp(r - 1)`` for ``r = |c| / 2^M`` above 1, else ``2^emin r``."""
        sign = sign_of(c)
        ratio = c * sign * 2.0**-self.mantissa_bits
        value = torch.where(ratio > 1, (torch.where(ratio > 1, ratio, 1.0) - 1).exp(), ratio)
        return value * sign * 2.0**self.lowest


class _GapTable(NamedTuple):
    """The gaps between values that are not negative, in float64."""

    #: the values, each the lower end of a gap
    knots: Tensor
    #: the steps from zero to each knot
    coordinates: Tensor
    #: one step in value within each gap
    stiffness: Tensor

    def cast_to(self, x: Tensor) -> "_GapTable":
        """Return the table on the device and in the dtype of ``x``."""
        return _GapTable(*(column.to(device=x.device, dtype=x.dtype) for column in self))


class TabulatedChart(Chart):
    """The chart of any positive function ``S(x, fmt)``.

    The gap between two neighbouring values has one stiffness: the function's value in
    its middle. The gap past the largest value has that of the largest value.
    """

    def __init__(self, function: Callable[[Tensor, FloatFormat], Any], fmt: FloatFormat) -> None:
        self._function = function
        self._format = fmt

    @cached_property
    def _table(self) -> _GapTable:
        positive = [value for value in self._format.values if value >= 0]
        knots = torch.tensor(positive, dtype=torch.float64, device="cpu").unique()
        middles = torch.cat([(knots[1:] + knots[:-1]) / 2, knots[-1:]])
        stiffness = _checked_stiffness(self._function(middles.clone(), self._format), middles)
        steps = knots.diff() / stiffness[:-1]
        coordinates = torch.cat([stiffness.new_zeros(1), steps.cumsum(0)])
        return _GapTable(knots, coordinates, stiffness)

    def stiffness(self, x: Tensor) -> Tensor:
        """Return the function's value at the middle of the gap around ``x``."""
        table = self._table.cast_to(x)
        return table.stiffness[_gap_of(table.knots, x)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the widths of gaps over their stiffness."""
        table = self._table.cast_to(x)
        gap = _gap_of(table.knots, x)
        sign = sign_of(x)
        steps_in_gap = (x * sign - table.knots[gap]) / table.stiffness[gap]
        return (table.coordinates[gap] + steps_in_gap) * sign

    def inverse(self, c: Tensor) -> Tensor:
        """Return the value ``c`` steps from zero."""
        table = self._table.cast_to(c)
        gap = _gap_of(table.coordinates, c)
        sign = sign_of(c)
        distance_in_gap = (c * sign - table.coordinates[gap]) * table.stiffness[gap]
        return (table.knots[gap] + distance_in_gap) * sign


def chart_of(fmt: FloatFormat, metric: Metric) -> Chart:
    """Return the chart of a metric over a format, in units of the scale."""
    if callable(metric):
        if metric.__hash__ is None:
            return TabulatedChart(metric, fmt)
        return _tabulated_chart(metric, fmt)
    if not isinstance(metric, str):
        raise TypeError(
            f"metric must be a name or a function S(x, fmt), not {type(metric).__name__}: "
            f"{metric!r}"
        )
    check_choice("metric", metric, METRICS)
    if metric == MetricName.ULP:
        return UlpChart(fmt.mantissa_bits, fmt.emin, fmt.emax)
    if metric == MetricName.LOG:
        return LogChart(fmt.mantissa_bits, fmt.emin)
    return Chart()


# One table for each function, not for each step of an optimizer.
_tabulated_chart = lru_cache(maxsize=64)(TabulatedChart)


def clamp_to_ends(x: Tensor, limit: float) -> Tensor:
    """Return ``clamp(x, -limit, limit)``, with derivative 1 at the ends themselves.

    The derivative of ``torch.clamp`` there differs between releases.
    """
    return torch.where(x.abs() > limit, x.detach().clamp(-limit, limit), x)


def _gap_of(knots: Tensor, x: Tensor) -> Tensor:
    magnitude = x.detach().abs().contiguous()
    gap = torch.searchsorted(knots, magnitude, right=True) - 1
    return gap.clamp(0, len(knots) - 1)


def sign_of(x: Tensor) -> Tensor:
    """Return +1 or -1 by the sign bit, a constant to autograd.

    A chart multiplies by it in place of ``abs`` and ``copysign``: these have derivative
    0 at zero, where a chart has 1/S.
    """
    fields = float_bits(x.dtype)
    sign = x.detach().view(fields.integer) & fields.sign_mask
    return (sign | fields.power_of_two(0)).view(x.dtype)


def _checked_stiffness(result: Any, points: Tensor) -> Tensor:
    """Return the result of a metric function as float64; refuse what is no stiffness."""
    if not isinstance(result, Tensor | int | float):
        raise TypeError(
            f"metric function gave a {type(result).__name__}: it must give a tensor or a number"
        )
    stiffness = torch.as_tensor(result, dtype=torch.float64).detach()
    if stiffness.shape not in (points.shape, ()):
        raise ValueError(
            f"metric function gave shape {tuple(stiffness.shape)} for x of shape "
            f"{tuple(points.shape)}"
        )
    valid = stiffness.isfinite() & (stiffness > 0)
    if not bool(valid.all()):
        first_invalid = stiffness[~valid].flatten()[0].item()
        raise ValueError(
            f"metric function gave a stiffness of {first_invalid}: it must be finite and positive "
            "everywhere"
        )
    return stiffness.expand(points.shape).clone()
