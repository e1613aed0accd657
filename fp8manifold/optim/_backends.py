"""Backends of a step, with the same bits: native code, a GPU's kernels, PyTorch; the
first that can takes it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._ranks import local_of
from fp8manifold.optim._directions import row_from_numbers
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import BOUND_NAMES
from fp8manifold.optim._step import run_eager
from fp8manifold.optim._triton_step import is_triton, run_triton
from fp8manifold.tensor import FP8Tensor


@eager_only  # no compiler sees into native code
def run_all(slots: Sequence[Slot]) -> None:
    """Take steps in place, each by the first backend that can; those in native code, or
    on a GPU, in one call.
    """
    places: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        if slot.weight.numel():
            places.setdefault(slot.weight.device, []).append(slot)
    for device, together in places.items():
        native, others = _split(together, is_native)
        if native:
            run_native(native)
        on_gpu, rest = _split(others, is_triton)
        rest = rest if on_gpu and run_triton(on_gpu) is not None else others
        if rest:
            _upload(rest, device)
        for slot in rest:
            run_eager(slot)
        note_changes([tensor for slot in together for tensor in slot.changed_tensors])
        note_changes(
            [
                slot.kept_scale
                for slot in together
                if slot.kept_scale is not None and any(slot.doubled)
            ]
        )


@contextmanager
def gathered(slots: Sequence[Slot]) -> Iterator[None]:
    """Gather all rows of each slot that is stepped whole, in one order everywhere, and
    put them back after the step.
    """
    homes = {slot: slot.tensors for slot in slots if slot.steps_all_rows}
    for slot, home in homes.items():
        assert slot.share is not None
        slot.tensors = {
            n: own if n in BOUND_NAMES else slot.share.gather_rows(own) for n, own in home.items()
        }
    yield
    for slot, home in homes.items():
        assert slot.share is not None
        for name in home.keys() - {"gradient"} - BOUND_NAMES:
            home[name].copy_(slot.share.local_rows(slot.tensors[name]))
        slot.tensors = home
    for slot in slots:
        if not slot.in_place:
            local_of(slot.parameter).copy_(slot.weight)


def _split(slots: Sequence[Slot], takes: Callable[[Slot], bool]) -> tuple[list[Slot], list[Slot]]:
    """Split slots into those that a backend takes, and the others: a step that fits
    scales is PyTorch's.
    """
    taken: list[Slot] = []
    others: list[Slot] = []
    for slot in slots:
        (taken if slot.fit_mask is None and takes(slot) else others).append(slot)
    return taken, others


def _upload(slots: Sequence[Slot], device: torch.device) -> None:
    """Put the numbers of slots on their GPU, by one copy from pinned memory that nobody
    waits for.
    """
    kinds: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(slot.dtype, []).append(slot)
    for dtype, some in kinds.items():
        numbers = torch.tensor(
            [row_from_numbers(slot.numbers, dtype) for slot in some], dtype=dtype
        )
        for slot, row in zip(some, upload_rows(numbers, device), strict=True):
            slot.number_row = row


def upload_rows(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return rows
    return (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of changes by native code and kernels, and drop remainders of a
    first rounding.
    """
    torch.autograd.graph.increment_version(tensors)
    for held in map(local_of, tensors):
        if isinstance(held, FP8Tensor) and held.remainder is not None:
            void_remainder(held)
