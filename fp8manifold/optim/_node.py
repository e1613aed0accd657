"""A step as one operator of torch's, so that the graph of a training step holds it as one node.

A compiler that looks into a step would find arithmetic on the host, draws and native code.  It sees this operator
instead, which names what changes: the parameters' memory.  The optimizer's own state is not in the graph.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import EncodedTensor, implements

__all__ = ["new_number", "step_as_a_node"]

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
