"""Running a step: compiled in one pass where that pays, eager in blocks that stay in cache elsewhere, same bits."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from fp8manifold._blocks import BLOCK
from fp8manifold.optim._compile import compiled, is_available
from fp8manifold.optim._layout import Layout
from fp8manifold.optim._moments import BOUNDS, SCALES
from fp8manifold.optim._step import Outcome, prepare_step, step
from fp8manifold.optim._variant import Variant
from fp8manifold.random_bits import round_keys, signed_word, word_range

__all__ = ["Job", "key_row", "run", "run_eager"]

WORTH_COMPILING: Final = 32_768
"""Elements from which a parameter is compiled for when nobody says otherwise: below, eager costs little."""

_FOR_MOMENTS: Final = 1
"""A fourth key word: the averages' draws are not the weights'."""


_PREPARES: Final = frozenset(
    {"weight", "gradient", "scale", "residual", "lowest", "highest", "numbers", *SCALES, *BOUNDS.values()}
)
"""Arrays that preparing a step looks at or fills."""


@dataclass
class Job:
    """One parameter's step: its arrays as views of one layout, by name."""

    variant: Variant
    layout: Layout
    arrays: dict[str, Tensor]
    words: tuple[int, int, int]
    #: position of the first element in a tensor that this is a part of
    offset: int = 0

    @property
    def blockwise(self) -> bool:
        """Whether averages are stored in blocks."""
        return self.variant.moments == "8bit" and bool(self.variant.stores)


def run(job: Job, numbers: Tensor, keys: Tensor, *, compile: bool | None) -> None:  # noqa: A002  # torch's word
    """Take the step in place.

    Args:
        job: what to step.
        numbers: a row of hyperparameters in the dtype that is computed in.
        keys: a row of round keys, as :func:`key_row` gives it.
        compile: True, False, or None for what pays.
    """
    if not (_compiles(job, numbers, compile) and _run_compiled(job, numbers, keys)):
        run_eager(job, numbers)


def _run_compiled(job: Job, numbers: Tensor, keys: Tensor) -> bool:
    """Whether it could be."""
    arrays = job.arrays | {"numbers": numbers}
    if job.blockwise:
        arrays |= _workspace(job)
        names = tuple(name for name in arrays if name in _PREPARES)
        arguments = [arrays[name] for name in names]
        if not compiled("prepare", job.variant, names, arguments)(arguments):
            return False
        arrays = {name: array for name, array in arrays.items() if name not in BOUNDS.values()}
    if job.variant.draws_for_weight or job.variant.draws_for_moments:
        arrays |= {"keys": keys, "columns": columns(job.layout.dims[-1], numbers.device)}
    arguments = list(arrays.values())
    return compiled("step", job.variant, tuple(arrays), arguments)(arguments)


def _workspace(job: Job) -> dict[str, Tensor]:
    """Room for the blocks' scales during the step."""
    prefixes = [BOUNDS[name].removesuffix("bound") for name in job.variant.stores]
    names = [prefix + suffix for prefix in prefixes for suffix in ("scale", "inverse")]
    device = job.arrays["gradient"].device
    return {name: torch.empty(job.layout.block_dims, device=device) for name in names}


def run_eager(job: Job, numbers: Tensor, *, observed: bool = False) -> list[Outcome]:
    """The same step in plain PyTorch, some rows at a time; what each part asked for, where it is observed."""
    first, inner = job.layout.dims[0], job.layout.numel // job.layout.dims[0]
    rows = max(1, BLOCK // inner)
    if len(job.layout.dims) == 1 and job.blockwise:
        rows = first  # its one block is not cut up
    outcomes = []
    for start in range(0, first, rows):
        arrays = {name: _rows(a, start, rows, first) for name, a in job.arrays.items()}
        prepared = prepare_step(job.variant, arrays, numbers)
        outcome = step(job.variant, arrays | prepared, numbers, _noise(job, arrays["gradient"], start * inner))
        bounds = {name: prepared[name] for name in BOUNDS.values() if name in prepared}
        for name, value in (outcome.stored | bounds).items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def key_row(words: tuple[int, int, int], offset: int) -> list[int]:
    """Round keys of the draws for the weights and for the averages, the offset taken into the first of each."""
    high, low = divmod(offset, 2**32)
    keys = []
    for key in (words, (*words, _FOR_MOMENTS)):
        first, second, third = round_keys(key, high)
        keys += [signed_word(first + low), second, third]
    return keys


@lru_cache(maxsize=8)
def columns(length: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... along a row."""
    return torch.arange(length, dtype=torch.int32, device=device)


def _compiles(job: Job, numbers: Tensor, wanted: bool | None) -> bool:
    if wanted is False or not is_available() or not job.variant.compiles or not job.layout.compiles:
        return False
    if numbers.dtype != torch.float32 or job.layout.numel >= 2**31 or job.offset % 2**32 + job.layout.numel > 2**32:
        return False
    return bool(wanted) or job.layout.numel >= WORTH_COMPILING


def _rows(array: Tensor, start: int, rows: int, total: int) -> Tensor:
    """The rows of an array that has them; what there is one of is for all."""
    return array[start : start + rows] if array.dim() and array.shape[0] == total else array


def _noise(job: Job, part: Tensor, start: int) -> dict[str, Tensor]:
    noise = {}
    if job.variant.draws_for_weight:
        words = word_range(job.offset + start, part.numel(), job.words, part.device)
        noise["weight"] = words.view(part.shape)
    if job.variant.draws_for_moments:
        words = word_range(job.offset + start, part.numel(), (*job.words, _FOR_MOMENTS), part.device)
        noise["moments"] = words.view(part.shape)
    return noise
