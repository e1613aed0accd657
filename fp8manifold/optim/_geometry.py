"""Where a direction takes a weight: along a line, a geodesic of the chart, or by a factor."""

import math

import torch
from torch import Tensor

from fp8manifold._numerics.charts import Chart, UlpChart, chart_of, sign_of
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._field import exp2_exact, factor
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._variant import Variant
from fp8manifold.optim._weights import Weights, reciprocal_scale

__all__ = ["bounded_ends", "bounds", "chart_for", "covector", "end_exponents", "move", "stiffness_factor"]

_LOG2_E = math.log2(math.e)
_UNBOUNDED = 2**20  # an exponent past all others
_LONGEST = 2.0**24  # steps of the chart: far past either end, and far from overflow


def move(variant: Variant, weights: Weights, direction: Tensor, arrays: dict[str, Tensor], hyper: Hyper) -> Tensor:
    """The value asked for, in units of the scale, before anything is rounded."""
    start = weights.x * hyper["keep"] if variant.decays else weights.x
    if variant.storage == "plain":
        return start - direction * hyper["rate"]
    if variant.geometry == "linear":
        if variant.stiffness != "none":
            direction = direction * stiffness_factor(variant, weights, arrays, hyper)
        return start - direction * (hyper["rate"] * reciprocal_scale(variant, arrays))
    if variant.geometry == "multiplicative":
        return _by_factor(start, direction * hyper["rate"], hyper["floor"] * reciprocal_scale(variant, arrays))
    chart, steps = chart_for(variant, arrays), (direction * -hyper["rate"]).clamp(-_LONGEST, _LONGEST)
    if variant.geometry == "tangent":
        moved = start + steps * chart.stiffness(start)
    else:
        moved = torch.where(steps == 0, start, chart.shift(start, steps))
    assert variant.fmt is not None
    return moved.clamp(-variant.fmt.max, variant.fmt.max)


def covector(variant: Variant, weights: Weights, gradient: Tensor, arrays: dict[str, Tensor], hyper: Hyper) -> Tensor:
    """The gradient with respect to the coordinates that the direction is taken in; of codes in a unit of its own."""
    if variant.geometry not in ("exponential", "tangent"):
        return gradient
    return gradient * (chart_for(variant, arrays).stiffness(weights.x) * (arrays["scale"] * hyper["per_unit"]))


def chart_for(variant: Variant, arrays: dict[str, Tensor]) -> Chart:
    """The chart of the metric; that of ``ulp`` with the ends that bound its stiffness."""
    assert variant.fmt is not None
    if variant.metric != "ulp":
        return chart_of(variant.fmt, variant.metric)
    return UlpChart(variant.fmt.mantissa_bits, arrays["lowest"], arrays["highest"])


def bounds(reference: float, damping: float, clip: float) -> tuple[float, float]:
    """The powers of two between which the stiffness is kept: the bounds rounded outwards."""
    low = 2.0 ** math.floor(math.log2(damping * reference)) if damping else 0.0
    high = 2.0 ** math.ceil(math.log2(clip * reference)) if math.isfinite(clip) else math.inf
    return low, high


def end_exponents(reference: float, damping: float, clip: float, mantissa_bits: int) -> tuple[int, int]:
    """The exponents, in value, of the weights between which the chart's stiffness follows the format."""
    low, high = bounds(reference, damping, clip)
    lowest = int(math.log2(low)) + mantissa_bits if low else -_UNBOUNDED
    return lowest, int(math.log2(high)) + mantissa_bits if math.isfinite(high) else _UNBOUNDED


def bounded_ends(fmt: FloatFormat, scale: Tensor, low: int, high: int) -> dict[str, Tensor]:
    """The same exponents in units of the scale, held within the format's own."""
    exponent = torch.frexp(scale).exponent - 1
    lowest = (low - exponent).clamp(min=fmt.emin)
    highest = (high - exponent).clamp(max=fmt.emax)
    return {"lowest": lowest, "highest": torch.maximum(highest, lowest)}


def stiffness_factor(variant: Variant, weights: Weights, arrays: dict[str, Tensor], hyper: Hyper) -> Tensor:
    """``(S / S_ref)^k`` of the variant's metric."""
    stiffness = weights.ulp
    if variant.metric != "ulp":
        assert variant.fmt is not None
        stiffness = chart_of(variant.fmt, variant.metric).stiffness(weights.x)
    assert stiffness is not None
    exact = variant.metric in ("ulp", "euclidean") and variant.scale_is_power_of_two
    return factor(stiffness * arrays["scale"], variant.stiffness, hyper, powers_of_two=exact)


def _by_factor(x: Tensor, step: Tensor, floor: Tensor) -> Tensor:
    """``x exp(-sign(x) step)`` above the floor; below it ``x - floor step``, which can change the sign.

    The two have the same value and slope in ``step`` where they meet.
    """
    outward = sign_of(x) * step
    return torch.where(x.abs() >= floor, x * exp2_exact(outward * -_LOG2_E), x - floor * step)
