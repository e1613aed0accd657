"""How a tensor uses the codes and the bits of a format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from fp8manifold._numerics.codec import encode_finite
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.grid import encode
from fp8manifold.monitor._passes import ScaleLike, fitting, plain, unit_blocks

__all__ = ["BitFigures", "bit_figures", "code_histogram", "gap_lengths"]


def code_histogram(x: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0) -> Tensor:
    """How many elements have each code, after rounding ``x / scale`` to the nearest value.

    .. math:: n_c = \\#\\{i : \\mathrm{encode}(x_i / s) = c\\}

    Args:
        x: float tensor of any shape, or the uint8 codes themselves (``scale`` is then not used).
        fmt: a format or its name.
        scale: positive, broadcasting against ``x``.

    Returns:
        int64 tensor of ``2**bits`` counts in code order; all zero for an empty tensor.  NaN has the code of
        :func:`fp8manifold.encode`, Inf that of the largest value, -0 its own where the layout has it.

    Raises:
        TypeError: ``x`` is neither a float tensor nor uint8.
        ValueError: a NaN in a format that has none, or a scale that does not fit ``x`` or is not positive.

    Example:
        >>> code_histogram(torch.tensor([1.0, 1.0, -6.0]), "E2M1").nonzero().flatten().tolist()
        [2, 15]
    """
    fmt = as_format(fmt)
    if isinstance(x, Tensor) and x.dtype is torch.uint8:
        return torch.bincount(x.flatten(), minlength=2 * fmt.sign_bit)
    x, size = plain(x), 2 * fmt.sign_bit
    counts = torch.zeros(size, dtype=torch.int64, device=x.device)
    for _, units in unit_blocks(fitting(scale, x), x):
        counts += torch.bincount(_codes(units, fmt), minlength=size)
    return counts


def _codes(units: Tensor, fmt: FloatFormat) -> Tensor:
    """:func:`fp8manifold.encode`, in half the time where there is no NaN to look out for."""
    if units.dtype is torch.float32 and not bool(units.sum().isnan()):
        return encode_finite(units, fmt)
    return encode(units, fmt)


@dataclass(frozen=True)
class BitFigures:
    """What :func:`bit_figures` finds in a code histogram; the shares are of the elements whose code is finite."""

    size: int
    """Elements whose code is finite."""
    entropy: float
    """Of the codes, in bits."""
    uniformity: float
    """That over the binary logarithm of the number of finite codes; 1 if all are used alike."""
    codes_used: float
    """Share of the finite codes that occur."""
    codes_ever_used: float
    """Share of the finite codes that occur here or in the histogram of earlier steps."""
    binades_occupied: float
    """Share of the exponent fields that occur."""
    top_exponent: float
    """Share of elements with the highest exponent field."""
    mantissa_utilisation: float | None
    """Entropy of the mantissa field over its bits; None in a format without them."""
    exponent_utilisation: float
    """Entropy of the exponent field over the binary logarithm of the number of fields."""
    exponent_bits: tuple[float, ...]
    """Share of elements that have each exponent bit set, the least significant first."""
    mantissa_bits: tuple[float, ...]
    """Share of elements that have each mantissa bit set, the least significant first."""
    longest_gap: int
    """Of :func:`gap_lengths`."""


def bit_figures(counts: Tensor, fmt: FormatLike, ever: Tensor | None = None) -> BitFigures:
    """What a code histogram says of the use of codes, exponents, mantissas and single bits.

    .. math:: entropy = -\\sum_c p_c \\log_2 p_c, \\qquad uniformity = entropy / \\log_2 (\\textrm{finite codes})

    Args:
        counts: int64, of :func:`code_histogram`.
        fmt: the format, or its name.
        ever: sum of earlier histograms.

    Returns:
        A :class:`BitFigures`.  Codes of NaN and Inf are left out; +0 and -0 are two codes.  All figures are 0 for an
        empty histogram, which has nothing to count.

    Raises:
        ValueError: a histogram of another length than the format's number of codes.

    Example:
        >>> found = bit_figures(code_histogram(torch.tensor([1.0, 1.5, 1.0, 1.5]), "E2M1"), "E2M1")
        >>> found.entropy, found.uniformity, found.mantissa_bits, found.exponent_bits
        (1.0, 0.25, (0.5,), (1.0, 0.0))
    """
    fmt = as_format(fmt)
    finite = _finite_codes(fmt)
    found = _listed(counts, fmt, "counts")
    earlier = _listed(ever, fmt, "ever") if ever is not None else [0] * len(found)
    fields = [(code & (fmt.sign_bit - 1)) >> fmt.mantissa_bits for code in finite]
    mantissas = [code & ((1 << fmt.mantissa_bits) - 1) for code in finite]
    used = [found[code] for code in finite]
    by_field, by_mantissa = _grouped(fields, used), _grouped(mantissas, used)
    entropy, total = _entropy(used), sum(used)
    return BitFigures(
        size=total,
        entropy=entropy,
        uniformity=entropy / math.log2(len(finite)),
        codes_used=sum(n > 0 for n in used) / len(finite),
        codes_ever_used=sum(found[code] + earlier[code] > 0 for code in finite) / len(finite),
        binades_occupied=sum(n > 0 for n in by_field) / len(by_field),
        top_exponent=by_field[-1] / max(total, 1),
        mantissa_utilisation=_entropy(by_mantissa) / fmt.mantissa_bits if fmt.mantissa_bits else None,
        exponent_utilisation=_entropy(by_field) / math.log2(len(by_field)) if len(by_field) > 1 else 0.0,
        exponent_bits=_set_bits(by_field, fmt.exponent_bits, total),
        mantissa_bits=_set_bits(by_mantissa, fmt.mantissa_bits, total),
        longest_gap=max(gap_lengths(counts, fmt), default=0),
    )


def gap_lengths(counts: Tensor, fmt: FormatLike) -> list[int]:
    """Lengths of the runs of unused values between the lowest and the highest used one, in order of value.

    .. math:: \\{\\, b - a - 1 : a < b \\text{ next to each other among the used positions}, \\; b > a + 1 \\,\\}

    Args:
        counts: int64, of :func:`code_histogram`.
        fmt: the format, or its name.

    Returns:
        The lengths, in steps of the format; +0 and -0 are one value, NaN and Inf none.  What lies outside the used
        values is no gap, and an empty histogram has none.

    Raises:
        ValueError: a histogram of another length than the format's number of codes.

    Example:
        >>> gap_lengths(code_histogram(torch.tensor([-1.0, 0.5, 6.0]), "E2M1"), "E2M1")
        [2, 5]
    """
    fmt = as_format(fmt)
    found = _listed(counts, fmt, "counts")
    positive = found[: fmt.max_code + 1]
    negative = found[fmt.sign_bit : fmt.sign_bit + fmt.max_code + 1]
    zero = positive[0] + (negative[0] if fmt.has_negative_zero else 0)
    used = [i for i, n in enumerate([*negative[:0:-1], zero, *positive[1:]]) if n]
    return [after - before - 1 for before, after in pairwise(used) if after > before + 1]


@lru_cache(maxsize=64)
def _finite_codes(fmt: FloatFormat) -> list[int]:
    return [code for code in range(2 * fmt.sign_bit) if math.isfinite(fmt.decode_code(code))]


def _listed(counts: Tensor, fmt: FloatFormat, name: str) -> list[int]:
    if counts.shape != (2 * fmt.sign_bit,):
        raise ValueError(f"{name} has shape {tuple(counts.shape)}: {fmt.name} has {2 * fmt.sign_bit} codes")
    return [int(n) for n in counts.tolist()]


def _grouped(keys: Sequence[int], counts: Sequence[int]) -> list[int]:
    sums = [0] * (max(keys) + 1)
    for key, n in zip(keys, counts, strict=True):
        sums[key] += n
    return sums


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    return math.fsum(n / total * math.log2(total / n) for n in counts if n)


def _set_bits(counts: Sequence[int], width: int, total: int) -> tuple[float, ...]:
    return tuple(sum(n for i, n in enumerate(counts) if i >> bit & 1) / max(total, 1) for bit in range(width))
