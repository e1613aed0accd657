"""Weights in units of their scale, their stiffness, and moves along the geometry that it defines."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._numerics.charts import Chart, UlpChart, chart_of, sign_of
from fp8manifold._numerics.codec import decode_signed, decode_with_ulp, encode_finite
from fp8manifold._numerics.float_bits import float_bits
from fp8manifold._numerics.rounding import round_block
from fp8manifold._ranks import ALONE, Ranks
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._directions import Numbers, sqrt_exact
from fp8manifold.optim._spec import Spec
from fp8manifold.optim._writeback import joined_codes, to_half


class Weights(NamedTuple):
    """Weights in units of the scale, and their spacing in the same units (None for an ordinary parameter)."""

    x: Tensor
    ulp: Tensor | None


def load_weights(spec: Spec, arrays: dict[str, Tensor], dtype: torch.dtype) -> Weights:
    """The weights, with the residual that is kept beside them."""
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage == "plain":
        return Weights(weight.to(dtype), None)
    assert fmt is not None
    if spec.storage == "free":
        x = weight.to(dtype) / arrays["scale"]
        return Weights(x, chart_of(fmt, "ulp").stiffness(x))
    if spec.storage == "grid":
        x = weight.to(dtype) / arrays["scale"]
        if not spec.scale_is_power_of_two:  # the division leaves a point of the grid a hair off it
            x = round_block(x, fmt, "nearest", "saturate", None)
        if not spec.residual_bits:
            return Weights(x, chart_of(fmt, "ulp").stiffness(x))
        codes = encode_finite(x.to(torch.float32), fmt)
    else:
        codes = weight.to(torch.int32)
    bits = spec.residual_bits
    if bits:
        x, ulp = decode_signed(joined_codes(codes, arrays["residual"].to(torch.int32), fmt, bits), fmt, bits)
    else:
        x, ulp = decode_with_ulp(codes, fmt)
    return Weights(x.to(dtype), (ulp * 2.0**bits).to(dtype))


def store_weights(
    spec: Spec, arrays: dict[str, Tensor], before: Weights, target: Tensor, draws: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored, by name, and the weights it stands for, in units of the scale."""
    weight, fmt = arrays["weight"], spec.fmt
    if spec.storage == "plain":
        return {"weight": _as_stored(target, weight.dtype, draws)}, target
    assert fmt is not None
    if spec.storage == "free":
        after = target.clamp(-fmt.max, fmt.max)
        moved = torch.where(after == before.x, weight.to(after.dtype), after * arrays["scale"])
        return {"weight": _as_stored(moved, weight.dtype, draws)}, after
    return spec.rule.store(spec.storage, fmt, arrays, target, draws)


def _as_stored(x: Tensor, dtype: torch.dtype, draws: Tensor | None) -> Tensor:
    return x.to(dtype) if draws is None else to_half(x, dtype, draws)


def reciprocal_scale(spec: Spec, arrays: dict[str, Tensor]) -> Tensor:
    """``1 / scale``; of a power of two by its exponent, as a division costs as much as ten other operations."""
    scale = arrays["scale"]
    if spec.storage != "codes":
        return 1 / scale
    return ((254 << 23) - scale.view(torch.int32)).view(torch.float32)


# ---------------------------------------------------------------------------------------------------------------- field


_COEFFICIENTS = tuple(math.log(2) ** i / math.factorial(i) for i in range(16))
_MODES = {0.0: "none", 1.0: "linear", 0.5: "sqrt", 2.0: "square"}


def reference_stiffness(stiffness: Tensor, ranks: Ranks = ALONE) -> float:
    """The mean of a stiffness field, of which processes may hold a part each, to the last bit or so of float64.

    Equal values are counted exactly, so the result does not depend on how a tensor is cut up or summed.
    """
    fields = float_bits(stiffness.dtype)
    exponents = (stiffness.view(fields.integer) >> fields.mantissa_bits).flatten()
    if bool((stiffness.view(fields.integer) == exponents.view(stiffness.shape) << fields.mantissa_bits).all()):
        counts = torch.bincount(exponents)
        counts = counts.cpu() if ranks.size == 1 else counts  # a few numbers: a card is waited for once, not for each
        used = counts.nonzero().flatten()
        values = torch.tensor([math.ldexp(1, i - fields.bias) for i in used.tolist()], dtype=torch.float64)
        counts = counts[used]
    else:
        values, counts = stiffness.flatten().unique(return_counts=True)
    values, counts = ranks.counted(values.to(counts.device, torch.float64), counts)
    terms = [value * count for value, count in zip(values.tolist(), counts.tolist(), strict=True)]
    return math.fsum(terms) / int(counts.sum())


def bounded_share(stiffness: Tensor, reference: float, damping: float, clip: float, ranks: Ranks = ALONE) -> float:
    """Share of elements, of all processes, whose ratio to the reference lies outside ``[damping, clip]``."""
    ratio = stiffness / reference
    outside = ((ratio < damping) | (ratio > clip)).sum()
    counts = ranks.total(torch.stack([outside, outside.new_tensor(stiffness.numel())]))
    beyond, total = counts.tolist()
    share: float = beyond / max(total, 1)
    return share


def power_mode(exponent: float) -> str:
    """How ``(S / S_ref)^k`` is computed: 1/2, 1 and 2 exactly, any other through :func:`exp2_exact`."""
    return _MODES.get(float(exponent), "power")


def factor(stiffness: Tensor, mode: str, numbers: Numbers, *, powers_of_two: bool) -> Tensor:
    """``clamp(S / S_ref, damping, clip)^k``, the same bits eager and compiled.

    Where every stiffness is a power of two, the general power is that of its exponent:
    ``2^(k (log2 S - log2 S_ref))``; other fields use ``pow``, in eager code only.
    """
    if mode == "power" and powers_of_two:
        logarithm = _exponent(stiffness) - numbers["log_reference"]
        return exp2_exact(_between(logarithm, numbers["log_low"], numbers["log_high"]) * numbers["power"])
    # positive floats order like their bits, and integer bounds cost a third of those that look for NaN
    fields = float_bits(stiffness.dtype)
    bits = (stiffness * numbers["inverse_reference"]).view(fields.integer)
    low, high = numbers["low"].view(fields.integer), numbers["high"].view(fields.integer)
    ratio = _between(bits, low, high).view(stiffness.dtype)
    if mode == "sqrt":
        return sqrt_exact(ratio)
    if mode == "square":
        return ratio * ratio
    return _pow(ratio, numbers["power"]) if mode == "power" else ratio


def exp2_exact(x: Tensor) -> Tensor:
    """``2^x`` by a polynomial in ``+`` and ``*``: within 4 ULP, and the same bits everywhere."""
    fields = float_bits(x.dtype)
    whole = torch.round(x)
    fraction = x - whole
    coefficients = _COEFFICIENTS if x.dtype == torch.float64 else _COEFFICIENTS[:8]
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * fraction + coefficient
    exponent = whole.to(fields.integer).clamp(1 - fields.bias, fields.bias)
    return value * ((exponent + fields.bias) << fields.mantissa_bits).view(x.dtype)


def power_of_ratio(stiffness: Tensor, reference: float, exponent: float, damping: float, clip: float) -> Tensor | float:
    """``clamp(S / S_ref, damping, clip)^k`` of a whole field, for optimizers that only scale."""
    if exponent == 0:
        return 1.0
    if exponent in (0.5, 1, 2):
        ratio = (stiffness * (1 / reference)).clamp_(damping, clip)
        return ratio if exponent == 1 else ratio.square_() if exponent == 2 else sqrt_exact(ratio)
    fields = float_bits(stiffness.dtype)
    if not bool((stiffness.view(fields.integer) & ((1 << fields.mantissa_bits) - 1)).any()):
        logarithm = _exponent(stiffness) - math.log2(reference)
        return exp2_exact(logarithm.clamp_(log2_bounded(damping), log2_bounded(clip)) * exponent)
    return _pow((stiffness * (1 / reference)).clamp_(damping, clip), exponent)


def log2_bounded(x: float) -> float:
    """``log2(x)``, with finite stand-ins for those of 0 and infinity."""
    return -1e4 if x == 0 else 1e4 if math.isinf(x) else math.log2(x)


def _exponent(power_of_two: Tensor) -> Tensor:
    fields = float_bits(power_of_two.dtype)
    exponent = (power_of_two.view(fields.integer) >> fields.mantissa_bits) - fields.bias
    return exponent.to(power_of_two.dtype)


def _pow(ratio: Tensor, exponent: Tensor | float) -> Tensor:
    """Through float64: a vectorised float32 ``pow`` differs in the last bit from the one for a row's tail."""
    return ratio.double().pow(exponent).to(ratio.dtype)


def _between(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(x, low), high)


# ------------------------------------------------------------------------------------------------------------- geometry


_LOG2_E = math.log2(math.e)
_UNBOUNDED = 2**20  # an exponent past all others
_LONGEST = 2.0**24  # steps of the chart: far past either end, and far from overflow


def move(spec: Spec, weights: Weights, direction: Tensor, arrays: dict[str, Tensor], numbers: Numbers) -> Tensor:
    """The value asked for, in units of the scale, before anything is rounded."""
    start = weights.x * numbers["keep"] if spec.decays else weights.x
    if spec.storage == "plain":
        return start - direction * numbers["rate"]
    if spec.geometry == "linear":
        if spec.stiffness != "none":
            direction = direction * stiffness_factor(spec, weights, arrays, numbers)
        return start - direction * (numbers["rate"] * reciprocal_scale(spec, arrays))
    if spec.geometry == "multiplicative":
        return _by_factor(start, direction * numbers["rate"], numbers["floor"] * reciprocal_scale(spec, arrays))
    chart, steps = chart_for(spec, arrays), (direction * -numbers["rate"]).clamp(-_LONGEST, _LONGEST)
    if spec.geometry == "tangent":
        moved = start + steps * chart.stiffness(start)
    else:
        moved = torch.where(steps == 0, start, chart.shift(start, steps))
    assert spec.fmt is not None
    return moved.clamp(-spec.fmt.max, spec.fmt.max)


def covector(spec: Spec, weights: Weights, gradient: Tensor, arrays: dict[str, Tensor], numbers: Numbers) -> Tensor:
    """The gradient with respect to the coordinates that the direction is taken in; of codes in a unit of its own."""
    if spec.geometry not in ("exponential", "tangent"):
        return gradient
    return gradient * (chart_for(spec, arrays).stiffness(weights.x) * (arrays["scale"] * numbers["per_unit"]))


def chart_for(spec: Spec, arrays: dict[str, Tensor]) -> Chart:
    """The chart of the metric; that of ``ulp`` with the ends that bound its stiffness."""
    assert spec.fmt is not None
    if spec.metric != "ulp":
        return chart_of(spec.fmt, spec.metric)
    return UlpChart(spec.fmt.mantissa_bits, arrays["lowest"], arrays["highest"])


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


def stiffness_factor(spec: Spec, weights: Weights, arrays: dict[str, Tensor], numbers: Numbers) -> Tensor:
    """``(S / S_ref)^k`` of the spec's metric."""
    stiffness = weights.ulp
    if spec.metric != "ulp":
        assert spec.fmt is not None
        stiffness = chart_of(spec.fmt, spec.metric).stiffness(weights.x)
    assert stiffness is not None
    exact = spec.metric in ("ulp", "euclidean") and spec.scale_is_power_of_two
    return factor(stiffness * arrays["scale"], spec.stiffness, numbers, powers_of_two=exact)


def _by_factor(x: Tensor, step: Tensor, floor: Tensor) -> Tensor:
    """``x exp(-sign(x) step)`` above the floor; below it ``x - floor step``, which can change the sign.

    The two have the same value and slope in ``step`` where they meet.
    """
    outward = sign_of(x) * step
    return torch.where(x.abs() >= floor, x * exp2_exact(outward * -_LOG2_E), x - floor * step)
