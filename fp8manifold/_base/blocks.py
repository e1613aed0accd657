"""Cut a large tensor into pieces.

A chain of ten operations on a large tensor reads and writes memory ten times. On a
block that fits in a core's cache, it reads memory once and writes it once. These blocks
are not those of weights that share a scale (``scaling.BLOCK_SIZE``).
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 131_072
"""Elements per block on the CPU.

They are few enough that temporaries stay in the second-level cache, and many enough to
hide the cost of calls.
"""
_GPU_BLOCK: Final = 2**22
"""Elements per block on a GPU.

They keep it busy for longer than Python takes to launch the next operation.
"""
PIECE: Final = BLOCK
"""Elements per piece of rows of a tensor that is encoded: temporaries of half a megabyte."""
Index = tuple[int | slice, ...]
"""A part of a tensor: a number or a slice with both ends for each dimension."""


def block_on(device: torch.device) -> int:
    """Return the number of elements per block on a device."""
    return BLOCK if device.type == "cpu" else _GPU_BLOCK


def runs_in_blocks(device: torch.device | str | None, numel: int) -> bool:
    """True if a chain of operations is worth cutting up: eager, on the CPU and large."""
    if torch.compiler.is_compiling() or numel <= BLOCK:
        return False
    return torch.device(device if device is not None else "cpu").type == "cpu"


def in_pieces(x: Tensor) -> bool:
    """True if a tensor is worth taking some rows at a time.

    Temporaries are then smaller than the tensor itself.
    """
    if x.dim() <= 1 or x.shape[0] <= 1:
        return False
    return runs_in_blocks(x.device, x.numel()) and x.numel() > PIECE


def pieces(x: Tensor, multiple: int = 1) -> list[slice]:
    """Return slices of the first dimension, each of about ``PIECE`` elements.

    Their lengths are multiples of ``multiple``.
    """
    length = max(1, PIECE * x.shape[0] // x.numel())
    length = -(-length // multiple) * multiple
    return [slice(start, start + length) for start in range(0, x.shape[0], length)]


def indices_of_pieces(shape: Sequence[int]) -> Iterator[Index]:
    """Yield the indices of pieces of about ``PIECE`` elements that make up a tensor.

    They are in the order of its memory. A piece is some rows of a matrix, or some
    entries of a stack.
    """
    if len(shape) < 2 or prod(shape) <= PIECE:
        yield tuple(slice(0, size) for size in shape)
        return
    rest = shape[1:]
    numel = prod(rest)
    if numel > PIECE and len(rest) > 1:
        for number in range(shape[0]):
            for index in indices_of_pieces(rest):
                yield (number, *index)
        return
    length = max(1, PIECE // numel)
    whole = tuple(slice(0, size) for size in rest)
    for start in range(0, shape[0], length):
        yield (slice(start, min(start + length, shape[0])), *whole)


def blockwise(
    function: Callable[[Tensor, int, Tensor | None], Tensor], x: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return ``function(block, start, out)`` over the flattened ``x``, block by block.

    The function returns as many elements as its block has. ``start`` is the position of
    the first of them. ``out`` is memory that it may return its result in, or None.
    """
    # Functions read bits, in which a lazy negation is not yet done.
    flat = x.reshape(-1).resolve_neg()
    if not runs_in_blocks(x.device, flat.numel()):
        return function(flat, 0, None).to(dtype).view(x.shape)
    results = torch.empty(flat.numel(), dtype=dtype, device=x.device)
    for start in range(0, flat.numel(), BLOCK):
        out = results[start : start + BLOCK]
        result = function(flat[start : start + BLOCK], start, out)
        if result is not out:
            out.copy_(result)
    return results.view(x.shape)
