"""The values of a weight in codes, some rows at a time.

::

    part of a weight    (3, 0:64, 0:4096)      an expert's rows
    its scales          of channels (3, 0:64, 0), of squares (3, 0:1, 0:32), ...
    spread over it      in a shape that broadcasts against the part

A model's largest matrix may be a tenth of it, and its floats four times its codes. So
nothing here is made for a whole weight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold._base.blocks import Index, indices_of_pieces
from fp8manifold._base.tensor_writer import TensorToWrite
from fp8manifold._encoded.storage import SQUARE, BlockSize, divided
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import decode_checked, encode
from fp8manifold.tensor import FP8Tensor


@dataclass(frozen=True)
class Grid:
    """The values that codes of a weight can have.

    Attributes:
        format: of the codes.
        scale: in float32, of the shape that a weight has it in.
        block_size: the weights that share a scale, as in `storage`.
    """

    format: FloatFormat
    scale: Tensor
    block_size: BlockSize

    @staticmethod
    def of(weight: FP8Tensor) -> "Grid":
        """Return the grid of a weight."""
        return Grid(weight.format, weight.scale, weight.block_size)

    def scale_at(self, part: Index) -> Tensor:
        """Return the scales of a part of a weight, in a shape that broadcasts against it."""
        scale = self.scale
        if not scale.dim():
            return scale
        axis = 0
        for entry, count in zip(part, self._sharing_counts(len(part)), strict=True):
            is_shared = scale.shape[axis] == 1
            if isinstance(entry, int):
                scale = scale.select(axis, 0 if is_shared else entry // count)
                continue
            if not is_shared:
                numbers = torch.arange(entry.start, entry.stop, device=scale.device) // count
                scale = scale.index_select(axis, numbers)
            axis += 1
        return scale

    def _sharing_counts(self, dims: int) -> list[int]:
        """Return how many entries of each dimension share a scale, where it has several."""
        last_counts: Sequence[int] = ()
        if self.block_size == SQUARE:
            last_counts = SQUARE
        elif isinstance(self.block_size, int):
            last_counts = (self.block_size,)
        return [1] * (dims - len(last_counts)) + list(last_counts)

    def codes(self, values: Tensor, part: Index) -> Tensor:
        """Return the codes nearest to the values of a part; NaN gives its first code.

        Raises:
            ValueError: NaN in a format that has none.
        """
        units = divided(values.float(), self.scale_at(part))
        if self.format.nan_code is None and bool(units.isnan().any()):
            raise ValueError(f"a weight holds NaN, which {self.format.name} can't hold")
        return encode(units, self.format)

    def values(self, codes: Tensor, part: Index, dtype: torch.dtype) -> Tensor:
        """Return the values of a part, rounded to float32 and from that to ``dtype``.

        Args:
            codes: of the part.
            part: in the weight.
            dtype: of the values.
        """
        return decode_checked(codes, self.format).mul_(self.scale_at(part)).to(dtype)


@dataclass(frozen=True)
class Decoded:
    """A weight in codes as the floats that are written of it.

    Attributes:
        weight: in codes.
        dtype: the one that holds its values exactly.
        is_transposed: whether the float model has it transposed.
        part: of the weight as the float model has it; empty for all of it.
    """

    weight: FP8Tensor
    dtype: torch.dtype
    is_transposed: bool = False
    part: Index = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats."""
        shape = tuple(self.weight.shape)
        if self.is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if not self.part:
            return shape
        return tuple(entry.stop - entry.start for entry in self.part if isinstance(entry, slice))

    @property
    def to_write(self) -> TensorToWrite:
        """The floats, which are made when they are written."""
        return TensorToWrite(self.dtype, self.shape, self.pieces)

    @torch.no_grad()
    def pieces(self) -> Iterator[Tensor]:
        """Decode the floats, some rows at a time."""
        grid = Grid.of(self.weight)
        for index in indices_of_pieces(self.shape):
            part = part_within(self.part, index)
            part = turned(part) if self.is_transposed else part
            values = grid.values(self.weight.codes[part], part, self.weight.dtype).to(self.dtype)
            yield values.mT if self.is_transposed else values


def turned(part: Index) -> Index:
    """Return a part's index in a tensor whose last two dimensions are exchanged."""
    return (*part[:-2], part[-1], part[-2])


def part_within(outer: Index, inner: Index) -> Index:
    """Return the index of a part of a part.

    Args:
        outer: of the part in a tensor; empty for all of it.
        inner: in the part.
    """
    if not outer:
        return inner
    entries = iter(inner)
    indices: list[int | slice] = []
    for entry in outer:
        if isinstance(entry, int):
            indices.append(entry)
            continue
        of_part = next(entries)
        if isinstance(of_part, int):
            indices.append(entry.start + of_part)
        else:
            indices.append(slice(entry.start + of_part.start, entry.start + of_part.stop))
    return tuple(indices)
