"""Running a step the fastest way that is right where it runs: native, Triton, compiled or eager, with the same bits."""

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
from fp8manifold.optim._triton_step import is_triton, run_triton
from fp8manifold.tensor import FP8Tensor

__all__ = ["note_changes", "run_all", "tables_of"]


@eager_only  # compiled code is called as it is
def run_all(jobs: Sequence[Job], numbers: Tensor, keys: Tensor, wanted: Sequence[bool | None]) -> None:
    """Take many steps in place, those that native code takes in one call.

    Args:
        jobs: what to step.
        numbers: a row of hyperparameters each, on the host.
        keys: a row of round keys each, on the host.
        wanted: each one's ``compile``.
    """
    dtype = numbers.dtype
    native = [i for i, (job, c) in enumerate(zip(jobs, wanted, strict=True)) if c is None and is_native(job, dtype)]
    if len(native) == len(jobs):
        run_native(jobs, numbers.numpy(), keys.numpy())
    elif native:
        run_native([jobs[i] for i in native], numbers[native].numpy(), keys[native].numpy())
    others = sorted(set(range(len(jobs))) - set(native))
    on_gpu = [i for i in others if wanted[i] is None and is_triton(jobs[i], dtype)]
    if on_gpu and run_triton([jobs[i] for i in on_gpu], numbers[on_gpu].numpy(), keys[on_gpu].numpy()) is None:
        on_gpu = []
    for i in sorted(set(others) - set(on_gpu)):
        _run_without_native(jobs[i], numbers[i], keys[i], wanted[i])
    note_changes([tensor for job in jobs for tensor in job.changed])


def tables_of(jobs: Sequence[Job]) -> list[tuple[list[Job], Tensor, Tensor]]:
    """The jobs of each device and dtype, with a row of numbers and of round keys each, on the host."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Job]] = {}
    for job in jobs:
        kinds.setdefault((job.held["weight"].device, working_dtype(job.parameter)), []).append(job)
    tables = []
    for (_, dtype), together in kinds.items():
        numbers = np.array([row(job.numbers, dtype) for job in together], dtype=np.float64)
        tables.append((together, torch.from_numpy(numbers).to(dtype), torch.from_numpy(key_rows(together))))
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
    device = job.held["weight"].device
    compiles = wanted or (wanted is None and device.type != "cpu")
    numbers, keys = numbers.to(device, non_blocking=True), keys.to(device, non_blocking=True)
    if not (compiles and can_compile(job, numbers.dtype) and run_compiled(job, numbers, keys)):
        run_eager(job, numbers)
