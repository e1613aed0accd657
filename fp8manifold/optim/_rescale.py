"""Widening the scale of one-byte weights that have reached the end of their range: rare, explicit, unbiased."""

import logging
import math
from typing import Any

import torch

from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._numerics.codec import encode_finite, encode_signed
from fp8manifold._ranks import local_of
from fp8manifold.optim._job import row_view
from fp8manifold.optim._plan import Grid
from fp8manifold.optim._residuals import pack_residual, unpack_residual
from fp8manifold.optim._variant import Variant
from fp8manifold.optim._weights import load_weights
from fp8manifold.optim._writeback import split_codes, unless_special
from fp8manifold.random_bits import draw_of, word_range
from fp8manifold.scaling import widened_scale
from fp8manifold.tensor import FP8Tensor

__all__ = ["widened"]

_LOG = logging.getLogger("fp8manifold")
_FOR_RESCALING = 2
"""A fourth key word, so that no draw of a step is used again."""


def widened(
    parameter: FP8Tensor, state: dict[str, Any], grid: Grid, variant: Variant, words: tuple[int, int, int]
) -> bool:
    """Give each scale whose largest weight is the format's its headroom back; whether there was any.

    Weights, with the residual kept beside them, are rounded stochastically once, which moves none that the wider grid
    holds.  Scales are never narrowed here: that is :meth:`FP8Tensor.adapt_scale_`.  Where processes hold a part of it
    each, they do so together.
    """
    old = parameter.scale
    widest = 2.0 ** min(127, 127 - math.floor(math.log2(parameter.format.max)))  # its max is still a float32
    largest = parameter.largest() if old.dim() else grid.ranks.largest(parameter.largest())
    new = widened_scale(largest, old, parameter.format).clamp(max=widest).maximum(old)
    if not grid.ranks.any(not torch.equal(old, new), old.device):
        return False
    change = describe_change(old, new)
    _LOG.info("%s of shape %s saturates: %s", parameter.format.name, tuple(parameter.shape), change)
    if not parameter.numel():
        old.copy_(new)
        return True
    bits, layout = variant.residual_bits, grid.layout(blocks=False)
    arrays = {"weight": grid.weight.view(layout.dims), "scale": row_view(old, parameter.shape, layout)}
    if bits:
        kept = local_of(state["residual"])
        arrays["residual"] = unpack_residual(kept, parameter.shape, bits).view(layout.dims)
    ratio = row_view(old / new, parameter.shape, layout)
    x = load_weights(variant, arrays, torch.float32).x * ratio
    offset = 0 if grid.share is None else grid.share.offset
    draws = draw_of(word_range(offset, x.numel(), (*words, _FOR_RESCALING), x.device)).view(x.shape)
    if not bits:
        codes = encode_finite(x, parameter.format, draws)
    else:
        codes, residual = split_codes(encode_signed(x, parameter.format, draws, bits), parameter.format, bits)
        residual = residual.to(torch.int8).view(parameter.shape)
        kept.copy_(pack_residual(residual, bits, in_rows=kept.dim() > 1))
    weight = arrays["weight"]
    weight.copy_(unless_special(codes, weight, parameter.format))
    parameter.scale.copy_(new)
    return True
