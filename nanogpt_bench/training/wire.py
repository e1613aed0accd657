"""Bytes that a process sends in a training step, counted at the collectives of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: collectives whose first argument is what a process gives; of the others it is the second
_IN_PLACE = ("allreduce", "broadcast", "reduce_", "send")


class Wire:
    """Counts the second step that this process takes: the first one makes more than a step needs."""

    def __init__(self, processes: int) -> None:
        self._processes, self._steps = processes, 0
        #: None before that step, and in one process
        self.bytes: int | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Take a step."""
        self._steps += 1
        if self._processes == 1 or self._steps != 2:
            yield
            return
        with _Count(self._processes) as count:
            yield
        self.bytes = round(count.sent)


class _Count(TorchDispatchMode):
    """What goes out along a ring of the processes: of what is summed up everywhere each byte goes out nearly twice."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self._processes, self.sent = processes, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").lstrip("_")
            given = args[0] if name.startswith(_IN_PLACE) and not name.startswith("reduce_scatter") else args[1]
            size = sum(x.nbytes for x in tree_leaves(given) if isinstance(x, Tensor))
            self.sent += size * self._factor(name)
        return func(*args, **(kwargs or {}))

    def _factor(self, name: str) -> float:
        others, share = self._processes - 1, (self._processes - 1) / self._processes
        if name.startswith("allreduce"):
            return 2 * share
        if name.startswith("allgather"):
            return others
        return share if name.startswith(("reduce_scatter", "broadcast")) else 1.0
