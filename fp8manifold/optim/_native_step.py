"""A step in native code: many parameters in one call, with pointers and sizes checked
before each.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._native import library, threads_for
from fp8manifold._numerics.records import JOB, SPEC, format_record
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._directions import NUMBERS, POSITIONS
from fp8manifold.optim._slot import FOR_MOMENTS, Slot, row_view
from fp8manifold.optim._spec import MOMENTS, Geometry, Spec
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import draw_key, draw_range, round_key_rows, round_keys, signed_word

#: what there is native code for, in the order of its enumerations; all else is stepped
#: in PyTorch
_DIRECTIONS: Final = ("adam", "sgd", "lion", "muon")
_WRITEBACKS: Final = ("nearest", "stochastic", "residual8", "momentum")
_STORAGES: Final = ("codes", "grid", "free", "plain")
_STIFFNESSES: Final = ("none", "linear", "sqrt", "square", "power")
_METRICS: Final = ("ulp", "euclidean")
_ONE, _A_ROW, _AN_ELEMENT = range(3)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS: Final = {
    "codes": (torch.uint8,),
    "grid": (torch.float32,),
    "free": _FLOATS,
    "plain": _FLOATS,
    "direction": _FLOATS,
}
#: elements of gradients and weights of 16 bits that are in float32 at a time
_COPIED: Final = 2**20
_MOMENT_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


def is_native(slot: Slot) -> bool:
    """True for a step of native code: on the CPU, computed in float32, without a
    logarithm or a user's function.
    """
    return slot.weight.device.type == "cpu" and has_kernel(slot) and library() is not None


def has_kernel(slot: Slot) -> bool:
    """True for a step that native code has, and a GPU's kernels too."""
    spec = slot.spec
    return (
        spec.direction in _DIRECTIONS
        and spec.writeback in _WRITEBACKS
        and slot.dtype is torch.float32
        and slot.weight.dtype in _WEIGHTS[spec.storage]
        and spec.compiles
        and slot.offset % 2**32 + slot.view.numel <= 2**32
    )


class NativeStep:
    """The records of some steps, in place, of disjoint memory; they serve the same
    parameters again.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        jobs = []
        self._specs, self._scales = [], []
        self._found = np.zeros((len(slots), 2), dtype=np.int32)
        for slot, found in zip(slots, self._found, strict=True):
            rows, length, kind, scale = _matrix(slot)
            spec = _specification(slot.spec)
            self._specs.append(spec)
            self._scales.append(scale)
            places = [
                spec.ctypes.data,
                *addresses_of(slot, slot.tensors["gradient"], scale),
                found.ctypes.data,
            ]
            jobs.append((places, rows, length, (kind, slot.view.repeats, *slot.chart_ends)))
        self.records = records_of(jobs)

    def run(self, slots: Sequence[Slot]) -> NDArray[np.int32]:
        """Take the steps; for each, whether a weight is at the end of its range, and
        some in a row are all 0.
        """
        kernels, records = library(), self.records
        assert kernels is not None
        self._found[:] = 0
        records["keys"], records["hyper"] = key_rows(slots), number_rows(slots)
        threads = threads_for(int(records["rows"] @ records["length"]))
        kernels.fp8manifold_step(ctypes.c_void_p(records.ctypes.data), len(records), threads)
        self._scales = []  # some are copies, with which a table can't serve again
        return self._found


def records_of(jobs: Sequence[tuple[list[int], int, int, tuple[int, ...]]]) -> NDArray[np.void]:
    """A record for each job of addresses, rows, length and facts, still without keys
    and numbers.
    """
    records = np.zeros(len(jobs), dtype=JOB)
    pointers, records["rows"], records["length"], records["facts"] = zip(*jobs, strict=True)
    records["pointers"] = np.array(pointers, dtype=np.uint64)
    return records


def key_rows(slots: Sequence[Slot], *more: int) -> NDArray[np.int32]:
    """Round keys and phase of each slot's draws, for weights and for moments; with
    ``more``, keys of other draws.
    """
    rows = np.zeros((len(slots), 8), dtype=np.int32)
    streams = np.array([slot.state["stream"] for slot in slots], dtype=np.uint64)
    words = [(slot.group["seed"], slot.steps_done + 1) for slot in slots]
    if more:
        rows[:, :3] = round_key_rows(words, streams, *more)
        return rows
    kinds: dict[str, list[int]] = {}
    for i, slot in enumerate(slots):
        kinds.setdefault(slot.draws, []).append(i)
    for draws, some in kinds.items():
        known = {words[i]: draw_key(draws, *words[i], 0) for i in some}
        keys = [known[words[i]] for i in some]
        rows[some, :3] = round_key_rows(
            [key.words[:2] for key in keys], streams[some], *keys[0].words[3:]
        )
        rows[some, 3] = [key.phase for key in keys]
    if some := [i for i, slot in enumerate(slots) if slot.spec.draws_for_moments]:
        rows[some, 4:7] = round_key_rows([words[i] for i in some], streams[some], FOR_MOMENTS)
    for slot, row in zip(slots, rows, strict=True):
        if slot.offset:  # it is added to the first of the three keys
            high, low = divmod(slot.offset, 2**32)
            for at, key in ((0, slot.rounding_key), (4, slot.moments_key)):
                first, second, third = round_keys(key.words, high)
                row[at : at + 4] = signed_word(first + low), second, third, key.phase
    return rows


def number_rows(slots: Sequence[Slot]) -> NDArray[np.float32]:
    """The numbers of each slot, in float32; for native code a direction is a step by -1
    from a weight of 0.
    """
    rows = np.zeros((len(slots), len(NUMBERS)), dtype=np.float64)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for i, slot in enumerate(slots):
        kinds.setdefault(tuple(slot.numbers), []).append(i)
    for names, some in kinds.items():
        places = [POSITIONS[name] for name in names]
        rows[np.ix_(some, places)] = [list(slots[i].numbers.values()) for i in some]
    rows[
        [i for i, slot in enumerate(slots) if slot.spec.storage == "direction"], POSITIONS["rate"]
    ] = -1.0
    eps = POSITIONS["eps"]
    rows[:, eps] = np.maximum(rows[:, eps], torch.finfo(torch.float32).tiny)
    return rows.astype(np.float32)


def run_native(slots: Sequence[Slot]) -> None:
    """Take the steps in place; no two of them share memory."""
    for part in _parts(slots):
        _run_part(part)  # and free its copies before the next ones are made


def _run_part(part: Sequence[Slot]) -> None:
    wide = [slot.replaced(tensors=slot.tensors | _in_float32(slot)) for slot in part]
    for slot, stepped, found in zip(part, wide, NativeStep(wide).run(wide).tolist(), strict=True):
        if slot.spec.storage == "codes":
            slot.saturated.append(bool(found[0]))
            slot.has_zero_rows.append(bool(found[1]))
        if (weight := slot.weight) is not (after := stepped.weight):  # rounded once
            if slot.spec.draws_for_weight:
                draws = draw_range(slot.offset, weight.numel(), slot.rounding_key, weight.device)
                after = to_half(after, weight.dtype, draws.view(weight.shape))
            weight.copy_(after)


def _parts(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots in runs whose float32 copies are one slot's, or have at most `_COPIED`
    elements together.
    """
    part: list[Slot] = []
    copied = 0
    for slot in slots:
        narrow = (slot.weight.dtype in _FLOATS[1:]) + (
            slot.tensors["gradient"].dtype in _FLOATS[1:]
        )
        size = slot.weight.numel() * narrow
        if part and size and copied + size > _COPIED:
            yield part
            part, copied = [], 0
        part.append(slot)
        copied += size
    if part:
        yield part


def _in_float32(slot: Slot) -> dict[str, Tensor]:
    """The gradient, and a 16-bit weight, in float32; the weight is rounded after the
    step.
    """
    wide = {"gradient": slot.tensors["gradient"].to(torch.float32)}
    return wide | ({"weight": slot.weight.float()} if slot.weight.dtype in _FLOATS[1:] else {})


def sum_of_squares(places: Any, sizes: Any) -> float | None:
    """The sum of squares over float32 memory of the CPU, by addresses and numbers of
    elements; None without C code.
    """
    if (kernels := library()) is None:
        return None
    addresses, numbers = np.array(places, dtype=np.uint64), np.array(sizes, dtype=np.int64)
    pointers = ctypes.c_void_p(addresses.ctypes.data), ctypes.c_void_p(numbers.ctypes.data)
    return float(kernels.fp8manifold_squares(*pointers, len(sizes)))


def _matrix(slot: Slot) -> tuple[int, int, int, Tensor | None]:
    """Rows and length of what is stepped, how the scale goes with them, and the scale."""
    view, scale = slot.view, slot.scale
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    if scale is None or not view.row_dims:
        return (
            (rows, length, _ONE, scale) if slot.spec.blockwise else (1, rows * length, _ONE, scale)
        )
    if view.row_dims == view.dims:
        return rows, length, _AN_ELEMENT, row_view(scale, slot.weight.shape, view).contiguous()
    return rows, length, _A_ROW, scale.contiguous()


def addresses_of(
    slot: Slot, gradient: Tensor, scale: Tensor | None, *, kept: bool = False
) -> list[int]:
    """Addresses of all tensors, 0 for absent ones, each of the right dtype, size and
    layout, or RuntimeError.

    With ``kept`` the scale may be exponents.
    """
    spec, numel, weight = slot.spec, slot.view.numel, slot.tensors["weight"]
    tensors: dict[Any, Any] = {None: None, **slot.tensors}
    blocks, dtype = numel // slot.view.dims[-1], _MOMENT_DTYPES[spec.moments]
    first, second = spec.first_moment, "exp_avg_sq" if "exp_avg_sq" in spec.moment_names else None
    bounds: dict[Any, str] = dict(spec.bound_names)
    exponents = kept and scale is not None and scale.dtype is torch.uint8
    own = weight.dtype if weight.dtype in _FLOATS else torch.float32
    wanted = [
        (weight, torch.uint8 if spec.storage == "codes" else own, numel),
        (gradient, gradient.dtype if gradient.dtype in _FLOATS else torch.float32, numel),
        (scale, torch.uint8 if exponents else torch.float32, None),
        (tensors["residual" if spec.residual_bits else None], torch.int8, numel),
        (tensors[first], dtype, numel),
        (tensors[second], dtype, numel),
        (tensors["max_exp_avg_sq" if spec.amsgrad else None], torch.float32, numel),
        (tensors[bounds.get(first)], torch.float32, blocks),
        (tensors[bounds.get(second)], torch.float32, blocks),
    ]
    return [0 if each[0] is None else _address(*each, weight.device) for each in wanted]


def _address(tensor: Tensor, dtype: torch.dtype, numel: int | None, device: torch.device) -> int:
    fits = (
        tensor.dtype is dtype
        and tensor.numel() == (numel or tensor.numel())
        and tensor.device == device
    )
    if not (fits and tensor.is_contiguous()):
        place = "the CPU" if device.type == "cpu" else device
        raise RuntimeError(
            f"a step needs {numel} contiguous elements of {dtype} on {place}: here are "
            f"{tensor.numel()} of {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


@lru_cache(maxsize=1024)
def _specification(spec: Spec) -> NDArray[np.void]:
    """A spec as a record of C."""
    record = np.zeros(1, dtype=SPEC)
    record[0] = (
        _DIRECTIONS.index(spec.direction),
        _STORAGES.index("plain" if spec.storage == "direction" else spec.storage),
        _WRITEBACKS.index(spec.writeback),
        MOMENTS.index(spec.moments),
        get_args(Geometry).index(spec.geometry),
        _STIFFNESSES.index(spec.stiffness),
        _METRICS.index(spec.metric) if spec.fmt is not None else 0,
        spec.decays,
        spec.nesterov,
        spec.maximize,
        format_record(spec.fmt or FloatFormat(4, 3))[0],
    )
    return record
