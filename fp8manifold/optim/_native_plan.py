"""All native steps of a plan: their records, and what is written into them in every step.

    direct    parameters that one call of C steps, all of them together (Adam, SGD, Lion,
              and the Riemannian steps along the chart)
    batches   Muon's matrices, some at a time, in two calls of C each with a product of
              torch's between them (`NativeMuonBatch`)

Records have addresses, sizes and specs, which stay. New in every step are the addresses of
gradients, the numbers (learning rate, bias corrections) and the keys of random bits. They
are computed once for all parameters. Parameters with the same numbers share a row.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import KernelDirection, NativeReport
from fp8manifold._native import library
from fp8manifold.optim._muon import (
    Iterations,
    as_matrices,
    averaged_as_torch,
    averages_as_torch,
    batches_of,
    first_half,
    iterations_of,
    orthogonal_factor,
    second_half,
)
from fp8manifold.optim._native_step import (
    GRADIENT_COLUMN,
    TENSOR_COLUMNS,
    WEIGHT_COLUMN,
    DrawKeys,
    NativeStep,
    number_rows,
)
from fp8manifold.optim._slot import Slot

_ALIGNMENT: Final = 16
"""Floats in 64 bytes, at a multiple of which torch begins a tensor of its own.

Parts of scratch memory begin at such places, too.
"""


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
        self._direct_step = NativeStep([slots[i] for i in self._direct]) if self._direct else None
        self._batches: list[tuple[list[int], NativeMuonBatch]] = []
        position = {slots[i]: i for i in matrices}
        for batch in batches_of([slots[i] for i in matrices]):
            self._batches.append(([position[slot] for slot in batch], NativeMuonBatch(batch)))

    def set_gradients(self, addresses: NDArray[np.uint64]) -> None:
        """Take the gradients of the next step from other memory."""
        self.gradients = addresses
        if self._direct_step is not None:
            self._direct_step.records["pointers"][:, GRADIENT_COLUMN] = addresses[self._direct]

    def run(self, slots: Sequence[Slot]) -> NDArray[np.int32]:
        """Take the steps of the slots, and return reports as `NativeStep.run` does."""
        keys = self._draw_keys.rows([slot.steps_done + 1 for slot in slots])
        numbers = number_rows([slots[i] for i in self._leaders])[self._rows]
        reports = np.zeros((len(slots), len(NativeReport._fields)), dtype=np.int32)
        if self._direct_step is not None:
            direct = self._direct
            reports[direct] = self._direct_step.run(keys[direct], numbers[direct])
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
        if self._direct_step is not None:
            addresses += self._direct_step.addresses()
        for _, batch in self._batches:
            addresses += batch.addresses()
        return addresses


class _Place(NamedTuple):
    """Where a parameter's matrices lie in scratch memory, and how they are multiplied."""

    #: in floats
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    iterations: Iterations


class NativeMuonBatch:
    """The steps of some matrices in native code, whose records serve again.

        momentum  C writes u into scratch memory    records: of momenta and gradients
        factor    torch, matrix by matrix; each takes the place of its u
        weights   C steps along the factors         records: of weights, codes and scales

    No slot has a stiffness exponent or injects an error, and none is sharded or observed.
    The scratch memory is new in every step, and freed at its end.

    Args:
        slots: the steps, with all their tensors.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._by_torch = [i for i, slot in enumerate(slots) if averages_as_torch(slot)]
        self._by_native = [i for i, slot in enumerate(slots) if not averages_as_torch(slot)]
        self._places: list[_Place] = []
        end = 0
        for slot in slots:
            self._places.append(_place_of(slot, end))
            end += -(-slot.view.numel // _ALIGNMENT) * _ALIGNMENT
        self._scratch_size = end
        begins = [place.begin for place in self._places]
        self._byte_offsets = np.array(begins, dtype=np.uint64) * np.uint64(torch.float32.itemsize)
        scratch = torch.zeros(end, dtype=torch.float32, device="cpu")
        directions = []
        for slot, begin in zip(slots, begins, strict=True):
            directions.append(scratch[begin : begin + slot.view.numel].view(slot.view.dims))
        halves = [first_half(slots[i], directions[i]) for i in self._by_native]
        self._momentum_half = NativeStep(halves) if halves else None
        self._weight_half = NativeStep(list(map(second_half, slots, directions)))

    def run(
        self,
        slots: Sequence[Slot],
        keys: NDArray[np.int32],
        numbers: NDArray[np.float32],
        gradients: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """Take the steps, and return reports as `NativeStep.run` does.

        Args:
            slots: the same as before; their tensors are not looked at.
            keys: of the draws. The first half draws for momenta, the second for
                weights.
            numbers: of the step, for both halves.
            gradients: the addresses of the gradients.
        """
        scratch = torch.zeros(self._scratch_size, dtype=torch.float32, device="cpu")
        addresses = np.uint64(scratch.data_ptr()) + self._byte_offsets
        if self._momentum_half is not None:
            positions = self._by_native
            pointers = self._momentum_half.records["pointers"]
            pointers[:, WEIGHT_COLUMN] = addresses[positions]
            pointers[:, GRADIENT_COLUMN] = gradients[positions]
            self._momentum_half.run(keys[positions], numbers[positions])
        matrices = []
        for begin, shape, strides, _ in self._places:
            matrices.append(scratch.as_strided(shape, strides, begin))
        for i in self._by_torch:
            matrices[i].copy_(_mix_with_torch(slots[i], numbers[i]).view(matrices[i].shape))
        for matrix, place in zip(matrices, self._places, strict=True):
            matrix.copy_(orthogonal_factor(matrix, *place.iterations))
        self._weight_half.records["pointers"][:, GRADIENT_COLUMN] = addresses
        return self._weight_half.run(keys, numbers)

    def addresses(self) -> list[int]:
        """Return the addresses in records that stay as they are."""
        addresses: list[int] = []
        for step, column in (
            (self._momentum_half, WEIGHT_COLUMN),
            (self._weight_half, GRADIENT_COLUMN),
        ):
            if step is not None:
                pointers = step.records["pointers"].copy()
                pointers[:, column] = 0
                addresses += pointers[:, TENSOR_COLUMNS].flatten().tolist()
        return addresses


def _place_of(slot: Slot, begin: int) -> _Place:
    # of no memory: only its form is asked for
    parameter = torch.empty(slot.parameter.shape, device="meta")
    matrices = as_matrices(parameter, slot.group["matrix_shape"])
    return _Place(begin, tuple(matrices.shape), matrices.stride(), iterations_of(slot))


def _mix_with_torch(slot: Slot, numbers: NDArray[np.float32]) -> Tensor:
    """Update a float momentum as torch does, and return ``u``."""
    dims = slot.view.dims
    name = slot.spec.first_moment
    momentum = None if name is None else slot.state[name].view(dims)
    assert slot.parameter.grad is not None
    gradient = slot.parameter.grad.contiguous().view(dims)
    _, mix = averaged_as_torch(slot.spec, momentum, gradient, torch.from_numpy(numbers))
    return mix
