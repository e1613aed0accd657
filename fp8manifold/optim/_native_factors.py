"""Records of Adafactor's factors for native code, and the memory that it works in.

`NativeStep` gives each job the address of its record. Native code advances the averages of
a state, and computes factors into memory that is freed at the end of the step. A slot that
has its factors already, as those that several processes share, gives them instead.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import FACTORS
from fp8manifold._numerics.records import FACTORS_DTYPE
from fp8manifold.optim._factors import RUN, TILE, Factors, Matrices, Preconditioner, matrices_of
from fp8manifold.optim._slot import Slot

_AVERAGES: Final = slice(FACTORS.column("row_means"), FACTORS.column("row"))
"""Positions of the addresses of averages in a record."""
_SCRATCH: Final = slice(FACTORS.column("row"), FACTORS.column("column_sums") + 1)
"""Positions of the addresses in memory to work in."""


class FactorRecords:
    """A record for each of some slots.

    Args:
        slots: with Adafactor's direction and all their tensors.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.records = np.zeros(len(slots), dtype=FACTORS_DTYPE)
        #: positions of records whose factors native code computes
        self._computed: list[int] = []
        # what is given lives as long as the records
        self._given = [slot.factors for slot in slots]
        sizes = []
        for i, slot in enumerate(slots):
            record = self.records[i : i + 1]
            if slot.factors is None:
                self._computed.append(i)
                sizes.append(_fill_averages(record, slot))
            else:
                _fill_factors(record, slot.factors)
        self._begins = np.cumsum([0, *np.ravel(sizes)], dtype=np.int64)
        in_bytes = self._begins[:-1].astype(np.uint64) * np.uint64(torch.float32.itemsize)
        self._byte_offsets = in_bytes.reshape(len(self._computed), _SCRATCH.stop - _SCRATCH.start)

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """The address of each record."""
        indices = np.arange(len(self.records), dtype=np.uint64)
        first = np.uint64(self.records.ctypes.data)
        return np.asarray(first + indices * np.uint64(self.records.itemsize))

    def renew_memory(self) -> Tensor:
        """Let the records refer to new memory, which has to live until the step is taken."""
        scratch = torch.empty(int(self._begins[-1]), dtype=torch.float32, device="cpu")
        addresses = np.uint64(scratch.data_ptr()) + self._byte_offsets
        self.records["pointers"][self._computed, _SCRATCH] = addresses
        return scratch

    def averages(self) -> list[int]:
        """Return the addresses of averages in the state, and 0."""
        addresses: list[int] = self.records["pointers"][:, _AVERAGES].flatten().tolist()
        return addresses


def _fill_averages(record: NDArray[np.void], slot: Slot) -> list[int]:
    """Fill a record for factors that native code computes.

    Returns:
        The numbers of floats of the memory that it works in, in the order of `FACTORS`.
    """
    shape = matrices_of(slot.parameter.shape, slot.group["matrix_shape"])
    if slot.spec.preconditioner == Preconditioner.WHOLE:
        averages = (0, _address(slot.tensors["variance"], shape.numel))
    else:
        averages = (
            _address(slot.tensors["row_var"], shape.matrices * shape.rows),
            _address(slot.tensors["col_var"], shape.matrices * shape.columns),
        )
    record["pointers"][0, _AVERAGES] = averages
    record["sizes"] = shape
    rows = shape.matrices * shape.rows
    tiles = rows * -(-shape.columns // TILE)
    runs = shape.matrices * -(-shape.rows // RUN)
    return [
        rows,
        shape.matrices * shape.columns,
        tiles,
        tiles,
        runs * shape.columns,
    ]


def _fill_factors(record: NDArray[np.void], factors: Factors) -> None:
    """Fill a record for factors that are given."""
    columns = factors.column.shape[-1]
    rows = factors.row.numel()
    record["pointers"][0, FACTORS.column("row")] = _address(factors.row, rows)
    record["pointers"][0, FACTORS.column("column")] = _address(
        factors.column, factors.column.numel()
    )
    record["sizes"] = Matrices(rows // factors.rows, factors.rows, columns)
    record["cap"] = float(factors.cap)
    record["size"] = float(factors.size)


def _address(tensor: Tensor, numel: int) -> int:
    fits = tensor.dtype is torch.float32 and tensor.numel() == numel and tensor.is_cpu
    if not (fits and tensor.is_contiguous()):
        raise RuntimeError(
            f"a step needs {numel} contiguous elements of torch.float32 on the CPU: here are "
            f"{tensor.numel()} of {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()
