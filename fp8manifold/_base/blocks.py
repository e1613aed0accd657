"""Walking a large tensor in pieces that stay in a core's cache, so that a chain of
operations costs one pass.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 131_072
"""Elements per block: few enough that temporaries stay in the second-level cache, many
enough to hide the calls.
"""
_LAUNCHED = 2**22
"""Elements per block on a GPU: they keep it busy for longer than Python takes to launch
the next operation.
"""


def block_on(device: torch.device) -> int:
    """Elements per block of a chain of operations on a device."""
    return BLOCK if device.type == "cpu" else _LAUNCHED


def runs_in_blocks(device: torch.device | str | None, numel: int) -> bool:
    """True if a chain of operations over ``numel`` elements is worth cutting up: eager,
    on the CPU and large.
    """
    if torch.compiler.is_compiling() or numel <= BLOCK:
        return False
    return torch.device(device if device is not None else "cpu").type == "cpu"


PIECE: Final = 2**20
"""Elements per piece of rows of a tensor that is turned into codes: its temporaries are
some megabytes.
"""


def in_pieces(x: Tensor) -> bool:
    """True if a tensor is worth taking some rows at a time, so that temporaries are not
    as large as it is.
    """
    return (
        x.dim() > 1 and x.shape[0] > 1 and runs_in_blocks(x.device, x.numel()) and x.numel() > PIECE
    )


def pieces(x: Tensor, whole: int = 1) -> list[slice]:
    """Slices of the first dimension, each of about ``PIECE`` elements, and in length a
    multiple of ``whole``.
    """
    length = max(1, PIECE * x.shape[0] // x.numel())
    length = -(-length // whole) * whole
    return [slice(start, start + length) for start in range(0, x.shape[0], length)]


def blockwise(
    function: Callable[[Tensor, int, Tensor | None], Tensor], x: Tensor, dtype: torch.dtype
) -> Tensor:
    """``function(block, start, out)`` over the flattened ``x``, block by block; ``out``
    is what it may write into.
    """
    flat = x.reshape(-1).resolve_neg()  # functions read bits
    if not runs_in_blocks(x.device, flat.numel()):
        return function(flat, 0, None).to(dtype).view(x.shape)
    whole = torch.empty(flat.numel(), dtype=dtype, device=x.device)
    for start in range(0, flat.numel(), BLOCK):
        out = whole[start : start + BLOCK]
        result = function(flat[start : start + BLOCK], start, out)
        if result is not out:
            out.copy_(result)
    return whole.view(x.shape)
