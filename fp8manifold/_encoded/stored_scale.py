"""Scales of stored weights: made, checked, described; those of blocks as exponents if
all are powers of two.
"""

import logging
import warnings
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold import scaling
from fp8manifold._encoded.storage import divided, expand_scale, is_traced
from fp8manifold._numerics.codec import (
    decode_signed,
    encode_signed,
    joined_codes,
    keep_nan_codes,
    split_codes,
)
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import round_to_grid
from fp8manifold.random_bits import named_word, random_bits

ONE: Final = 127  #: The byte of a scale of 1.
IN_BLOCKS: Final = ("block", "square")
"""Granularities whose scales are stored as exponents, one byte each, if all are powers
of two.
"""
_MANTISSA_BITS: Final = 23
_FRACTION: Final = 2**_MANTISSA_BITS - 1


def are_powers_of_two(scale: Tensor) -> bool:
    """True if a float32 scale has only powers of two, which can be stored as exponents;
    False in a graph.
    """
    return scale.is_meta or not (
        is_traced(scale) or bool((scale.view(torch.int32) & _FRACTION).any())
    )


def as_kept(scale: Tensor, *, blocks: bool) -> Tensor:
    """A float32 scale, checked, as it is stored: for blocks the bytes ``e`` of
    ``2^(e - 127)`` if all are such.
    """
    if not is_traced(scale):
        wrong = ~((scale >= torch.finfo(torch.float32).tiny) & scale.isfinite())
        if bool(wrong.any()):
            entry = scale[wrong][0].item()
            raise ValueError(
                f"scale holds {entry:g}: every entry must be finite, and 2^-126 at least"
            )
    return exponents_of(scale) if blocks and are_powers_of_two(scale) else scale


def exponents_of(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def decoded_scale(kept: Tensor) -> Tensor:
    """A stored scale in float32; 0 for a byte of 0, which is memory without values."""
    return (
        (kept.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        if kept.dtype is torch.uint8
        else kept
    )


_LOG: Final = logging.getLogger("fp8manifold")


def kept_fresh_scale(
    w: Tensor, fmt: FloatFormat, granularity: scaling.StoredGranularity, headroom: float | None
) -> Tensor:
    """:func:`fp8manifold.storage_scale` as it is stored: uint8 for blocks, as all are powers of two."""
    scale = scaling.storage_scale(w, fmt, granularity, headroom=headroom)
    return exponents_of(scale) if granularity in IN_BLOCKS else scale


def own_headroom(fmt: FloatFormat, headroom: float | None) -> float:
    """The headroom that a caller gives, or for None the usual one, at least 1."""
    return scaling.usual_headroom(fmt, 1.0) if headroom is None else headroom


def given_scale(scale: float | Tensor, w: Tensor, granularity: str) -> Tensor:
    """A scale that the caller chose, as it is stored, in the granularity's shape."""
    scaling.check_is_scale(scale)
    blocks = granularity in IN_BLOCKS
    if blocks and isinstance(scale, Tensor) and scale.dtype == torch.uint8:
        kept = scale.to(w.device)
        wrong = (kept == 0) | (kept == 255)  # 2^-127 and NaN
        if not is_traced(kept) and bool(wrong.any()):
            raise ValueError(
                f"scale holds the exponent {int(kept[wrong][0])}: they are 1 to 254, from 2^-126 "
                f"to 2^127"
            )
    else:
        kept = as_kept(scale_in_float32(scale, w.device), blocks=blocks)
    shape = scaling.amax_of(torch.empty(w.shape, device="meta"), granularity).shape
    if kept.shape == shape:
        return kept
    if kept.dim() == 0:
        return kept.expand(shape).clone()
    raise ValueError(
        f"scale has shape {tuple(kept.shape)}: with granularity={granularity!r} a tensor of shape "
        f"{tuple(w.shape)} needs {tuple(shape)}"
    )


def scale_in_float32(scale: float | Tensor, device: torch.device) -> Tensor:
    """A number or a tensor as float32."""
    scaling.check_is_scale(scale)
    if isinstance(scale, Tensor) and scale.dtype == torch.uint8:
        raise TypeError(
            "scale has dtype torch.uint8, as exponents have: give the scales themselves, in float32"
        )
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def other_scale(own: Any, scale: float | Tensor, *, blocks: bool = False) -> Tensor:
    """A scale to take the place of a tensor's, which it has to fit, as it is stored."""
    new, shape = scale_in_float32(scale, own.device), own.kept_scale.shape
    if not scaling.broadcasts_to(new.shape, shape):
        raise ValueError(f"scale has shape {tuple(new.shape)}: it must fit {tuple(shape)}")
    return as_kept(new, blocks=blocks)


def check_covers(scale: Tensor, largest: Tensor, fmt: FloatFormat) -> None:
    """Raise ValueError unless the largest stored magnitude under each scale is within
    its range.
    """
    beyond = largest > scale * fmt.max * scaling.ROUNDING_OF_SCALES
    if bool(beyond.any()):
        top = float(largest[beyond].max())
        raise ValueError(
            f"scale is too small: a stored value of {top:g} needs a scale of at least "
            f"{top / fmt.max:g}"
        )


def describe_scale(scale: Tensor) -> str:
    """``2^-5``, ``1.5*2^-7`` or ``2^-5..2^-3`` where there are several."""
    if is_traced(scale) or not scale.numel():
        return "?"
    low, high = _ends(scale, "")
    return low if scale.dim() == 0 else f"{low}..{high}"


def describe_change(old: Tensor, new: Tensor) -> str:
    """In words, how many scales change, and by how much."""
    if not old.numel():
        return "no scale to change"
    low, high = _ends(new / old, "+")
    return f"{int((old != new).sum())} of {old.numel()} scales changed, by {low} to {high}"


def warn_if_saturated(values: Tensor, scale: Tensor, fmt: FloatFormat) -> None:
    """Warn of values to be stored that lie too far beyond the range to round to its
    end.
    """
    if is_traced(scale) or is_traced(values):
        return
    beyond = int((values.abs() > scale * (fmt.max + fmt.ulp_max / 2)).sum())
    if beyond:
        warnings.warn(
            f"{beyond} of {values.numel()} values are beyond the range of a stored {fmt.name} "
            f"scale, and saturate: "
            "raise the scale with adapt_scale_ or rescale_, or make a new FP8Parameter of the "
            "values",
            scaling.SaturationWarning,
            stacklevel=2,
        )


def warn_if_lost(values: Tensor, scale: Tensor, fmt: FloatFormat, granularity: str) -> None:
    """Warn if even the largest value under a scale rounds to zero."""
    if is_traced(scale) or is_traced(values) or not values.numel():
        return
    amax = scaling.amax_of(values, granularity)
    lost = int(((amax > 0) & (amax <= scale * (fmt.ulp_min / 2))).sum())
    if lost:
        warnings.warn(
            f"at {lost} of {amax.numel()} scales all values are below half a step of {fmt.name} "
            f"near 0, and most "
            "become 0: lower the scale first, with adapt_scale_ or rescale_, or make a new "
            "FP8Parameter of the values",
            scaling.UnderflowWarning,
            stacklevel=2,
        )


def warn_of_rounding(fmt: FloatFormat) -> None:
    """Warn that values assigned to the ``data`` of a weight were rounded."""
    warnings.warn(
        f"values assigned to the data of a weight in {fmt.name} were rounded: merging an adapter "
        f"this way may change "
        "outputs, and unmerging it does not restore the weight; to round once, call "
        "dequantize_model, merge_and_unload and quantize_model",
        UserWarning,
        stacklevel=3,
    )


def refit_scale_(x: Any, values: Tensor, *, fresh: bool) -> None:
    """Set the scale for values that replace all: a fresh one, or unless ``fresh`` the
    present one if it suits them.
    """
    amax = scaling.amax_of(values, x.granularity)
    if not bool(amax.isfinite().all()):
        return
    old = x.scale
    new = scaling.refitted_scale(amax, torch.where(amax > 0, 0.0, old) if fresh else old, x.format)
    if torch.equal(new, old):
        return
    points = round_to_grid(divided(values, x.expanded_scale()), x.format) * x.expanded_scale()
    if fresh or not bool(((points == values) | (points.to(x.dtype) == values)).all()):
        _LOG.info("%s of shape %s: %s", x.format.name, tuple(x.shape), describe_change(old, new))
        x.set_scale_(new)


def _ends(scale: Tensor, sign: str) -> list[str]:
    """The least and the largest as a factor and a power of two."""
    ends = zip(*map(Tensor.tolist, torch.frexp(torch.stack(torch.aminmax(scale)))), strict=True)
    return [f"{2 * m:.6g}*".removeprefix("1*") + f"2^{e - 1:{sign}d}" for m, e in ends]


_BITS = 8


def entry_of(own: Any) -> dict[str, Any]:
    """The state that its optimizer has for a tensor of codes; empty without an
    optimizer.
    """
    optimizer = None if own.stepped_by is None else own.stepped_by()
    entries = {} if optimizer is None else optimizer.state
    return next(
        (entry for p, entry in entries.items() if getattr(p, "codes", None) is own.codes), {}
    )


def largest_of(own: Any, left: Tensor | None) -> Tensor:
    """The largest magnitude under each scale, in value, of codes and the residual
    ``left`` together.
    """
    if left is None or not own.codes.numel():
        largest: Tensor = own.largest()
        return largest
    finite = (own.codes & (own.format.sign_bit - 1)) <= own.format.max_code
    values = torch.where(finite, _units(own, left) * own.expanded_scale(), 0.0)
    return scaling.amax_of(values, own.granularity).minimum(own.scale * own.format.max)


def _units(own: Any, left: Tensor) -> Tensor:
    """The sum of codes and residual in units of the scale, float32."""
    joined = joined_codes(own.codes.to(torch.int32), left.to(torch.int32), own.format, _BITS)
    return decode_signed(joined, own.format, _BITS)[0]


def rewrite_together(own: Any, left: Tensor, new: Tensor) -> None:
    """Write codes and residual (int8, 1/256 step) at other scales: their sum stays,
    rounded at random to 1/256 step.
    """
    fmt, codes = own.format, own.codes
    ratio = own.expanded_scale() / expand_scale(new, own.block_size, codes.shape)
    stream = named_word("rescale_") if own.by_operator else 0
    key = {"seed": own.seed, "step": int(own.counter), "stream": stream}
    draws = random_bits(
        codes.shape, device=codes.device, **key
    )  # independent, as of every operator
    own.counter.add_(1)
    rounded, rest = split_codes(
        encode_signed(_units(own, left) * ratio, fmt, draws, _BITS), fmt, _BITS, codes
    )
    left.copy_(torch.where(ratio == 1, left, rest.to(torch.int8)))
    codes.copy_(torch.where(ratio == 1, codes, keep_nan_codes(rounded, codes, fmt)))
