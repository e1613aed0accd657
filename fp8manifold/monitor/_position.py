"""Where values lie between the points of a format: the chart, taken apart so that small steps keep their digits."""

import torch
from torch import Tensor

from fp8manifold._numerics.float_bits import binade, float_bits
from fp8manifold.formats import FloatFormat

__all__ = ["chart_steps", "inside", "spacing", "steps_from_zero"]


def inside(units: Tensor, fmt: FloatFormat) -> Tensor:
    """The nearest value within the range; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def spacing(units: Tensor, fmt: FloatFormat) -> Tensor:
    """:func:`fp8manifold.ulp` of values within the range, in their own dtype; Inf for NaN."""
    return binade(units, fmt.emin).mul_(2.0**-fmt.mantissa_bits)


def steps_from_zero(units: Tensor, ulps: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """The chart's coordinate as a whole number, of the binade, and what the mantissa adds to it.

    .. math:: \\mathrm{sign}(x) (e - e_{min}) 2^M, \\qquad x / S(x)
    """
    fields = float_bits(units.dtype)
    lowest = fields.bias + fmt.emin - fmt.mantissa_bits
    binades = ((ulps.view(fields.integer) >> fields.mantissa_bits) - lowest) << fmt.mantissa_bits
    return torch.sign(units).mul_(binades), units / ulps


def chart_steps(a: Tensor, b: Tensor, fmt: FloatFormat) -> Tensor:
    """``|phi(a) - phi(b)|`` of values in units of their scale, exact to the last digits of ``a - b``.

    The coordinates themselves are two orders of magnitude larger than many a difference between them.
    """
    a, b = inside(a, fmt), inside(b, fmt)
    whole_a, part_a = steps_from_zero(a, spacing(a, fmt), fmt)
    whole_b, part_b = steps_from_zero(b, spacing(b, fmt), fmt)
    return whole_a.sub_(whole_b).add_(part_a.sub_(part_b)).abs_()
