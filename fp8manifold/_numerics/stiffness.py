"""Powers of a stiffness field's ratios to its mean, the same bits on every backend.

A stiffness optimizer scales each weight's step by

    ratio^k,   ratio = clamp(S / S_ref, damping, clip),   S_ref = mean of S

**Mean.** A sum of floats depends on its order, and so on how a field is cut up among
threads, blocks and processes. Integers can be added in any order::

    value    1.mantissa * 2^(field - bias)
    sums     number of values and sum of mantissas, for each of the 256 exponent fields
    mean     (sum over fields of (count + mantissas 2^-23) 2^(field - bias)) / count

**Power.** ``pow``, ``exp2`` and ``log2`` differ in their last bits from one library to the
next. Exponents 1/2, 1 and 2 need a root or a product. Any other one goes over

    log2 x = exponent field + log2 of the mantissa,    2^y = 2^whole * 2^fraction

with polynomials in ``+`` and ``*`` for the logarithm of a mantissa and for ``2^fraction``.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.float_bits import float_bits
from fp8manifold._interface import EXP2_SERIES, FLOAT32_TERMS, LOG2_SERIES, StiffnessPower
from fp8manifold._ranks import ALONE, Ranks
from fp8manifold.formats import FloatFormat

# Sums of so many bits of mantissas stay exact in float64.
_PART_BITS = 26


@dataclass(frozen=True, eq=False)
class Field:
    """A stiffness field.

    Attributes:
        values: the stiffness in value, float32 or float64.
        counts: how many weights have each value, int64; None for one each.
    """

    values: Tensor
    counts: Tensor | None = None

    def largest(self) -> Tensor:
        """Return the largest value that a weight has, or 0 if there are no weights."""
        values = self.values if self.counts is None else self.values[self.counts > 0]
        return values.max() if values.numel() else values.new_zeros(())


def reference_stiffness(field: Field, ranks: Ranks = ALONE) -> float:
    """Return the mean of a field over all weights and processes, in float64.

    It is computed from integer sums: the same bits however the field is cut up.
    """
    fields = float_bits(field.values.dtype)
    counts, *mantissa_sums = ranks.total(_sums_by_exponent(field)).tolist()
    terms = []
    for exponent_field, count in enumerate(counts):
        # A subnormal number, of exponent field 0, has no leading 1.
        if count and exponent_field:
            terms.append(math.ldexp(count, exponent_field - fields.bias))
    for part, sums in enumerate(mantissa_sums):
        unit = _PART_BITS * part - fields.bias - fields.mantissa_bits
        for exponent_field, mantissa_sum in enumerate(sums):
            if mantissa_sum:
                terms.append(math.ldexp(mantissa_sum, max(exponent_field, 1) + unit))
    mean = math.fsum(terms) / sum(counts)
    # If all of the field has underflowed, the smallest number that can be divided by.
    return mean or 2.0**-fields.bias


def _sums_by_exponent(field: Field) -> Tensor:
    """Return sums (int64) over the values of each exponent field, one field a column.

    Row 0 has the number of weights. The rows below have the sums of their mantissas, in
    parts of 26 bits from the lowest up.
    """
    fields = float_bits(field.values.dtype)
    shifts = range(0, fields.mantissa_bits, _PART_BITS)
    sums = torch.zeros(
        1 + len(shifts), 2 * fields.bias + 2, dtype=torch.int64, device=field.values.device
    )
    for piece, counts in _pieces(field):
        bits = piece.view(fields.integer)
        exponents = bits >> fields.mantissa_bits
        mantissas = bits - (exponents << fields.mantissa_bits)
        sums[0] += _sums_by_place(exponents, None, counts, sums.shape[1])
        if bool(mantissas.any()):
            for row, shift in zip(sums[1:], shifts, strict=True):
                part = (mantissas >> shift) & ((1 << _PART_BITS) - 1)
                row += _sums_by_place(exponents, part, counts, sums.shape[1])
    return sums


def _pieces(field: Field) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the values in pieces, each with its counts."""
    length = block_on(field.values.device)
    pieces = field.values.flatten().split(length)
    if field.counts is None:
        for piece in pieces:
            yield piece, None
    else:
        yield from zip(pieces, field.counts.flatten().split(length), strict=True)


def _sums_by_place(places: Tensor, x: Tensor | None, counts: Tensor | None, size: int) -> Tensor:
    """Return the sums of whole numbers by place, exactly, int64.

    Args:
        places: where each is added, below ``size``.
        x: the numbers, below 2^26; None for ones.
        counts: how often each is added; None for once.
        size: the number of places.
    """
    if counts is None:
        # the fastest way; a piece's sums are exact in float64
        return torch.bincount(places, None if x is None else x.double(), size).long()
    total = counts if x is None else x * counts
    return counts.new_zeros(size).index_add_(0, places, total)


def bounded_share(
    field: Field, reference: float, damping: float, clip: float, ranks: Ranks = ALONE
) -> float:
    """Return the share of weights whose ratio is outside ``[damping, clip]``.

    They are counted over all processes.
    """
    outside = torch.zeros((), dtype=torch.int64, device=field.values.device)
    total = torch.zeros_like(outside)
    for piece, counts in _pieces(field):
        ratio = piece / reference
        is_outside = (ratio < damping) | (ratio > clip)
        outside += (is_outside if counts is None else is_outside * counts).sum()
        total += piece.numel() if counts is None else counts.sum()
    outside_count, total_count = ranks.total(torch.stack([outside, total])).tolist()
    share: float = outside_count / max(total_count, 1)
    return share


def bounded_ratio_power(
    stiffness: Tensor, scale: Tensor, power: StiffnessPower, numbers: Mapping[str, Tensor]
) -> Tensor:
    """Return ``clamp(S / S_ref, damping, clip)^k``, the same bits everywhere.

    Args:
        stiffness: the field ``S``, positive.
        scale: a tensor whose entries have the mantissas of ``stiffness``: its logarithms
            are taken in place of those of the larger field. It is the scale where the
            stiffness is that times a power of two, and else the stiffness itself.
        power: which ``k``; not ``NONE``.
        numbers: scalar tensors: ``inverse_reference``, ``low`` and ``high``; or, for
            ``ANY``, ``log_reference``, ``log_low``, ``log_high`` and ``power``.
    """
    if power == StiffnessPower.ANY:
        logarithm = _floor_log2(stiffness) - (numbers["log_reference"] - log2_of_mantissa(scale))
        bounded = logarithm.clamp(numbers["log_low"], numbers["log_high"])
        return exp2_exact(bounded * numbers["power"])
    # Positive floats are ordered like their bits. Clamping integers costs a third of
    # clamping floats, which checks for NaN.
    fields = float_bits(stiffness.dtype)
    bits = (stiffness * numbers["inverse_reference"]).view(fields.integer)
    low = numbers["low"].view(fields.integer)
    high = numbers["high"].view(fields.integer)
    ratio = bits.clamp(low, high).view(stiffness.dtype)
    if power == StiffnessPower.SQRT:
        return sqrt_exact(ratio)
    return ratio * ratio if power == StiffnessPower.SQUARE else ratio


def log2_of_mantissa(x: Tensor) -> Tensor:
    r"""Return ``log2 f`` of a positive ``x = 2^e f`` with ``f`` in [1, 2).

    .. math:: \log_2 f = \frac{2}{\ln 2}
              \left( t + \frac{t^3}{3} + \frac{t^5}{5} + \dots \right),
              \qquad t = \frac{f - 1}{f + 1}

    It is 0 for a power of two, elsewhere within ``2^-22``. A sum in ``+``, ``*`` and
    one division has the same bits everywhere.
    """
    fields = float_bits(x.dtype)
    mantissa_mask = (1 << fields.mantissa_bits) - 1
    one = fields.power_of_two(0)
    f = ((x.view(fields.integer) & mantissa_mask) | one).view(x.dtype)
    t = (f - 1) / (f + 1)
    return _polynomial(t * t, LOG2_SERIES) * t


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return a polynomial by Horner's scheme, of its first eight terms in float32."""
    if x.dtype != torch.float64:
        coefficients = coefficients[:FLOAT32_TERMS]
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def exp2_exact(x: Tensor) -> Tensor:
    """Return ``2^x``, within 4 ULP and the same bits everywhere."""
    fields = float_bits(x.dtype)
    whole = torch.round(x)
    power_of_fraction = _polynomial(x - whole, EXP2_SERIES)
    exponent = whole.to(fields.integer).clamp(1 - fields.bias, fields.bias)
    return power_of_fraction * fields.power_of_two(exponent).view(x.dtype)


def power_of_ratio(
    stiffness: Tensor, reference: float, exponent: float, damping: float, clip: float
) -> Tensor | float:
    """Return ``clamp(S / S_ref, damping, clip)^k`` of a whole field.

    It is :func:`bounded_ratio_power` with numbers in place of tensors. It serves
    optimizers that scale gradients and leave the step to others.
    """
    if exponent == 0:
        return 1.0
    if exponent in (0.5, 1, 2):
        ratio = (stiffness * (1 / reference)).clamp_(damping, clip)
        if exponent == 1:
            return ratio
        return ratio.square_() if exponent == 2 else sqrt_exact(ratio)
    logarithm = _floor_log2(stiffness) - (math.log2(reference) - log2_of_mantissa(stiffness))
    bounded = logarithm.clamp_(log2_bounded(damping), log2_bounded(clip))
    return exp2_exact(bounded * exponent)


def log2_bounded(x: float) -> float:
    """Return ``log2(x)``, with finite stand-ins for those of 0 and infinity."""
    if x == 0:
        return -1e4
    return 1e4 if math.isinf(x) else math.log2(x)


def _floor_log2(x: Tensor) -> Tensor:
    """Return ``floor(log2(x))`` of positive normal numbers."""
    fields = float_bits(x.dtype)
    exponent_field = x.view(fields.integer) >> fields.mantissa_bits
    return (exponent_field - fields.bias).to(x.dtype)


def sqrt_exact(x: Tensor) -> Tensor:
    """Return the correctly rounded square root.

    Eager float32 ``torch.sqrt`` on the CPU is off by one ULP now and then.
    """
    if x.dtype == torch.float64 or torch.compiler.is_compiling():
        return x.sqrt()
    return x.double().sqrt_().to(x.dtype)


def stiffness_bounds(reference: float, damping: float, clip: float) -> tuple[float, float]:
    """Return the powers of two that bound the stiffness: its bounds rounded outwards."""
    low = 2.0 ** math.floor(math.log2(damping * reference)) if damping else 0.0
    high = 2.0 ** math.ceil(math.log2(clip * reference)) if math.isfinite(clip) else math.inf
    return low, high


def end_exponents(
    reference: float, damping: float, clip: float, mantissa_bits: int
) -> tuple[int, int]:
    """Return the exponents of values between which the stiffness follows the format."""
    low, high = stiffness_bounds(reference, damping, clip)
    return int(log2_bounded(low)) + mantissa_bits, int(log2_bounded(high)) + mantissa_bits


def bounded_ends(fmt: FloatFormat, scale: Tensor, low: int, high: int) -> dict[str, Tensor]:
    """Return exponents of :func:`end_exponents` in units of the scale.

    They are clamped to the exponents of the format.
    """
    scale_exponent = torch.frexp(scale).exponent - 1
    lowest = (low - scale_exponent).clamp(min=fmt.emin)
    highest = (high - scale_exponent).clamp(max=fmt.emax)
    return {"lowest": lowest, "highest": torch.maximum(highest, lowest)}
