"""A layer's weight in one byte a number, with the options that the layer was made with."""

import torch
from torch import Tensor

from fp8manifold._encoded.traits import Rounding
from fp8manifold.formats import FloatFormat
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import Granularity

__all__ = ["byte_weight"]


def byte_weight(
    weight: Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    seed: int,
    draws: Draws,
    *,
    granularity: Granularity,
    headroom: float | None,
    keep_remainder: bool,
) -> FP8Parameter:
    """The codes of a float weight at a scale of its own.

    Args:
        weight: float32 or bfloat16.
        fmt: format of the codes.
        rounding, seed, draws: of what others write into it.
        granularity, headroom: of the scale.
        keep_remainder: whether what rounding leaves is kept.

    Raises:
        TypeError: another dtype.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"a weight has dtype {weight.dtype}: storage='fp8' takes float32 or bfloat16 layers")
    return FP8Parameter(
        weight.detach(),
        fmt,
        granularity=granularity,
        headroom=headroom,
        rounding=rounding,
        seed=seed,
        draws=draws,
        keep_remainder=keep_remainder,
        requires_grad=weight.requires_grad,
    )
