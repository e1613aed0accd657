"""Steps in native code: many parameters in one call of C.

`NativeStep` makes records of parameters (`_records.py`) and calls C with them. Two ways
lead to it:

    run_native(slots)     steps without a plan: records are made, serve once, and go
    NativePlan.run        steady steps (`_plan.py`): records are made once, and in every
                          step get new numbers, keys, and addresses of gradients
        direct            parameters that one call of C steps, all of them together (Adam,
                          SGD, Lion, and the Riemannian steps along the chart)
        batches           Muon's matrices, some at a time (`NativeMuonBatch`): a call of C
                          for momenta (float matrices with float32 momenta: torch),
                          Newton-Schulz in torch for each matrix, a call of C for weights

Numbers and keys are computed once for all parameters. Parameters with the same numbers
share a row. Only steps without a plan have gradients or weights of 16 bits: these are
copied to float32, some at a time, and the weight is rounded once after the step.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import (
    JOB,
    JobFacts,
    KernelDirection,
    NativeReport,
    WeightStorage,
)
from fp8manifold._native import library, most_threads
from fp8manifold.optim._factors import Preconditioner
from fp8manifold.optim._matrices import (
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
from fp8manifold.optim._native_factors import FactorRecords
from fp8manifold.optim._records import (
    GRADIENT_COLUMN,
    TENSOR_COLUMNS,
    WEIGHT_COLUMN,
    Job,
    addresses_of,
    has_kernel,
    key_rows,
    matrix_of,
    records_of,
    spec_record,
    step_keys_of,
)
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._step_numbers import number_rows, set_numbers
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import draw_range

_HALVES: Final = (torch.bfloat16, torch.float16)
_COPIED_AT_ONCE: Final = 2**20
"""Elements of gradients and weights of 16 bits that have a copy in float32 at a time."""
_ALIGNMENT: Final = 16
"""Floats in 64 bytes, at a multiple of which torch begins a tensor of its own.

Parts of scratch memory begin at such places, too.
"""


def is_native(slot: Slot) -> bool:
    """Return True for a step of native code: on the CPU, and as `has_kernel` says."""
    return slot.weight.device.type == "cpu" and has_kernel(slot) and library() is not None


def sum_of_squares(
    addresses: NDArray[np.uint64], sizes: NDArray[np.int64], kernels: ctypes.CDLL
) -> float:
    """Return the sum of squares over float32 memory of the CPU.

    Args:
        addresses: of the memory.
        sizes: numbers of elements.
        kernels: the native code.
    """
    total = kernels.fp8manifold_squares(
        ctypes.c_void_p(addresses.ctypes.data), ctypes.c_void_p(sizes.ctypes.data), len(sizes)
    )
    return float(total)


class NativeStep:
    """C job records for the steps of slots that share no memory.

    They can be used again for the same parameters.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        jobs = []
        # whatever the records point to has to live as long as they do
        self._specs, self._scales = [], []
        #: the positions of steps that end with a direction, in place of a weight
        self._directions = []
        self._reports = np.zeros((len(slots), len(NativeReport._fields)), dtype=np.int32)
        factored: list[int] = []
        for i, (slot, report) in enumerate(zip(slots, self._reports, strict=True)):
            if slot.spec.preconditioner is not Preconditioner.NONE:
                factored.append(i)
            if slot.spec.storage == WeightStorage.DIRECTION:
                self._directions.append(i)
            matrix = matrix_of(slot)
            spec = spec_record(slot.spec)
            self._specs.append(spec)
            self._scales.append(matrix.scale)
            pointers = [
                spec.ctypes.data,
                *addresses_of(slot, slot.tensors["gradient"], matrix.scale),
                report.ctypes.data,
                # of factors
                0,
            ]
            low, high = slot.chart_ends
            facts = JobFacts(
                scales=matrix.scales,
                repeats=slot.view.repeats,
                low_exponent=low,
                high_exponent=high,
            )
            jobs.append(Job(pointers, matrix.rows, matrix.length, facts))
        self.records = records_of(jobs)
        self._factors = FactorRecords([slots[i] for i in factored]) if factored else None
        if self._factors is not None:
            self.records["pointers"][factored, JOB.column("factors")] = self._factors.addresses
        self._most_threads = most_threads(int(self.records["rows"] @ self.records["length"]))
        kernels = library()
        assert kernels is not None
        self._kernels = kernels

    def run(self, keys: NDArray[np.int32], numbers: NDArray[np.float32]) -> NDArray[np.int32]:
        """Take the steps.

        Args:
            keys: of the draws, as `key_rows` returns them.
            numbers: of the step, as `number_rows` returns them.

        Returns:
            The fields of a `NativeReport` for each.
        """
        records = self.records
        self._reports[:] = 0
        records["keys"] = keys
        set_numbers(records, numbers, self._directions)
        threads = min(torch.get_num_threads(), self._most_threads)
        # freed at the end
        scratch = None if self._factors is None else self._factors.renew_memory()
        self._kernels.fp8manifold_step(ctypes.c_void_p(records.ctypes.data), len(records), threads)
        # Some are copies, with which the records can't be used again: a `Plan` sees that
        # their addresses are of no tensor that it knows.
        self._scales = []
        del scratch
        return self._reports

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors that the next step will find where they are."""
        addresses: list[int] = self.records["pointers"][:, TENSOR_COLUMNS].flatten().tolist()
        return addresses if self._factors is None else addresses + self._factors.averages()


# Steady steps


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
        self._keys = step_keys_of(slots)
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
        keys = self._keys.rows([slot.steps_done + 1 for slot in slots])
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
                  (for float matrices with float32 momenta torch does)
        factor    Newton-Schulz in torch, matrix by matrix; each takes the place of its u
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
            slots: the same as before, without tensors. Gradient and momentum of a matrix
                that torch averages are read from parameter and state.
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


# Steps without a plan


def run_native(slots: Sequence[Slot]) -> None:
    """Take the steps in place; no two of them share memory."""
    for portion in _portions(slots):
        # its copies are freed before those of the next one are made
        _run_portion(portion)


def _portions(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield slots in runs, such that few elements of a run need a copy in float32.

    They are at most `_COPIED_AT_ONCE`, or those of one slot.
    """
    portion: list[Slot] = []
    copied = 0
    for slot in slots:
        copies = (slot.weight.dtype in _HALVES) + (slot.tensors["gradient"].dtype in _HALVES)
        size = slot.weight.numel() * copies
        if portion and size and copied + size > _COPIED_AT_ONCE:
            yield portion
            portion, copied = [], 0
        portion.append(slot)
        copied += size
    if portion:
        yield portion


def _run_portion(slots: Sequence[Slot]) -> None:
    wide_slots = [slot.replaced(tensors=slot.tensors | _in_float32(slot)) for slot in slots]
    step = NativeStep(wide_slots)
    reports = step.run(key_rows(wide_slots), number_rows(wide_slots)).tolist()
    for slot, wide_slot, words in zip(slots, wide_slots, reports, strict=True):
        if slot.spec.storage == WeightStorage.CODES:
            report = NativeReport(*words)
            slot.saturated.append(bool(report.is_saturated))
            slot.has_zero_rows.append(bool(report.has_zero_tile))
        if wide_slot.weight is not slot.weight:
            slot.weight.copy_(_rounded(wide_slot.weight, slot))


def _in_float32(slot: Slot) -> dict[str, Tensor]:
    """Return the gradient, and a 16-bit weight, in float32."""
    tensors = {"gradient": slot.tensors["gradient"].to(torch.float32)}
    if slot.weight.dtype in _HALVES:
        tensors["weight"] = slot.weight.float()
    return tensors


def _rounded(wide: Tensor, slot: Slot) -> Tensor:
    """Round a stepped weight to 16 bits, at random if the step draws for it."""
    if not slot.spec.draws_for_weight:
        return wide
    draws = draw_range(slot.offset, wide.numel(), slot.rounding_key, wide.device)
    return to_half(wide, slot.weight.dtype, draws.view(wide.shape))
