"""Launching steps: one launch for all parameters of a kind, from a table that is
uploaded without a wait.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._triton import options
from fp8manifold._triton.kinds import KernelSpec, Tile, Widening, as_constants

Kind = tuple[KernelSpec, Tile]  #: The facts that a step's kernel is compiled for.
_CHECKED: Final = 2048  #: Elements that a program reads for the verdict on finiteness.


class KernelsUnavailableError(RuntimeError):
    """A kernel could not be compiled; nothing has been launched."""


def _uploaded(table: NDArray[np.int32], device: torch.device) -> Tensor:
    """A copy on the device, made before the next launch runs; torch reuses its pinned
    memory after that.
    """
    source = torch.from_numpy(table)
    if device.type == "cpu":
        return source
    return torch.empty_like(source, pin_memory=True).copy_(source).to(device, non_blocking=True)


@lru_cache(maxsize=256)
def chunks_of(tile: Tile, sizes: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """The parameter's index and the start of every program, int32: (programs, 2)."""
    parts, by_rows = [], tile.length or tile.long
    for index, rows, length in sizes:
        starts = np.arange(0, rows, tile.rows) if by_rows else np.arange(-(-length // tile.width))
        parts.append(np.stack([np.full(len(starts), index), starts], axis=1).astype(np.int32))
    return torch.from_numpy(np.concatenate(parts)).to(device)


Call = tuple[
    Any, Tensor, tuple[Any, ...]
]  #: A kernel, its table of chunks, and what it is compiled for.
Launches = list[
    tuple[NDArray[np.void], list[Call]]
]  #: Records, and the calls that take them, in their order.
Widenings = tuple[NDArray[np.void], Sequence[Widening]]
"""Records of parameters whose scales may double, and the facts of each doubling."""


def launches_of(
    records: NDArray[np.void],
    kinds: Sequence[Kind],
    device: torch.device,
    *,
    check: bool = False,
    widenings: Widenings | None = None,
) -> Launches:
    """The launches of steps, one per kind, after a verdict on gradients (``check``),
    before the doubling of scales.
    """
    launches = [(records, _steps(records, kinds, device, check=check))]
    if widenings is None:
        return launches
    others, found = widenings
    return [
        *launches,
        (others, _calls(_kernels()[2], [(w, _rows_of(w)) for w in found], _sizes(others), device)),
    ]


def launch(launches: Launches, said: Tensor) -> None:
    """Take the steps, unless the first word of ``said`` is set; all kernels are
    compiled before the first launch.
    """
    with _on(said.device):
        tables = [_uploaded(records.view(np.int32), said.device) for records, _ in launches]
        for table, (_, calls) in zip(tables, launches, strict=True):
            _compile(table, calls, said)
        _run(tables, launches, said)


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _run(tables: Sequence[Tensor], launches: Launches, said: Tensor) -> None:
    for table, (_, calls) in zip(tables, launches, strict=True):
        for kernel, chunks, facts in calls:
            kernel[(len(chunks),)](table, chunks, said, *map(as_constants, facts), **options())


class Tables:
    """The tables of launches that have run before, in memory that a CUDA graph reads in
    every replay.
    """

    def __init__(self, launches: Launches, said: Tensor) -> None:
        self.said, self._launches = said, launches
        self._tables = [
            torch.empty(r.view(np.int32).shape, dtype=torch.int32, device=said.device)
            for r, _ in launches
        ]

    def fill(self, launches: Launches) -> None:
        """Copy the records of launches of the same kinds."""
        for table, (records, _) in zip(self._tables, launches, strict=True):
            table.copy_(_uploaded(records.view(np.int32), self.said.device))

    def launch(self) -> None:
        with _on(self.said.device):
            _run(self._tables, self._launches, self.said.zero_())


def _kernels() -> tuple[Any, Any, Any]:
    """The kernels of the step, of the verdict, and of scales that double."""
    try:
        from fp8manifold._triton.arrays import finite_kernel
        from fp8manifold._triton.step import step_kernel, widen_kernel
    except Exception as error:  # of any kind, as another release of Triton may lack anything
        raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
    return step_kernel, finite_kernel, widen_kernel


Sizes = list[tuple[int, int, int]]  #: Index, rows and length of each parameter.


def _sizes(records: NDArray[np.void]) -> Sizes:
    rows, lengths = records["rows"].tolist(), records["length"].tolist()
    return [(i, *size) for i, size in enumerate(zip(rows, lengths, strict=True))]


def _steps(
    records: NDArray[np.void], kinds: Sequence[Kind], device: torch.device, *, check: bool
) -> list[Call]:
    """One launch per kind, after those of the verdict."""
    sizes = _sizes(records)
    return [
        *(_checks(kinds, sizes, device) if check else []),
        *_calls(_kernels()[0], kinds, sizes, device),
    ]


def _calls(
    kernel: Any, kinds: Sequence[tuple[Any, Tile]], sizes: Sizes, device: torch.device
) -> list[Call]:
    groups = _groups(kinds).items()
    return [
        (kernel, chunks_of(kind[1], tuple(sizes[i] for i in own), device), kind)
        for kind, own in groups
    ]


@lru_cache(maxsize=256)
def _rows_of(widening: Widening) -> Tile:
    """A tile for programs that take some whole rows, piece by piece."""
    width = 32 if widening.exponents else 128
    return Tile(_CHECKED // width, width, 0, "row", aligned=False, long=True)


def _groups(kinds: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return groups


def _checks(kinds: Sequence[Kind], sizes: Sizes, device: torch.device) -> list[Call]:
    """The verdict's launches, one for each dtype of gradients."""
    tile = Tile(1, _CHECKED, 0, "one", aligned=False)
    calls: list[Call] = []
    for dtype, members in _groups([spec.gradient for spec, _ in kinds]).items():
        flat = tuple((i, 1, sizes[i][1] * sizes[i][2]) for i in members)
        calls.append((_kernels()[1], chunks_of(tile, flat, device), (dtype, _CHECKED)))
    return calls


_compiled: Final[set[tuple[Any, ...]]] = (
    set()
)  #: Kernels that have been compiled before; Triton caches the code.


def _compile(table: Tensor, calls: Sequence[Call], said: Tensor) -> None:
    for kernel, chunks, facts in calls:
        known = (table.device, kernel, *facts)
        if known in _compiled or table.device.type != "cuda":
            continue
        try:
            known_ones = map(as_constants, facts)
            kernel.warmup(table, chunks, said, *known_ones, grid=(len(chunks),), **options())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind, when a compiler is missing or fails
            raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
        _compiled.add(known)
