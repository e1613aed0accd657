"""Launching steps: one launch for all parameters of a kind, from a table that is uploaded without waiting."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._triton import options
from fp8manifold._triton.kinds import KernelSpec, Tile

__all__ = ["KernelsUnavailableError", "Kind", "chunks_of", "launch"]

Kind = tuple[KernelSpec, Tile]
"""What a kernel is compiled for."""

_CHECKED: Final = 2048
"""Elements that a program looks at for the verdict on finiteness."""

_BUFFERS: Final = 2
"""How many tables are being uploaded at a time: one is filled while the other may still be on its way."""


class KernelsUnavailableError(RuntimeError):
    """A kernel could not be compiled; nothing has been launched."""


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


Call = tuple[Any, Tensor, tuple[Any, ...]]
"""A kernel, its table of chunks, and what follows the two tables."""


def launch(
    records: NDArray[np.void],
    kinds: Sequence[Kind],
    flags: Tensor,
    *,
    check: bool = False,
) -> int:
    """Take the steps of some records in place, and say in how many launches.

    All kernels are compiled before the first is launched: what fails has changed nothing.

    Args:
        records: one a parameter, as native code reads them, with addresses of the device.
        kinds: what each is stepped by.
        flags: int32, on the device: nothing is stepped where the first is not 0.
        check: set that, and step nothing, where the square of any gradient is not finite.

    Raises:
        KernelsUnavailableError: a kernel could not be compiled.
    """
    device, rows, lengths = flags.device, records["rows"].tolist(), records["length"].tolist()
    sizes = [(i, *size) for i, size in enumerate(zip(rows, lengths, strict=True))]
    with torch.cuda.device(device if device.type == "cuda" else -1):
        calls = _checks(kinds, sizes, flags) if check else []
        for (spec, tile), members in _groups(kinds).items():
            chunks = chunks_of(tile, tuple(sizes[i] for i in members), device)
            calls.append((_kernels()[0], chunks, (flags, spec, tile)))
        table = _staging(device).upload(records.view(np.int32), device)
        _compile(table, calls)
        for kernel, chunks, facts in calls:
            kernel[(len(chunks),)](table, chunks, *facts, **options())
    return len(calls)


def _kernels() -> tuple[Any, Any]:
    """The step's, and the verdict's."""
    try:
        from fp8manifold._triton.arrays import finite_kernel
        from fp8manifold._triton.step import step_kernel
    except Exception as error:  # whatever another release of Triton lacks
        raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
    return step_kernel, finite_kernel


def _groups(kinds: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return groups


def _checks(kinds: Sequence[Kind], sizes: Sequence[tuple[int, int, int]], flags: Tensor) -> list[Call]:
    """The verdict's launches, one for each dtype of gradients."""
    tile = Tile(1, _CHECKED, 0, "one", aligned=False)
    calls: list[Call] = []
    for dtype, members in _groups([spec.gradient for spec, _ in kinds]).items():
        flat = tuple((i, 1, sizes[i][1] * sizes[i][2]) for i in members)
        calls.append((_kernels()[1], chunks_of(tile, flat, flags.device), (flags, dtype, _CHECKED)))
    return calls


_compiled: Final[set[tuple[Any, ...]]] = set()
"""What has been compiled before; Triton keeps the code."""


def _compile(table: Tensor, calls: Sequence[Call]) -> None:
    for kernel, chunks, (refused, *facts) in calls:
        known = (table.device, kernel, *facts)
        if known in _compiled or table.device.type != "cuda":
            continue
        try:
            kernel.warmup(table, chunks, refused, *facts, grid=(len(chunks),), **options())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler's absence or failure raises
            raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
        _compiled.add(known)
