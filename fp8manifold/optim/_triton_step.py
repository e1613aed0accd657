"""A step on a GPU by Triton's kernels: the same records as native code's, one launch for all parameters of a kind."""

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._native._layouts import JOB
from fp8manifold._triton.kinds import Spec, Tile, format_of
from fp8manifold._triton.launch import KernelsUnavailableError, Kind, launch
from fp8manifold.optim._compiled_step import CompileUnavailableWarning
from fp8manifold.optim._job import Job, row_view
from fp8manifold.optim._native_step import has_code, places_of
from fp8manifold.optim._variant import MOMENT_FORMAT, Variant

__all__ = ["Launched", "is_triton", "kind_of", "run_triton", "spec_of"]

_ELEMENTS: Final = 2048
"""Of a program: 16 a thread, which loads and stores bytes by 128 bits."""
_LONGEST: Final = 1024
"""Of a row whose averages share a block and that a program takes at once."""
_PIECES: Final = (256, 128, 64, 32, 16)
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.uint8: "uint8"}


def is_triton(job: Job, dtype: torch.dtype) -> bool:
    """Whether a kernel takes this step: what native code takes, on a GPU of NVIDIA."""
    weight, gradient = job.held["weight"], job.held["gradient"]
    return (
        weight.device.type == "cuda"
        and gradient.device == weight.device
        and gradient.dtype in _DTYPES
        and has_code(job, dtype)
        and not _given_up
        and _triton.is_available()
    )


class Launched(NamedTuple):
    """How many launches steps took, and whether they were refused."""

    launches: int
    refused: bool


def run_triton(
    jobs: Sequence[Job], numbers: NDArray[np.float32], keys: NDArray[np.int32], *, check: bool = False
) -> Launched | None:
    """Take the steps in place; None, with nothing changed and one warning ever, where kernels can't be compiled.

    The host waits for the card once, at the end, for the verdict and for who reached the end of its range.

    Args:
        jobs: what to step, on one device; none of them shares memory with another.
        numbers: a row of hyperparameters each.
        keys: a row of round keys each.
        check: refuse all steps where the square of any gradient is not finite.
    """
    flags = torch.zeros(1 + len(jobs), dtype=torch.int32, device=jobs[0].held["weight"].device)
    scales = [_scale(job) for job in jobs]
    records, kinds = _records(jobs, scales, flags)
    records["keys"], records["hyper"] = keys, numbers
    try:
        count = launch(records, kinds, flags, check=check)
    except KernelsUnavailableError as error:
        _give_up(error)
        return None
    if not check and not any(job.variant.storage == "codes" for job in jobs):
        return Launched(count, refused=False)
    refused, *reached = flags.tolist()
    for job, found in zip(jobs, reached, strict=True):
        if job.variant.storage == "codes" and not refused:
            job.reached.append(bool(found))
    return Launched(count, bool(refused))


def _records(
    jobs: Sequence[Job], scales: Sequence[Tensor | None], flags: Tensor
) -> tuple[NDArray[np.void], list[Kind]]:
    """One a job, short of keys and hyperparameters, and what it is stepped by."""
    records = np.zeros(len(jobs), dtype=JOB)
    kinds, pointers, facts, sizes = [], [], [], []
    for i, (job, scale) in enumerate(zip(jobs, scales, strict=True)):
        places = [0, *places_of(job, job.held["gradient"], scale)]
        rows, length, repeats, kind = kind_of(job, places)
        kinds.append(kind)
        pointers.append([*places, flags.data_ptr() + flags.itemsize * (1 + i)])
        sizes.append((rows, length))
        facts.append((0, repeats, *job.ends))
    records["pointers"], records["facts"] = np.array(pointers, dtype=np.uint64), facts
    records["rows"], records["length"] = zip(*sizes, strict=True)
    return records, kinds


_given_up: Final[list[str]] = []
"""Why there are no kernels, once that is known: it was warned of."""


def _give_up(error: Exception) -> None:
    _given_up.append(first_line := str(error).strip().splitlines()[0])
    warnings.warn(
        f"optimizer steps on the GPU run without Triton's kernels: {first_line}; the same results, slower",
        CompileUnavailableWarning,
        stacklevel=3,
    )


def _scale(job: Job) -> Tensor | None:
    """The scale as it lies in memory: one in all, one a row, or one an element."""
    if job.scale is None or job.variant.storage == "plain":
        return None
    if job.layout.row_dims == job.layout.dims:
        return row_view(job.scale, job.shape, job.layout).contiguous()
    return job.scale.contiguous()


def kind_of(job: Job, places: Sequence[int] = ()) -> tuple[int, int, int, Kind]:
    """Rows and length of what is stepped, what shares a scale, and the kernel for it.

    Args:
        job: the step.
        places: addresses of its arrays.
    """
    layout = job.layout
    rows, length = layout.dims if len(layout.dims) == 2 else (1, layout.dims[0])
    repeats, scales = layout.repeats, "one"
    if job.scale is not None and layout.row_dims:
        scales = "element" if layout.row_dims == layout.dims else "row"
    if not job.blockwise:
        # a row of a matrix whose averages come in blocks, which are no part of this step, is whole again
        rows, length, repeats, scales = _cut(rows // repeats, length * repeats, scales)
    long = job.blockwise and length > _LONGEST
    tiled = (scales == "row" and not long) or (job.blockwise and not long)
    width = _ELEMENTS if not tiled else 1 << (length - 1).bit_length()
    aligned = length % 16 == 0 and not any(place % 16 for place in places)
    tile = Tile(
        rows=1 if long or not tiled else _ELEMENTS // width,
        width=_LONGEST if long else width,
        length=length if tiled else 0,
        scales=scales,
        aligned=aligned,
        long=long,
    )
    return rows, length, repeats, (spec_of(job.variant, job.held["weight"].dtype, job.held["gradient"].dtype), tile)


def _cut(rows: int, length: int, scales: str) -> tuple[int, int, int, str]:
    """Rows, length, what shares a scale and how, where no averages are kept in blocks."""
    if scales != "row":
        return 1, rows * length, 1, scales
    piece = next((piece for piece in _PIECES if length % piece == 0), 0)
    if not piece:
        return 1, rows * length, length, "run"
    return rows * length // piece, piece, length // piece, scales


@lru_cache(maxsize=1024)
def spec_of(variant: Variant, weight: torch.dtype, gradient: torch.dtype) -> Spec:
    fmt = format_of(variant.fmt or MOMENT_FORMAT)
    return Spec(
        direction=variant.direction,
        storage=variant.storage,
        writeback=variant.writeback,
        moments=variant.moments if variant.stores else "float32",
        geometry=variant.geometry,
        stiffness=variant.stiffness,
        metric=str(variant.metric),
        decays=variant.decays,
        nesterov=variant.nesterov,
        maximize=variant.maximize,
        first="exp_avg" in variant.stores or "momentum_buffer" in variant.stores,
        second="exp_avg_sq" in variant.stores,
        amsgrad=variant.amsgrad,
        exact=variant.scale_is_power_of_two,
        draws=variant.draws_for_weight and (variant.rule.rounding == "stochastic"),
        extra=variant.residual_bits if variant.storage in ("codes", "grid") else 0,
        fixed=fmt.fixed(variant.residual_bits),
        weight=_DTYPES[weight],
        gradient=_DTYPES[gradient],
        format=fmt,
        average=format_of(variant.average),
        fitted=variant.fitted,
    )
