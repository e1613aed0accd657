"""How a parameter is laid out for a step: dimensions of the view, and how scales and blocks fit them."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

__all__ = ["Layout", "index_in", "layout_of", "row_view"]

_LONGEST_BLOCK: Final = 256
_SHORTEST_BLOCK: Final = 32


@dataclass(frozen=True)
class Layout:
    """A view of one or two dimensions that every array of a step broadcasts to.

    ``dims`` are (rows, length), or the length alone where there is one row; a row is a block of the averages, where
    they are stored in blocks, or what shares a scale.
    """

    dims: tuple[int, ...]
    #: dimensions of a scale, one for a row or for an element; () for one in all
    row_dims: tuple[int, ...]
    #: rows of the view that share one of the scale's entries
    repeats: int = 1

    @property
    def block_dims(self) -> tuple[int, ...]:
        """Dimensions of what there is one of for a block."""
        return (*self.dims[:-1], 1)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def compiles(self) -> bool:
        """A dimension of 1 is compiled for anew, so that such a view is left to eager code."""
        return min(self.dims) > 1


def index_in(shape: torch.Size, device: torch.device) -> Tensor:
    """The position of every element of a view, int32."""
    columns = torch.arange(shape[-1], dtype=torch.int32, device=device)
    if len(shape) == 1:
        return columns
    rows = torch.arange(shape[0], dtype=torch.int32, device=device) * shape[1]
    return rows.unsqueeze(1) + columns


def row_view(scale: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """What there is one of for a scale, for the rows of a view."""
    if layout.row_dims == layout.dims and scale.numel() != layout.numel:
        scale = scale.expand(shape)
    if layout.repeats > 1:
        scale = scale.reshape(-1).repeat_interleave(layout.repeats)
    return scale.reshape(layout.row_dims)


@lru_cache(maxsize=4096)
def layout_of(
    shape: tuple[int, ...], scale_shape: tuple[int, ...] | None, block_size: int | None, blocks: bool
) -> Layout:
    """The layout of a parameter.

    Args:
        shape: of the parameter.
        scale_shape: of its scale; None for an ordinary parameter.
        block_size: length of the blocks that share a scale, where there are such.
        blocks: whether averages are stored in blocks.
    """
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    if scale_shape is None or math.prod(scale_shape) == 1:
        row_dims: tuple[int, ...] | None = ()
        if not blocks and scale_shape is None:
            rows = 1
    elif block_size is not None:
        rows, row_dims = numel // block_size, None
    elif len(shape) > 1 and scale_shape == (rows, *(1,) * (len(shape) - 1)):
        row_dims = None
    else:
        return Layout((numel,), (numel,))
    length = numel // rows
    block = _block_length(length) if blocks else length
    repeats = length // block
    dims = (rows * repeats, block) if rows * repeats > 1 else (block,)
    row_dims = (rows * repeats, 1) if row_dims is None and len(dims) == 2 else ()
    return Layout(dims, row_dims, repeats if row_dims else 1)


def _block_length(length: int) -> int:
    """The longest block up to 256 that divides a row, or the row itself where only a short one does."""
    for block in range(min(length, _LONGEST_BLOCK), _SHORTEST_BLOCK - 1, -1):
        if length % block == 0:
            return block
    return length
