"""Launch steps: one launch for all parameters of a kind.

What kernels read is a table of records (the structs of native code, a row per
parameter), uploaded without a wait, and chunks that say which program takes what::

    factor_calls   what Adafactor computes before its steps
    launches_of    records and kinds -> [Launch(records, [Call(kernel, chunks, facts)])]
                   first steps, then the doubling of scales
    compile_all    their kernels, before any of them changes anything
    upload         each table
    run_calls      the launches

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
from fp8manifold._triton.kinds import (
    KernelSpec,
    Statistics,
    Tile,
    TileScales,
    Widening,
    as_constants,
)

Kind = tuple[KernelSpec, Tile]
"""The facts that a step's kernel is compiled for."""

_CHECKED: Final = 2048
"""Elements that a program reads for the verdict on finiteness."""
_ROW_TILE: Final = 128
_BLOCK_TILE: Final = 32
_COLUMN_RUNS: Final = (32, 32)
"""Runs that a program adds up at a time, and columns that it takes."""
_ROW_RUNS: Final = (4, 32)
"""Runs of a row's tiles that a program adds up at a time, and rows that it takes."""
_TOTAL_RUNS: Final = 128
"""Runs of rows that a program adds up at a time, of one parameter."""


class ParameterSize(NamedTuple):
    """The size of a parameter, and the number of its record."""

    record: int
    rows: int
    length: int


class FactoredSize(NamedTuple):
    """The matrices of a parameter with Adafactor's factors, and the number of its record."""

    record: int
    matrices: int
    rows: int
    columns: int
    #: whether there are averages of rows; a vector has none
    has_row_means: bool


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
    warps: int = 4


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
    members: Sequence[int],
    check: bool = False,
    before: Sequence[Call] = (),
    widenings: Widenings | None = None,
) -> Launches:
    """Return the launches of steps, one per kind.

    Args:
        records: a record for each parameter.
        kinds: its kind.
        device: where the parameters are.
        members: the positions of the records that are stepped.
        check: whether a verdict on all gradients goes before the steps.
        before: calls between the verdict and the steps.
        widenings: what doubles scales after the steps.
    """
    step_kernel, _, widen_kernel = _kernels()
    sizes = _sizes_of(records)
    calls = _finite_calls(kinds, sizes, device) if check else []
    calls += before
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


def compile_all(launches: Launches, device: torch.device) -> None:
    """Compile the kernels of launches that are not compiled yet.

    Raises:
        KernelsUnavailableError: a compiler is missing or fails.
    """
    with on_device(device):
        for _, calls in launches:
            for call in calls:
                _compile(call, device)


def upload(launches: Launches, device: torch.device) -> list[Tensor]:
    """Return the table of each launch, on the device."""
    return [_uploaded(records.view(np.int32), device) for records, _ in launches]


def run_calls(tables: Sequence[Tensor], launches: Launches, report: Tensor) -> None:
    """Run the calls of launches whose kernels are compiled.

    None of them does anything if the first word of ``report`` is set.

    Args:
        tables: the uploaded records of each launch.
        launches: of these records.
        report: of all steps.
    """
    for table, (_, calls) in zip(tables, launches, strict=True):
        for kernel, chunks, facts, warps in calls:
            constants = map(as_constants, facts)
            kernel[(len(chunks),)](table, chunks, report, *constants, **_launch_options(warps))


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


def factor_calls(
    sizes: Sequence[FactoredSize],
    facts: Sequence[Statistics],
    device: torch.device,
    *,
    tile: int,
    run: int,
) -> list[Call]:
    """Return the calls that compute Adafactor's factors, in their order.

    Passes over the elements are one call for each kind, everything between them is one.

    Args:
        sizes: of the parameters.
        facts: what the passes are compiled for, of each parameter.
        device: where they are.
        tile: neighbours in a row that are added up by halves; a shorter row is one tile.
        run: numbers that are added up one after the other.
    """
    if not sizes:
        return []
    kernels = _factor_kernels()
    passes: list[tuple[Statistics, Tensor]] = []
    for kind, indices in _indices_by_kind(facts, range(len(facts))).items():
        counts = []
        for i in indices:
            size = sizes[i]
            runs = size.matrices * -(-size.rows // run)
            counts.append((size.record, runs * -(-size.columns // kind.tile)))
        passes.append((kind, _counted(counts, device)))
    columns, rows, means, ones = [], [], [], []
    _, lanes = _COLUMN_RUNS
    _, rows_at_once = _ROW_RUNS
    for size in sizes:
        columns.append((size.record, size.matrices * -(-size.columns // lanes)))
        rows.append((size.record, -(-size.matrices * size.rows // rows_at_once)))
        means.append((size.record, 1 + size.has_row_means * size.matrices))
        ones.append((size.record, 1))
    row_chunks = _counted(rows, device)
    totals = (tile, run, _TOTAL_RUNS)
    of_rows = (tile, run, *_ROW_RUNS)
    return [
        *(Call(kernels.square, chunks, (kind,), 1) for kind, chunks in passes),
        Call(kernels.column, _counted(columns, device), (run, *_COLUMN_RUNS)),
        Call(kernels.row, row_chunks, (True, *of_rows)),
        Call(kernels.mean, _counted(means, device), totals),
        *(Call(kernels.direction, chunks, (kind,), 1) for kind, chunks in passes),
        Call(kernels.row, row_chunks, (False, *of_rows)),
        Call(kernels.clip, _counted(ones, device), totals),
    ]


def _counted(counts: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return chunks of so many programs for each of some records."""
    one = Tile(1, 1, 0, TileScales.ONE, aligned=False)
    return chunks_of(one, tuple(ParameterSize(i, 1, count) for i, count in counts), device)


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


class FactorKernels(NamedTuple):
    """The kernels of Adafactor's statistics."""

    square: Any
    column: Any
    row: Any
    mean: Any
    direction: Any
    clip: Any


def _factor_kernels() -> FactorKernels:
    try:
        from fp8manifold._triton import factors
    except Exception as error:
        # Of any kind: another release of Triton may lack anything.
        raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
    return FactorKernels(*[getattr(factors, f"{name}_kernel") for name in FactorKernels._fields])


def _launch_options(warps: int) -> dict[str, bool | int]:
    return options() | {"num_warps": warps}


_compiled: Final[set[tuple[Any, ...]]] = set()
"""Kernels that have been compiled before; Triton caches the code."""


def _compile(call: Call, device: torch.device) -> None:
    """Compile the kernel of a call, unless it is compiled.

    Raises:
        KernelsUnavailableError: a compiler is missing or fails.
    """
    kernel, chunks, facts, warps = call
    key = (device, kernel, *facts)
    if key in _compiled or device.type != "cuda":
        return
    try:
        constants = map(as_constants, facts)
        # the chunks stand for the table and the report too, which are of the same kind
        grid = (len(chunks),)
        kernel.warmup(chunks, chunks, chunks, *constants, grid=grid, **_launch_options(warps))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise KernelsUnavailableError(f"{type(error).__name__}: {error}") from error
    _compiled.add(key)
