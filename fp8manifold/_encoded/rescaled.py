"""Other scales for weights that something is kept beside: what rounding left, and what an optimizer has of them."""

from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.storage import expand_scale
from fp8manifold._numerics.codec import decode_signed, encode_signed, joined_codes, split_codes, unless_special
from fp8manifold.random_bits import named_word, random_bits
from fp8manifold.scaling import amax_of

_BITS = 8


def entry_of(own: Any) -> dict[str, Any]:
    """What the optimizer that steps a tensor of codes keeps for it; empty where none does."""
    optimizer = None if own.stepped_by is None else own.stepped_by()
    entries = {} if optimizer is None else optimizer.state
    return next((entry for p, entry in entries.items() if getattr(p, "codes", None) is own.codes), {})


def largest_of(own: Any, left: Tensor | None) -> Tensor:
    """The largest magnitude under each scale, in value, with what is left beside the codes."""
    if left is None or not own.codes.numel():
        largest: Tensor = own.largest()
        return largest
    finite = (own.codes & (own.format.sign_bit - 1)) <= own.format.max_code
    values = torch.where(finite, _units(own, left) * own.expanded_scale(), 0.0)
    return amax_of(values, own.granularity).minimum(own.scale * own.format.max)


def _units(own: Any, left: Tensor) -> Tensor:
    """The sum in units of the scale, float32."""
    joined = joined_codes(own.codes.to(torch.int32), left.to(torch.int32), own.format, _BITS)
    return decode_signed(joined, own.format, _BITS)[0]


def rewrite_together(own: Any, left: Tensor, new: Tensor) -> None:
    """Write codes, and what is left beside them, at other scales: their sum stays, rounded at random to 1/256 step.

    .. math:: s' (w' + r') = s (w + r) \\text{ on average,} \\qquad |r'| \\le 1/2 \\text{ step}

    Args:
        own: the tensor, at its old scales.
        left: int8, in 1/256 of a step of the chart.
        new: the other scales, in the shape of its own.
    """
    fmt, codes = own.format, own.codes
    ratio = own.expanded_scale() / expand_scale(new, own.block_size, codes.shape)
    stream = named_word("rescale_") if own.by_operator else 0
    key = {"seed": own.seed, "step": int(own.counter), "stream": stream}
    draws = random_bits(codes.shape, device=codes.device, **key)  # independent, as of every operator
    own.counter.add_(1)
    rounded, rest = split_codes(encode_signed(_units(own, left) * ratio, fmt, draws, _BITS), fmt, _BITS)
    left.copy_(torch.where(ratio == 1, left, rest.to(torch.int8)))
    codes.copy_(torch.where(ratio == 1, codes, unless_special(rounded, codes, fmt)))
