"""A step in native code: of many parameters in one call, whose pointers and sizes are checked before every one."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._native import library, threads_for
from fp8manifold._native._layouts import JOB, SPEC, format_record
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._job import Job, row_view
from fp8manifold.optim._variant import MOMENTS, Geometry, Storage, Variant
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import draw_range

#: what there is native code for, in its order; all else takes its steps in PyTorch
_DIRECTIONS: Final = ("adam", "sgd", "lion", "madam", "muon")
_WRITEBACKS: Final = ("nearest", "stochastic", "residual8", "residual4", "residual2", "momentum")
_STIFFNESSES: Final = ("none", "linear", "sqrt", "square", "power")
_METRICS: Final = ("ulp", "euclidean")
_ONE, _A_ROW, _AN_ELEMENT = range(3)
_FIRST: Final = ("exp_avg", "momentum_buffer")
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS: Final = {"codes": (torch.uint8,), "grid": (torch.float32,), "free": _FLOATS, "plain": _FLOATS}
_AVERAGES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


def is_native(job: Job, dtype: torch.dtype) -> bool:
    """Whether native code takes this step; every known step in float32 on the CPU but those that need a logarithm."""
    return job.held["weight"].device.type == "cpu" and has_code(job, dtype) and library() is not None


def has_code(job: Job, dtype: torch.dtype) -> bool:
    """Whether there is code for this step, native or of a GPU."""
    variant, weight = job.variant, job.held["weight"]
    return (
        variant.direction in _DIRECTIONS
        and variant.writeback in _WRITEBACKS
        and dtype is torch.float32
        and weight.dtype in _WEIGHTS[variant.storage]
        and variant.compiles
        and job.offset % 2**32 + job.layout.numel <= 2**32
    )


def run_native(jobs: Sequence[Job], numbers: NDArray[np.float32], keys: NDArray[np.int32]) -> None:
    """Take the steps in place.

    Args:
        jobs: what to step; none of them shares memory with another.
        numbers: a row of hyperparameters each.
        keys: a row of round keys each.
    """
    kernels = library()
    assert kernels is not None
    records = np.zeros(len(jobs), dtype=JOB)
    kept: list[object] = []
    pointers, sizes, facts = [], [], []
    wide = [_in_float32(job) for job in jobs]
    reached = np.zeros(len(jobs), dtype=np.int32)
    for job in wide:
        rows, length, kind, scale = _matrix(job)
        spec, gradient = _specification(job.variant), job.held["gradient"].to(torch.float32)
        kept += [spec, gradient, scale]
        pointers.append([spec.ctypes.data, *places_of(job, gradient, scale)])
        sizes.append((rows, length))
        facts.append((kind, job.layout.repeats, *job.ends))
    places = reached.ctypes.data + reached.itemsize * np.arange(len(jobs), dtype=np.uint64)
    records["pointers"] = np.column_stack([np.array(pointers, dtype=np.uint64), places])
    records["facts"], records["keys"], records["hyper"] = facts, keys, numbers
    records["rows"], records["length"] = zip(*sizes, strict=True)
    threads = threads_for(sum(job.layout.numel for job in jobs))
    kernels.fp8manifold_step(ctypes.c_void_p(records.ctypes.data), len(jobs), threads)
    for job, stepped, found in zip(jobs, wide, reached.tolist(), strict=True):
        if job.variant.storage == "codes":
            job.reached.append(bool(found))
        if stepped is not job:
            _store_halves(job, stepped.held["weight"])


def _in_float32(job: Job) -> Job:
    """The job itself, or that of a copy of weights that are stored in half as many bits."""
    weight = job.held["weight"]
    return job if weight.dtype not in _FLOATS[1:] else replace(job, held=job.held | {"weight": weight.float()})


def _store_halves(job: Job, stepped: Tensor) -> None:
    """Round what has been stepped in float32, once."""
    weight = job.held["weight"]
    if job.variant.draws_for_weight:
        draws = draw_range(job.offset, weight.numel(), job.key, weight.device).view(weight.shape)
        stepped = to_half(stepped, weight.dtype, draws)
    weight.copy_(stepped)


def sum_of_squares(gradients: Sequence[Tensor]) -> float | None:
    """Of all elements of contiguous float32 tensors on the CPU, in float32; None where there is no native code."""
    kernels = library()
    if kernels is None:
        return None
    places = np.array([(g.data_ptr(), g.numel()) for g in gradients], dtype=np.uint64).reshape(-1, 2).T.copy()
    addresses, sizes = (ctypes.c_void_p(row.ctypes.data) for row in places)
    return float(kernels.fp8manifold_squares(addresses, sizes, len(gradients)))


def _matrix(job: Job) -> tuple[int, int, int, Tensor | None]:
    """Rows and length of what is stepped, how the scale goes with them, and the scale."""
    layout, scale = job.layout, job.scale
    rows, length = layout.dims if len(layout.dims) == 2 else (1, layout.dims[0])
    if scale is None or not layout.row_dims:
        return (rows, length, _ONE, scale) if job.blockwise else (1, rows * length, _ONE, scale)
    if layout.row_dims == layout.dims:
        return rows, length, _AN_ELEMENT, row_view(scale, job.shape, layout).contiguous()
    return rows, length, _A_ROW, scale.contiguous()


def places_of(job: Job, gradient: Tensor, scale: Tensor | None) -> list[int]:
    """Where everything lies, 0 for what there is not; of the right dtype, size and layout, or nothing is stepped."""
    held, numel, variant = job.held, job.layout.numel, job.variant
    device = held["weight"].device
    blocks = numel // job.layout.dims[-1]
    average = _AVERAGES[variant.moments]
    stores = variant.stores
    first = next((name for name in _FIRST if name in stores), None)
    second = "exp_avg_sq" if "exp_avg_sq" in stores else None
    wanted = [
        (held["weight"], torch.uint8 if variant.storage == "codes" else _own(held["weight"]), numel),
        (gradient, _own(gradient), numel),
        (scale, torch.float32, None),
        (held["residual"] if variant.residual_bits else None, torch.int8, numel),
        (None if first is None else held[first], average, numel),
        (None if second is None else held[second], average, numel),
        (held["max_exp_avg_sq"] if "max_exp_avg_sq" in stores else None, torch.float32, numel),
        (None if first is None or not job.blockwise else held[variant.bounds[first]], torch.float32, blocks),
        (None if second is None or not job.blockwise else held[variant.bounds[second]], torch.float32, blocks),
    ]
    return [0 if tensor is None else _address(tensor, dtype, size, device) for tensor, dtype, size in wanted]


def _own(floats: Tensor) -> torch.dtype:
    return floats.dtype if floats.dtype in _FLOATS else torch.float32


def _address(tensor: Tensor, dtype: torch.dtype, numel: int | None, device: torch.device) -> int:
    fits = tensor.dtype is dtype and tensor.numel() == (numel or tensor.numel()) and tensor.device == device
    if not (fits and tensor.is_contiguous()):
        place = "the CPU" if device.type == "cpu" else device
        raise RuntimeError(
            f"a step needs {numel} contiguous elements of {dtype} on {place}: here are {tensor.numel()} of "
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


@lru_cache(maxsize=1024)
def _specification(variant: Variant) -> NDArray[np.void]:
    """A variant as C knows it: one record."""
    record = np.zeros(1, dtype=SPEC)
    record[0] = (
        _DIRECTIONS.index(variant.direction),
        get_args(Storage).index(variant.storage),
        _WRITEBACKS.index(variant.writeback),
        MOMENTS.index(variant.moments),
        get_args(Geometry).index(variant.geometry),
        _STIFFNESSES.index(variant.stiffness),
        _METRICS.index(variant.metric) if variant.fmt is not None else 0,
        variant.decays,
        variant.nesterov,
        variant.maximize,
        format_record(variant.fmt or FloatFormat(4, 3))[0],
    )
    return record
