"""Records of Adafactor's factors for kernels of a GPU, and the memory that these work in.

A step has one piece of memory for all its parameters: the records, whose addresses the jobs
have, and after them what kernels compute with (`launch.factor_calls`)::

    records       uploaded: addresses, sizes, and cap, size and shrink of given factors
    row, column   factors of each parameter
    sums, ...     of tiles and of runs

It is new in every step, and freed at its end. A CUDA graph keeps it. A slot that has its
factors already, as those that several processes share, gives them instead.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import GPU_FACTORS, WeightStorage
from fp8manifold._numerics.records import GPU_FACTORS_DTYPE
from fp8manifold._triton.kinds import Statistics, TileScales, format_of
from fp8manifold._triton.launch import Call, FactoredSize, factor_calls
from fp8manifold.optim._factors import RUN, TILE, Factors, Matrices, Preconditioner, matrices_of
from fp8manifold.optim._records import address_of
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import MOMENT_FORMAT

_SCRATCH: Final = slice(GPU_FACTORS.column("row"), GPU_FACTORS.column("means") + 1)
"""Positions of the addresses in memory to work in."""
_ALIGNMENT: Final = 4
"""Floats in 16 bytes, at a multiple of which the memory of a parameter begins."""
_WORDS: Final = GPU_FACTORS.size // 4


class GpuFactors:
    """A record for each of some slots on one device.

    Args:
        slots: with Adafactor's direction and all their tensors.
        owners: the positions of their jobs.
        scales: of each as a kernel reads it, or None.
        dtype_names: what kernels call the dtypes in memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        owners: Sequence[int],
        scales: Sequence[Tensor | None],
        dtype_names: dict[torch.dtype, str],
    ) -> None:
        self._device = slots[0].device
        self.records = np.zeros(len(slots), dtype=GPU_FACTORS_DTYPE)
        self.owners = list(owners)
        #: factors that are given, by the position of their record
        self._given: dict[int, Factors] = {}
        #: positions of records whose factors kernels compute
        self._computed: list[int] = []
        self._facts: list[Statistics] = []
        self._sizes: list[FactoredSize] = []
        lengths: list[list[int]] = []
        for i, (slot, owner, scale) in enumerate(zip(slots, owners, scales, strict=True)):
            record = self.records[i : i + 1]
            if slot.factors is not None:
                self._given[i] = slot.factors
                _fill_factors(record, slot.factors)
                continue
            shape = matrices_of(slot.parameter.shape, slot.group["matrix_shape"])
            has_row_means = slot.spec.preconditioner == Preconditioner.FACTORED
            self._computed.append(i)
            self._facts.append(_facts_of(slot, shape, scale, dtype_names))
            self._sizes.append(FactoredSize(owner, *shape, has_row_means))
            _fill_averages(record, slot, shape)
            record["sizes"] = shape
            record["neighbours"] = _neighbours(shape, scale)
            lengths.append(_lengths_of(shape))
        padded = -(-np.array(lengths, dtype=np.int64).reshape(-1) // _ALIGNMENT) * _ALIGNMENT
        begins = np.cumsum([_words_of(len(slots)), *padded], dtype=np.int64)
        #: 32-bit words of the memory
        self.words = int(begins[-1])
        in_bytes = begins[:-1].astype(np.uint64) * np.uint64(4)
        self._byte_offsets = in_bytes.reshape(len(self._computed), _SCRATCH.stop - _SCRATCH.start)

    def calls(self, members: Sequence[int]) -> list[Call]:
        """Return the calls that compute the factors of some jobs.

        Args:
            members: the positions of the jobs.
        """
        wanted = set(members)
        chosen = [i for i, size in enumerate(self._sizes) if size.record in wanted]
        sizes = [self._sizes[i] for i in chosen]
        facts = [self._facts[i] for i in chosen]
        return factor_calls(sizes, facts, self._device, tile=TILE, run=RUN)

    def memory(self) -> Tensor:
        """Return memory for a step, int32, which has to live until the step is taken."""
        return torch.empty(self.words, dtype=torch.int32, device=self._device)

    def fill(self, memory: Tensor) -> NDArray[np.uint64]:
        """Let the records refer to memory, and copy them to it without a wait.

        Returns:
            The addresses of the records, for the jobs that own them.
        """
        base = np.uint64(memory.data_ptr())
        self.records["pointers"][self._computed, _SCRATCH] = base + self._byte_offsets
        source = torch.from_numpy(self.records.view(np.int32))
        if memory.is_cuda:
            source = torch.empty_like(source, pin_memory=True).copy_(source)
        memory[: len(source)].copy_(source, non_blocking=True)
        floats = memory.view(torch.float32)
        for i, factors in self._given.items():
            floats[i * _WORDS + GPU_FACTORS.word("cap")] = factors.cap
            floats[i * _WORDS + GPU_FACTORS.word("size")] = factors.size
        indices = np.arange(len(self.records), dtype=np.uint64)
        return np.asarray(base + indices * np.uint64(GPU_FACTORS.size))

    def drop_given(self) -> None:
        """Free factors that are given."""
        self._given = {}

    def addresses(self) -> list[int]:
        """Return the addresses of averages in the state, and 0."""
        averages = self.records["pointers"][:, : _SCRATCH.start]
        addresses: list[int] = averages.flatten().tolist()
        return addresses


def _words_of(records: int) -> int:
    return -(-records * _WORDS // _ALIGNMENT) * _ALIGNMENT


def _lengths_of(shape: Matrices) -> list[int]:
    """Return the numbers of floats that kernels work in, in the order of `GPU_FACTORS`."""
    rows = shape.matrices * shape.rows
    columns = shape.matrices * shape.columns
    tiles = rows * -(-shape.columns // TILE)
    runs = shape.matrices * -(-shape.rows // RUN)
    return [rows, columns, tiles, tiles, runs * shape.columns, shape.matrices]


def _fill_averages(record: NDArray[np.void], slot: Slot, shape: Matrices) -> None:
    """Fill in the addresses of the averages in a state."""
    sizes = {
        "row_means": ("row_var", shape.matrices * shape.rows),
        "column_means": ("col_var", shape.matrices * shape.columns),
    }
    if slot.spec.preconditioner == Preconditioner.WHOLE:
        sizes = {"column_means": ("variance", shape.numel)}
    for field, (name, numel) in sizes.items():
        address = address_of(slot.tensors[name], torch.float32, numel, slot.device)
        record["pointers"][0, GPU_FACTORS.column(field)] = address


def _fill_factors(record: NDArray[np.void], factors: Factors) -> None:
    """Fill a record for factors that are given, but for results that are on the GPU."""
    record["pointers"][0, GPU_FACTORS.column("row")] = factors.row.data_ptr()
    record["pointers"][0, GPU_FACTORS.column("column")] = factors.column.data_ptr()
    columns = factors.column.shape[-1]
    record["sizes"] = Matrices(factors.row.numel() // factors.rows, factors.rows, columns)
    record["shrink"] = 1.0


def _facts_of(
    slot: Slot, shape: Matrices, scale: Tensor | None, dtype_names: dict[torch.dtype, str]
) -> Statistics:
    """Return what passes over the elements of a slot are compiled for."""
    weight, gradient = slot.tensors["weight"], slot.tensors["gradient"]
    is_coded = slot.storage == WeightStorage.CODES
    neighbours = _neighbours(shape, scale)
    sharing = _sharing(shape, neighbours) if is_coded else TileScales.ONE
    return Statistics(
        coded=is_coded,
        weight=dtype_names[weight.dtype],
        gradient=dtype_names[gradient.dtype],
        format=format_of((slot.fmt if is_coded else None) or MOMENT_FORMAT),
        exponents=is_coded and scale is not None and scale.dtype is torch.uint8,
        scales=sharing,
        neighbours=neighbours if sharing == TileScales.RUN else 0,
        tile=min(TILE, 1 << (shape.columns - 1).bit_length()),
        run=RUN,
        aligned=shape.columns % 16 == 0 and not any(x.data_ptr() % 16 for x in (weight, gradient)),
    )


def _neighbours(shape: Matrices, scale: Tensor | None) -> int:
    """Return how many elements share a scale, one after the other."""
    return shape.numel if scale is None else shape.numel // scale.numel()


def _sharing(shape: Matrices, neighbours: int) -> TileScales:
    """Return how the elements of a matrix share scales.

    As many neighbours share one as a whole number of rows has, or a whole number of them
    is a row.
    """
    if neighbours == shape.numel:
        return TileScales.ONE
    if neighbours == 1:
        return TileScales.ELEMENT
    return TileScales.ROW if neighbours % shape.columns == 0 else TileScales.RUN
