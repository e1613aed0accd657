"""Compiled steps: one pure function for all, specialised by variant; eager where there is no compiler.

``torch.compile`` spends more time on the guards of a small tensor than on its step.  So a call is checked by them
once for every shape, and repeated calls of that shape go straight to the code that was found.
"""

import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fp8manifold.optim._bitcasts import bitcasts_in_registers
from fp8manifold.optim._layout import index_in
from fp8manifold.optim._step import prepare_step, step
from fp8manifold.optim._variant import Variant
from fp8manifold.random_bits import mix

__all__ = ["Arguments", "CompileUnavailableWarning", "Compiled", "DirectCall", "compiled", "is_available", "next_name"]

Arguments = Sequence[Tensor]


class CompileUnavailableWarning(UserWarning):
    """Steps run eager: the same results, several times slower."""


@dataclass
class _State:
    """What is known of the compiler, and the call that is being watched."""

    available: bool = True
    steps: dict[tuple[Any, ...], "Compiled"] = field(default_factory=dict)
    #: from the outermost layer of compiled code to the innermost: the code and what it was given
    seen: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)


_state = _State()


def is_available() -> bool:
    """Whether no compilation has failed yet."""
    return _state.available


def compiled(kind: str, variant: Variant, names: tuple[str, ...], arguments: Arguments) -> "Compiled":
    """A function of the arrays called ``names`` that changes them in place: a ``step``, or what ``prepare``s for one.

    It returns False, with nothing changed and one :class:`CompileUnavailableWarning` ever, where compiling fails.
    """
    key = (kind, variant, names, tuple([(a.dtype, a.dim(), a.device.type) for a in arguments]))
    if key not in _state.steps:
        make = _step_function if kind == "step" else _prepare_function
        _state.steps[key] = Compiled(make(variant, names))
    return _state.steps[key]


class DirectCall:
    """Compiled code that takes a list, and which of its arguments is which of the arrays or a size."""

    def __init__(self, function: Callable[..., Any], template: list[tuple[bool, int]]) -> None:
        self.function, self._template = function, template

    def __call__(self, arguments: Arguments) -> None:
        """Call it without guards or look-ups."""
        self.function([arguments[x] if is_array else x for is_array, x in self._template])

    def bound(self, arguments: Arguments, fresh: Mapping[int, int]) -> tuple[list[Any], list[tuple[int, int]]]:
        """The code's arguments, and where in them (first) what is new in every step (second) belongs.

        Args:
            arguments: the arrays.
            fresh: of those that are new in every step, where the new ones will be found.
        """
        positions = [(i, fresh[x]) for i, (is_array, x) in enumerate(self._template) if is_array and x in fresh]
        new = {i for i, _ in positions}
        kept = [(arguments[x] if is_array else x) for is_array, x in self._template]
        return [None if i in new else value for i, value in enumerate(kept)], positions


class Compiled:
    """One variant's step with a code object of its own: variants that share one would exhaust its cache."""

    def __init__(self, function: Callable[..., None]) -> None:
        code = function.__code__.replace(co_name=f"{function.__name__}_{len(_state.steps)}")
        own = types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)
        self._function = torch.compile(own, dynamic=True, fullgraph=True, backend=_inductor)
        self._direct: dict[tuple[torch.Size, ...], DirectCall] = {}

    def __call__(self, arguments: Arguments) -> bool:
        """Take the step."""
        shapes = tuple([a.shape for a in arguments])
        if (direct := self._direct.get(shapes)) is not None:
            direct(arguments)
            return True
        return self._first_call(shapes, arguments)

    def direct(self, arguments: Arguments) -> DirectCall | None:
        """The call for arguments of these shapes without guards or look-ups, once one has been made."""
        return self._direct.get(tuple([a.shape for a in arguments]))

    def _first_call(self, shapes: tuple[torch.Size, ...], arguments: Arguments) -> bool:
        if not _state.available:
            return False
        _state.seen = []
        try:
            with _only_sizes_are_dynamic(), _innermost_is_seen():
                self._function(*arguments)
        except Exception as error:  # whatever a compiler's absence or failure raises
            _state.available = False
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            warnings.warn(
                f"optimizer steps run eager, several times slower: compiling failed with {type(error).__name__}: "
                f"{first_line} (a C++ compiler and Python's headers are needed; compile=False silences this)",
                CompileUnavailableWarning,
                stacklevel=2,
            )
            return False
        found = (_direct_call(code, received, arguments) for code, received in reversed(_state.seen))
        if (direct := next((call for call in found if call is not None), None)) is not None:
            self._direct[shapes] = direct
        _state.seen = []
        return True


def _step_function(variant: Variant, names: tuple[str, ...]) -> Callable[..., None]:
    def take_step(*tensors: Tensor) -> None:
        arrays = dict(zip(names, tensors, strict=True))
        numbers = arrays.pop("numbers")
        noise = _noise(variant, arrays)
        for name, value in step(variant, arrays, numbers, noise).stored.items():
            arrays[name].copy_(value)

    return take_step


def _prepare_function(variant: Variant, names: tuple[str, ...]) -> Callable[..., None]:
    def prepare(*tensors: Tensor) -> None:
        arrays = dict(zip(names, tensors, strict=True))
        numbers = arrays.pop("numbers")
        for name, value in prepare_step(variant, arrays, numbers).items():
            arrays[next_name(name)].copy_(value)

    return prepare


def next_name(name: str) -> str:
    """Where what is prepared goes: bounds beside those in use, so that nothing has changed if the step fails."""
    return f"{name}_next" if name.endswith("_bound") else name


def _noise(variant: Variant, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    if not (variant.draws_for_weight or variant.draws_for_moments):
        return {}
    keys, columns = arrays.pop("keys"), arrays.pop("columns")
    index = index_in(arrays["gradient"].shape, columns)
    noise = {}
    for name, wanted, k in (("weight", variant.draws_for_weight, 0), ("moments", variant.draws_for_moments, 3)):
        if wanted:
            noise[name] = mix(index + keys[k], keys[k + 1], keys[k + 2])
    return noise


def _inductor(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    with bitcasts_in_registers():
        function: Any = compile_fx(graph, example_inputs)

    inner = _unwrapped(function)

    def watched(*arguments: Any) -> Any:
        _state.seen.append((lambda given: inner(*given), arguments))
        return function(*arguments)

    return watched


@contextmanager
def _innermost_is_seen() -> Iterator[None]:
    """Note the code below the layers that take care of gradients and aliases, of which there are none here."""
    try:
        from torch._inductor.output_code import CompiledFxGraph

        call = CompiledFxGraph.__call__
    except (ImportError, AttributeError):
        yield
        return

    def watched(graph: Any, arguments: list[Any]) -> Any:
        if (inner := getattr(graph, "current_callable", None)) is not None:
            _state.seen.append((inner, tuple(arguments)))
        return call(graph, arguments)

    with patch.object(CompiledFxGraph, "__call__", watched):
        yield


def _direct_call(function: Callable[..., Any], received: tuple[Any, ...], arguments: Arguments) -> "DirectCall | None":
    """The call without guards, where it is plain which argument went where; sizes are the shape's own."""
    positions = {id(a): i for i, a in enumerate(arguments)}
    template: list[tuple[bool, int]] = []
    for value in received:
        if isinstance(value, Tensor):
            if id(value) not in positions:
                return None
            template.append((True, positions[id(value)]))
        elif isinstance(value, int):
            template.append((False, int(value)))
        else:
            return None
    return DirectCall(function, template)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code without the layers that keep a tracer out of it: whoever calls it does that once for all."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


@contextmanager
def _only_sizes_are_dynamic() -> Iterator[None]:
    """Sizes that happen to be equal are not taken to be one, and the numbers of a format are constants.

    Otherwise a square matrix would compile a step of its own, and every shift would be by a variable.
    """
    shapes: Any = torch.fx.experimental._config
    dynamo: Any = torch._dynamo.config
    with shapes.patch(use_duck_shape=False), dynamo.patch(specialize_int=True, specialize_float=True):
        yield
