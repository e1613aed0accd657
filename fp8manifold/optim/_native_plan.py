"""All native steps of a plan: their records, and what is written into them in every step.

    direct    parameters that one call of C steps, all of them together (Adam, SGD, Lion,
              and the Riemannian steps along the chart)
    batches   Muon's matrices, some at a time, in two calls of C each with a product of
              torch's between them (`MuonBatch`)

Records have addresses, sizes and specs, which stay. New in every step are the addresses of
gradients, the numbers (learning rate, bias corrections) and the keys of random bits. They
are computed once for all parameters. Parameters with the same numbers share a row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fp8manifold._interface import KernelDirection, NativeReport
from fp8manifold._native import library
from fp8manifold.optim._muon import MuonBatch, batches_of
from fp8manifold.optim._native_step import (
    GRADIENT_COLUMN,
    TENSOR_COLUMNS,
    DrawKeys,
    NativeStep,
    number_rows,
)
from fp8manifold.optim._slot import Slot


class NativePlan:
    """The native steps of parameters that share no memory, prepared once.

    Args:
        slots: the steps, with all their tensors.
        twins: for each slot the position of the first one with the same numbers.

    Attributes:
        gradients: the addresses of the gradients.
        sizes: how many elements they have.
        kernels: the native code.
    """

    def __init__(self, slots: Sequence[Slot], twins: Sequence[int]) -> None:
        kernels = library()
        assert kernels is not None
        self.kernels = kernels
        self._draw_keys = DrawKeys(slots)
        # positions of the slots whose numbers are computed, each a row
        self._leaders = sorted(set(twins))
        row_of_leader = {leader: row for row, leader in enumerate(self._leaders)}
        # for each slot the row that has its numbers
        self._rows = np.array([row_of_leader[twin] for twin in twins])
        self.sizes = np.array([slot.view.numel for slot in slots], dtype=np.int64)
        self.gradients = np.array(
            [slot.tensors["gradient"].data_ptr() for slot in slots], dtype=np.uint64
        )
        matrices = [
            i for i, slot in enumerate(slots) if slot.spec.direction == KernelDirection.MUON
        ]
        self._direct = [
            i for i, slot in enumerate(slots) if slot.spec.direction != KernelDirection.MUON
        ]
        self._step = NativeStep([slots[i] for i in self._direct]) if self._direct else None
        self._batches: list[tuple[list[int], MuonBatch]] = []
        position = {slots[i]: i for i in matrices}
        for batch in batches_of([slots[i] for i in matrices]):
            self._batches.append(([position[slot] for slot in batch], MuonBatch(batch)))

    def set_gradients(self, addresses: NDArray[np.uint64]) -> None:
        """Take the gradients of the next step from other memory."""
        self.gradients = addresses
        if self._step is not None:
            self._step.records["pointers"][:, GRADIENT_COLUMN] = addresses[self._direct]

    def run(self, slots: Sequence[Slot]) -> NDArray[np.int32]:
        """Take the steps of the slots, and return reports as `NativeStep.run` does."""
        keys = self._draw_keys.rows([slot.steps_done + 1 for slot in slots])
        numbers = number_rows([slots[i] for i in self._leaders])[self._rows]
        reports = np.zeros((len(slots), len(NativeReport._fields)), dtype=np.int32)
        if self._step is not None:
            direct = self._direct
            reports[direct] = self._step.run(keys[direct], numbers[direct])
        for positions, batch in self._batches:
            reports[positions] = batch.run(
                [slots[i] for i in positions],
                keys[positions],
                numbers[positions],
                self.gradients[positions],
            )
        return reports

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors that the next step will find where they are.

        Gradients are among them, and scratch memory is not.
        """
        addresses: list[int] = self.gradients.tolist()
        if self._step is not None:
            addresses += self._step.records["pointers"][:, TENSOR_COLUMNS].flatten().tolist()
        for _, batch in self._batches:
            addresses += batch.addresses()
        return addresses
