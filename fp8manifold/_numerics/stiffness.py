"""Stiffness fields: their mean, the bounds of their ratios to it, and powers of those."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.float_bits import float_bits
from fp8manifold._ranks import ALONE, Ranks
from fp8manifold.formats import FloatFormat

_UNBOUNDED = 2**20  # an exponent past all others
_COEFFICIENTS = tuple(math.log(2) ** i / math.factorial(i) for i in range(16))


def reference_stiffness(stiffness: Tensor, ranks: Ranks = ALONE) -> float:
    """The mean of a stiffness field, of which processes may hold a part each, to the last bit or so of float64.

    Equal values are counted exactly, so the result does not depend on how a tensor is cut up or summed.
    """
    fields = float_bits(stiffness.dtype)
    if (counts := _counted(stiffness)) is not None:
        counts = counts.cpu() if ranks.size == 1 else counts  # a few numbers: a card is waited for once, not for each
        used = counts.nonzero().flatten()
        values = torch.tensor([math.ldexp(1, i - fields.bias) for i in used.tolist()], dtype=torch.float64)
        counts = counts[used]
    else:
        values, counts = stiffness.flatten().unique(return_counts=True)
    values, counts = ranks.counted(values.to(counts.device, torch.float64), counts)
    terms = [value * count for value, count in zip(values.tolist(), counts.tolist(), strict=True)]
    return math.fsum(terms) / int(counts.sum())


def _counted(stiffness: Tensor) -> Tensor | None:
    """How many there are of each exponent, counted in pieces; None unless all are powers of two."""
    fields = float_bits(stiffness.dtype)
    counts = torch.zeros(2 * fields.bias + 2, dtype=torch.int64, device=stiffness.device)
    for part in stiffness.flatten().split(block_on(stiffness.device)):
        bits = part.view(fields.integer)
        exponents = bits >> fields.mantissa_bits
        if not bool((bits == exponents << fields.mantissa_bits).all()):
            return None
        counts += torch.bincount(exponents, minlength=len(counts))
    return counts


def bounded_share(stiffness: Tensor, reference: float, damping: float, clip: float, ranks: Ranks = ALONE) -> float:
    """Share of elements, of all processes, whose ratio to the reference lies outside ``[damping, clip]``."""
    outside = torch.zeros((), dtype=torch.int64, device=stiffness.device)
    for part in stiffness.flatten().split(block_on(stiffness.device)):
        ratio = part / reference
        outside += ((ratio < damping) | (ratio > clip)).sum()
    counts = ranks.total(torch.stack([outside, outside.new_tensor(stiffness.numel())]))
    beyond, total = counts.tolist()
    share: float = beyond / max(total, 1)
    return share


def factor(stiffness: Tensor, mode: str, numbers: Mapping[str, Tensor], *, powers_of_two: bool) -> Tensor:
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


def sqrt_exact(x: Tensor) -> Tensor:
    """The correctly rounded square root: eager float32 ``torch.sqrt`` on the CPU is off by one ULP now and then."""
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt_().to(x.dtype)


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
    """Exponents of :func:`end_exponents` in units of the scale, held within the format's own."""
    exponent = torch.frexp(scale).exponent - 1
    lowest = (low - exponent).clamp(min=fmt.emin)
    highest = (high - exponent).clamp(max=fmt.emax)
    return {"lowest": lowest, "highest": torch.maximum(highest, lowest)}
