"""Running a step: compiled in one pass where that pays, eager in blocks that stay in cache elsewhere, same bits."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._blocks import BLOCK
from fp8manifold._eager import eager_only
from fp8manifold.optim._compile import DirectCall, compiled, is_available, next_name
from fp8manifold.optim._hyper import KEYS
from fp8manifold.optim._layout import Layout
from fp8manifold.optim._moments import BOUNDS, SCALES
from fp8manifold.optim._step import Outcome, prepare_step, step
from fp8manifold.optim._variant import Variant
from fp8manifold.random_bits import round_key_rows, round_keys, signed_word, word_range

__all__ = [
    "Job",
    "Ready",
    "block_noise",
    "blocks_of",
    "compiles",
    "key_row",
    "key_rows",
    "note_changes",
    "run",
    "run_eager",
    "settle",
]

WORTH_COMPILING: Final = 32_768
"""Elements from which a parameter is compiled for when nobody says otherwise: below, eager costs little."""

_MANY: Final = 16
"""Parameters of one kind that are worth compiling for whatever their size."""

_FOR_MOMENTS: Final = 1
"""A fourth key word: the averages' draws are not the weights'."""


_ONLY_PREPARED: Final = frozenset({*BOUNDS.values(), *map(next_name, BOUNDS.values())})
_PREPARES: Final = frozenset(
    {"weight", "gradient", "scale", "residual", "lowest", "highest", "numbers", *SCALES, *_ONLY_PREPARED}
)
"""Arrays that preparing a step looks at or fills."""


_READ_ONLY: Final = frozenset({"gradient", "scale", "lowest", "highest"})


@dataclass
class Job:
    """One parameter's step: its arrays as views of one layout, by name."""

    variant: Variant
    layout: Layout
    arrays: dict[str, Tensor]
    words: tuple[int, int, int]
    #: position of the first element in a tensor that this is a part of
    offset: int = 0
    #: whether it is one of enough elements, or of enough parameters of its kind, to be compiled for
    worth_compiling: bool = False
    #: the compiled call, once it has been made
    ready: "Ready | None" = None

    @property
    def blockwise(self) -> bool:
        """Whether averages are stored in blocks."""
        return self.variant.moments == "8bit" and bool(self.variant.stores)


@eager_only  # compiled code is called as it is
def run(job: Job, numbers: Tensor, keys: Tensor, *, compile: bool | None) -> None:  # noqa: A002  # torch's word
    """Take the step in place.

    Args:
        job: what to step.
        numbers: a row of hyperparameters in the dtype that is computed in.
        keys: a row of round keys, as :func:`key_row` gives it.
        compile: True, False, or None for what pays.
    """
    if job.ready is not None and job.ready.fits(job.arrays["gradient"], compile):
        job.ready(job.arrays, numbers, keys)
    elif not (compiles(job, numbers.dtype, compile) and _run_compiled(job, numbers, keys)):
        run_eager(job, numbers)
        return
    note_changes([array for name, array in job.arrays.items() if name not in _READ_ONLY])


def note_changes(arrays: Sequence[Tensor]) -> None:
    """Compiled code, and codes, change behind autograd's back: say so, for it refuses what was saved before."""
    torch.autograd.graph.increment_version(arrays)


def _run_compiled(job: Job, numbers: Tensor, keys: Tensor) -> bool:
    """Whether it could be."""
    arrays = job.arrays | {"numbers": numbers}
    workspace: dict[str, Tensor] = {}
    calls: list[tuple[tuple[str, ...], list[Tensor], DirectCall | None]] = []
    if job.blockwise:
        arrays |= _workspace(job)
        names = tuple(name for name in arrays if name in _PREPARES)
        arguments = [arrays[name] for name in names]
        prepare = compiled("prepare", job.variant, names, arguments)
        if not prepare(arguments):
            return False
        calls.append((names, arguments, prepare.direct(arguments)))
        workspace = {name: array for name, array in arrays.items() if name not in job.arrays}
        arrays = {name: array for name, array in arrays.items() if name not in _ONLY_PREPARED}
    if job.variant.draws_for_weight or job.variant.draws_for_moments:
        arrays |= {"keys": keys, "columns": columns(job.layout.dims[-1], numbers.device)}
    arguments = list(arrays.values())
    take = compiled("step", job.variant, tuple(arrays), arguments)
    if not take(arguments):
        return False
    if job.blockwise:
        _advance_bounds(job.arrays, workspace)
    calls.append((tuple(arrays), arguments, take.direct(arguments)))
    known = [(names, arguments, direct) for names, arguments, direct in calls if direct is not None]
    job.ready = Ready(job, known) if len(known) == len(calls) else None
    return True


_Call = tuple[Callable[[list[Any]], Any], list[Any], list[tuple[int, int]]]


class Ready:
    """The compiled calls of a job with everything in place but what is new in each step.

    What is new comes as a sequence: a contiguous gradient in the layout's sizes, numbers, keys, what is unpacked, and
    room for what :meth:`prepare` fills in, an array of the blocks' sizes for each of ``workspace``.
    """

    def __init__(self, job: Job, calls: list[tuple[tuple[str, ...], list[Tensor], DirectCall]]) -> None:
        gradient = job.arrays["gradient"]
        self.changes = [array for name, array in job.arrays.items() if name not in _READ_ONLY]
        self.dtype, self.block_dims, self._device = gradient.dtype, job.layout.block_dims, gradient.device
        self.workspace = _workspace_names(job)
        self._unpacked = ("residual",) if job.variant.residual_bits == 4 else ()
        #: each bound, and where in the workspace its next value is
        self.bounds = [
            (self.workspace.index(next_name(name)), job.arrays[name])
            for name in dict.fromkeys(BOUNDS.values())
            if next_name(name) in self.workspace
        ]
        fresh = {name: i for i, name in enumerate(("gradient", "numbers", "keys", *self._unpacked, *self.workspace))}
        bound: list[_Call] = []
        for names, arguments, direct in calls:
            new = {i: fresh[name] for i, name in enumerate(names) if name in fresh}
            bound.append((direct.function, *direct.bound(arguments, new)))
        *self._preparations, self._step = bound

    def fits(self, gradient: Tensor, wanted: bool | None) -> bool:
        """Whether nothing has changed that was compiled for."""
        return wanted is not False and gradient.dtype == self.dtype

    def __call__(self, arrays: dict[str, Tensor], numbers: Tensor, keys: Tensor) -> None:
        """Prepare, and take the step."""
        unpacked = [arrays[name] for name in self._unpacked]
        room = [torch.empty(self.block_dims, dtype=torch.float32, device=self._device) for _ in self.workspace]
        fresh = [arrays["gradient"], numbers, keys, *unpacked, *room]
        self.prepare(fresh)
        self.take(fresh)
        for i, bound in self.bounds:
            bound.copy_(room[i])

    def prepare(self, fresh: Sequence[Tensor]) -> None:
        """Fill in the workspace; nothing that is kept changes."""
        for call in self._preparations:
            _make(call, fresh)

    def take(self, fresh: Sequence[Tensor]) -> None:
        """Take the step; the bounds are left as they were."""
        _make(self._step, fresh)


def _make(call: _Call, fresh: Sequence[Tensor]) -> None:
    function, kept, positions = call
    arguments = kept.copy()
    for i, k in positions:
        arguments[i] = fresh[k]
    function(arguments)


def _advance_bounds(arrays: dict[str, Tensor], prepared: dict[str, Tensor]) -> None:
    for name in BOUNDS.values():
        if (following := prepared.get(next_name(name))) is not None:
            arrays[name].copy_(following)


def _workspace(job: Job) -> dict[str, Tensor]:
    """Room for the blocks' scales during the step."""
    device = job.arrays["gradient"].device
    return {
        name: torch.empty(job.layout.block_dims, dtype=torch.float32, device=device) for name in _workspace_names(job)
    }


def _workspace_names(job: Job) -> list[str]:
    if not job.blockwise:
        return []
    prefixes = [BOUNDS[name].removesuffix("bound") for name in job.variant.stores]
    return [prefix + suffix for prefix in prefixes for suffix in ("scale", "inverse", "bound_next")]


def run_eager(job: Job, numbers: Tensor, *, observed: bool = False) -> list[Outcome]:
    """The same step in plain PyTorch, some rows at a time; what each part asked for, where it is observed."""
    outcomes = []
    for arrays, start in blocks_of(job):
        prepared = prepare_step(job.variant, arrays, numbers)
        outcome = step(job.variant, arrays | prepared, numbers, block_noise(job, arrays["gradient"], start))
        bounds = {name: prepared[name] for name in BOUNDS.values() if name in prepared}
        for name, value in (outcome.stored | bounds).items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def blocks_of(job: Job) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The arrays some rows at a time, and the position of their first element in the job."""
    first, inner = job.layout.dims[0], job.layout.numel // job.layout.dims[0]
    rows = max(1, BLOCK // inner)
    if len(job.layout.dims) == 1 and job.blockwise:
        rows = first  # its one block is not cut up
    for start in range(0, first, rows):
        yield {name: _rows(a, start, rows, first) for name, a in job.arrays.items()}, start * inner


def key_row(words: tuple[int, int, int], offset: int, *, moments: bool = True) -> list[int]:
    """Round keys of the draws for the weights and for the averages, the offset taken into the first of each."""
    high, low = divmod(offset, 2**32)
    keys = []
    for key in (words, (*words, _FOR_MOMENTS)) if moments else (words,):
        first, second, third = round_keys(key, high)
        keys += [signed_word(first + low), second, third]
    return keys if moments else [*keys, 0, 0, 0]


def key_rows(prefixes: Sequence[tuple[int, int]], streams: NDArray[np.uint64], *, moments: bool) -> Tensor:
    """:func:`key_row` of many words (seed, step, stream), all at offset 0."""
    rows = np.zeros((len(streams), KEYS), dtype=np.int32)
    rows[:, :3] = round_key_rows(prefixes, streams)
    if moments:
        rows[:, 3:] = round_key_rows(prefixes, streams, _FOR_MOMENTS)
    return torch.from_numpy(rows)


@lru_cache(maxsize=8)
def columns(length: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... along a row."""
    return torch.arange(length, dtype=torch.int32, device=device)


def compiles(job: Job, dtype: torch.dtype, wanted: bool | None) -> bool:
    """Whether a step of these is compiled."""
    if wanted is False or not is_available() or not job.variant.compiles or not job.layout.compiles:
        return False
    if dtype != torch.float32 or job.layout.numel >= 2**31 or job.offset % 2**32 + job.layout.numel > 2**32:
        return False
    return bool(wanted) or job.worth_compiling


def settle(jobs: list[Job]) -> None:
    """Say of each job whether it is worth compiling for: one large parameter is, and so are many small ones."""
    kinds = Counter((job.variant, len(job.layout.dims)) for job in jobs)
    for job in jobs:
        many = kinds[job.variant, len(job.layout.dims)] >= _MANY
        job.worth_compiling = job.layout.numel >= WORTH_COMPILING or many


def _rows(array: Tensor, start: int, rows: int, total: int) -> Tensor:
    """The rows of an array that has them; what there is one of is for all."""
    return array[start : start + rows] if array.dim() and array.shape[0] == total else array


def block_noise(job: Job, part: Tensor, start: int) -> dict[str, Tensor]:
    """The random words of a part of a job, by what draws them."""
    noise = {}
    if job.variant.draws_for_weight:
        words = word_range(job.offset + start, part.numel(), job.words, part.device)
        noise["weight"] = words.view(part.shape)
    if job.variant.draws_for_moments:
        words = word_range(job.offset + start, part.numel(), (*job.words, _FOR_MOMENTS), part.device)
        noise["moments"] = words.view(part.shape)
    return noise
