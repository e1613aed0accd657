"""Tensors walked in pieces that stay in a core's cache, so that a chain of operations costs one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import fp8manifold as fm

Scale = Tensor | float
"""Positive; a tensor broadcasts against what it scales."""
#: elements a piece, on the CPU
BLOCK = 131_072


def fitting(scale: Scale, x: Tensor) -> Tensor:
    """Return a scale as a tensor that does not widen `x`."""
    return torch.as_tensor(scale, device=x.device).detach().to(_working(x))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape, in float32 or float64; one empty piece of empty tensors."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    numel = flat[0].numel()
    size = BLOCK if flat[0].device.type == "cpu" else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        yield tuple(part[start : start + size].to(_working(part)) for part in flat)


def scaled_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the scale's piece (flat, or one number), and the pieces of the tensors."""
    fitted = fitting(scale, tensors[0])
    if fitted.numel() == 1:
        one = fitted.reshape(())
        for parts in blocks(*tensors):
            yield one, *parts
        return
    yield from blocks(fitted.expand(tensors[0].shape), *tensors)


def unit_blocks(scale: Scale, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the scale's piece, and the pieces of the tensors in units of it."""
    for scales, *parts in scaled_blocks(scale, *tensors):
        yield scales, *(part / scales for part in parts)


def inside(units: Tensor, fmt: fm.FloatFormat) -> Tensor:
    """Return the nearest values within the range of a format; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def share(mask: Tensor) -> float:
    """Return the share of a mask that is set; 0 where there is nothing."""
    return int(mask.sum()) / max(mask.numel(), 1)


def _working(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
