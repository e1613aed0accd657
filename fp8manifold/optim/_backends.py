"""The backends of a step, with the same bits: native code, a GPU's kernels, PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8manifold._base.blocks import block_on
from fp8manifold._base.reading import eager_only
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._numerics.charts import chart_of
from fp8manifold._ranks import local_of
from fp8manifold.optim._directions import row_of
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import BOUND_NAMES
from fp8manifold.optim._step import Outcome, load_weights, step
from fp8manifold.optim._triton_step import is_triton, run_triton
from fp8manifold.random_bits import word_range
from fp8manifold.tensor import FP8Tensor


@eager_only  # no compiler sees into native code
def run_all(slots: Sequence[Slot]) -> None:
    """Take steps in place, each by the first backend that has it; those of native code, or of a GPU, in one call."""
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
        note_changes([tensor for slot in together for tensor in slot.changed])
        note_changes([slot.kept_scale for slot in together if slot.kept_scale is not None and any(slot.doubled)])


@contextmanager
def gathered(slots: Sequence[Slot]) -> Iterator[None]:
    """Gather all rows of each slot that is stepped whole, in one order everywhere, and put them back after the step."""
    homes = {slot: slot.tensors for slot in slots if slot.whole}
    for slot, home in homes.items():
        assert slot.share is not None
        slot.tensors = {n: own if n in BOUND_NAMES else slot.share.gathered(own) for n, own in home.items()}
    yield
    for slot, home in homes.items():
        assert slot.share is not None
        for name in home.keys() - {"gradient"} - BOUND_NAMES:
            home[name].copy_(slot.share.own(slot.tensors[name]))
        slot.tensors = home
    for slot in slots:
        if not slot.in_place:
            local_of(slot.parameter).copy_(slot.weight)


def _split(slots: Sequence[Slot], takes: Callable[[Slot], bool]) -> tuple[list[Slot], list[Slot]]:
    """Split slots into those that a backend takes, and the others: a step that fits scales is PyTorch's."""
    taken: list[Slot] = []
    others: list[Slot] = []
    for slot in slots:
        (taken if slot.zero is None and takes(slot) else others).append(slot)
    return taken, others


def _upload(slots: Sequence[Slot], device: torch.device) -> None:
    """Put the numbers of slots on their GPU, by one copy from pinned memory that nobody waits for."""
    kinds: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(slot.dtype, []).append(slot)
    for dtype, some in kinds.items():
        numbers = torch.tensor([row_of(slot.numbers, dtype) for slot in some], dtype=dtype)
        for slot, row in zip(some, uploaded(numbers, device), strict=True):
            slot.row = row


def uploaded(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return rows
    pinned = rows.pin_memory() if device.type == "cuda" else rows
    return pinned.to(device, non_blocking=True)


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of changes by native code and kernels; remainders of a first rounding are void then."""
    torch.autograd.graph.increment_version(tensors)
    for held in map(local_of, tensors):
        if isinstance(held, FP8Tensor) and held.remainder is not None:
            void_remainder(held)


def run_eager(slot: Slot, *, observed: bool = False) -> list[Outcome]:
    """Take the step in place, and return the outcome of each part of it where it is observed."""
    outcomes = []
    for arrays, start in blocks_of(slot):
        outcome = step(slot.spec, arrays, slot.row, block_noise(slot, arrays["gradient"], start))
        for name, value in outcome.stored.items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def blocks_of(slot: Slot) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The arrays some rows at a time, and the position of their first element in the slot."""
    first, inner = slot.view.dims[0], slot.view.numel // slot.view.dims[0]
    rows = max(1, block_on(slot.device) // inner)
    if len(slot.view.dims) == 1 and slot.spec.blockwise:
        rows = first  # its one block is not cut up
    for start in range(0, first, rows):
        yield {name: _rows(a, start, rows, first) for name, a in slot.arrays.items()}, start * inner


def block_noise(slot: Slot, part: Tensor, start: int) -> dict[str, Tensor]:
    """The random words of a part of a slot, by what draws them."""
    wanted = {"weight": slot.spec.draws_for_weight, "moments": slot.spec.draws_for_moments}
    keys = {"weight": slot.rounding_key, "moments": slot.moments_key}
    noise = {}
    for name in (name for name, draws in wanted.items() if draws):
        words, phase = keys[name]
        noise[name] = word_range(slot.offset + start, part.numel(), words, part.device, phase=phase).view(part.shape)
    return noise


def _rows(array: Tensor, start: int, rows: int, total: int) -> Tensor:
    return array[start : start + rows] if array.dim() and array.shape[0] == total else array


@dataclass(frozen=True)
class StepView:
    """What an observer sees of one quantised parameter in one step; the tensors are detached and not to be changed."""

    parameter: Tensor
    """The parameter itself, after the step."""
    before: Tensor
    """Its values before the step; as those below of its shape, in float32 (float64 for float64 parameters)."""
    target: Tensor
    """The value requested, before the write-back rounds it."""
    after: Tensor
    """The value after the write-back."""
    stiffness: Tensor
    """One step of the metric at ``before``: an ULP, where that is ``ulp``."""


def observed_step(slot: Slot) -> StepView:
    """Take the step eagerly and show the values it started from, asked for and left, residuals included."""
    return viewed(slot, lambda: run_eager(slot, observed=True))


def viewed(slot: Slot, take: Callable[[], list[Outcome]]) -> StepView:
    """Show the step of a slot that ``take`` takes, part by part."""
    shape, scale = slot.weight.shape, slot.arrays["scale"]
    before = load_weights(slot.spec, slot.arrays, slot.dtype).x * scale
    outcomes = take()
    target = torch.cat([outcome.target for outcome in outcomes]) * scale
    x = torch.cat([outcome.before.x for outcome in outcomes])
    assert slot.spec.fmt is not None
    stiffness = chart_of(slot.spec.fmt, slot.spec.metric).stiffness(x) * scale
    after = load_weights(slot.spec, slot.arrays, slot.dtype).x * slot.arrays.get("next_scale", scale)
    return StepView(slot.parameter, *(x.reshape(shape) for x in (before, target, after, stiffness)))
