"""Muon's step on a GPU: kernels, products of torch's, kernels, and no wait between them.

::

    verdict    are all gradients finite?        one launch; if not, no later kernel writes
    direct     Adam's part                      one launch for each kind of kernel
    batch      u = momentum kernel(gradient)    into scratch memory, in float32
               factor of u                      torch, matrices of one shape together
               weights along the factor         from the same scratch memory
               scales that double
    batch      ...

The records of all batches are uploaded once, before the first launch: they point to the
same scratch memory, as one batch is over before the next begins. So a step holds copies
of one batch alone, and how many launches it takes does not depend on the number of
parameters, but on the number of batches (`_matrices.batches_of`).

A step that the GPU refuses still multiplies what is in the scratch memory, zeros, and
writes nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._base.reading import PendingValues
from fp8manifold._interface import KernelDirection
from fp8manifold._triton.launch import on_device, run_calls, upload
from fp8manifold.optim._matrices import batches_of, factors_of_batch, first_half, second_half
from fp8manifold.optim._records import GRADIENT_COLUMN, WEIGHT_COLUMN
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._triton_step import TritonRecords


class TritonMuonStep:
    """The launches of a step with matrices, prepared once.

    No slot has a stiffness exponent or injects an error, and none is sharded, observed or
    averaged as torch does.

    Args:
        slots: the steps, with all their tensors. Those of matrices have Muon's direction.

    Raises:
        KernelsUnavailableError: a kernel can't be compiled.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        matrices = [
            i for i, slot in enumerate(slots) if slot.spec.direction == KernelDirection.MUON
        ]
        position = {slots[i]: i for i in matrices}
        self._matrices = matrices
        #: the positions of each batch's slots
        self._batches = [
            [position[slot] for slot in batch] for batch in batches_of([slots[i] for i in matrices])
        ]
        #: for each matrix the bytes before it in the scratch memory
        self._offsets = np.zeros(len(matrices), dtype=np.uint64)
        self._device = slots[0].device
        #: elements of the scratch memory
        self._scratch_size = 0
        row_of = {i: row for row, i in enumerate(matrices)}
        for batch in self._batches:
            size = slots[batch[0]].view.numel
            rows = [row_of[i] for i in batch]
            self._offsets[rows] = np.arange(len(batch)) * size * torch.float32.itemsize
            self._scratch_size = max(self._scratch_size, len(batch) * size)
        firsts, seconds = self._halves(slots)
        #: of all slots; those of matrices step as far as their directions
        self._first = TritonRecords(firsts)
        #: of matrices alone
        self._second = TritonRecords(seconds)
        direct = [i for i, slot in enumerate(slots) if slot not in position]
        #: the verdict, and the steps that need no product
        self._direct_launches = self._first.launches_of(direct, check=True)
        #: of each batch the launches before its product, and those after it
        self._batch_launches = []
        for batch in self._batches:
            momenta = self._first.launches_of(batch)
            weights = self._second.launches_of([row_of[i] for i in batch])
            self._batch_launches.append((momenta, weights))

    def _halves(self, slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
        """Return both halves of the steps; of those that are direct the first is all."""
        scratch = self._scratch()
        firsts = list(slots)
        seconds = []
        for i, offset in zip(self._matrices, self._offsets.tolist(), strict=True):
            view = slots[i].view
            begin = offset // scratch.itemsize
            part = scratch[begin : begin + view.numel].view(view.dims)
            firsts[i] = first_half(slots[i], part)
            seconds.append(second_half(slots[i], part))
        return firsts, seconds

    def _scratch(self) -> Tensor:
        return torch.zeros(self._scratch_size, dtype=torch.float32, device=self._device)

    def run(self, slots: Sequence[Slot]) -> PendingValues:
        """Launch the step, and return the kernels' report without waiting for it.

        The report has a row for all steps and one for each.

        Args:
            slots: the same as before; their tensors are not looked at.
        """
        report = self._first.words()
        scratch = self._scratch()
        self._set_scratch(scratch)
        self._first.fill(slots, report)
        self._second.fill([slots[i] for i in self._matrices], report, self._matrices)
        with on_device(self._device):
            first_tables = upload(self._direct_launches, self._device)
            # launches of all batches have the same records
            second_tables = upload(self._batch_launches[0][1], self._device)
            run_calls(first_tables, self._direct_launches, report)
            for batch, (momenta, weights) in zip(self._batches, self._batch_launches, strict=True):
                leader = slots[batch[0]]
                mixes = scratch[: len(batch) * leader.view.numel]
                mixes = mixes.view(len(batch), *leader.view.dims).zero_()
                run_calls(first_tables, momenta, report)
                mixes.copy_(factors_of_batch(leader, mixes))
                run_calls(second_tables, weights, report)
        self._first.drop_copies()
        self._second.drop_copies()
        return PendingValues(report)

    def _set_scratch(self, scratch: Tensor) -> None:
        """Let the records of matrices point to the scratch memory of this step."""
        addresses = np.uint64(scratch.data_ptr()) + self._offsets
        self._first.records["pointers"][self._matrices, WEIGHT_COLUMN] = addresses
        self._second.records["pointers"][:, GRADIENT_COLUMN] = addresses

    def set_gradients(self, addresses: NDArray[np.uint64]) -> None:
        """Take the gradients of the next step from other memory."""
        self._first.set_gradients(addresses)

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors that the next step will find where they are.

        Scratch memory is not among them.
        """
        self._first.records["pointers"][self._matrices, WEIGHT_COLUMN] = 0
        self._second.records["pointers"][:, GRADIENT_COLUMN] = 0
        return self._first.addresses() + self._second.addresses()
