"""Running a step the fastest way that is right where it runs: native, compiled or eager, with the same bits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fp8manifold._encoded.storage import void_remainder
from fp8manifold._numerics.eager import eager_only
from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold._ranks import local_of
from fp8manifold.optim._compiled_step import can_compile, run_compiled
from fp8manifold.optim._eager_step import run_eager
from fp8manifold.optim._hyper import row
from fp8manifold.optim._job import Job, key_rows
from fp8manifold.optim._native_step import is_native, run_native
from fp8manifold.tensor import FP8Tensor

__all__ = ["note_changes", "run_all", "tables_of"]


@eager_only  # compiled code is called as it is
def run_all(jobs: Sequence[Job], numbers: Tensor, keys: Tensor, wanted: Sequence[bool | None]) -> None:
    """Take many steps in place, those that native code takes in one call.

    Args:
        jobs: what to step.
        numbers: a row of hyperparameters each, on the jobs' device.
        keys: a row of round keys each, on the jobs' device.
        wanted: each one's ``compile``.
    """
    dtype = numbers.dtype
    native = [i for i, (job, c) in enumerate(zip(jobs, wanted, strict=True)) if c is None and is_native(job, dtype)]
    if len(native) == len(jobs):
        run_native(jobs, numbers.numpy(), keys.numpy())
    elif native:
        run_native([jobs[i] for i in native], numbers[native].numpy(), keys[native].numpy())
    for i in sorted(set(range(len(jobs))) - set(native)):
        _run_without_native(jobs[i], numbers[i], keys[i], wanted[i])
    note_changes([tensor for job in jobs for tensor in job.changed])


def tables_of(jobs: Sequence[Job]) -> list[tuple[list[Job], Tensor, Tensor]]:
    """The jobs of each device and dtype, with a row of numbers and of round keys each, in one transfer."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Job]] = {}
    for job in jobs:
        kinds.setdefault((job.held["weight"].device, working_dtype(job.parameter)), []).append(job)
    tables = []
    for (device, dtype), together in kinds.items():
        numbers = np.array([row(job.numbers, dtype) for job in together], dtype=np.float64)
        keys = torch.from_numpy(key_rows(together)).to(device)
        tables.append((together, torch.from_numpy(numbers).to(device, dtype), keys))
    return tables


def note_changes(tensors: Sequence[Tensor]) -> None:
    """Native and compiled code, and codes, change behind autograd's back: say so, for it refuses what it had saved.

    What the rounding of the codes before has left, where no residual has begun with it, is void.
    """
    torch.autograd.graph.increment_version(tensors)
    for held in map(local_of, tensors):
        if isinstance(held, FP8Tensor):
            void_remainder(held)


def _run_without_native(job: Job, numbers: Tensor, keys: Tensor, wanted: bool | None) -> None:
    compiles = wanted or (wanted is None and numbers.device.type != "cpu")
    if not (compiles and can_compile(job, numbers.dtype) and run_compiled(job, numbers, keys)):
        run_eager(job, numbers)
