"""The bytes that a model and its optimizer hold: counted on the tensors that are alive, not derived from a scheme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the parameters, the buffers and the optimizer's state and groups.

    A tensor subclass counts as the tensors inside it, a memory that several tensors share once, and a view as the
    whole memory it keeps alive. Gradients are left out, unless the state keeps some that the model does not. So is
    what an optimizer remembers beside its state, only to be quicker or until the next step: whether it is there depends
    on the last step, and a run that is taken up makes it anew.

    >>> model = nn.Linear(8, 4, bias=False)
    >>> held_bytes(model, torch.optim.SGD(model.parameters(), lr=0.1))
    128
    """
    held = [*model.parameters(), *model.buffers(), *tensors_in([optimizer.state, optimizer.param_groups])]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(_sizes(held).values()) - sum(size for key, size in _sizes(gradients).items() if key in _sizes(held))


class GradientPeak:
    """The most bytes that a model's gradients take at once in its next backward pass: counted as each of them comes."""

    def __init__(self, model: nn.Module) -> None:
        #: None before that pass
        self.bytes: int | None = None
        self._most, self._own = 0, [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Before an optimizer's own hooks, which may take a gradient away.
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._count) for parameter in self._own]

    def _count(self, _: Tensor) -> None:
        gradients = (parameter.grad for parameter in self._own)
        alive = [gradient for gradient in gradients if type(gradient) is Tensor]
        self._most = max(self._most, memory_of(alive))

    def known(self) -> None:
        """Called after a backward pass."""
        for hook in self._hooks:
            hook.remove()
        if not self._most and self.bytes is None:  # of shards nobody calls hooks
            self._most = memory_of([parameter.grad for parameter in self._own if parameter.grad is not None])
        self._hooks, self.bytes = [], self.bytes or self._most or None


def bytes_of(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of these parameters alone, with the optimizer's state for each."""
    held = [tensor for parameter in parameters for tensor in (parameter, *tensors_in(optimizer.state.get(parameter)))]
    return memory_of(held)


def memory_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct memories behind tensors.

    >>> memory_of([torch.zeros(3), torch.zeros(5)])
    32
    """
    return sum(_sizes(tensors).values())


def _sizes(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Return the bytes of the distinct memories behind the tensors, by device and address."""
    storages = [inner.untyped_storage() for tensor in tensors for inner in plain_tensors(tensor)]
    return {(str(storage.device), storage.data_ptr()): storage.nbytes() for storage in storages}


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's memory: itself, or those inside a wrapper subclass, however deep."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in [getattr(tensor, name) for name in flatten()[0]]:
        if isinstance(part, Tensor):  # a DTensor has its mesh among them
            yield from plain_tensors(part)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers and objects, the keys of mappings among them.

    >>> len(tensors_in({"a": [torch.zeros(1), 2.0], torch.zeros(1): None}))
    2
    """
    return list(_walk(value, set()))


def _walk(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        for item in _contents(value):
            yield from _walk(item, seen)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, type | ModuleType | FunctionType) or not hasattr(value, "__dict__"):
        return ()
    return list(vars(value).values())
