"""CUDA graphs without a card: operators and launches are noted while a function runs, undone, and run again."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8manifold._triton import launch
from fp8manifold.optim import _graphed


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class Tape(TorchDispatchMode):
    """The launches of a function, in their order; nothing of it has happened when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[Callable[[], None]] = []
        self._before: list[tuple[Tensor, Tensor]] = []
        self._kernels = mock.patch.object(launch, "_run", lambda *args: self._noted.append(lambda: _RUN(*args)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(x): x for x in _tensors((args, kwargs))}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(x, x.clone()) for x in _tensors(value)]
        result = func(*args, **kwargs)
        places = {x.untyped_storage().data_ptr() for x in given.values() if type(x) is Tensor}
        made = [
            (i, x)
            for i, x in enumerate(_tensors(result))
            if id(x) not in given and (type(x) is not Tensor or x.untyped_storage().data_ptr() not in places)
        ]

        def again() -> None:
            new = _tensors(func(*args, **kwargs))
            for i, x in made:
                x.copy_(new[i])

        self._noted.append(again)
        return result

    def begin(self) -> None:
        self._kernels.start()
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        self._kernels.stop()
        with torch.no_grad():
            for x, before in reversed(self._before):
                x.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        written = [x for x, _ in self._before]
        versions = [x._version for x in written]
        for again in self._noted:
            again()
        torch._C._autograd._unsafe_set_version_counter(written, versions)  # a card's replay tells torch nothing


_RUN = launch._run


class Tapes(_graphed._Graphs):
    """Recordings of a card, on tapes."""

    def __init__(self) -> None:
        self._tapes: list[Tape] = []

    def begin(self) -> None:
        self._tapes.append(Tape())
        self._tapes[-1].begin()

    def end(self) -> None:
        self._tapes[-1].end()

    def replay(self, which: int) -> None:
        self._tapes[which].replay()
