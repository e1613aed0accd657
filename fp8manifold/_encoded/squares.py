"""Squares of 128 x 128 weights that share a scale: partial ones end the rows and columns of a matrix."""

import math
from typing import Final

from torch import Tensor

from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE

__all__ = [
    "SQUARE",
    "BlockSize",
    "block_size_of",
    "expand_squares",
    "number_of",
    "run_length",
    "runs_of",
    "runs_of_rows",
    "spread_rows",
]

BlockSize = int | tuple[int, int] | None
"""What shares a scale: 32 weights of a row, 128 x 128 of the last two dimensions, or what the scale's shape says."""

SQUARE: Final = (SQUARE_SIZE, SQUARE_SIZE)

_SHORTEST_RUN: Final = 32
_KNOWN: Final[dict[int, BlockSize]] = {0: None, BLOCK_SIZE: BLOCK_SIZE, SQUARE_SIZE**2: SQUARE}


def number_of(block_size: BlockSize) -> int:
    """The weights that share a scale, as states of plain numbers have it; 0 where no blocks do."""
    return next(number for number, known in _KNOWN.items() if known == block_size)


def block_size_of(number: int) -> BlockSize:
    """The way back.

    Raises:
        ValueError: a number that no block has.
    """
    if number not in _KNOWN:
        raise ValueError(f"blocks of {number} weights are unknown: {', '.join(map(str, _KNOWN))}")
    return _KNOWN[number]


def expand_squares(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One scale a square, of the last two dimensions, as one a weight."""
    return _cut_to(spread_rows(scale, shape[-2]).repeat_interleave(SQUARE_SIZE, -1), shape[-1])


def run_length(columns: int) -> int:
    """Weights of a row that share a scale, in equal runs: kernels know no others.

    It is the row of a matrix of one column of squares, otherwise a divisor of 128 that is no shorter than 32, or 1.
    """
    if columns <= SQUARE_SIZE:
        return max(columns, 1)
    length = math.gcd(columns, SQUARE_SIZE)
    return length if length >= _SHORTEST_RUN else 1


def runs_of(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One scale a square as one for each of the runs that :func:`run_length` has, contiguous."""
    return runs_of_rows(spread_rows(scale, shape[-2]), shape[-1])


def runs_of_rows(scale: Tensor, columns: int) -> Tensor:
    """The same of rows that have their scales already, one for each square that a row runs through."""
    length = run_length(columns)
    if columns <= SQUARE_SIZE:
        return scale.contiguous()
    return _cut_to(scale.repeat_interleave(SQUARE_SIZE // length, -1), columns // length)


def spread_rows(scale: Tensor, rows: int) -> Tensor:
    """One scale a square as one a row, for each square that it runs through."""
    return scale.repeat_interleave(SQUARE_SIZE, -2)[..., :rows, :]


def _cut_to(scale: Tensor, columns: int) -> Tensor:
    return scale[..., :columns].contiguous()
