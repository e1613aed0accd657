"""Scales: how a tensor of any size is laid over a format's range.

Everywhere, value = scale * grid point::

    activations   amax / scale = max           nothing saturates, and nothing is left above
    weights       amax / scale = max / 16      a power of two, with headroom to grow into
                  |--------------------|-----------|
                  0                   amax        max

The scale of stored weights is kept as long as amax stays in the middle of its range. It is
replaced when a weight reaches the end, or when it could be 16 times smaller::

    storage_scale     from the weights alone
    widened_scale     the present one; a new one for either reason
    narrowed_scale    the present one; a new one if it could be 16 times smaller
    refitted_scale    for weights that are all replaced: the present one; a new one also
                      if it is no positive normal number
"""

import math
from numbers import Real
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8manifold._base.blocks import in_pieces, pieces
from fp8manifold._base.checks import check_choice, check_number
from fp8manifold._base.float_bits import float_bits, working_dtype
from fp8manifold._base.reading import has_values
from fp8manifold.formats import FloatFormat, FormatLike, as_format

Granularity = Literal["tensor", "channel", "block"]
GRANULARITIES: Final = ("tensor", "channel", "block")
WeightGranularity = Literal["tensor", "channel", "block", "square"]
WEIGHT_GRANULARITIES: Final = (*GRANULARITIES, "square")
"""Granularities of weights.

They include a scale for each square of 128 x 128, as servers of such weights take.
"""
StoredGranularity = Literal["tensor", "channel", "block", "square", "row"]
STORED_GRANULARITIES: Final = (*WEIGHT_GRANULARITIES, "row")
"""Granularities of stored codes.

They include, with more than two dimensions, a scale for each row of the last one.
"""
ROUNDING_OF_SCALES: Final = 1 + 2.0**-20
"""Slack of comparisons with the end of the range.

A float32 scale of amax / max may put amax itself beyond max.
"""
BLOCK_SIZE: Final = 32
"""Values along the last dimension that share a scale under the granularity ``block``.

It is the number of the OCP MX formats.
"""
SQUARE_SIZE: Final = 128
"""Rows and columns of the last two dimensions that share a scale under ``square``.

It is the number of DeepSeek-V3's checkpoints.
"""
# Binades from amax down to the smallest spacing. More would take S and S^2 of stored
# weights out of float32.
_DEPTH: Final = 40
# The scale stays as long as amax swings by less than this.
_HYSTERESIS: Final = 2.0**4


class SaturationWarning(UserWarning):
    """A frozen scale no longer covers the values it scales."""


class UnderflowWarning(UserWarning):
    """All values under a scale are too small for it.

    They are rounded to zero or to the smallest step.
    """


class RepeatedRoundingWarning(UserWarning):
    """Arithmetic changes a copy in codes again and again, and rounds it each time.

    A running average in codes is noise, or stalls. Average in ``p.detach().float()``,
    which is a float tensor, or by :func:`fp8manifold.averaged_model`.
    """


def amax_scale(
    x: Tensor,
    fmt: FormatLike,
    granularity: Granularity = "tensor",
    *,
    axis: int = 0,
    pow2: bool = False,
) -> Tensor:
    r"""Return the scale that takes the largest magnitude to the format's largest value.

    .. math:: s = \max|x| / max

    Args:
        x: float tensor of any shape.
        fmt: a format or its name.
        granularity: one scale for the ``tensor``, one for each ``channel``, an index of
            ``axis``, or one for each ``block`` of 32 values along the last dimension.
        axis: the channel axis.
        pow2: round up to a power of two, so that scaling is exact; scales of blocks
            always are, as in E8M0.

    Returns:
        float32 tensor that broadcasts against ``x``; under ``block`` it has the shape
        of ``x`` with a 32nd of the last dimension. It is 1 where the magnitude is 0 (+0
        or -0) or not finite (a NaN or Inf), and for an empty tensor, and nowhere less
        than ``2^-126``.

    Raises:
        TypeError, ValueError: ``x`` is not a float tensor; an unknown format or
            granularity, an axis that ``x`` does not have, a last dimension that 32 does
            not divide, or float64 values beyond float32, which have no scale.

    Example:
        >>> x = torch.tensor([[1.0, -896.0], [0.0, 0.0]])
        >>> amax_scale(x, "E4M3", "channel").flatten().tolist()
        [2.0, 1.0]

    Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning); OCP Microscaling
    Formats 1.0 for blocks.
    """
    # refuses other dtypes
    working_dtype(x, "x")
    check_choice("granularity", granularity, GRANULARITIES)
    amax = amax_of(x, granularity, axis)
    return scale_of_amax(amax, as_format(fmt), pow2=pow2 or granularity == "block")


def scale_of_amax(amax: Tensor, fmt: FloatFormat, *, pow2: bool) -> Tensor:
    """Return the scale under which ``amax`` is the largest value.

    It is 1 where ``amax`` is 0 or not finite.
    """
    scale = (amax / fmt.max).clamp(min=torch.finfo(amax.dtype).tiny)
    if pow2:
        scale = _power_of_two_above(scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def amax_of(x: Tensor, granularity: StoredGranularity, axis: int = 0) -> Tensor:
    """Return the largest magnitude under each scale, float32; NaN where there is one."""
    amax = wide_amax(x, granularity, axis)
    if amax.dtype is torch.float64:
        _check_fits_float32(amax)
    return amax.float()


def wide_amax(x: Tensor, granularity: StoredGranularity, axis: int = 0) -> Tensor:
    """Return the largest magnitude under each scale, in the working dtype of ``x``."""
    check_choice("granularity", granularity, STORED_GRANULARITIES if axis == 0 else GRANULARITIES)
    if type(x.detach()) is Tensor and in_pieces(x) and axis == 0:
        rows_per_scale = SQUARE_SIZE if granularity == "square" and x.dim() == 2 else 1
        row_slices = pieces(x, rows_per_scale)
        if len(row_slices) > 1:
            parts = [wide_amax(x[rows], granularity) for rows in row_slices]
            return torch.stack(parts).amax() if granularity == "tensor" else torch.cat(parts)
    return _amax(x, granularity, axis)


def _amax(x: Tensor, granularity: StoredGranularity, axis: int) -> Tensor:
    x = x.detach()
    magnitude = x.abs() if x.dtype is torch.float64 else x.float().abs()
    if granularity == "block":
        return magnitude.reshape(*block_shape(x.shape), BLOCK_SIZE).amax(-1)
    if granularity == "square":
        return square_amax(magnitude)
    if granularity == "row":
        if not x.numel():
            return magnitude.new_zeros((*x.shape[:-1], 1))
        return magnitude.amax(-1, keepdim=True)
    if granularity == "tensor":
        return magnitude.amax() if x.numel() else magnitude.new_zeros(())
    return _channel_amax(magnitude, axis)


def _channel_amax(magnitude: Tensor, axis: int) -> Tensor:
    dimensions = magnitude.dim()
    if not -dimensions <= axis < dimensions:
        raise ValueError(
            f"axis={axis} is out of range for a tensor of shape {tuple(magnitude.shape)}"
        )
    axis %= dimensions
    if not magnitude.numel():
        shape = [1] * dimensions
        shape[axis] = magnitude.shape[axis]
        return magnitude.new_zeros(shape)
    reduced_axes = [d for d in range(dimensions) if d != axis]
    return magnitude.amax(dim=reduced_axes, keepdim=True) if reduced_axes else magnitude


def _check_fits_float32(amax: Tensor) -> None:
    """Raise ValueError for finite float64 magnitudes that are Inf in float32."""
    if not _can_check(amax):
        return
    beyond = amax.isfinite() & ~amax.float().isfinite()
    if bool(beyond.any()):
        raise ValueError(
            f"a magnitude of {float(amax[beyond][0]):g} is beyond float32 (3.4e38), the dtype of "
            "scales: divide by a power of two first, or use fake_quantize, which has float64 "
            "scales for float64"
        )


def _can_check(x: Tensor) -> bool:
    """True if there are values to check, outside of a compiled graph."""
    return type(x) is Tensor and has_values(x) and not torch.compiler.is_compiling()


def check_is_scale(scale: object) -> None:
    """Raise TypeError unless ``scale`` is a real number, or a tensor of such."""
    if isinstance(scale, Tensor):
        if scale.dtype is torch.bool or scale.is_complex():
            raise TypeError(f"scale has dtype {scale.dtype}: real numbers are needed")
    elif isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or a tensor, not {type(scale).__name__}")


def check_positive(scale: Tensor) -> None:
    """Raise ValueError for an entry that is not finite and positive."""
    if not _can_check(scale):
        return
    valid = scale.isfinite() & (scale > 0)
    if not bool(valid.all()):
        raise ValueError(
            f"scale holds {scale[~valid][0].item()}: every entry must be finite and positive"
        )


def storage_scale(
    w: Tensor,
    fmt: FormatLike,
    granularity: StoredGranularity = "channel",
    *,
    headroom: float | None = None,
    axis: int = 0,
) -> Tensor:
    r"""Return the power-of-two scale of weights that are stored on the grid.

    .. math:: s = 2^{\lceil \log_2 (\max|w| \cdot headroom / max) \rceil}

    The largest weight may grow by the factor ``headroom`` before it saturates. It is
    placed at most 40 binades above the smallest spacing, so that squares of the
    stiffness stay within float32.

    Args:
        w: float tensor of any shape.
        fmt: a format or its name.
        granularity: one scale for the ``tensor``, each ``channel``, each ``row`` of the
            last dimension, each ``block`` of 32 weights along it, or each ``square`` of
            128 x 128 in the last two.
        headroom: at least 1. None takes 16. In a format of few binades it takes less,
            which leaves the largest weight at 8 times the smallest normal, but no less
            than 2: with more headroom most weights would be subnormal, or zero.
        axis: the channel axis.

    Returns:
        float32 tensor of powers of two, 1 where all weights are 0 (+0 or -0) and for an
        empty tensor. It broadcasts against ``w``; ``block`` and ``square`` divide the
        last dimension by 32, or the last two by 128, rounded up.

    Raises:
        TypeError, ValueError: as :func:`amax_scale`; a headroom below 1; weights NaN or
            Inf; squares of a vector.

    Example:
        >>> storage_scale(torch.tensor([[0.25, -0.5]]), "E4M3").item() == 2.0**-5
        True
    """
    # refuses other dtypes
    working_dtype(w, "w")
    fmt = as_format(fmt)
    target = _target_of_amax(fmt, headroom)
    amax = amax_of(w, granularity, axis)
    if has_values(amax) and not bool(amax.isfinite().all()):
        raise ValueError(
            f"weights of shape {tuple(w.shape)} hold NaN or Inf: they can't be stored in {fmt.name}"
        )
    return _placing_scale(amax, target)


def refitted_scale(amax: Tensor, scale: Tensor, fmt: FloatFormat, least: float = 1.0) -> Tensor:
    """Return the scale for weights that are all replaced.

    It is the present one, unless some weights saturate at it, or it is 16 times too
    wide, or not a positive normal number.
    """
    valid = (scale >= torch.finfo(scale.dtype).tiny) & scale.isfinite()
    target = _target_of_amax(fmt, usual_headroom(fmt, least))
    fresh = _placing_scale(amax, target, torch.where(valid, scale, 1.0))
    # Below half a step beyond max, the nearest value is max.
    saturates = amax >= scale * (fmt.max + fmt.ulp_max / 2)
    return torch.where(saturates | _is_too_wide(amax, scale, fresh) | ~valid, fresh, scale)


def narrowed_scale(amax: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """Return a fresh scale where the present one is at least 16 times as wide.

    It is the narrowing half of :func:`widened_scale`.
    """
    fresh = _placing_scale(amax, _target_of_amax(fmt, usual_headroom(fmt, 1.0)), scale)
    return torch.where(_is_too_wide(amax, scale, fresh), fresh, scale)


def _is_too_wide(amax: Tensor, scale: Tensor, fresh: Tensor) -> Tensor:
    return (amax > 0) & (fresh * _HYSTERESIS <= scale)


def widened_scale(
    amax: Tensor, scale: Tensor, fmt: FormatLike, headroom: float | None = None
) -> Tensor:
    r"""Return the scale that stored weights should have.

    It is the present one, unless the largest weight has left the middle of the range.

    .. math:: s' = s^* \text{ where } amax \ge s \, max \text{ or } 16 s^* \le s, \qquad
              s' = s \text{ elsewhere},

    with ``s*`` the :func:`storage_scale` of ``amax``, times the factor ``f`` in [1, 2)
    of ``s = 2^e f``. A scale whose end was reached, or that could be 16 times smaller,
    is replaced by one with ``headroom``.

    Args:
        amax: the largest magnitude under each scale, in value, in the shape of
            ``scale``.
        scale: positive normal numbers.
        fmt: a format or its name.
        headroom: as in :func:`storage_scale`.

    Returns:
        float32 in the shape of ``scale``: the present scale times powers of two. It is
        unchanged where ``amax`` is 0 (+0 or -0) or NaN. Where ``amax`` is Inf it is the
        largest possible, ``2^127`` for powers of two. Empty tensors give an empty one.

    Raises:
        TypeError, ValueError: ``amax`` or ``scale`` is not a float tensor; a headroom
            that is not a number, or below 1.

    Example:
        >>> scale = torch.tensor([0.5, 0.5, 0.5])
        >>> widened_scale(torch.tensor([224.0, 28.0, 0.25]), scale, "E4M3", headroom=8.0).tolist()
        [4.0, 0.5, 0.0078125]
    """
    # refuse other dtypes
    working_dtype(amax, "amax")
    working_dtype(scale, "scale")
    fmt = as_format(fmt)
    fresh = _placing_scale(amax.float(), _target_of_amax(fmt, headroom), scale)
    saturates = amax >= scale * fmt.max
    return torch.where(saturates | _is_too_wide(amax, scale, fresh), fresh, scale)


def usual_headroom(fmt: FloatFormat, least: float) -> float:
    """Return the usual headroom, at least ``least``.

    It is 16, or what leaves the largest weight at 8 times the smallest normal.
    """
    return min(16.0, max(least, fmt.max / (8 * fmt.min_normal)))


def _target_of_amax(fmt: FloatFormat, headroom: float | None) -> float:
    """Return where the largest stored weight is placed, in units of the scale."""
    if headroom is None:
        headroom = usual_headroom(fmt, 2.0)
    check_number("headroom", headroom, 1.0, open_high=True)
    return min(fmt.max / headroom, math.ldexp(fmt.ulp_min, _DEPTH))


def _placing_scale(amax: Tensor, target: float, old_scale: Tensor | None = None) -> Tensor:
    """Return the least scale that places a magnitude at ``target`` or below.

    It is a power of two, times the factor in [1, 2) of the old scale.
    """
    factor = 1.0 if old_scale is None else 2 * torch.frexp(old_scale).mantissa
    least = (amax / (target * factor)).clamp(2.0**-126, 2.0**127)
    return torch.where(amax > 0, _power_of_two_above(least) * factor, 1.0)


def block_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales of blocks."""
    if not shape or shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"granularity='block' needs a last dimension that {BLOCK_SIZE} divides, not shape "
            f"{tuple(shape)}: take 'channel' or 'tensor'"
        )
    return torch.Size((*shape[:-1], shape[-1] // BLOCK_SIZE))


def broadcasts_to(shape: torch.Size, target: torch.Size) -> bool:
    """True if a shape broadcasts to the target without widening it."""
    try:
        return bool(torch.broadcast_shapes(shape, target) == target)
    except RuntimeError:
        return False


def square_amax(x: Tensor) -> Tensor:
    """Return the largest value in each square of a tensor without negative ones."""
    shape = square_shape(x.shape)
    if not x.numel():
        return x.new_zeros(shape)
    missing_rows = -x.shape[-2] % SQUARE_SIZE
    missing_columns = -x.shape[-1] % SQUARE_SIZE
    if missing_columns:
        x = F.pad(x, (0, missing_columns))
    x = x.unflatten(-1, (-1, SQUARE_SIZE)).amax(-1)
    x = F.pad(x, (0, 0, 0, missing_rows))
    largest: Tensor = x.unflatten(-2, (-1, SQUARE_SIZE)).amax(-2)
    return largest


def square_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales of squares."""
    if len(shape) < 2:
        raise ValueError(
            f"granularity='square' needs two or more dimensions, not shape {tuple(shape)}: take "
            "'tensor'"
        )
    *batch, rows, columns = shape
    return torch.Size((*batch, -(-rows // SQUARE_SIZE), -(-columns // SQUARE_SIZE)))


def _power_of_two_above(x: Tensor) -> Tensor:
    """Return the least power of two that is not below ``x``."""
    # x = mantissa * 2^exponent with the mantissa in [0.5, 1)
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    if x.dtype is torch.float64:
        # torch.ldexp takes its power of two in float32.
        bits = float_bits(x.dtype)
        return bits.power_of_two(exponent.to(bits.integer)).view(x.dtype)
    return torch.ldexp(torch.ones_like(x), exponent)
