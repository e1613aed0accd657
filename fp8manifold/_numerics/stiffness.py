"""Stiffness fields: their mean, bounds of their ratios to the mean, and powers of these
ratios.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.float_bits import float_bits
from fp8manifold._ranks import ALONE, Ranks
from fp8manifold.formats import FloatFormat

_COEFFICIENTS = tuple(math.log(2) ** i / math.factorial(i) for i in range(16))
_LOGARITHM = tuple(2 / math.log(2) / (2 * i + 1) for i in range(18))
_PART = 26  # bits of a mantissa that are summed at once


def reference_stiffness(stiffness: Tensor, ranks: Ranks = ALONE) -> float:
    """The mean of a field over all processes, float64, from integer sums: the same bits
    however it is cut up.
    """
    fields = float_bits(stiffness.dtype)
    counts, *parts = ranks.total(_summed(stiffness)).tolist()
    terms = [math.ldexp(n, e - fields.bias) for e, n in enumerate(counts) if n and e]
    for i, part in enumerate(parts):
        unit = _PART * i - fields.bias - fields.mantissa_bits
        terms += [math.ldexp(n, max(e, 1) + unit) for e, n in enumerate(part) if n]
    return math.fsum(terms) / sum(counts) or 2.0**-fields.bias  # if all of it has underflowed


def _summed(stiffness: Tensor) -> Tensor:
    """The number of values of each exponent, and the sums of their mantissas in parts
    of 26 bits.
    """
    fields = float_bits(stiffness.dtype)
    shifts = range(0, fields.mantissa_bits, _PART)
    sums = torch.zeros(
        1 + len(shifts), 2 * fields.bias + 2, dtype=torch.int64, device=stiffness.device
    )
    for piece in stiffness.flatten().split(block_on(stiffness.device)):
        bits = piece.view(fields.integer)
        exponents = bits >> fields.mantissa_bits
        mantissas = bits - (exponents << fields.mantissa_bits)
        sums[0] += torch.bincount(exponents, minlength=sums.shape[1])
        if bool(mantissas.any()):
            for row, shift in zip(sums[1:], shifts, strict=True):
                part = ((mantissas >> shift) & ((1 << _PART) - 1)).double()  # whose sums are exact
                row += torch.bincount(exponents, part, sums.shape[1]).long()
    return sums


def bounded_share(
    stiffness: Tensor, reference: float, damping: float, clip: float, ranks: Ranks = ALONE
) -> float:
    """Share of elements, over all processes, whose ratio to the reference is outside
    ``[damping, clip]``.
    """
    outside = torch.zeros((), dtype=torch.int64, device=stiffness.device)
    for part in stiffness.flatten().split(block_on(stiffness.device)):
        ratio = part / reference
        outside += ((ratio < damping) | (ratio > clip)).sum()
    beyond, total = ranks.total(
        torch.stack([outside, outside.new_tensor(stiffness.numel())])
    ).tolist()
    share: float = beyond / max(total, 1)
    return share


def bounded_ratio_power(
    stiffness: Tensor, scale: Tensor, mode: str, numbers: Mapping[str, Tensor]
) -> Tensor:
    """``clamp(S / S_ref, damping, clip)^k``, the same bits everywhere; ``scale`` has
    the mantissas of ``stiffness``.
    """
    if mode == "power":
        logarithm = _exponent(stiffness) - (numbers["log_reference"] - log2_of_mantissa(scale))
        return exp2_exact(
            logarithm.clamp(numbers["log_low"], numbers["log_high"]) * numbers["power"]
        )
    # positive floats order like their bits, and integer bounds cost a third of float
    # ones, which check for NaN
    fields = float_bits(stiffness.dtype)
    bits = (stiffness * numbers["inverse_reference"]).view(fields.integer)
    low, high = numbers["low"].view(fields.integer), numbers["high"].view(fields.integer)
    ratio = bits.clamp(low, high).view(stiffness.dtype)
    if mode == "sqrt":
        return sqrt_exact(ratio)
    return ratio * ratio if mode == "square" else ratio


def log2_of_mantissa(x: Tensor) -> Tensor:
    """``log2 f`` of a positive ``x = 2^e f`` with ``f`` in [1, 2): 0 for a power of
    two, elsewhere within ``2^-22``.

    .. math:: \\log_2 f = \\frac{2}{\\ln 2} \\left( t + \\frac{t^3}{3} + \\frac{t^5}{5} + \\dots \\right),
              \\qquad t = \\frac{f - 1}{f + 1}

    A sum in ``+``, ``*`` and one division: the same bits everywhere.
    """
    fields = float_bits(x.dtype)
    mask, one = (1 << fields.mantissa_bits) - 1, fields.power_of_two(0)
    f = ((x.view(fields.integer) & mask) | one).view(x.dtype)
    t = (f - 1) / (f + 1)
    return _polynomial(t * t, _LOGARITHM) * t


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's scheme, of eight coefficients in float32."""
    used = coefficients if x.dtype == torch.float64 else coefficients[:8]
    value = torch.full_like(x, used[-1])
    for coefficient in reversed(used[:-1]):
        value = value * x + coefficient
    return value


def exp2_exact(x: Tensor) -> Tensor:
    """``2^x`` by a polynomial in ``+`` and ``*``: within 4 ULP, and the same bits
    everywhere.
    """
    fields = float_bits(x.dtype)
    whole = torch.round(x)
    value = _polynomial(x - whole, _COEFFICIENTS)
    exponent = whole.to(fields.integer).clamp(1 - fields.bias, fields.bias)
    return value * ((exponent + fields.bias) << fields.mantissa_bits).view(x.dtype)


def power_of_ratio(
    stiffness: Tensor, reference: float, exponent: float, damping: float, clip: float
) -> Tensor | float:
    """``clamp(S / S_ref, damping, clip)^k`` of a whole field, for optimizers that only
    scale.
    """
    if exponent == 0:
        return 1.0
    if exponent in (0.5, 1, 2):
        ratio = (stiffness * (1 / reference)).clamp_(damping, clip)
        return ratio if exponent == 1 else ratio.square_() if exponent == 2 else sqrt_exact(ratio)
    logarithm = _exponent(stiffness) - (math.log2(reference) - log2_of_mantissa(stiffness))
    return exp2_exact(logarithm.clamp_(log2_bounded(damping), log2_bounded(clip)) * exponent)


def log2_bounded(x: float) -> float:
    """``log2(x)``, with finite stand-ins for those of 0 and infinity."""
    return -1e4 if x == 0 else 1e4 if math.isinf(x) else math.log2(x)


def _exponent(x: Tensor) -> Tensor:
    fields = float_bits(x.dtype)
    return ((x.view(fields.integer) >> fields.mantissa_bits) - fields.bias).to(x.dtype)


def sqrt_exact(x: Tensor) -> Tensor:
    """The correctly rounded square root: eager float32 ``torch.sqrt`` on the CPU is off
    by one ULP now and then.
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt_().to(x.dtype)


def stiffness_bounds(reference: float, damping: float, clip: float) -> tuple[float, float]:
    """The powers of two between which the stiffness is held: the bounds rounded
    outwards.
    """
    low = 2.0 ** math.floor(math.log2(damping * reference)) if damping else 0.0
    high = 2.0 ** math.ceil(math.log2(clip * reference)) if math.isfinite(clip) else math.inf
    return low, high


def end_exponents(
    reference: float, damping: float, clip: float, mantissa_bits: int
) -> tuple[int, int]:
    """The exponents of values between which the chart's stiffness follows the format."""
    low, high = map(log2_bounded, stiffness_bounds(reference, damping, clip))
    return int(low) + mantissa_bits, int(high) + mantissa_bits


def bounded_ends(fmt: FloatFormat, scale: Tensor, low: int, high: int) -> dict[str, Tensor]:
    """Exponents of :func:`end_exponents` in units of the scale, held within the
    format's own.
    """
    exponent = torch.frexp(scale).exponent - 1
    lowest = (low - exponent).clamp(min=fmt.emin)
    highest = (high - exponent).clamp(max=fmt.emax)
    return {"lowest": lowest, "highest": torch.maximum(highest, lowest)}
