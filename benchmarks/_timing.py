"""Times of two functions taken in turn, and the bytes of every tensor that objects
hold.
"""

import time
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["live_bytes", "paired_seconds", "seconds", "wall_seconds"]

OPAQUE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call: CPU time of the whole process, or time between two events of
    the GPU's stream.
    """
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    begin = time.process_time()
    function()
    return time.process_time() - begin


def wall_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call: what a user waits for, compilers running beside the
    process included.
    """
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def paired_seconds(
    function: Callable[[], object],
    reference: Callable[[], object],
    pairs: int,
    device: torch.device,
) -> list[tuple[float, float]]:
    """Times (function, reference) of each pair; which goes first changes from pair to
    pair.
    """
    times = []
    for pair in range(pairs):
        if pair % 2:
            ours = seconds(function, device)
            times.append((ours, seconds(reference, device)))
        else:
            theirs = seconds(reference, device)
            times.append((seconds(function, device), theirs))
    return times


def live_bytes(*roots: object) -> int:
    """Bytes of the storages that the roots hold, each counted once; gradients are left
    out.

    Follows containers and attributes, takes a tensor subclass for its inner tensors,
    and so needs no list of what an optimizer keeps or where.
    """
    storages: dict[int, int] = {}
    seen: dict[int, object] = {}
    queue = list(roots)
    while queue:
        item = queue.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            if isinstance(item, Tensor) and not inner_tensors(item):
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            queue.extend(held_by(item))
    return sum(storages.values())


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass consists of; empty for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else []


def held_by(item: Any) -> list[object]:
    """Objects that an object refers to: elements, attributes, inner tensors."""
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, OPAQUE):
        return []
    attributes = list(vars(item).values()) if hasattr(item, "__dict__") else []
    return attributes + (inner_tensors(item) if isinstance(item, Tensor) else [])
