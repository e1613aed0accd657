"""Adafactor's second moment: its statistics, and the factors of a gradient that follow.

A matrix ``G`` of n rows and m columns has n + m numbers in place of n m::

    G^2  -> means of rows and columns -> row_var, col_var     averages, in the state
         -> 1 / sqrt                  -> row, column          `Factors`
    u_ij = g_ij min(row_i column_j, cap)                      `Factors.multiplier`

A vector has a full second moment (``variance``): it is a matrix of one row, whose factor
is 1.

The functions here are the definition, on plain tensors. `_factored.py` applies them to a
parameter in a step, whole or sharded. ``_native/factors.c`` is their twin.

Sums are the only operations of a step whose result depends on their order. Theirs is
fixed, so that threads, blocks, processes and devices change no bit:

    along a row     tiles of 512 neighbours; in a tile the upper half is added to the
                    lower one until one number is left (`sum_of_tiles`)
    along the rest  tiles of a row, rows of a matrix: runs of 32, each added up from its
                    first to its last, and then runs of these sums (`sum_of_runs`)

Missing numbers at the end of a tile or a run count as 0. A sum of squares that overflows
is the dtype's largest value.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8manifold._numerics.stiffness import sqrt_exact

TILE: Final = 512
"""Neighbours in a row that are added up by halves."""
RUN: Final = 32
"""Numbers that are added up one after the other."""


class Preconditioner(StrEnum):
    """What divides a gradient before the rest of a step."""

    NONE = "none"
    #: a second moment of rows and one of columns
    FACTORED = "factored"
    #: one of every element
    WHOLE = "whole"


STATISTICS: Final = {
    Preconditioner.NONE: (),
    Preconditioner.FACTORED: ("row_var", "col_var"),
    Preconditioner.WHOLE: ("variance",),
}
"""Entries of the state, named as in ``torch.optim.Adafactor``."""
STATISTIC_NAMES: Final = tuple(chain.from_iterable(STATISTICS.values()))


class FactoredShape(StrEnum):
    """A reading of a parameter as matrices; the option ``matrix_shape`` is the plain word."""

    #: the last two dimensions are a matrix, as in torch
    AUTO = "auto"
    #: one matrix, with a row for each index of the first dimension
    FLATTEN = "flatten"


FACTORED_SHAPES: Final = tuple(shape.value for shape in FactoredShape)


class Matrices(NamedTuple):
    """How a parameter is read: so many matrices of one size."""

    matrices: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.matrices * self.rows * self.columns


def matrices_of(shape: Sequence[int], matrix_shape: str) -> Matrices:
    """Return the matrices that a parameter is; a vector is one of one row."""
    if len(shape) < 2:
        return Matrices(1, 1, math.prod(shape))
    if matrix_shape == FactoredShape.FLATTEN:
        return Matrices(1, shape[0], math.prod(shape[1:]))
    return Matrices(math.prod(shape[:-2]), shape[-2], shape[-1])


def cuts_matrices(shape: Sequence[int], matrix_shape: str) -> bool:
    """Return True if the first dimension of a parameter has rows of one matrix."""
    return len(shape) == 2 or matrix_shape == FactoredShape.FLATTEN


def statistic_shapes(shape: Sequence[int], matrix_shape: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each entry of the state, by its name."""
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    if matrix_shape == FactoredShape.FLATTEN:
        return {"row_var": (shape[0], 1), "col_var": (1, math.prod(shape[1:]))}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


# Sums in a fixed order


def sum_of_tiles(x: Tensor) -> Tensor:
    """Return the sums over the last dimension, in tiles whose halves are added up."""
    length = x.shape[-1]
    width = min(TILE, 1 << (length - 1).bit_length())
    tiles = F.pad(x, (0, -length % width)).unflatten(-1, (-1, width))
    while width > 1:
        width //= 2
        tiles = tiles[..., :width] + tiles[..., width:]
    return sum_of_runs(tiles.squeeze(-1), -1)


def sum_of_runs(x: Tensor, dim: int) -> Tensor:
    """Return the sums over a dimension, in runs of 32, and runs of their sums."""
    sums = x.movedim(dim, 0)
    while len(sums) > 1:
        sums = sums_of_each_run(sums)
    return sums.squeeze(0)


def sums_of_each_run(x: Tensor) -> Tensor:
    """Return the sum of each run of 32 along the first dimension."""
    in_runs = len(x) // RUN * RUN
    parts = []
    if in_runs:
        parts.append(_sum_one_by_one(x[:in_runs].unflatten(0, (-1, RUN)), RUN))
    if in_runs < len(x):
        rest = x[in_runs:].unsqueeze(0)
        parts.append(_sum_one_by_one(rest, rest.shape[1]))
    return torch.cat(parts)


def _sum_one_by_one(runs: Tensor, length: int) -> Tensor:
    """Add up the second dimension, from the first to the last."""
    total = runs[:, 0].clone()
    for i in range(1, length):
        total += runs[:, i]
    return total


# From statistics to factors


def averaged(average: Tensor, mean: Tensor, beta2: Tensor, gain2: Tensor) -> Tensor:
    """Return a running average after a step."""
    return average * beta2 + mean * gain2


def inverse_root(x: Tensor) -> Tensor:
    """Return ``1 / sqrt(x)``; that of 0 is infinite."""
    return 1 / sqrt_exact(x)


def mean_of(total: Tensor, count: int) -> Tensor:
    """Return a mean, of a sum that ends at the dtype's largest value."""
    # a GPU multiplies by the reciprocal of a number
    return total.clamp(max=torch.finfo(total.dtype).max) / torch.full_like(total, count)


def root_of_mean(total: Tensor, count: int) -> Tensor:
    return sqrt_exact(mean_of(total, count))


class Factors(NamedTuple):
    r"""What a gradient is multiplied by, and how long a step is.

    .. math:: \hat u_{ij} = g_{ij} \min(row_i \, column_j, cap)
    """

    #: (matrices * rows)
    row: Tensor
    #: (matrices, columns)
    column: Tensor
    cap: Tensor
    #: what the learning rate is multiplied by: the root mean square of the weights
    size: Tensor
    #: rows of each matrix
    rows: int

    def multiplier(self, start: int, shape: Sequence[int]) -> Tensor:
        """Return what the elements from a position on are multiplied by, in a shape."""
        columns = self.column.shape[-1]
        places = torch.arange(start, start + math.prod(shape), device=self.row.device)
        row = places // columns
        column = row // self.rows * columns + places % columns
        products = self.row[row] * self.column.reshape(-1)[column]
        return torch.minimum(products, self.cap).view(*shape)

    def clipped(self, rms: Tensor, most: Tensor) -> "Factors":
        """Return factors whose direction has at most a root mean square.

        Args:
            rms: that of the direction.
            most: the option ``d``.
        """
        shrink = torch.where(rms > most, most / rms, 1.0)
        return self._replace(row=self.row * shrink, cap=self.cap * shrink)
