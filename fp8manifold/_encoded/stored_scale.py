"""Scales of stored weights: how they are chosen, checked, stored and changed.

A scale is stored in float32, or for blocks and squares in one byte ``e`` that stands
for ``2^(e - 127)``, if all scales of the tensor are powers of two. ``as_kept`` gives
the stored form of a float32 scale, and ``decoded_scale`` goes back. Two ways to change
a scale are here:

- ``refit_scale_``, before all values are replaced: these owe nothing to the codes;
- ``rewrite_with_residual``, for a weight whose optimizer has stored what codes could
  not hold: codes and residual are written anew, and their sum stays.
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
from fp8manifold.scaling import StoredGranularity

ONE: Final = 127
"""The byte of a scale of 1."""
IN_BLOCKS: Final = ("block", "square")
"""Granularities whose scales are stored as exponents if all are powers of two."""
_MANTISSA_BITS: Final = 23
_FRACTION: Final = 2**_MANTISSA_BITS - 1
_RESIDUAL_BITS: Final = 8
_LOG: Final = logging.getLogger("fp8manifold")


def are_powers_of_two(scale: Tensor) -> bool:
    """Return True if a float32 scale has only powers of two; False in a graph."""
    if scale.is_meta:
        return True
    if is_traced(scale):
        return False
    return not bool((scale.view(torch.int32) & _FRACTION).any())


def as_kept(scale: Tensor, *, blocks: bool) -> Tensor:
    """Return a float32 scale as it is stored: in ``blocks`` as exponents, if it can be.

    Raises:
        ValueError: an entry is not finite, or below 2^-126.
    """
    if not is_traced(scale):
        is_wrong = ~((scale >= torch.finfo(torch.float32).tiny) & scale.isfinite())
        if bool(is_wrong.any()):
            entry = scale[is_wrong][0].item()
            raise ValueError(
                f"scale holds {entry:g}: every entry must be finite, and 2^-126 at least"
            )
    return exponents_of(scale) if blocks and are_powers_of_two(scale) else scale


def exponents_of(scale: Tensor) -> Tensor:
    """Return the stored bytes of a scale of powers of two."""
    return (scale.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def decoded_scale(kept_scale: Tensor) -> Tensor:
    """Return a stored scale in float32; 0 for a byte of 0 (memory without values)."""
    if kept_scale.dtype is not torch.uint8:
        return kept_scale
    return (kept_scale.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)


def fresh_scale(
    w: Tensor, fmt: FloatFormat, granularity: scaling.StoredGranularity, headroom: float | None
) -> Tensor:
    """Choose a scale for the values of ``w`` as :func:`fp8manifold.storage_scale` does.

    It is returned as it is stored. These scales are powers of two, so those of blocks
    are exponents.
    """
    scale = scaling.storage_scale(w, fmt, granularity, headroom=headroom)
    return exponents_of(scale) if granularity in IN_BLOCKS else scale


def headroom_or_usual(fmt: FloatFormat, headroom: float | None) -> float:
    """Return the headroom that a caller chose, or for None the usual one from 1 up."""
    return scaling.usual_headroom(fmt, 1.0) if headroom is None else headroom


def chosen_scale(scale: float | Tensor, w: Tensor, granularity: StoredGranularity) -> Tensor:
    """Return a scale that the caller chose, as stored, in the granularity's shape."""
    scaling.check_is_scale(scale)
    blocks = granularity in IN_BLOCKS
    if blocks and isinstance(scale, Tensor) and scale.dtype == torch.uint8:
        kept_scale = scale.to(w.device)
        # 0 is 2^-127, which float32 has as a subnormal, and 255 is NaN
        is_wrong = (kept_scale == 0) | (kept_scale == 255)
        if not is_traced(kept_scale) and bool(is_wrong.any()):
            raise ValueError(
                f"scale holds the exponent {int(kept_scale[is_wrong][0])}: exponents must be 1 to "
                "254, for 2^-126 to 2^127"
            )
    else:
        kept_scale = as_kept(scale_in_float32(scale, w.device), blocks=blocks)
    shape = scaling.amax_of(torch.empty(w.shape, device="meta"), granularity).shape
    if kept_scale.shape == shape:
        return kept_scale
    if kept_scale.dim() == 0:
        return kept_scale.expand(shape).clone()
    raise ValueError(
        f"scale has shape {tuple(kept_scale.shape)}: with granularity={granularity!r} a tensor of "
        f"shape {tuple(w.shape)} needs {tuple(shape)}"
    )


def scale_in_float32(scale: float | Tensor, device: torch.device) -> Tensor:
    """Return a number or a tensor as float32; raise TypeError for exponents."""
    scaling.check_is_scale(scale)
    if isinstance(scale, Tensor) and scale.dtype == torch.uint8:
        raise TypeError(
            "scale has dtype torch.uint8, as exponents have: give the scales themselves, in float32"
        )
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def replacement_scale(tensor: Any, scale: float | Tensor, *, blocks: bool = False) -> Tensor:
    """Return a scale to take the place of a tensor's, as it is stored.

    Raises:
        ValueError: it does not broadcast to the present scale.
    """
    new = scale_in_float32(scale, tensor.device)
    shape = tensor.kept_scale.shape
    if not scaling.broadcasts_to(new.shape, shape):
        raise ValueError(f"scale has shape {tuple(new.shape)}: it must fit {tuple(shape)}")
    return as_kept(new, blocks=blocks)


def check_covers(scale: Tensor, largest: Tensor, fmt: FloatFormat) -> None:
    """Raise ValueError if the largest magnitude under a scale is beyond its range."""
    is_beyond = largest > scale * fmt.max * scaling.ROUNDING_OF_SCALES
    if bool(is_beyond.any()):
        top = float(largest[is_beyond].max())
        raise ValueError(
            f"scale is too small: a stored value of {top:g} needs a scale of at least "
            f"{top / fmt.max:g}"
        )


def describe_scale(scale: Tensor) -> str:
    """Return ``2^-5``, ``1.5*2^-7`` or ``2^-5..2^-3`` where there are several."""
    if is_traced(scale) or not scale.numel():
        return "?"
    low, high = _describe_ends(scale, "")
    return low if scale.dim() == 0 else f"{low}..{high}"


def describe_change(old: Tensor, new: Tensor) -> str:
    """Return how many scales change, and by how much, in words."""
    if not old.numel():
        return "no scale to change"
    low, high = _describe_ends(new / old, "+")
    return f"{int((old != new).sum())} of {old.numel()} scales changed, by {low} to {high}"


def _describe_ends(factors: Tensor, sign: str) -> tuple[str, str]:
    """Return the least and the largest of positive numbers, in words.

    With a ``sign`` of "+" exponents have a sign.
    """
    mantissas, exponents = torch.frexp(torch.stack(torch.aminmax(factors)))
    low, high = mantissas.tolist()
    exponent_of_low, exponent_of_high = exponents.tolist()
    return (
        _describe_factor(low, exponent_of_low, sign),
        _describe_factor(high, exponent_of_high, sign),
    )


def _describe_factor(mantissa: float, exponent: int, sign: str) -> str:
    # frexp's mantissas are in [0.5, 1)
    power = f"2^{exponent - 1:{sign}d}"
    factor = f"{2 * mantissa:.6g}"
    return power if factor == "1" else f"{factor}*{power}"


def warn_if_saturated(values: Tensor, scale: Tensor, fmt: FloatFormat) -> None:
    """Warn of values that lie too far beyond the range to round to its end."""
    if is_traced(scale) or is_traced(values):
        return
    beyond = int((values.abs() > scale * (fmt.max + fmt.ulp_max / 2)).sum())
    if beyond:
        warnings.warn(
            f"{beyond} of {values.numel()} values are beyond the range of a stored {fmt.name} "
            "scale, and saturate: raise the scale with adapt_scale_ or rescale_, or make a new "
            "FP8Parameter of the values",
            scaling.SaturationWarning,
            stacklevel=2,
        )


def warn_if_lost(
    values: Tensor, scale: Tensor, fmt: FloatFormat, granularity: StoredGranularity
) -> None:
    """Warn if even the largest value under a scale rounds to zero."""
    if is_traced(scale) or is_traced(values) or not values.numel():
        return
    amax = scaling.amax_of(values, granularity)
    lost = int(((amax > 0) & (amax <= scale * (fmt.ulp_min / 2))).sum())
    if lost:
        warnings.warn(
            f"at {lost} of {amax.numel()} scales all values are below half a step of {fmt.name} "
            "near 0, and most become 0: lower the scale first, with adapt_scale_ or rescale_, or "
            "make a new FP8Parameter of the values",
            scaling.UnderflowWarning,
            stacklevel=2,
        )


def warn_of_rounding(fmt: FloatFormat) -> None:
    """Warn that values assigned to the ``data`` of a weight were rounded."""
    warnings.warn(
        f"values assigned to the data of a weight in {fmt.name} were rounded: merging an adapter "
        "this way may change outputs, and unmerging it does not restore the weight; to round "
        "once, call dequantize_model, merge_and_unload and quantize_model",
        UserWarning,
        stacklevel=3,
    )


def refit_scale_(tensor: Any, values: Tensor, *, fresh: bool) -> None:
    """Set the scale of a tensor whose values are all about to be replaced.

    Args:
        tensor: its codes stay as they are.
        values: the new values. The scale stays if they are not finite.
        fresh: the new scale does not depend on the present one. Otherwise that one
            stays if it suits the values, or if they are on its grid already.
    """
    amax = scaling.amax_of(values, tensor.granularity)
    if not bool(amax.isfinite().all()):
        return
    old = tensor.scale
    # refitted_scale replaces 0, which is no valid scale
    present = torch.where(amax > 0, 0.0, old) if fresh else old
    new = scaling.refitted_scale(amax, present, tensor.format)
    if torch.equal(new, old):
        return
    if not fresh and _are_on_grid(tensor, values):
        return
    _LOG.info(
        "%s of shape %s: %s", tensor.format.name, tuple(tensor.shape), describe_change(old, new)
    )
    tensor.set_scale_(new)


def _are_on_grid(tensor: Any, values: Tensor) -> bool:
    """Return True if a tensor has codes for these values, or those in its dtype."""
    scale = tensor.expanded_scale()
    points = round_to_grid(divided(values, scale), tensor.format) * scale
    return bool(((points == values) | (points.to(tensor.dtype) == values)).all())


def optimizer_state_of(tensor: Any) -> dict[str, Any]:
    """Return the state that its optimizer has for a tensor of codes.

    It is empty without an optimizer.
    """
    optimizer = None if tensor.stepped_by is None else tensor.stepped_by()
    if optimizer is None:
        return {}
    for parameter, state in optimizer.state.items():
        if getattr(parameter, "codes", None) is tensor.codes:
            return state  # type: ignore[no-any-return]
    return {}


def largest_with_residual(tensor: Any, residual: Tensor | None) -> Tensor:
    """Return the largest magnitude under each scale of codes and residual, in value.

    Args:
        tensor: NaN is left out.
        residual: what codes could not hold, int8 in 1/256 of a step; None for none.
    """
    if residual is None or not tensor.codes.numel():
        largest: Tensor = tensor.largest()
        return largest
    is_finite = (tensor.codes & (tensor.format.sign_bit - 1)) <= tensor.format.max_code
    sums = _units_with_residual(tensor, residual) * tensor.expanded_scale()
    amax = scaling.amax_of(torch.where(is_finite, sums, 0.0), tensor.granularity)
    # without what a residual would add to the largest value
    return amax.minimum(tensor.scale * tensor.format.max)


def rewrite_with_residual(tensor: Any, residual: Tensor, new_scale: Tensor) -> None:
    """Write codes and residual anew, in place, for another scale.

    Their sum stays, rounded at random to 1/256 of a step. Where the scale stays, so do
    both. The scale itself is left to the caller.
    """
    fmt, codes = tensor.format, tensor.codes
    ratio = tensor.expanded_scale() / expand_scale(new_scale, tensor.block_size, codes.shape)
    # draws are independent of each other, as those of every operator
    draws = random_bits(
        codes.shape,
        device=codes.device,
        seed=tensor.seed,
        step=int(tensor.counter),
        stream=named_word("rescale_") if tensor.by_operator else 0,
    )
    tensor.counter.add_(1)
    units = _units_with_residual(tensor, residual) * ratio
    joined = encode_signed(units, fmt, draws, _RESIDUAL_BITS)
    new_codes, new_residual = split_codes(joined, fmt, _RESIDUAL_BITS, codes)
    residual.copy_(torch.where(ratio == 1, residual, new_residual.to(torch.int8)))
    codes.copy_(torch.where(ratio == 1, codes, keep_nan_codes(new_codes, codes, fmt)))


def _units_with_residual(tensor: Any, residual: Tensor) -> Tensor:
    """Return the sum of codes and residual in units of the scale, float32."""
    joined = joined_codes(
        tensor.codes.to(torch.int32), residual.to(torch.int32), tensor.format, _RESIDUAL_BITS
    )
    units, _ = decode_signed(joined, tensor.format, _RESIDUAL_BITS)
    return units
