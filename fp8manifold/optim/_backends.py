"""The backends of a step, with the same bits: native code, a GPU's kernels, compiled or eager PyTorch.

A whole step as one node of a graph that ``torch.compile`` makes is here too.
"""

import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import EncodedTensor, implements
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._numerics.blocks import block_on
from fp8manifold._numerics.charts import chart_of
from fp8manifold._numerics.reading import eager_only
from fp8manifold._ranks import local_of
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.optim._slot import Slot, index_in, key_rows, row_of
from fp8manifold.optim._spec import Spec
from fp8manifold.optim._state import unpacked
from fp8manifold.optim._step import Outcome, load_weights, step
from fp8manifold.optim._triton_step import CompileUnavailableWarning, is_triton, run_triton
from fp8manifold.random_bits import mix, word_range
from fp8manifold.tensor import FP8Tensor


@eager_only  # compiled code is called as it is
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
            with unpacked([slot]):  # of those that were left to kernels
                _run_alone(slot)
        note_changes([tensor for slot in together for tensor in slot.changed])


def _split(slots: Sequence[Slot], takes: Callable[[Slot], bool]) -> tuple[list[Slot], list[Slot]]:
    """Split slots into those that a backend takes, unless their group asks for PyTorch, and the others.

    A step that fits scales is PyTorch's: there are few of them.
    """
    taken: list[Slot] = []
    others: list[Slot] = []
    for slot in slots:
        (taken if slot.group["compile"] is None and slot.zero is None and takes(slot) else others).append(slot)
    return taken, others


_ALIGNED: Final = 16
"""Bytes at whose multiples compiled code wants its arguments to begin: it copies the others."""


def _upload(slots: Sequence[Slot], device: torch.device) -> None:
    """Put the numbers and keys of slots on their GPU, by one copy each from pinned memory that nobody waits for."""
    kinds: dict[torch.dtype, list[Slot]] = {}
    for slot in slots:
        kinds.setdefault(slot.dtype, []).append(slot)
    for dtype, some in kinds.items():
        numbers = torch.tensor([row_of(slot.numbers, dtype) for slot in some], dtype=dtype)
        keys = torch.from_numpy(key_rows(some))
        for slot, row, key in zip(some, uploaded(numbers, device), uploaded(keys, device), strict=True):
            slot.row, slot.keys = row, key


def uploaded(rows: Tensor, device: torch.device) -> Tensor:
    """Rows on a device, each of which begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return rows
    each, width = _ALIGNED // rows.itemsize, rows.shape[1]
    shape = (len(rows), -(-width // each) * each)
    table = torch.zeros(shape, dtype=rows.dtype, pin_memory=device.type == "cuda")
    table[:, :width] = rows
    return table.to(device, non_blocking=True)[:, :width]


def _run_alone(slot: Slot) -> None:
    """Take a step compiled, where that is asked for or usual on its device, or eagerly."""
    wanted = slot.group["compile"]
    compiles = slot.zero is None and (wanted or (wanted is None and slot.device.type != "cpu"))
    if not (compiles and can_compile(slot) and run_compiled(slot)):
        run_eager(slot)


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of changes by native and compiled code, so that it refuses tensors that it had saved.

    The remainder of the first rounding, where no residual has begun with it, is void.
    """
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
    """The rows of an array that has them; an array of one value is for all."""
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
    """Take the step eagerly and show it: the values it started from, asked for and left.

    With an ULP residual these are the values that the residual stands for, not those of the codes alone.
    """
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


_functions: Final[dict[tuple[object, ...], Callable[..., None]]] = {}
"""Compiled functions by their keys."""

_failed: Final[set[tuple[object, ...]]] = set()
"""Keys of functions that could not be compiled, after a warning."""


def can_compile(slot: Slot) -> bool:
    """True for a step that has the same bits compiled, and has not failed to compile."""
    fits = slot.spec.compiles and slot.view.compiles and slot.dtype is torch.float32
    small = slot.view.numel < 2**31 and slot.offset % 2**32 + slot.view.numel <= 2**32
    return fits and small and _key(slot) not in _failed


def run_compiled(slot: Slot) -> bool:
    """Take the step in place; False, with nothing changed and one warning ever, where compiling fails."""
    key, arrays = _key(slot), slot.arrays
    if key not in _functions:
        _functions[key] = _compiled(slot.spec, tuple(arrays), slot.device.type)
    try:
        _functions[key](slot.row, slot.keys, *arrays.values())
    except torch.OutOfMemoryError:
        raise  # no failure of the compiler's: eager, it would need more
    except Exception as error:  # whatever a compiler's absence or failure raises
        if not _failed:
            first_line = next(iter(str(error).strip().splitlines()), "")
            warnings.warn(
                f"optimizer steps are not compiled: torch.compile failed with {type(error).__name__}: {first_line} "
                "(compile=False silences this)",
                CompileUnavailableWarning,
                stacklevel=2,
            )
        _failed.add(key)
        return False
    return True


def _key(slot: Slot) -> tuple[object, ...]:
    return (slot.spec, len(slot.view.dims), slot.device.type, tuple(slot.tensors))


def _compiled(spec: Spec, names: tuple[str, ...], device: str) -> Callable[..., None]:
    """The pure step with a code object of its own: specifications that share one would exhaust its cache."""
    for name, fact in vars(Spec).items():
        if isinstance(fact, cached_property):
            getattr(spec, name)  # known before: no compiler goes through the lock that guards it

    def take_step(row: Tensor, keys: Tensor, *tensors: Tensor) -> None:
        arrays = dict(zip(names, tensors, strict=True))
        noise = _noise(spec, arrays["gradient"], keys)
        for name, value in step(spec, arrays, row, noise).stored.items():
            arrays[name].copy_(value)

    code = take_step.__code__.replace(co_name=f"take_step_{len(_functions)}")
    own = types.FunctionType(code, take_step.__globals__, code.co_name, None, take_step.__closure__)
    function: Callable[..., None] = torch.compile(own, fullgraph=True, options=exact_options(device))
    return function


_EXACT: Final = ("emulate_precision_casts", "eager_numerics.division_rounding", "eager_numerics.disable_ftz")
"""Options of Inductor's without which a GPU's code contracts products and sums, and divides approximately."""


@cache
def exact_options(device: str) -> dict[str, str | int | bool | Callable[..., Any]] | None:
    """Compile a step on a device to the bits of an eager one, with the options that the release of torch has."""
    if device == "cpu":
        return None
    from torch._inductor import config

    known = getattr(config, "get_config_copy", None) or config.to_dict  # older releases have the latter alone
    return {name: True for name in _EXACT if name in known()}


def _noise(spec: Spec, gradient: Tensor, keys: Tensor) -> dict[str, Tensor]:
    if not (spec.draws_for_weight or spec.draws_for_moments):
        return {}
    index = index_in(gradient.shape, gradient.device)
    noise = {}
    for name, wanted, k in (("weight", spec.draws_for_weight, 0), ("moments", spec.draws_for_moments, 4)):
        if wanted:
            noise[name] = mix(index + keys[k], keys[k + 1], keys[k + 2]) + keys[k + 3]
    return noise


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
"""No CUDA graph may record a step: it runs on the host, and waits for the verdict on gradients."""


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
    """Pass encoded parameters on as their parts."""
    number, members, memory, gradients = args
    return func(number, members, _memory_of(memory), gradients)


def _memory_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that hold parameters: of an encoded one all of its parts."""
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
