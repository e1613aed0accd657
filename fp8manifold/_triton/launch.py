"""Launch steps: one launch for all parameters of a kind.

What kernels read is a table of records (the structs of native code, a row per
parameter), uploaded without a wait, and chunks that say which program takes what::

    launches_of    records and kinds -> [Launch(records, [Call(kernel, chunks, facts)])]
                   first steps, then the doubling of scales
    launch         upload each table, compile all kernels, run the calls

Kernels write words into the ``report``: a row for all parameters, then one for each.
Its first word, if set, makes all later kernels return.

Chunks and compiled kernels are cached: they are the same in every step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._triton import options
from fp8manifold._triton.kinds import KernelSpec, Tile, TileScales, Widening, as_constants

Kind = tuple[KernelSpec, Tile]
"""The facts that a step's kernel is compiled for."""

_CHECKED: Final = 2048
"""Elements that a program reads for the verdict on finiteness."""
_ROW_TILE: Final = 128
_BLOCK_TILE: Final = 32


class ParameterSize(NamedTuple):
    """The size of a parameter, and the number of its record."""

    record: int
    rows: int
    length: int


class Widenings(NamedTuple):
    """Records of parameters whose scales may double, and the facts of each doubling."""

    records: NDArray[np.void]
    facts: Sequence[Widening]
    #: the position of each one's record among those of the step
    owners: Sequence[int]


class Call(NamedTuple):
    """A kernel, its chunks, and the facts that it is compiled for."""

    kernel: Any
    chunks: Tensor
    facts: tuple[Any, ...]


class Launch(NamedTuple):
    """Records, and the calls that take them, in their order."""

    records: NDArray[np.void]
    calls: list[Call]


Launches = list[Launch]


class KernelsUnavailableError(RuntimeError):
    """A kernel that could not be compiled, before anything was launched."""


def launches_of(
    records: NDArray[np.void],
    kinds: Sequence[Kind],
    device: torch.device,
    *,
    check: bool = False,
    widenings: Widenings | None = None,
    members: Sequence[int] | None = None,
) -> Launches:
    """Return the launches of steps, one per kind.

    Args:
        records: a record for each parameter.
        kinds: its kind.
        device: where the parameters are.
        check: whether a verdict on all gradients goes before the steps.
        widenings: what doubles scales after the steps.
        members: the positions of the records that are stepped; None for all.
    """
    if members is None:
        members = range(len(records))
    step_kernel, _, widen_kernel = _kernels()
    sizes = _sizes_of(records)
    calls = _finite_calls(kinds, sizes, device) if check else []
    calls += _calls(step_kernel, kinds, sizes, members, device)
    launches = [Launch(records, calls)]
    if widenings is None:
        return launches
    stepped = set(members)
    widened = [i for i, owner in enumerate(widenings.owners) if owner in stepped]
    widening_kinds = [(widening, _tile_of_rows(widening)) for widening in widenings.facts]
    widening_sizes = _sizes_of(widenings.records)
    calls = _calls(widen_kernel, widening_kinds, widening_sizes, widened, device)
    launches.append(Launch(widenings.records, calls))
    return launches


def launch(launches: Launches, report: Tensor) -> None:
    """Take the steps, unless the first word of ``report`` is set.

    All kernels are compiled before the first one is launched.
    """
    with on_device(report.device):
        tables = upload(launches, report)
        compile_all(tables, launches, report)
        run_calls(tables, launches, report)


def upload(launches: Launches, report: Tensor) -> list[Tensor]:
    """Return the table of each launch, on the device of the report."""
    return [_uploaded(records.view(np.int32), report.device) for records, _ in launches]


def compile_all(tables: Sequence[Tensor], launches: Launches, report: Tensor) -> None:
    """Compile the kernels of launches that are not compiled yet.

    Raises:
        KernelsUnavailableError: a compiler is missing or fails.
    """
    for table, (_, calls) in zip(tables, launches, strict=True):
        _compile(table, calls, report)


def run_calls(tables: Sequence[Tensor], launches: Launches, report: Tensor) -> None:
    """Run the calls of launches whose kernels are compiled.

    Args:
        tables: the uploaded records of each launch.
        launches: of these records.
        report: of all steps.
    """
    for table, (_, calls) in zip(tables, launches, strict=True):
        for kernel, chunks, facts in calls:
            kernel[(len(chunks),)](table, chunks, report, *map(as_constants, facts), **options())


class Tables:
    """The tables of launches, in memory that a CUDA graph reads in every replay.

    The launches must have run once before, so that their kernels are compiled.
    """

    def __init__(self, launches: Launches, report: Tensor) -> None:
        self.report = report
        self._launches = launches
        self._tables = []
        for records, _ in launches:
            shape = records.view(np.int32).shape
            self._tables.append(torch.empty(shape, dtype=torch.int32, device=report.device))

    def fill(self, launches: Launches) -> None:
        """Copy the records of launches of the same kinds."""
        for table, (records, _) in zip(self._tables, launches, strict=True):
            table.copy_(_uploaded(records.view(np.int32), self.report.device))

    def launch(self) -> None:
        """Clear the report and take the steps."""
        with on_device(self.report.device):
            run_calls(self._tables, self._launches, self.report.zero_())


# --------------------------------------------------------------------------------------
# Calls


def _calls(
    kernel: Any,
    kinds: Sequence[tuple[Any, Tile]],
    sizes: Sequence[ParameterSize],
    members: Sequence[int],
    device: torch.device,
) -> list[Call]:
    """Return a call of a kernel for each kind among some members."""
    calls = []
    for kind, indices in _indices_by_kind(kinds, members).items():
        _, tile = kind
        chunks = chunks_of(tile, tuple(sizes[i] for i in indices), device)
        calls.append(Call(kernel, chunks, kind))
    return calls


def _finite_calls(
    kinds: Sequence[Kind], sizes: Sequence[ParameterSize], device: torch.device
) -> list[Call]:
    """Return the calls of the verdict, one for each dtype of gradients."""
    _, finite_kernel, _ = _kernels()
    tile = Tile(1, _CHECKED, 0, TileScales.ONE, aligned=False)
    calls: list[Call] = []
    dtypes = [spec.gradient for spec, _ in kinds]
    for dtype, indices in _indices_by_kind(dtypes, range(len(dtypes))).items():
        flat_sizes = tuple(ParameterSize(i, 1, sizes[i].rows * sizes[i].length) for i in indices)
        calls.append(Call(finite_kernel, chunks_of(tile, flat_sizes, device), (dtype, _CHECKED)))
    return calls


def _indices_by_kind(kinds: Sequence[Any], members: Sequence[int]) -> dict[Any, list[int]]:
    indices: dict[Any, list[int]] = {}
    for i in members:
        indices.setdefault(kinds[i], []).append(i)
    return indices


def _sizes_of(records: NDArray[np.void]) -> list[ParameterSize]:
    rows = records["rows"].tolist()
    lengths = records["length"].tolist()
    return [ParameterSize(i, *size) for i, size in enumerate(zip(rows, lengths, strict=True))]


@lru_cache(maxsize=256)
def chunks_of(tile: Tile, sizes: tuple[ParameterSize, ...], device: torch.device) -> Tensor:
    """Return (parameter, start) of every program, int32: (programs, 2).

    The start is a row if programs take whole rows, else the index of a tile.
    """
    takes_rows = tile.length or tile.long
    chunks = []
    for index, rows, length in sizes:
        starts = (
            np.arange(0, rows, tile.rows) if takes_rows else np.arange(-(-length // tile.width))
        )
        chunks.append(np.stack([np.full(len(starts), index), starts], axis=1).astype(np.int32))
    return torch.from_numpy(np.concatenate(chunks)).to(device)


@lru_cache(maxsize=256)
def _tile_of_rows(widening: Widening) -> Tile:
    """Return a tile for programs that take some whole rows, piece by piece."""
    width = _BLOCK_TILE if widening.exponents else _ROW_TILE
    return Tile(_CHECKED // width, width, 0, TileScales.ROW, aligned=False, long=True)


# --------------------------------------------------------------------------------------
# On the device


def on_device(device: torch.device) -> torch.cuda.device:
    """Return a context in which kernels are launched on a device."""
    # -1 leaves the current device as it is.
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _uploaded(table: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return a copy on the device, made before the next launch runs.

    torch reuses its pinned memory after that.
    """
    source = torch.from_numpy(table)
    if device.type == "cpu":
        return source
    return torch.empty_like(source, pin_memory=True).copy_(source).to(device, non_blocking=True)


def _kernels() -> tuple[Any, Any, Any]:
    """Return the kernels of the step, of the verdict, and of scales that double."""
    try:
        from fp8manifold._triton.arrays import finite_kernel
        from fp8manifold._triton.step import step_kernel, widen_kernel
    except Exception as error:
        # Of any kind: another release of Triton may lack anything.
        raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
    return step_kernel, finite_kernel, widen_kernel


_compiled: Final[set[tuple[Any, ...]]] = set()
"""Kernels that have been compiled before; Triton caches the code."""


def _compile(table: Tensor, calls: Sequence[Call], report: Tensor) -> None:
    """Compile the kernels of calls that are not compiled yet.

    Raises:
        KernelsUnavailableError: a compiler is missing or fails.
    """
    for kernel, chunks, facts in calls:
        key = (table.device, kernel, *facts)
        if key in _compiled or table.device.type != "cuda":
            continue
        try:
            constants = map(as_constants, facts)
            kernel.warmup(table, chunks, report, *constants, grid=(len(chunks),), **options())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
        _compiled.add(key)
