"""The stiffness field of a parameter relative to its mean: reference, bounds and power."""

import math

import torch
from torch import Tensor

from fp8manifold._float_bits import float_bits
from fp8manifold.optim._directions import sqrt_exact

__all__ = ["bounded_share", "power_of_ratio", "reference_stiffness"]


def reference_stiffness(stiffness: Tensor) -> float:
    """The mean of a stiffness field, correctly rounded to float64.

    Equal values are counted exactly, so the result does not depend on how a tensor is cut up or summed.
    """
    fields = float_bits(stiffness.dtype)
    exponents = (stiffness.view(fields.integer) >> fields.mantissa_bits).flatten()
    if bool((stiffness.view(fields.integer) == exponents.view(stiffness.shape) << fields.mantissa_bits).all()):
        counts = torch.bincount(exponents).tolist()
        terms = [math.ldexp(count, i - fields.bias) for i, count in enumerate(counts) if count]
    else:
        values, repeats = stiffness.flatten().unique(return_counts=True)
        terms = [value * count for value, count in zip(values.tolist(), repeats.tolist(), strict=True)]
    return math.fsum(terms) / stiffness.numel()


def bounded_share(stiffness: Tensor, reference: float, damping: float, clip: float) -> float:
    """Share of elements whose ratio to the reference lies outside ``[damping, clip]``."""
    ratio = stiffness / reference
    return int(((ratio < damping) | (ratio > clip)).sum()) / max(stiffness.numel(), 1)


def power_of_ratio(stiffness: Tensor, reference: float, exponent: float, damping: float, clip: float) -> Tensor | float:
    """``clamp(S / S_ref, damping, clip)^k``.

    Exponents 1/2, 1 and 2 are computed exactly.  Any other goes through a table over the powers of two that a
    stiffness can be, so that its bits don't depend on a vectorised ``pow``; fields with other values use ``pow``.
    """
    if exponent == 0:
        return 1.0
    if exponent in (0.5, 1, 2):
        ratio = (stiffness * (1 / reference)).clamp_(damping, clip)
        return ratio if exponent == 1 else ratio.square_() if exponent == 2 else sqrt_exact(ratio)
    fields = float_bits(stiffness.dtype)
    bits = stiffness.view(fields.integer)
    if stiffness.dtype == torch.float32 and not bool((bits & ((1 << fields.mantissa_bits) - 1)).any()):
        ratios = (min(max(math.ldexp(1 / reference, i - fields.bias), damping), clip) for i in range(255))
        table = torch.tensor([ratio**exponent for ratio in ratios], dtype=torch.float64).to(stiffness)
        return table.index_select(0, (bits >> fields.mantissa_bits).flatten()).view(stiffness.shape)
    return (stiffness * (1 / reference)).clamp_(damping, clip).pow_(exponent)
