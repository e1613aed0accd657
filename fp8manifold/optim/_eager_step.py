"""A step in plain PyTorch, some rows at a time: the readable definition, and what runs where nothing faster does."""

from collections.abc import Iterator

from torch import Tensor

from fp8manifold._numerics.blocks import block_on
from fp8manifold.optim._job import FOR_MOMENTS, Job
from fp8manifold.optim._step import Outcome, step
from fp8manifold.random_bits import word_range

__all__ = ["block_noise", "blocks_of", "run_eager"]


def run_eager(job: Job, numbers: Tensor, *, observed: bool = False) -> list[Outcome]:
    """Take the step in place; what each part of it asked for, where it is observed.

    Args:
        job: what to step.
        numbers: a row of hyperparameters in the dtype that is computed in.
        observed: whether to keep what was asked for.
    """
    outcomes = []
    for arrays, start in blocks_of(job):
        outcome = step(job.variant, arrays, numbers, block_noise(job, arrays["gradient"], start))
        for name, value in outcome.stored.items():
            arrays[name].copy_(value)
        if observed:
            outcomes.append(outcome)
    return outcomes


def blocks_of(job: Job) -> Iterator[tuple[dict[str, Tensor], int]]:
    """The arrays some rows at a time, and the position of their first element in the job."""
    first, inner = job.layout.dims[0], job.layout.numel // job.layout.dims[0]
    rows = max(1, block_on(job.held["weight"].device) // inner)
    if len(job.layout.dims) == 1 and job.blockwise:
        rows = first  # its one block is not cut up
    for start in range(0, first, rows):
        yield {name: _rows(a, start, rows, first) for name, a in job.arrays.items()}, start * inner


def block_noise(job: Job, part: Tensor, start: int) -> dict[str, Tensor]:
    """The random words of a part of a job, by what draws them."""
    noise = {}
    if job.variant.draws_for_weight:
        key = job.key
        words = word_range(job.offset + start, part.numel(), key.words, part.device, phase=key.phase)
        noise["weight"] = words.view(part.shape)
    if job.variant.draws_for_moments:
        words = word_range(job.offset + start, part.numel(), (*job.words, FOR_MOMENTS), part.device)
        noise["moments"] = words.view(part.shape)
    return noise


def _rows(array: Tensor, start: int, rows: int, total: int) -> Tensor:
    """The rows of an array that has them; what there is one of is for all."""
    return array[start : start + rows] if array.dim() and array.shape[0] == total else array
