"""Launching steps: a launch for all parameters of one kind, from one table of records that is uploaded without waiting."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._native._layouts import JOB
from fp8manifold._triton import options
from fp8manifold._triton.kinds import Spec, Tile

__all__ = ["Kind", "chunks_of", "launch"]

Kind = tuple[Spec, Tile]
"""What a kernel is compiled for."""

_BUFFERS: Final = 2
"""How many tables are being uploaded at a time: one is filled while the other may still be on its way."""


class _Staging:
    """Pinned memory in turns, each with the event after which it may be written again."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, torch.cuda.Event] | None] = [None] * _BUFFERS
        self._next = 0

    def upload(self, table: NDArray[np.int32], device: torch.device) -> Tensor:
        """A copy on the device, which is there before what is launched next."""
        source = torch.from_numpy(table)
        if device.type == "cpu":
            return source
        turn, self._next = self._next, (self._next + 1) % _BUFFERS
        kept = self._buffers[turn]
        if kept is not None:
            kept[1].synchronize()  # of the upload before the last, which is long done
        if kept is None or kept[0].numel() < source.numel():
            kept = (torch.empty(2 * source.numel(), dtype=torch.int32, pin_memory=True), torch.cuda.Event())
        buffer, event = kept
        buffer[: source.numel()].copy_(source)
        uploaded = buffer[: source.numel()].to(device, non_blocking=True)
        event.record()
        self._buffers[turn] = kept
        return uploaded


@lru_cache(maxsize=16)
def _staging(device: torch.device) -> _Staging:
    return _Staging()


@lru_cache(maxsize=16)
def _nothing_refused(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def chunks_of(tile: Tile, sizes: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """The parameter and the start of every program, int32: (programs, 2).

    Args:
        tile: how they walk.
        sizes: index, rows and length of each parameter.
        device: where the table lies.
    """
    parts = []
    for index, rows, length in sizes:
        step = tile.rows if tile.length or tile.long else tile.width
        starts = np.arange(0, rows if tile.length or tile.long else length, step, dtype=np.int64)
        starts = starts if tile.length or tile.long else starts // tile.width
        parts.append(np.stack([np.full(len(starts), index), starts], axis=1).astype(np.int32))
    return torch.from_numpy(np.concatenate(parts)).to(device)


def launch(
    records: NDArray[np.void], kinds: Sequence[Kind], device: torch.device, refused: Tensor | None = None
) -> int:
    """Take the steps of some records in place, and say in how many launches.

    All kernels are compiled before the first is launched: what fails has changed nothing.

    Args:
        records: one a parameter, as native code reads them, with addresses of the device.
        kinds: what each is stepped by.
        device: where all of it lies.
        refused: int32, one element: nothing is stepped where it is not 0.
    """
    from fp8manifold._triton.step import step_kernel

    groups: dict[Kind, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    refused = _nothing_refused(device) if refused is None else refused
    rows, lengths = records["rows"].tolist(), records["length"].tolist()
    with torch.cuda.device(device if device.type == "cuda" else -1):
        table = _staging(device).upload(records.view(np.int32), device)
        calls = []
        for (spec, tile), members in groups.items():
            chunks = chunks_of(tile, tuple((i, rows[i], lengths[i]) for i in members), device)
            calls.append((table, chunks, refused, spec, tile))
        _compile(step_kernel, calls)
        for call in calls:
            step_kernel[(len(call[1]),)](*call, **options())
    return len(calls)


_compiled: Final[set[tuple[torch.device, Spec, Tile]]] = set()
"""What has been compiled before; Triton keeps the code."""


def _compile(kernel: Any, calls: Sequence[tuple[Tensor, Tensor, Tensor, Spec, Tile]]) -> None:
    for call in calls:
        known = (call[0].device, call[3], call[4])
        if known not in _compiled and call[0].device.type == "cuda":
            kernel.warmup(*call, grid=(len(call[1]),), **options())
            _compiled.add(known)


assert JOB.itemsize % 4 == 0
