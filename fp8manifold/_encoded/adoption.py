"""What an encoded tensor takes over: the parts of another that is copied into it, or a new scale."""

from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.loading import is_loading
from fp8manifold._encoded.scaled import as_kept
from fp8manifold._encoded.stored_scale import broadcasts_to, check_covers, scale_in_float32

__all__ = ["adopt_parts", "checked_remainder", "checked_scale"]


def adopt_parts(own: Any, other: Any) -> Tensor | None:
    """Codes and scale exactly, and the counter: the larger one, or while a module loads the other's, with its seed.

    Args:
        own, other: tensors of codes.

    Returns:
        What rounding left in the other, in memory of its own.

    Raises:
        ValueError: another format or shape, or scales finer than the own.
    """
    if other.format != own.format:
        raise ValueError(f"the other tensor is of {other.format.name}, but this one is of {own.format.name}")
    if other.shape != own.shape:
        raise ValueError(f"the other tensor has shape {tuple(other.shape)}, but this one {tuple(own.shape)}")
    scale = other.expanded_scale() if other.block_size != own.block_size else other.kept_scale
    if not broadcasts_to(scale.shape, own.kept_scale.shape):
        raise ValueError(
            f"the other tensor has a scale for each {other.granularity}, this one for each {own.granularity}"
        )
    kept = other.kept_scale if other.block_size == own.block_size else as_kept(own, scale)
    counter = other.counter
    if is_loading():
        own.seed, own.by_operator, own.draws = other.seed, other.by_operator, other.draws
    else:
        counter = torch.maximum(own.counter, counter.to(own.counter.device))
    for mine, part in ((own.codes, other.codes), (own.kept_scale, kept), (own.counter, counter)):
        mine.copy_(part)
    return None if other.remainder is None else other.remainder.to(own.codes.device, copy=True)


def checked_scale(own: Any, scale: float | Tensor) -> Tensor:
    """A new scale in the shape of the old one.

    Raises:
        TypeError: uint8, which might be exponents.
        ValueError: a scale that is no power of two, does not fit, or is too narrow for a stored value.
    """
    new, shape = scale_in_float32(scale, own.device), own.kept_scale.shape
    as_kept(own, new)  # or refused
    if not broadcasts_to(new.shape, shape):
        raise ValueError(f"scale has shape {tuple(new.shape)}: it must fit {tuple(shape)}")
    new = new.expand(shape)
    check_covers(new, own.largest(), own.format)
    return new


def checked_remainder(left: Tensor | None, codes: Tensor) -> Tensor | None:
    """What rounding left, as it was saved, if it was.

    Raises:
        ValueError: another dtype or shape.
    """
    if left is not None and (left.dtype != torch.int8 or left.shape != codes.shape):
        raise ValueError(
            f"remainder is {left.dtype} of shape {tuple(left.shape)}: it must be torch.int8 of {tuple(codes.shape)}"
        )
    return left
