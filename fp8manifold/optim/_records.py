"""Records of a step: what native code and a GPU's kernels read of a parameter.

The C code (``_native/step.c``) takes an array of `JOB` records, one for each parameter
(``_interface.py``). A record has

    pointers    of the spec, the weight, the gradient, the scale, the residual, moments,
                their bounds, of two flags that the step reports, and of Adafactor's
                factors
    rows        and length: the matrix that the parameter is seen as
    facts       whether there is one scale, one a row or one an element, how many rows
                share one, and where a chart of the ulp ends (`JobFacts`)
    keys        round keys of the random bits: new in every step
    hyper       the numbers of the step (`NUMBERS`): new in every step

C and kernels trust the pointers. So `addresses_of` checks dtype, size, device and layout of
every tensor before its address is taken. Later steps of a plan take the addresses of
gradients alone, which `Plan.is_stale` has compared with those before. Records of native code
are made by `_native_step.py`, those of a GPU's kernels by `_triton_step.py`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import (
    JOB,
    JobFacts,
    KernelDirection,
    KernelMetric,
    KernelWriteBack,
    MomentStorage,
    ScaleSharing,
    WeightStorage,
    numbers_in_c,
)
from fp8manifold._numerics.records import FORMAT_DTYPE, JOB_DTYPE, SPEC_DTYPE, format_record
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._slot import Slot, row_view
from fp8manifold.optim._spec import Spec
from fp8manifold.random_bits import (
    KEY_WORDS,
    ROUND_KEYS,
    DrawKey,
    StepKeys,
    round_key_rows,
    round_keys,
    signed_word,
)

# What there is native code for. All else is stepped in PyTorch.
_DIRECTIONS: Final = frozenset(KernelDirection)
_WRITEBACKS: Final = frozenset(KernelWriteBack)

WEIGHT_COLUMN: Final = JOB.column("weight")
"""Position of the weight's address among the pointers of a record."""
GRADIENT_COLUMN: Final = JOB.column("gradient")
"""Position of the gradient's address among the pointers of a record."""
REPORT_COLUMN: Final = JOB.column("report")
"""Position of the report's address among the pointers of a record."""
TENSOR_COLUMNS: Final = slice(WEIGHT_COLUMN, REPORT_COLUMN)
"""Positions of the addresses of all tensors: of `addresses_of`."""
_TENSORS: Final = tuple(field.name for field in JOB.fields)[TENSOR_COLUMNS]
WEIGHT_KEYS: Final = slice(0, KEY_WORDS)
"""Words of the keys of weights, before those of the keys of moments."""
_MOMENT_KEYS: Final = slice(KEY_WORDS, 2 * KEY_WORDS)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHT_DTYPES: Final = {
    WeightStorage.CODES: (torch.uint8,),
    WeightStorage.GRID: (torch.float32,),
    WeightStorage.FREE: _FLOATS,
    WeightStorage.PLAIN: _FLOATS,
    WeightStorage.DIRECTION: _FLOATS,
}
_MOMENT_DTYPES: Final = {
    MomentStorage.FLOAT32: torch.float32,
    MomentStorage.BFLOAT16: torch.bfloat16,
    MomentStorage.EIGHT_BIT: torch.uint8,
}


def has_kernel(slot: Slot) -> bool:
    """Return True for a step that native code has, and a GPU's kernels too.

    It is computed in float32, without a logarithm or a function of the user's.
    """
    spec = slot.spec
    return (
        spec.direction in _DIRECTIONS
        and spec.writeback in _WRITEBACKS
        and slot.dtype is torch.float32
        and slot.weight.dtype in _WEIGHT_DTYPES[spec.storage]
        and spec.compiles
        and slot.offset % 2**32 + slot.view.numel <= 2**32
    )


class Job(NamedTuple):
    """One parameter in a call of C or of a kernel, without what changes in every step."""

    pointers: list[int]
    rows: int
    length: int
    facts: JobFacts


def records_of(jobs: Sequence[Job]) -> NDArray[np.void]:
    """Return the records of jobs, still without keys and numbers."""
    records = np.zeros(len(jobs), dtype=JOB_DTYPE)
    pointers, records["rows"], records["length"], records["facts"] = zip(*jobs, strict=True)
    records["pointers"] = np.array(pointers, dtype=np.uint64)
    return records


class Matrix(NamedTuple):
    """A parameter as C sees it."""

    rows: int
    length: int
    scales: ScaleSharing
    scale: Tensor | None


def matrix_of(slot: Slot) -> Matrix:
    """Return the matrix that C sees a slot's parameter as."""
    view, scale = slot.view, slot.scale
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    if scale is None or not view.row_dims:
        if not slot.spec.blockwise:
            # nothing is by rows: one long row is quickest
            rows, length = 1, rows * length
        return Matrix(rows, length, ScaleSharing.ONE_SCALE, scale)
    if view.row_dims == view.dims:
        scale = row_view(scale, slot.weight.shape, view).contiguous()
        return Matrix(rows, length, ScaleSharing.SCALE_AN_ELEMENT, scale)
    return Matrix(rows, length, ScaleSharing.SCALE_A_ROW, scale.contiguous())


def addresses_of(
    slot: Slot, gradient: Tensor, scale: Tensor | None, *, allows_exponents: bool = False
) -> list[int]:
    """Return the addresses of all tensors in the order of `JOB`, 0 for absent ones.

    Args:
        slot: with the tensors.
        gradient: its gradient.
        scale: as the step reads it.
        allows_exponents: whether the scale may be exponents.

    Raises:
        RuntimeError: a tensor of another dtype, size, device or layout.
    """
    spec, weight = slot.spec, slot.tensors["weight"]
    device = weight.device
    numel = slot.view.numel
    weight_dtype = weight.dtype if weight.dtype in _FLOATS else torch.float32
    if spec.storage == WeightStorage.CODES:
        weight_dtype = torch.uint8
    gradient_dtype = gradient.dtype if gradient.dtype in _FLOATS else torch.float32
    addresses = dict.fromkeys(_TENSORS, 0)
    addresses["weight"] = address_of(weight, weight_dtype, numel, device)
    addresses["gradient"] = address_of(gradient, gradient_dtype, numel, device)
    if scale is not None:
        is_exponents = allows_exponents and scale.dtype is torch.uint8
        scale_dtype = torch.uint8 if is_exponents else torch.float32
        addresses["scale"] = address_of(scale, scale_dtype, scale.numel(), device)
    blocks = numel // slot.view.dims[-1]
    moment_dtype = _MOMENT_DTYPES[spec.moments]
    first = spec.first_moment
    second = "exp_avg_sq" if "exp_avg_sq" in spec.moment_names else None
    second_max = "max_exp_avg_sq" if spec.amsgrad else None
    first_bound = spec.bound_names.get(first) if first else None
    second_bound = spec.bound_names.get(second) if second else None
    entries = (
        ("residual", "residual" if spec.residual_bits else None, torch.int8, numel),
        ("first", first, moment_dtype, numel),
        ("second", second, moment_dtype, numel),
        ("second_max", second_max, torch.float32, numel),
        ("first_bound", first_bound, torch.float32, blocks),
        ("second_bound", second_bound, torch.float32, blocks),
    )
    for field, name, dtype, size in entries:
        if name is not None:
            addresses[field] = address_of(slot.tensors[name], dtype, size, device)
    return list(addresses.values())


def address_of(tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> int:
    """Return the address of a tensor that is as a step needs it.

    Raises:
        RuntimeError: another dtype, size, device or layout, or no memory of its own.
    """
    fits = tensor.dtype is dtype and tensor.numel() == numel and tensor.device == device
    # a tensor that holds others has the address 0, which stands for no tensor
    if not (fits and tensor.is_contiguous() and (tensor.data_ptr() or not numel)):
        place = "the CPU" if device.type == "cpu" else device
        raise RuntimeError(
            f"a step needs {numel} contiguous elements of {dtype} on {place}: here are "
            f"{tensor.numel()} of {tensor.dtype} on {tensor.device} with strides "
            f"{tensor.stride()}, a {type(tensor).__name__}"
        )
    return tensor.data_ptr()


@lru_cache(maxsize=1024)
def spec_record(spec: Spec) -> NDArray[np.void]:
    """Return a spec as a record of C, whose memory lives as long as the cache."""
    # a direction is stored as the step of a plain weight of 0 (`set_numbers`)
    storage = WeightStorage.PLAIN if spec.storage == WeightStorage.DIRECTION else spec.storage
    metric = "ulp" if spec.fmt is None else spec.metric
    assert isinstance(metric, str)
    choices = {
        "direction": KernelDirection(spec.direction),
        "storage": storage,
        "writeback": KernelWriteBack(spec.writeback),
        "moments": spec.moments,
        "geometry": spec.geometry,
        "stiffness": spec.stiffness,
        "metric": KernelMetric(metric),
    }
    fmt = spec.fmt or FloatFormat(4, 3)
    fields = numbers_in_c(choices) | {
        "decays": spec.decays,
        "nesterov": spec.nesterov,
        "maximize": spec.maximize,
        "format": np.frombuffer(format_record(fmt), FORMAT_DTYPE)[0],
    }
    record = np.zeros(1, dtype=SPEC_DTYPE)
    for name, value in fields.items():
        record[name] = value
    return record


def step_keys_of(slots: Sequence[Slot]) -> StepKeys:
    """Return the keys of slots whose seeds, streams and kinds of draws stay as they are."""
    return StepKeys(
        seeds=[slot.group["seed"] for slot in slots],
        streams=[slot.state["stream"] for slot in slots],
        draws=[slot.draws for slot in slots],
        with_moments=[i for i, slot in enumerate(slots) if slot.spec.draws_for_moments],
    )


def key_rows(slots: Sequence[Slot], *further_words: int) -> NDArray[np.int32]:
    """Return the keys of each slot's draws, as `StepKeys` does, for shards too.

    With ``further_words`` a row has only the round keys of other draws, whose key words
    end with these.
    """
    if further_words:
        rows = np.zeros((len(slots), 2 * KEY_WORDS), dtype=np.int32)
        streams = np.array([slot.state["stream"] for slot in slots], dtype=np.uint64)
        prefixes = [(slot.group["seed"], slot.steps_done + 1) for slot in slots]
        rows[:, ROUND_KEYS] = round_key_rows(prefixes, streams, *further_words)
        return rows
    rows = step_keys_of(slots).rows([slot.steps_done + 1 for slot in slots])
    for slot, row in zip(slots, rows, strict=True):
        if slot.offset:
            row[WEIGHT_KEYS] = _keys_at(slot.offset, slot.rounding_key)
            row[_MOMENT_KEYS] = _keys_at(slot.offset, slot.moments_key)
    return rows


def _keys_at(offset: int, key: DrawKey) -> tuple[int, int, int, int]:
    """Return the round keys and the phase of draws that begin at an offset."""
    high, low = divmod(offset, 2**32)
    first, second, third = round_keys(key.words, high)
    # a position is added to the first key
    return signed_word(first + low), second, third, key.phase
