"""`train.parallel`: a model that several processes train together, each with its share of every batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.ranks import ALONE, Ranks
from nanogpt_bench.system.words import counted

#: collectives whose first argument is what a process gives; of the others it is the second
_IN_PLACE = ("allreduce", "broadcast", "reduce_", "send")


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Refuse processes that nothing says how to use, and a batch that they can't share.

    Raises:
        BenchError: says what to give.
    """
    size = ranks.size
    if ranks is ALONE:
        refuse_parallel(config.train.parallel, "this")
    if config.train.batch_size % size:
        raise BenchError(
            f"train.batch_size: {counted(config.train.batch_size, 'sequence')} can't be divided among {size} "
            f"processes; give a multiple of {size}"
        )
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    if size > 1 and config.runtime.device != "cpu" and 0 < gpus < here:
        raise BenchError(
            f"runtime.device: {here} processes need a GPU each, and {gpus} are here; start fewer, or give "
            "--runtime.device cpu"
        )


def refuse_parallel(mode: str | None, who: str) -> None:
    """Refuse `train.parallel` where runs are trained in one process.

    Raises:
        BenchError: says so.
    """
    if mode is not None:
        raise BenchError(
            f"train.parallel: {mode!r} is for torchrun -m nanogpt_bench run; {who} trains in one process; add "
            "--train.parallel null"
        )


def processes(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Return what environment.json says of a run in several processes; nothing of a run in one."""
    return {"parallel": config.train.parallel, "processes": ranks.size} if ranks.size > 1 else {}


Loss = Callable[[Tensor, Tensor], Tensor]


def replicated(model: nn.Module, loss: Loss) -> Loss:
    """Return a loss whose backward pass leaves the mean of all processes' gradients in each of them."""
    wrapped: Loss = nn.parallel.DistributedDataParallel(_Loss(model, loss), init_sync=False)
    return wrapped


class _Loss(nn.Module):
    """A loss as a module that holds the model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self._loss(tokens, targets)


def joined_model(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Return the first process' model, to the bit, in every process."""
    if ranks.size > 1:
        fm.distributed.sync(model)
    return model


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
