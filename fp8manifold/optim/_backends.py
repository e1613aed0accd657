"""Backends of a step, which give the same bits: the first that can takes it.

    native code    on the CPU, in float32             _native_step.py, all in one call
    Triton         on an NVIDIA GPU, in float32       _triton_step.py, one launch a kind
    PyTorch        anything else                      _eager_step.py, slot by slot

A step that fits scales is PyTorch's, since it needs the targets of a step twice. A
sharded parameter that is stepped whole is gathered before, and its rows are put back
after (`gathered`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._ranks import local_of
from fp8manifold.optim._directions import row_from_numbers
from fp8manifold.optim._eager_step import run_eager
from fp8manifold.optim._factored import factors_of
from fp8manifold.optim._factors import Preconditioner
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import BOUND_NAMES
from fp8manifold.optim._triton_step import is_triton, run_triton
from fp8manifold.tensor import FP8Tensor


@eager_only  # no compiler sees into native code
def run_all(slots: Sequence[Slot]) -> None:
    """Take steps in place, each by the first backend that can."""
    slots_by_device: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        if slot.weight.numel():
            slots_by_device.setdefault(slot.weight.device, []).append(slot)
    for device, together in slots_by_device.items():
        native, others = _split(together, is_native)
        if native:
            run_native(native)
        on_gpu, rest = _split(others, is_triton)
        if not on_gpu or run_triton(on_gpu) is None:
            rest = others
        _compute_factors(rest, device)
        if rest:
            _upload_numbers(rest, device)
        for slot in rest:
            run_eager(slot)
        changed = []
        rescaled = []
        for slot in together:
            changed += slot.changed_tensors
            if slot.kept_scale is not None and any(slot.doubled):
                rescaled.append(slot.kept_scale)
        note_changes(changed)
        note_changes(rescaled)


def _compute_factors(slots: Sequence[Slot], device: torch.device) -> None:
    """Advance Adafactor's statistics of slots that PyTorch steps."""
    factored = [
        slot
        for slot in slots
        if slot.factors is None and slot.spec.preconditioner != Preconditioner.NONE
    ]
    if factored:
        _upload_numbers(factored, device)
    for slot in factored:
        slot.factors = factors_of(slot)


@contextmanager
def gathered(slots: Sequence[Slot]) -> Iterator[None]:
    """Gather all rows of each slot that is stepped whole, and put them back afterwards.

    Weights that were stepped in a contiguous copy are written back, too. The order is
    the same in every process.
    """
    local_tensors = {slot: slot.tensors for slot in slots if slot.steps_all_rows}
    for slot, local in local_tensors.items():
        assert slot.share is not None
        whole = {}
        for name, tensor in local.items():
            whole[name] = tensor if name in BOUND_NAMES else slot.share.gather_rows(tensor)
        slot.tensors = whole
    yield
    for slot, local in local_tensors.items():
        assert slot.share is not None
        for name in local.keys() - {"gradient"} - BOUND_NAMES:
            local[name].copy_(slot.share.local_rows(slot.tensors[name]))
        slot.tensors = local
    for slot in slots:
        if not slot.in_place:
            local_of(slot.parameter).copy_(slot.weight)


def _split(slots: Sequence[Slot], takes: Callable[[Slot], bool]) -> tuple[list[Slot], list[Slot]]:
    """Split slots into those that a backend takes, and the others."""
    taken: list[Slot] = []
    others: list[Slot] = []
    for slot in slots:
        if slot.fit_mask is None and takes(slot):
            taken.append(slot)
        else:
            others.append(slot)
    return taken, others


def _upload_numbers(slots: Sequence[Slot], device: torch.device) -> None:
    """Put the numbers of slots on their GPU, by one copy for each dtype."""
    slots_by_dtype: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        slots_by_dtype.setdefault(slot.dtype, []).append(slot)
    for dtype, slots_of_dtype in slots_by_dtype.items():
        values = [row_from_numbers(slot.numbers, dtype) for slot in slots_of_dtype]
        rows = torch.tensor(values, dtype=dtype, device="cpu")
        for slot, row in zip(slots_of_dtype, upload_rows(rows, device), strict=True):
            slot.number_row = row


def upload_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Copy rows to a device. The host does not wait, as the copy is from pinned memory."""
    if device.type == "cpu":
        return rows
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of changes by native code and kernels.

    Remainders of a first rounding are dropped, as the weights have moved.
    """
    torch.autograd.graph.increment_version(tensors)
    for tensor in map(local_of, tensors):
        if isinstance(tensor, FP8Tensor) and tensor.remainder is not None:
            void_remainder(tensor)
