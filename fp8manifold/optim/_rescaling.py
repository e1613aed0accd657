"""Codes under other scales: values stay, but for a stochastic rounding to the new grid.

Rows whose scale stays are not touched. Draws go by a weight's position, so shards and
native code have the same bits.
"""

import torch
from torch import Tensor

from fp8manifold._native._arrays import rescale_by_kernel
from fp8manifold._numerics.codec import encode_finite, encode_signed, keep_nan_codes, split_codes
from fp8manifold._ranks import local_of
from fp8manifold.optim._eager_step import load_weights
from fp8manifold.optim._slot import Slot, row_view
from fp8manifold.random_bits import FOR_RESCALING, DrawKey, draw_of, words_at


def rescale_codes(slot: Slot, new: Tensor) -> None:
    """Round the weights of every scale that changes to its new grid, in place.

    ``new`` has the new scales, as :func:`scales_in_runs` returns them.
    """
    scale = slot.scale
    assert scale is not None
    codes = local_of(slot.parameter).codes
    view = slot.view_in(blocks=False)
    old_by_row = row_view(scale, codes.shape, view).flatten()
    new_by_row = row_view(new, codes.shape, view).flatten()
    factors = old_by_row / new_by_row
    weight = codes.view(len(factors), -1)
    residual = None
    if slot.spec.residual_bits:
        residual = local_of(slot.state["residual"]).view(weight.shape)
    key = DrawKey((*slot.draw_words, FOR_RESCALING))
    offset = 0 if slot.share is None else slot.share.offset
    assert slot.fmt is not None
    if not rescale_by_kernel(weight, residual, slot.fmt, factors, key, offset):
        _rescale_with_torch(slot, weight, residual, factors, key, offset)


def _rescale_with_torch(
    slot: Slot,
    weight: Tensor,
    residual: Tensor | None,
    factors: Tensor,
    key: DrawKey,
    offset: int,
) -> None:
    """Do the same with PyTorch's operations, on the rows that change."""
    fmt, bits = slot.fmt, slot.spec.residual_bits
    assert fmt is not None
    rows = (factors != 1).nonzero().flatten()
    arrays = {"weight": weight[rows]}
    if residual is not None:
        arrays["residual"] = residual[rows]
    x = load_weights(slot.spec, arrays, torch.float32).x * factors[rows].unsqueeze(1)
    columns = torch.arange(weight.shape[1], device=x.device)
    positions = (rows * weight.shape[1] + offset).unsqueeze(1) + columns
    draws = draw_of(words_at(positions, key.words))
    if residual is not None:
        rounded, rest = split_codes(encode_signed(x, fmt, draws, bits), fmt, bits, arrays["weight"])
        residual[rows] = rest.to(torch.int8)
    else:
        rounded = encode_finite(x, fmt, draws)
    weight[rows] = keep_nan_codes(rounded, arrays["weight"], fmt)
