"""Widening the scale of one-byte weights that have reached the end of their range: rare, explicit, unbiased."""

import logging
import math
from typing import Any

import torch

from fp8manifold._codec import encode_finite, encode_signed
from fp8manifold._stored_scale import describe_change
from fp8manifold.optim._job import Job
from fp8manifold.optim._layout import row_view
from fp8manifold.optim._plan import pack_nibbles, unpack_nibbles
from fp8manifold.optim._weights import load_weights
from fp8manifold.optim._writeback import split_codes, unless_special
from fp8manifold.random_bits import draw_of, word_range
from fp8manifold.scaling import widened_scale
from fp8manifold.tensor import FP8Tensor

__all__ = ["widened"]

_LOG = logging.getLogger("fp8manifold")
_FOR_RESCALING = 2
"""A fourth key word, so that no draw of a step is used again."""


def widened(parameter: FP8Tensor, state: dict[str, Any], job: Job, words: tuple[int, int, int]) -> bool:
    """Give each scale whose largest weight is the format's its headroom back; whether there was any.

    Weights, with the residual kept beside them, are rounded stochastically once, which moves none that the wider grid
    holds.  Scales are never narrowed here: that is :meth:`FP8Tensor.adapt_scale_`.
    """
    old = parameter.scale
    widest = 2.0 ** min(127, 127 - math.floor(math.log2(parameter.format.max)))  # its max is still a float32
    new = widened_scale(parameter.largest(), old, parameter.format).clamp(max=widest).maximum(old)
    if torch.equal(old, new):
        return False
    change = describe_change(old, new)
    _LOG.info("%s of shape %s saturates: %s", parameter.format.name, tuple(parameter.shape), change)
    bits, arrays = job.variant.residual_bits, dict(job.arrays)
    if bits == 4:
        arrays["residual"] = unpack_nibbles(state["residual"], parameter.shape).view(job.layout.dims)
    ratio = row_view(old / new, parameter.shape, job.layout)
    x = load_weights(job.variant, arrays, torch.float32).x * ratio
    draws = draw_of(word_range(0, x.numel(), (*words, _FOR_RESCALING), x.device)).view(x.shape)
    if not bits:
        codes = encode_finite(x, parameter.format, draws)
    else:
        codes, residual = split_codes(encode_signed(x, parameter.format, draws, bits), parameter.format, bits)
        packed = pack_nibbles(residual.to(torch.int8)) if bits == 4 else residual.view(parameter.shape)
        state["residual"].copy_(packed)
    weight = arrays["weight"]
    weight.copy_(unless_special(codes, weight, parameter.format))
    parameter.scale.copy_(new)
    return True
