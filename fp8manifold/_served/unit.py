"""A unit of what is served: tensors that are made together, such as codes and scales.

Under ``fully_shard`` a process has a run of a parameter's first dimension. Of a served
tensor, which is the parameter or a part of it, this is a run of rows too, or nothing::

    parameter (E, R, C) of 8 experts, of which this process has 4 to 7
    served tensor: expert 5, (R, C)              here whole
    served tensor: expert 1                      in another process

    parameter (3 M, C), a fused qkv, of which this process has rows f to l
    served tensor: k, rows M to 2 M              here rows max(f, M) to min(l, 2 M)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.blocks import Index
from fp8manifold._published.places import Place, part_of
from fp8manifold._published.stored_weight import StoredWeight, torch_dtype
from fp8manifold._ranks import Share, share_of
from fp8manifold.tensor import FP8Tensor


class TensorMetadata(NamedTuple):
    """What a served tensor is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ShardPlace(NamedTuple):
    """Where the rows of a shard are in the tensor that is served."""

    #: of the first element in the flat tensor
    offset: int
    #: of the whole tensor
    shape: tuple[int, ...]


class Shard(NamedTuple):
    """The rows of a served tensor that this process has."""

    name: str
    tensor: Tensor
    place: ShardPlace


@dataclass(frozen=True)
class Rows:
    """Rows of a served tensor that this process has."""

    #: where they are in the local part of the parameter
    index: Index
    #: of the first one in the served tensor
    first: int
    count: int


class Unit(ABC):
    """Tensors that are made together.

    Attributes:
        target: the name of the parameter that they are read from, or "".
    """

    target: str

    @abstractmethod
    def metadata(self) -> list[TensorMetadata]:
        """Return what the unit has, without making a tensor."""

    @abstractmethod
    def shards(self, is_first: bool) -> Iterator[Shard]:
        """Yield the rows that this process has; whole tensors if nothing is sharded.

        What all processes have is yielded if this is the first.
        """

    @abstractmethod
    def is_sharded(self) -> bool:
        """Return whether the parameter is spread over processes."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by name.

        Raises:
            TypeError: they are spread over processes.
        """
        if self.is_sharded():
            raise TypeError(
                f"{self.target!r} is sharded, and each process has a part of it: use shards(), "
                "which yields that part"
            )
        for name, tensor, _ in self.shards(is_first=True):
            yield name, tensor


@dataclass(frozen=True)
class ConstantUnit(Unit):
    """A tensor that is no parameter of the model."""

    header: TensorMetadata
    read: Callable[[], Tensor]
    target: str = ""

    def metadata(self) -> list[TensorMetadata]:
        return [self.header]

    def shards(self, is_first: bool) -> Iterator[Shard]:
        if is_first:
            yield Shard(self.header.name, self.read(), ShardPlace(0, self.header.shape))

    def is_sharded(self) -> bool:
        return False


@dataclass(frozen=True)
class FloatUnit(Unit):
    """A float, or a number of another kind: a parameter, a buffer, or a part of one.

    Attributes:
        header: what is served.
        place: where it is in the model.
        entry: the parameter or buffer; codes are decoded.
        is_turned: whether the model has it transposed.
    """

    header: TensorMetadata
    place: Place
    entry: Tensor
    is_turned: bool = False

    @property
    def target(self) -> str:  # type: ignore[override]
        return self.place.target

    def metadata(self) -> list[TensorMetadata]:
        return [self.header]

    def is_sharded(self) -> bool:
        return share_of(self.entry) is not None

    @torch.no_grad()
    def shards(self, is_first: bool) -> Iterator[Shard]:
        name, _, shape = self.header
        share = share_of(self.entry)
        if share is None:
            if is_first:
                tensor = self._tensor_of(self.entry, self.place.index).reshape(shape)
                yield Shard(name, tensor, ShardPlace(0, shape))
            return
        if self.is_turned:
            raise TypeError(f"{self.target!r} is transposed and sharded, which can't be served")
        rows = _local_rows(self.place.index, share)
        if rows is not None:
            yield Shard(name, self._tensor_of(share.local, rows.index), _place_of(rows, shape))

    def _tensor_of(self, entry: Tensor, index: Index) -> Tensor:
        tensor = entry.detach()
        if isinstance(tensor, FP8Tensor) and not index:
            tensor = tensor.dequantize()
        elif isinstance(tensor, FP8Tensor):
            # a copy of a part decodes no other
            tensor = tensor[index].clone()
        else:
            tensor = tensor[index]
        tensor = tensor.to(self.header.dtype)
        return tensor.mT.contiguous() if self.is_turned else tensor


@dataclass(frozen=True)
class CodesUnit(Unit):
    """A weight in codes with its scales: a parameter or a part of one.

    Attributes:
        stored: dtypes, shapes and names.
        place: where it is in the model.
        entry: the parameter, or what makes its codes from floats.
        written: returns the two tensors of an FP8Tensor.
    """

    stored: StoredWeight
    place: Place
    entry: Tensor | Callable[[], FP8Tensor]
    written: Callable[[StoredWeight, FP8Tensor], dict[str, Tensor]]

    @property
    def target(self) -> str:  # type: ignore[override]
        return self.place.target

    def metadata(self) -> list[TensorMetadata]:
        stored = self.stored
        return [
            TensorMetadata(stored.codes, torch_dtype(stored.code_dtype), stored.code_shape),
            TensorMetadata(stored.scale, torch_dtype(stored.scale_dtype), stored.scale_shape),
        ]

    def is_sharded(self) -> bool:
        return isinstance(self.entry, Tensor) and share_of(self.entry) is not None

    @torch.no_grad()
    def shards(self, is_first: bool) -> Iterator[Shard]:
        share = share_of(self.entry) if isinstance(self.entry, Tensor) else None
        if share is not None:
            yield from self._shards_of(share)
        elif is_first:
            weight = self.entry if isinstance(self.entry, Tensor) else self.entry()
            assert isinstance(weight, FP8Tensor)
            part = part_of(weight, self.place, self.stored)
            for name, tensor in self.written(self.stored, part).items():
                yield Shard(name, tensor, ShardPlace(0, tuple(tensor.shape)))

    def _shards_of(self, share: Share) -> Iterator[Shard]:
        """Yield codes and scales of the rows that this process has."""
        stored, index = self.stored, self.place.index
        weight = share.local
        assert isinstance(weight, FP8Tensor)
        is_stack = bool(index) and isinstance(index[0], int)
        has_scale_of_all = stored.granularity == "tensor" and not is_stack
        if has_scale_of_all:
            if weight.kept_scale.dim():
                raise TypeError(
                    f"{self.target!r} is sharded and has a scale for each row, but "
                    f"{stored.codes!r} has one for all: read files with a scale for each row"
                )
            if share.ranks.rank == 0:
                # Never as 0, which depends on the codes of all processes.
                scale = weight.scale.to(torch_dtype(stored.scale_dtype))
                place = ShardPlace(0, stored.scale_shape)
                yield Shard(stored.scale, scale.reshape(stored.scale_shape), place)
        rows = _local_rows(index, share)
        if rows is None:
            return
        local = stored if is_stack else _of_rows(stored, rows.count)
        part = part_of(weight, Place(self.target, rows.index), local)
        for metadata, tensor in zip(
            self.metadata(), self.written(local, part).values(), strict=True
        ):
            if not (has_scale_of_all and metadata.name == stored.scale):
                yield Shard(metadata.name, tensor, _place_of(rows, metadata.shape))


def _of_rows(stored: StoredWeight, count: int) -> StoredWeight:
    """Return the description of some rows of a weight, which share no scale with others."""
    scale_shape = stored.scale_shape
    if stored.granularity != "tensor":
        scale_shape = (count, *scale_shape[1:])
    return replace(
        stored,
        shape=(count, *stored.shape[1:]),
        code_shape=(count, *stored.code_shape[1:]),
        scale_shape=scale_shape,
    )


def _local_rows(index: Index, share: Share) -> Rows | None:
    """Return the rows of a part that this process has; None if it has none."""
    first, end = share.first_row, share.first_row + share.local.shape[0]
    whole = tuple(slice(0, size) for size in share.shape)
    head, *rest = index or whole
    if isinstance(head, int):
        if not first <= head < end:
            return None
        return Rows((head - first, *rest), 0, 0)
    low, high = max(head.start, first), min(head.stop, end)
    if low >= high:
        return None
    return Rows((slice(low - first, high - first), *rest), low - head.start, high - low)


def _place_of(rows: Rows, shape: tuple[int, ...]) -> ShardPlace:
    return ShardPlace(rows.first * prod(shape[1:]), shape)
