"""Times of two functions taken in turn, and the bytes of every tensor that objects hold."""

import statistics
import time
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CPU",
    "Pair",
    "Ratio",
    "Step",
    "live_bytes",
    "paired_seconds",
    "seconds",
    "wall_seconds",
]

CPU: Final = torch.device("cpu")
#: what is timed: its calls one after the other
Step = Callable[[], object]

#: kinds of objects that hold no tensors of an optimizer, and lead everywhere
OPAQUE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Pair(NamedTuple):
    """Seconds of two functions that were called one after the other."""

    measured: float
    reference: float

    @property
    def ratio(self) -> float:
        """Time of the measured function over that of the reference."""
        return self.measured / self.reference


class Ratio(NamedTuple):
    """Ratios of several pairs."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> "Ratio":
        """Summarise ratios."""
        values = list(ratios)
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_pairs(cls, pairs: Iterable[Pair]) -> "Ratio":
        """Summarise the ratios of pairs."""
        return cls.of(pair.ratio for pair in pairs)

    def __str__(self) -> str:
        """Return all three on one line.

        >>> str(Ratio.of([1.0, 3.0, 1.5]))
        '1.50x (1.00 .. 3.00)'
        """
        return f"{self.median:.2f}x ({self.smallest:.2f} .. {self.largest:.2f})"


def seconds(function: Step, device: torch.device) -> float:
    """Return the time of one call.

    It is the CPU time of the whole process, or on a GPU the time between two events of
    the stream.
    """
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    begin = time.process_time()
    function()
    return time.process_time() - begin


def wall_seconds(function: Step, device: torch.device) -> float:
    """Return the wall-clock time of one call.

    It is what a user waits for, compilers included that run in other processes.
    """
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def paired_seconds(
    function: Step,
    reference: Step,
    pairs: int,
    device: torch.device,
) -> list[Pair]:
    """Return the times of each pair; which function goes first changes from pair to pair."""
    times = []
    for number in range(pairs):
        if number % 2:
            measured = seconds(function, device)
            times.append(Pair(measured, seconds(reference, device)))
        else:
            reference_seconds = seconds(reference, device)
            times.append(Pair(seconds(function, device), reference_seconds))
    return times


def live_bytes(*roots: object) -> int:
    """Return the bytes of the storages that the roots hold, each counted once.

    It follows containers and attributes, and takes a tensor subclass for its inner
    tensors. So it needs no list of what an optimizer keeps or where. A gradient in
    ``grad`` is left out, and one that an object holds in another place is not.
    """
    storages: dict[int, int] = {}
    # Objects stay referenced, so that no other gets the id of one that was freed.
    visited: dict[int, object] = {}
    queue = list(roots)
    while queue:
        item = queue.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item
        if isinstance(item, Tensor) and not inner_tensors(item):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        queue.extend(referred_objects(item))
    return sum(storages.values())


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a wrapper subclass consists of; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten()
    return [getattr(tensor, name) for name in names]


def referred_objects(item: Any) -> list[object]:
    """Return the objects that an object refers to: elements, attributes, inner tensors."""
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, OPAQUE):
        return []
    objects: list[object] = list(vars(item).values()) if hasattr(item, "__dict__") else []
    if isinstance(item, Tensor):
        objects += inner_tensors(item)
    return objects
