"""A histogram as a run stores it, and those of magnitudes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold._base.checks import check_int
from fp8manifold._base.float_bits import float_bits
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.monitor._passes import ScaleLike, blocks, fitting, inside, plain, spacing, unit_blocks

__all__ = ["Histogram", "magnitude_histogram", "residual_histogram", "stiffness_histogram"]


@dataclass(frozen=True)
class Histogram:
    """Counts between edges: bin ``i`` is ``[edges[i], edges[i + 1])``."""

    edges: tuple[float, ...]
    """Ascending, one more than there are counts."""
    counts: tuple[int, ...]
    """How many elements are in each bin."""


@torch.no_grad()
def magnitude_histogram(x: Tensor) -> Histogram:
    """How many elements have a magnitude in each binade.

    .. math:: c_k = \\#\\{i : 2^k \\le |x_i| < 2^{k+1}\\}

    Args:
        x: float tensor of any shape.

    Returns:
        The binades from the lowest to the highest that is occupied, with a first bin from 0 for zeros and subnormals of
        float32 (float64: of its own), -0 included.  NaN and Inf are left out; of an empty tensor it is the one bin
        [0, 1).

    Raises:
        TypeError: ``x`` is not a float tensor.

    Example:
        >>> magnitude_histogram(torch.tensor([0.0, 0.3, -0.4, 1.0]))
        Histogram(edges=(0.0, 0.25, 0.5, 1.0, 2.0), counts=(1, 2, 0, 1))
    """
    x = plain(x)
    return _of_exponents(sum(_exponent_counts(part) for (part,) in blocks(x)), x)


@torch.no_grad()
def stiffness_histogram(w: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0) -> Histogram:
    """How many weights have a stiffness, the value of one ULP, in each binade.

    .. math:: c_k = \\#\\{i : 2^k \\le s\\,S(w_i / s) < 2^{k+1}\\}

    Args:
        w: float tensor of any shape.
        fmt: a format or its name.
        scale: positive, broadcasting against ``w``.

    Returns:
        As :func:`magnitude_histogram`; weights that are NaN are left out, those beyond the range, Inf included, have
        the stiffness of its end, and +0 and -0 the smallest one.  Of an empty tensor it is the one bin [0, 1).

    Raises:
        TypeError: ``w`` is not a float tensor.
        ValueError: a scale that does not fit ``w`` or is not positive.

    Example:
        >>> stiffness_histogram(torch.tensor([1.0, 1.5, 2.0]), "E4M3")
        Histogram(edges=(0.0, 0.125, 0.25, 0.5), counts=(0, 2, 1))
    """
    w, fmt = plain(w, "w"), as_format(fmt)
    pieces = unit_blocks(fitting(scale, w), w)
    return _of_exponents(sum(_exponent_counts(_stiffness(units, scales, fmt)) for scales, units in pieces), w)


@torch.no_grad()
def residual_histogram(w: Tensor, fmt: FormatLike, scale: ScaleLike = 1.0, bins: int = 32) -> Histogram:
    """Where master weights lie between the values of the format.

    .. math:: r_i = (w_i - Q(w_i)) / S(w_i), \\qquad Q(w) = s\\,\\mathrm{round}(w / s)

    Args:
        w: float tensor of any shape, the weights before quantisation.
        fmt: a format or its name.
        scale: positive, broadcasting against ``w``.
        bins: number of bins of equal width over [-1/2, 1/2] ULP.

    Returns:
        The histogram; what lies beyond the range of the format by more than half an ULP is in the first or last bin,
        NaN and Inf in none, +0 and -0 in that of 0.  All counts are 0 for an empty tensor.

    Raises:
        TypeError: ``w`` is not a float tensor.
        ValueError: a scale that does not fit ``w`` or is not positive, ``bins`` below 1.

    Example:
        >>> residual_histogram(torch.tensor([1.0, 1.03125, 1.1]), "E4M3", bins=4)
        Histogram(edges=(-0.5, -0.25, 0.0, 0.25, 0.5), counts=(0, 1, 1, 1))
    """
    w, fmt = plain(w, "w"), as_format(fmt)
    check_int("bins", bins, 1, 65536)
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=w.device)
    for _, units in unit_blocks(fitting(scale, w), w):
        near = inside(units, fmt)
        gap = spacing(near, fmt)
        steps = near / gap
        residual = steps.sub_(steps.round()).add_((units - near).div_(gap)).add_(units * 0)  # NaN of Inf as well
        place = residual.add_(0.5).mul_(bins).floor_().clamp_(0, bins - 1).nan_to_num_(nan=bins)
        counts += torch.bincount(place.to(torch.int32), minlength=bins + 1)
    return Histogram(tuple(i / bins - 0.5 for i in range(bins + 1)), tuple(counts[:bins].tolist()))


def _stiffness(units: Tensor, scales: Tensor, fmt: FloatFormat) -> Tensor:
    return spacing(inside(units, fmt), fmt).mul_(scales)


def _exponent_counts(x: Tensor) -> Tensor:
    """Counts of the exponent fields of a float32 or float64 tensor."""
    fields = float_bits(x.dtype)
    field = (x.view(fields.integer) & fields.exponent_mask) >> fields.mantissa_bits
    return torch.bincount(field, minlength=2 * fields.bias + 2)


def _of_exponents(counts: Tensor | int, x: Tensor) -> Histogram:
    assert isinstance(counts, Tensor)
    bias = len(counts) // 2 - 1
    listed: list[int] = counts.tolist()
    occupied = [i for i in range(1, len(listed) - 1) if listed[i]]
    if not occupied:
        return Histogram((0.0, 1.0), (listed[0],))
    low, high = occupied[0], occupied[-1]
    edges = (0.0, *(2.0 ** (i - bias) for i in range(low, high + 1)), _power(high + 1 - bias))
    return Histogram(edges, (listed[0], *listed[low : high + 1]))


def _power(exponent: int) -> float:
    return 2.0**exponent if exponent < 1024 else float("inf")
