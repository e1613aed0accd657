"""Residuals of 4 bits, which steps take as whole bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fp8manifold._ranks import local_of
from fp8manifold.optim._job import Job
from fp8manifold.optim._plan import pack_nibbles, unpack_nibbles

__all__ = ["unpacked"]


@contextmanager
def unpacked(jobs: Sequence[Job], state: dict[Tensor, Any]) -> Iterator[None]:
    """Hold them as int8 while the steps are taken."""
    packed = [(job, local_of(state[job.parameter]["residual"])) for job in jobs if job.variant.residual_bits == 4]
    for job, kept in packed:
        rows = kept if job.share is None else job.share.gathered(kept)
        job.held["residual"] = unpack_nibbles(rows, job.held["weight"].shape)
    yield
    for job, kept in packed:
        residual = job.held["residual"] if job.share is None else job.share.own(job.held["residual"])
        kept.copy_(pack_nibbles(residual, in_rows=kept.dim() > 1))
