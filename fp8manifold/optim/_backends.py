"""Running what is planned: in native code, by kernels, compiled or eagerly, with the same bits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import EncodedTensor, implements
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._numerics.blocks import block_on
from fp8manifold._numerics.eager import eager_only
from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold._ranks import local_of
from fp8manifold.optim._compiled_step import can_compile, run_compiled
from fp8manifold.optim._directions import row
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.optim._slot import Slot, key_rows
from fp8manifold.optim._step import Outcome, step
from fp8manifold.optim._triton_step import is_triton, run_triton
from fp8manifold.random_bits import word_range
from fp8manifold.tensor import FP8Tensor


def run_eager(slot: Slot, numbers: Tensor, *, observed: bool = False) -> list[Outcome]:
    """Take the step in place; what each part of it asked for, where it is observed.

    Args:
        slot: what to step.
        numbers: a row of hyperparameters in the dtype that is computed in.
        observed: whether to keep what was asked for.
    """
    outcomes = []
    for arrays, start in blocks_of(slot):
        outcome = step(slot.spec, arrays, numbers, block_noise(slot, arrays["gradient"], start))
        for name, value in outcome.stored.items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def blocks_of(slot: Slot) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The arrays some rows at a time, and the position of their first element in the slot."""
    first, inner = slot.view.dims[0], slot.view.numel // slot.view.dims[0]
    rows = max(1, block_on(slot.tensors["weight"].device) // inner)
    if len(slot.view.dims) == 1 and slot.blockwise:
        rows = first  # its one block is not cut up
    for start in range(0, first, rows):
        yield {name: _rows(a, start, rows, first) for name, a in slot.arrays.items()}, start * inner


def block_noise(slot: Slot, part: Tensor, start: int) -> dict[str, Tensor]:
    """The random words of a part of a slot, by what draws them."""
    noise = {}
    if slot.spec.draws_for_weight:
        key = slot.rounding_key
        words = word_range(slot.offset + start, part.numel(), key.words, part.device, phase=key.phase)
        noise["weight"] = words.view(part.shape)
    if slot.spec.draws_for_moments:
        key = slot.moments_key
        words = word_range(slot.offset + start, part.numel(), key.words, part.device, phase=key.phase)
        noise["moments"] = words.view(part.shape)
    return noise


def _rows(array: Tensor, start: int, rows: int, total: int) -> Tensor:
    """The rows of an array that has them; what there is one of is for all."""
    return array[start : start + rows] if array.dim() and array.shape[0] == total else array


# ------------------------------------------------------------------------------------------------------------------ run


@eager_only  # compiled code is called as it is
def run_all(slots: Sequence[Slot], numbers: Tensor, keys: Tensor, wanted: Sequence[bool | None]) -> None:
    """Take many steps in place, those that native code takes in one call.

    Args:
        slots: what to step, on one device.
        numbers: a row of hyperparameters each, on the host.
        keys: a row of round keys each, on the host.
        wanted: each one's ``compile``.
    """
    dtype = numbers.dtype
    native = [i for i, (slot, c) in enumerate(zip(slots, wanted, strict=True)) if c is None and is_native(slot, dtype)]
    if len(native) == len(slots):
        run_native(slots, numbers.numpy(), keys.numpy())
    elif native:
        run_native([slots[i] for i in native], numbers[native].numpy(), keys[native].numpy())
    others = sorted(set(range(len(slots))) - set(native))
    on_gpu = [i for i in others if wanted[i] is None and is_triton(slots[i], dtype)]
    if on_gpu and run_triton([slots[i] for i in on_gpu], numbers[on_gpu].numpy(), keys[on_gpu].numpy()) is None:
        on_gpu = []
    if rest := sorted(set(others) - set(on_gpu)):
        device = slots[rest[0]].tensors["weight"].device
        rows = zip(uploaded(numbers[rest], device), uploaded(keys[rest], device), strict=True)
        for i, (own_numbers, own_keys) in zip(rest, rows, strict=True):
            _run_without_native(slots[i], own_numbers, own_keys, wanted[i])
    note_changes([tensor for slot in slots for tensor in slot.changed])


def tables_of(slots: Sequence[Slot]) -> list[tuple[list[Slot], Tensor, Tensor]]:
    """The slots of each device and dtype, with a row of numbers and of round keys each, on the host."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Slot]] = {}
    for slot in slots:
        kinds.setdefault((slot.tensors["weight"].device, working_dtype(slot.parameter)), []).append(slot)
    tables = []
    for (_, dtype), together in kinds.items():
        numbers = np.array([row(slot.numbers, dtype) for slot in together], dtype=np.float64)
        tables.append((together, torch.from_numpy(numbers).to(dtype), torch.from_numpy(key_rows(together))))
    return tables


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Native and compiled code, and codes, change behind autograd's back: say so, for it refuses what it had saved.

    What the rounding of the codes before has left, where no residual has begun with it, is void.
    """
    torch.autograd.graph.increment_version(tensors)
    for held in map(local_of, tensors):
        if isinstance(held, FP8Tensor):
            void_remainder(held)


_ALIGNED: Final = 16
"""Bytes at whose multiples compiled code wants its arguments to begin: it copies the others."""


def uploaded(rows: Tensor, device: torch.device) -> Tensor:
    """Rows on a device, by one copy from pinned memory that nobody waits for; each begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return rows
    each, width = _ALIGNED // rows.itemsize, rows.shape[1]
    shape = (len(rows), -(-width // each) * each)
    table = torch.zeros(shape, dtype=rows.dtype, pin_memory=device.type == "cuda")
    table[:, :width] = rows
    return table.to(device, non_blocking=True)[:, :width]


def _run_without_native(slot: Slot, numbers: Tensor, keys: Tensor, wanted: bool | None) -> None:
    device = slot.tensors["weight"].device
    compiles = wanted or (wanted is None and device.type != "cpu")
    if not (compiles and can_compile(slot, numbers.dtype) and run_compiled(slot, numbers, keys)):
        run_eager(slot, numbers)


# ----------------------------------------------------------------------------------------------------------------- node


_optimizers: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
"""Optimizers by the numbers that graphs name them by."""

_numbers: Final = count(1)


def new_number(optimizer: torch.optim.Optimizer) -> int:
    """A number that names an optimizer in graphs for as long as it lives."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def step_as_a_node(number: int, parameters: Sequence[Tensor]) -> None:
    """Take the step of those parameters that have a gradient, as one node of the graph that is being made.

    Args:
        number: what :func:`new_number` has named the optimizer.
        parameters: all of the optimizer's, in order.
    """
    members = [i for i, p in enumerate(parameters) if p.grad is not None]
    gradients = [parameters[i].grad for i in members]
    torch.ops.fp8manifold.optimizer_step(number, members, [parameters[i] for i in members], gradients)


_TAGS: Final = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []
"""It plans on the host, and waits for the verdict on gradients: no CUDA graph may record it."""


@torch.library.custom_op("fp8manifold::optimizer_step", mutates_args=("memory",), tags=_TAGS)
def optimizer_step(number: int, members: list[int], memory: list[Tensor], gradients: list[Tensor]) -> None:
    """Step the parameters at ``members``; ``memory`` is theirs, or copies that a compiler keeps in its place."""
    optimizer = _optimizers.get(number)
    if optimizer is None:
        raise RuntimeError("this graph was compiled for an optimizer that is gone: compile the step of the new one")
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = [everyone[i] for i in members]
    _copy(memory, _memory_of(stepped))
    with ExitStack() as stack:
        for p in everyone:
            stack.callback(_put_gradient(p, None))
        for p, gradient in zip(stepped, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
    _copy(_memory_of(stepped), memory)


@optimizer_step.register_fake
def _(number: int, members: list[int], memory: list[Tensor], gradients: list[Tensor]) -> None:
    return None


@implements(torch.ops.fp8manifold.optimizer_step.default)
def _with_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Encoded parameters as their parts."""
    number, members, memory, gradients = args
    return func(number, members, _memory_of(memory), gradients)


def _memory_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that hold them: of an encoded one all of its parts."""
    parts = [p._held() if isinstance(p, EncodedTensor) else [p] for p in parameters]
    return [part for each in parts for part in each]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def _put_gradient(p: Tensor, gradient: Tensor | None) -> Callable[[], None]:
    """Replace a gradient, and return what puts the present one back."""
    present, p.grad = p.grad, gradient

    def back() -> None:
        p.grad = present

    return back
