"""The round keys of a step's draws: three for what is written back, three for the averages."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8manifold.optim._hyper import KEYS
from fp8manifold.optim._job import Job
from fp8manifold.random_bits import round_key_rows, round_keys, signed_word

__all__ = ["FOR_MOMENTS", "key_row", "key_rows"]

FOR_MOMENTS: Final = 1
"""A fourth key word: the averages' draws are not the weights'."""


def key_row(words: tuple[int, int, int], offset: int) -> list[int]:
    """The round keys of one job, the offset taken into the first of each three."""
    high, low = divmod(offset, 2**32)
    keys = []
    for key in (words, (*words, FOR_MOMENTS)):
        first, second, third = round_keys(key, high)
        keys += [signed_word(first + low), second, third]
    return keys


def key_rows(jobs: Sequence[Job]) -> NDArray[np.int32]:
    """:func:`key_row` of many jobs, those at offset 0 together."""
    rows = np.zeros((len(jobs), KEYS), dtype=np.int32)
    prefixes = [job.words[:2] for job in jobs]
    streams = np.array([job.words[2] for job in jobs], dtype=np.uint64)
    rows[:, :3] = round_key_rows(prefixes, streams)
    if any(job.variant.draws_for_moments for job in jobs):
        rows[:, 3:] = round_key_rows(prefixes, streams, FOR_MOMENTS)
    for i, job in enumerate(jobs):
        if job.offset:
            rows[i] = key_row(job.words, job.offset)
    return rows
