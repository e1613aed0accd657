"""A step in native code: of many parameters in one call, whose pointers and sizes are checked before every one."""

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
from fp8manifold.optim._slot import Slot, key_rows, number_rows, row_view
from fp8manifold.optim._spec import MOMENTS, Geometry, Spec
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import draw_range

#: what there is native code for, in its order; all else takes its steps in PyTorch
_DIRECTIONS: Final = ("adam", "sgd", "lion", "madam", "muon")
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
    """True for a step of native code: every known one in float32 on the CPU but those that need a logarithm."""
    return slot.weight.device.type == "cpu" and has_code(slot) and library() is not None


def has_code(slot: Slot) -> bool:
    """True for a step that there is code for, native or of a GPU."""
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
    """The records of some steps, in place, which serve the same parameters again; no two of them share memory."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        pointers, sizes, facts = [], [], []
        self._specs, self._scales = [], []
        self._found = np.zeros((len(slots), 2), dtype=np.int32)
        for slot, found in zip(slots, self._found, strict=True):
            rows, length, kind, scale = _matrix(slot)
            spec = _specification(slot.spec)
            self._specs.append(spec)
            self._scales.append(scale)
            places = places_of(slot, slot.tensors["gradient"], scale)
            pointers.append([spec.ctypes.data, *places, found.ctypes.data])
            sizes.append((rows, length))
            facts.append((kind, slot.view.repeats, *slot.ends))
        self.records = np.zeros(len(slots), dtype=JOB)
        self.records["pointers"], self.records["facts"] = np.array(pointers, dtype=np.uint64), facts
        self.records["rows"], self.records["length"] = zip(*sizes, strict=True)

    def run(self, slots: Sequence[Slot]) -> NDArray[np.int32]:
        """Take the steps; of each, whether it left a weight at the end of its range, and some in a row at 0."""
        kernels, records = library(), self.records
        assert kernels is not None
        self._found[:] = 0
        records["keys"], records["hyper"] = key_rows(slots), number_rows(slots)
        threads = threads_for(int(records["rows"] @ records["length"]))
        kernels.fp8manifold_step(ctypes.c_void_p(records.ctypes.data), len(records), threads)
        self._scales = []  # some are copies, which no table serves with
        return self._found


def run_native(slots: Sequence[Slot]) -> None:
    """Take the steps in place; no two of them share memory."""
    for part in _parts(slots):
        wide = [slot.replaced(tensors=slot.tensors | _in_float32(slot)) for slot in part]
        for slot, stepped, found in zip(part, wide, NativeStep(wide).run(wide).tolist(), strict=True):
            if slot.spec.storage == "codes":
                slot.reached.append(bool(found[0]))
                slot.emptied.append(bool(found[1]))
            if stepped.weight is not slot.weight:
                _store_halves(slot, stepped.weight)


def _parts(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Slots in runs whose float32 copies are one slot's, or have at most `_COPIED` elements together."""
    part: list[Slot] = []
    copied = 0
    for slot in slots:
        narrow = (slot.weight.dtype in _FLOATS[1:]) + (slot.tensors["gradient"].dtype in _FLOATS[1:])
        size = slot.weight.numel() * narrow
        if part and size and copied + size > _COPIED:
            yield part
            part, copied = [], 0
        part.append(slot)
        copied += size
    if part:
        yield part


def _in_float32(slot: Slot) -> dict[str, Tensor]:
    """The gradient, and a weight of half as many bits, which is rounded once."""
    wide = {"gradient": slot.tensors["gradient"].to(torch.float32)}
    return wide | ({"weight": slot.weight.float()} if slot.weight.dtype in _FLOATS[1:] else {})


def _store_halves(slot: Slot, stepped: Tensor) -> None:
    """Round weights that were stepped in float32, once."""
    weight = slot.weight
    if slot.spec.draws_for_weight:
        draws = draw_range(slot.offset, weight.numel(), slot.rounding_key, weight.device).view(weight.shape)
        stepped = to_half(stepped, weight.dtype, draws)
    weight.copy_(stepped)


def sum_of_squares(places: Any, sizes: Any) -> float | None:
    """The sum of squares over contiguous float32 memory of the CPU, in float32; None without native code.

    ``places`` are addresses, and ``sizes`` numbers of elements, in lists or arrays.
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
        return (rows, length, _ONE, scale) if slot.spec.blockwise else (1, rows * length, _ONE, scale)
    if view.row_dims == view.dims:
        return rows, length, _AN_ELEMENT, row_view(scale, slot.weight.shape, view).contiguous()
    return rows, length, _A_ROW, scale.contiguous()


def places_of(slot: Slot, gradient: Tensor, scale: Tensor | None, *, kept: bool = False) -> list[int]:
    """Addresses of all tensors, 0 for absent ones; raises unless each has the right dtype, size and layout.

    Args:
        slot: the step.
        gradient, scale: as they are read.
        kept: whether scales may be exponents, as they are kept.
    """
    tensors, numel, spec = slot.tensors, slot.view.numel, slot.spec
    device = tensors["weight"].device
    blocks = numel // slot.view.dims[-1]
    dtype = _MOMENT_DTYPES[spec.moments]
    stores = spec.stores
    first = spec.first
    second = "exp_avg_sq" if "exp_avg_sq" in stores else None
    wanted = [
        (tensors["weight"], torch.uint8 if spec.storage == "codes" else _own(tensors["weight"]), numel),
        (gradient, _own(gradient), numel),
        (scale, torch.uint8 if kept and scale is not None and scale.dtype is torch.uint8 else torch.float32, None),
        (tensors["residual"] if spec.residual_bits else None, torch.int8, numel),
        (None if first is None else tensors[first], dtype, numel),
        (None if second is None else tensors[second], dtype, numel),
        (tensors["max_exp_avg_sq"] if "max_exp_avg_sq" in stores else None, torch.float32, numel),
        (None if first is None or not slot.spec.blockwise else tensors[spec.bounds[first]], torch.float32, blocks),
        (None if second is None or not slot.spec.blockwise else tensors[spec.bounds[second]], torch.float32, blocks),
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
