"""A step in native code: many parameters in one call of C.

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

C trusts the pointers. So `addresses_of` checks dtype, size, device and layout of every
tensor before its address is taken.

`run_native` makes records and steps once. `NativeStep` serves again for the same memory
(`_native_plan.py`): only keys, numbers and the gradients' addresses are written anew. The
records of a GPU's kernels are the same (`_triton_step.py`).

Gradients and weights of 16 bits are copied to float32, some at a time, and the weight is
rounded once after the step.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._interface import (
    JOB,
    KEYS,
    NUMBERS,
    POSITIONS,
    JobFacts,
    KernelDirection,
    KernelMetric,
    KernelWriteBack,
    MomentStorage,
    NativeReport,
    ScaleSharing,
    WeightStorage,
    numbers_in_c,
)
from fp8manifold._native import library, most_threads
from fp8manifold._numerics.records import FORMAT_DTYPE, JOB_DTYPE, SPEC_DTYPE, format_record
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._factors import Preconditioner
from fp8manifold.optim._native_factors import FactorRecords
from fp8manifold.optim._slot import FOR_MOMENTS, Slot, row_view
from fp8manifold.optim._spec import Spec
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import (
    DrawKey,
    draw_key,
    draw_range,
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
_KEY_WORDS: Final = len(KEYS.fields)
"""Words of the keys of one kind of draws: round keys, and a phase after them."""
_PHASE: Final = KEYS.word("phase")
WEIGHT_KEYS: Final = slice(0, _KEY_WORDS)
"""Words of the keys of weights, before those of the keys of moments."""
_MOMENT_KEYS: Final = slice(_KEY_WORDS, 2 * _KEY_WORDS)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_HALVES: Final = (torch.bfloat16, torch.float16)
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
_EPS: Final = POSITIONS["eps"]
_RATE: Final = POSITIONS["rate"]
_COPIED_AT_ONCE: Final = 2**20
"""Elements of gradients and weights of 16 bits that have a copy in float32 at a time."""


def is_native(slot: Slot) -> bool:
    """Return True for a step of native code: on the CPU, and as `has_kernel` says."""
    return slot.weight.device.type == "cpu" and has_kernel(slot) and library() is not None


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


class NativeStep:
    """C job records for the steps of slots that share no memory.

    They can be used again for the same parameters.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        jobs = []
        # whatever the records point to has to live as long as they do
        self._specs, self._scales = [], []
        #: the positions of steps that end with a direction, in place of a weight
        self._directions = []
        self._reports = np.zeros((len(slots), len(NativeReport._fields)), dtype=np.int32)
        factored: list[int] = []
        for i, (slot, report) in enumerate(zip(slots, self._reports, strict=True)):
            if slot.spec.preconditioner is not Preconditioner.NONE:
                factored.append(i)
            if slot.spec.storage == WeightStorage.DIRECTION:
                self._directions.append(i)
            matrix = _matrix_of(slot)
            spec = _spec_record(slot.spec)
            self._specs.append(spec)
            self._scales.append(matrix.scale)
            pointers = [
                spec.ctypes.data,
                *addresses_of(slot, slot.tensors["gradient"], matrix.scale),
                report.ctypes.data,
                # of factors
                0,
            ]
            low, high = slot.chart_ends
            facts = JobFacts(
                scales=matrix.scales,
                repeats=slot.view.repeats,
                low_exponent=low,
                high_exponent=high,
            )
            jobs.append(Job(pointers, matrix.rows, matrix.length, facts))
        self.records = records_of(jobs)
        self._factors = FactorRecords([slots[i] for i in factored]) if factored else None
        if self._factors is not None:
            self.records["pointers"][factored, JOB.column("factors")] = self._factors.addresses
        self._most_threads = most_threads(int(self.records["rows"] @ self.records["length"]))
        kernels = library()
        assert kernels is not None
        self._kernels = kernels

    def run(self, keys: NDArray[np.int32], numbers: NDArray[np.float32]) -> NDArray[np.int32]:
        """Take the steps.

        Args:
            keys: of the draws, as `key_rows` returns them.
            numbers: of the step, as `number_rows` returns them.

        Returns:
            The fields of a `NativeReport` for each.
        """
        records = self.records
        self._reports[:] = 0
        records["keys"] = keys
        set_numbers(records, numbers, self._directions)
        threads = min(torch.get_num_threads(), self._most_threads)
        # freed at the end
        scratch = None if self._factors is None else self._factors.renew_memory()
        self._kernels.fp8manifold_step(ctypes.c_void_p(records.ctypes.data), len(records), threads)
        # Some are copies, with which the records can't be used again: a `Plan` sees that
        # their addresses are of no tensor that it knows.
        self._scales = []
        del scratch
        return self._reports

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors that the next step will find where they are."""
        addresses: list[int] = self.records["pointers"][:, TENSOR_COLUMNS].flatten().tolist()
        return addresses if self._factors is None else addresses + self._factors.averages()


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


class DrawKeys:
    """The keys of the draws of some slots, which are new in every step.

    Seeds, streams and kinds of draws stay as they are when this is made.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._seeds = [slot.group["seed"] for slot in slots]
        self._streams = np.array([slot.state["stream"] for slot in slots], dtype=np.uint64)
        positions: dict[str, list[int]] = {}
        for i, slot in enumerate(slots):
            positions.setdefault(slot.draws, []).append(i)
        self._positions_by_draws = positions
        self._with_moments = [i for i, slot in enumerate(slots) if slot.spec.draws_for_moments]

    def rows(self, steps: Sequence[int]) -> NDArray[np.int32]:
        """Return the keys of a step, as `JOB` has them.

        A row has three round keys and a phase for the draws of weights, and the same for
        those of moments.

        Args:
            steps: the number of the step of each slot, from 1.
        """
        rows = np.zeros((len(steps), 2 * _KEY_WORDS), dtype=np.int32)
        prefixes = list(zip(self._seeds, steps, strict=True))
        for draws, positions in self._positions_by_draws.items():
            # One key for each (seed, step), made for stream 0. Its words are seed, step, 0;
            # with dither seed, epoch, 0, a word. The streams take the place of the 0.
            key_by_prefix = {}
            keys = []
            for i in positions:
                prefix = prefixes[i]
                if prefix not in key_by_prefix:
                    key_by_prefix[prefix] = draw_key(draws, *prefix, 0)
                keys.append(key_by_prefix[prefix])
            seeds_and_epochs: list[tuple[int, ...]] = [key.words[:2] for key in keys]
            further_words = keys[0].words[3:]
            rows[positions, :_PHASE] = round_key_rows(
                seeds_and_epochs, self._streams[positions], *further_words
            )
            rows[positions, _PHASE] = [key.phase for key in keys]
        moments = self._with_moments
        if moments:
            rows[moments, _KEY_WORDS : _KEY_WORDS + _PHASE] = round_key_rows(
                [prefixes[i] for i in moments], self._streams[moments], FOR_MOMENTS
            )
        return rows


def key_rows(slots: Sequence[Slot], *further_words: int) -> NDArray[np.int32]:
    """Return the keys of each slot's draws, as `DrawKeys` does, for shards too.

    With ``further_words`` a row has only the round keys of other draws, whose key words
    end with these.
    """
    if further_words:
        rows = np.zeros((len(slots), 2 * _KEY_WORDS), dtype=np.int32)
        streams = np.array([slot.state["stream"] for slot in slots], dtype=np.uint64)
        prefixes = [(slot.group["seed"], slot.steps_done + 1) for slot in slots]
        rows[:, :_PHASE] = round_key_rows(prefixes, streams, *further_words)
        return rows
    rows = DrawKeys(slots).rows([slot.steps_done + 1 for slot in slots])
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


def number_rows(slots: Sequence[Slot]) -> NDArray[np.float32]:
    """Return the numbers of each slot, in float32.

    Of the halves of a step they are those of the whole.
    """
    rows = np.zeros((len(slots), len(NUMBERS)), dtype=np.float64)
    positions_by_names: dict[tuple[str, ...], list[int]] = {}
    for i, slot in enumerate(slots):
        positions_by_names.setdefault(tuple(slot.numbers), []).append(i)
    for names, positions in positions_by_names.items():
        columns = [POSITIONS[name] for name in names]
        rows[np.ix_(positions, columns)] = [list(slots[i].numbers.values()) for i in positions]
    rows[:, _EPS] = np.maximum(rows[:, _EPS], torch.finfo(torch.float32).tiny)
    return rows.astype(np.float32)


def set_numbers(
    records: NDArray[np.void], numbers: NDArray[np.float32], directions: Sequence[int]
) -> None:
    """Write the numbers of a step into records.

    For native code and kernels a direction is a step by -1 from a weight of 0.

    Args:
        records: of jobs.
        numbers: of whole steps, as `number_rows` returns them.
        directions: the positions of records whose steps end with a direction.
    """
    records["hyper"] = numbers
    records["hyper"][directions, _RATE] = -1.0


def run_native(slots: Sequence[Slot]) -> None:
    """Take the steps in place; no two of them share memory."""
    for portion in _portions(slots):
        # its copies are freed before those of the next one are made
        _run_portion(portion)


def _portions(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield slots in runs, such that few elements of a run need a copy in float32.

    They are at most `_COPIED_AT_ONCE`, or those of one slot.
    """
    portion: list[Slot] = []
    copied = 0
    for slot in slots:
        copies = (slot.weight.dtype in _HALVES) + (slot.tensors["gradient"].dtype in _HALVES)
        size = slot.weight.numel() * copies
        if portion and size and copied + size > _COPIED_AT_ONCE:
            yield portion
            portion, copied = [], 0
        portion.append(slot)
        copied += size
    if portion:
        yield portion


def _run_portion(slots: Sequence[Slot]) -> None:
    wide_slots = [slot.replaced(tensors=slot.tensors | _in_float32(slot)) for slot in slots]
    step = NativeStep(wide_slots)
    reports = step.run(key_rows(wide_slots), number_rows(wide_slots)).tolist()
    for slot, wide_slot, words in zip(slots, wide_slots, reports, strict=True):
        if slot.spec.storage == WeightStorage.CODES:
            report = NativeReport(*words)
            slot.saturated.append(bool(report.is_saturated))
            slot.has_zero_rows.append(bool(report.has_zero_tile))
        if wide_slot.weight is not slot.weight:
            slot.weight.copy_(_rounded(wide_slot.weight, slot))


def _in_float32(slot: Slot) -> dict[str, Tensor]:
    """Return the gradient, and a 16-bit weight, in float32."""
    tensors = {"gradient": slot.tensors["gradient"].to(torch.float32)}
    if slot.weight.dtype in _HALVES:
        tensors["weight"] = slot.weight.float()
    return tensors


def _rounded(wide: Tensor, slot: Slot) -> Tensor:
    """Round a stepped weight to 16 bits, at random if the step draws for it."""
    if not slot.spec.draws_for_weight:
        return wide
    draws = draw_range(slot.offset, wide.numel(), slot.rounding_key, wide.device)
    return to_half(wide, slot.weight.dtype, draws.view(wide.shape))


def sum_of_squares(
    addresses: NDArray[np.uint64], sizes: NDArray[np.int64], kernels: ctypes.CDLL
) -> float:
    """Return the sum of squares over float32 memory of the CPU.

    Args:
        addresses: of the memory.
        sizes: numbers of elements.
        kernels: the native code.
    """
    total = kernels.fp8manifold_squares(
        ctypes.c_void_p(addresses.ctypes.data), ctypes.c_void_p(sizes.ctypes.data), len(sizes)
    )
    return float(total)


class _Matrix(NamedTuple):
    """A parameter as C sees it."""

    rows: int
    length: int
    scales: ScaleSharing
    scale: Tensor | None


def _matrix_of(slot: Slot) -> _Matrix:
    view, scale = slot.view, slot.scale
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    if scale is None or not view.row_dims:
        if not slot.spec.blockwise:
            # nothing is by rows: one long row is quickest
            rows, length = 1, rows * length
        return _Matrix(rows, length, ScaleSharing.ONE_SCALE, scale)
    if view.row_dims == view.dims:
        scale = row_view(scale, slot.weight.shape, view).contiguous()
        return _Matrix(rows, length, ScaleSharing.SCALE_AN_ELEMENT, scale)
    return _Matrix(rows, length, ScaleSharing.SCALE_A_ROW, scale.contiguous())


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
        RuntimeError: another dtype, size, device or layout.
    """
    fits = tensor.dtype is dtype and tensor.numel() == numel and tensor.device == device
    if not (fits and tensor.is_contiguous()):
        place = "the CPU" if device.type == "cpu" else device
        raise RuntimeError(
            f"a step needs {numel} contiguous elements of {dtype} on {place}: here are "
            f"{tensor.numel()} of {tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


@lru_cache(maxsize=1024)
def _spec_record(spec: Spec) -> NDArray[np.void]:
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
