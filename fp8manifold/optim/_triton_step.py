"""Steps on a GPU by Triton kernels: a record for each parameter, a launch for each kind.

    slots --> TritonRecords: a record per slot (addresses, sizes; as native code has
              them) and a kind per slot (what its kernel is compiled for)
    fill  --> numbers of the step, keys of the draws, addresses of the report
    run   --> one kernel for all records of a kind; if the GPU decides, after kernels
              that check all gradients, and refuse the step if one is not finite. Those of
              Adafactor's statistics come between (`_triton_factors.py`)
    report -> a row for all steps, and one for each: is a weight at the end of its range,
              how many scales were doubled, is the gradient finite, is a row of zeros left

`run_triton` serves `_backends.py`: it waits for the report, unless the GPU decides. A
steady step (`_plan.py`) never waits: its report is a `PendingVerdict`, which
`count_verdict` reads at a later step. If no kernel can be compiled, one warning says
so, and steps run in PyTorch.
"""

import logging
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold._interface import (
    JOB,
    WIDENING,
    GpuReport,
    JobFacts,
    MomentStorage,
    ScaleSharing,
    WeightStorage,
)
from fp8manifold._numerics.records import WIDENING_DTYPE
from fp8manifold._triton.kinds import (
    KernelSpec,
    Tile,
    TileScales,
    format_of,
    widening_of,
)
from fp8manifold._triton.launch import (
    KernelsUnavailableError,
    Kind,
    Launch,
    Widenings,
    compile_all,
    launches_of,
    on_device,
    run_calls,
    upload,
)
from fp8manifold.optim._factors import Preconditioner, matrices_of
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._records import (
    GRADIENT_COLUMN,
    REPORT_COLUMN,
    TENSOR_COLUMNS,
    WEIGHT_KEYS,
    Job,
    addresses_of,
    has_kernel,
    key_rows,
    records_of,
)
from fp8manifold.optim._slot import Slot, row_view
from fp8manifold.optim._spec import MOMENT_FORMAT, Spec
from fp8manifold.optim._step_numbers import number_rows, set_numbers
from fp8manifold.optim._triton_factors import GpuFactors
from fp8manifold.random_bits import FOR_RESCALING
from fp8manifold.tensor import FP8Tensor

_ELEMENTS: Final = 2048
"""Elements of a program: 16 per thread, so that it loads and stores bytes by 128 bits."""
_LONGEST: Final = 1024
"""The longest row with moments in blocks that one program steps at once."""
_PIECES: Final = (256, 128, 64, 32, 16)
"""Lengths of the pieces that rows are cut into, where nothing binds a row together."""
_DTYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
}
_GRADIENT_OF_WIDENING: Final = WIDENING.column("gradient")
"""Position of the gradient's address among the pointers of a doubling of scales."""
_REPORT_OF_WIDENING: Final = WIDENING.column("report")
"""Position of the report's address among the pointers of a doubling of scales."""
_FACTORS_COLUMN: Final = JOB.column("factors")
"""Position of the address of factors among the pointers of a record."""
_LOG: Final = logging.getLogger("fp8manifold")
_given_up: Final[list[str]] = []
"""The first line of the error for which kernels were given up, once that has happened."""


class CompileUnavailableWarning(UserWarning):
    """Steps on a GPU run without Triton's kernels: the same results, slower."""


def is_triton(slot: Slot) -> bool:
    """Return True if a Triton kernel can take a step.

    It can where native code could, on an NVIDIA GPU.
    """
    weight, gradient = slot.tensors["weight"], slot.tensors["gradient"]
    return (
        weight.device.type == "cuda"
        and gradient.device == weight.device
        and gradient.dtype in _DTYPES
        and has_kernel(slot)
        and not _given_up
        and _triton.is_available()
    )


class TritonRecords:
    """Records for a list of steps on one device, which share no memory.

    They serve the same parameters again.

    Args:
        slots: the steps, with all their tensors.

    Attributes:
        records: one for each slot.
        device: where the slots are.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._scales = [_scale(slot) for slot in slots]
        jobs, kinds = [], []
        for slot, scale in zip(slots, self._scales, strict=True):
            places = [
                # no record of the spec, which kernels are compiled for
                0,
                *addresses_of(slot, slot.tensors["gradient"], scale, allows_exponents=True),
            ]
            rows, length, repeats, kind = kind_of(slot, places)
            kinds.append(kind)
            # how scales are shared a kernel knows from its kind
            low, high = slot.chart_ends
            facts = JobFacts(
                scales=ScaleSharing.ONE_SCALE,
                repeats=repeats,
                low_exponent=low,
                high_exponent=high,
            )
            # the addresses of the report and of factors are filled in later
            jobs.append(Job([*places, 0, 0], rows, length, facts))
        self.records = records_of(jobs)
        factored = [
            i for i, slot in enumerate(slots) if slot.spec.preconditioner != Preconditioner.NONE
        ]
        #: of Adafactor's steps
        self._factors: GpuFactors | None = None
        if factored:
            scales = [self._scales[i] for i in factored]
            self._factors = GpuFactors([slots[i] for i in factored], factored, scales, _DTYPES)
        self._kinds = kinds
        self._doubling = [i for i, slot in enumerate(slots) if kernel_doubles_scales(slot)]
        self._widenings = _widenings(slots, self._doubling)
        #: the positions of steps that end with a direction, in place of a weight
        self._directions = [
            i for i, slot in enumerate(slots) if slot.spec.storage == WeightStorage.DIRECTION
        ]
        self.device = slots[0].device

    def launches_of(self, members: Sequence[int], *, check: bool = False) -> list[Launch]:
        """Return launches that step some of the slots; their kernels are compiled.

        Args:
            members: the positions of these slots.
            check: whether the GPU refuses this and all later launches of a report if
                the square of any slot's gradient is not finite.

        Raises:
            KernelsUnavailableError: a kernel can't be compiled.
        """
        launches = launches_of(
            self.records,
            self._kinds,
            self.device,
            members=members,
            check=check,
            before=[] if self._factors is None else self._factors.calls(members),
            widenings=self._widenings,
        )
        compile_all(launches, self.device)
        return launches

    def drop_copies(self) -> None:
        """Free scales and given factors after a step.

        Some are copies, with which a plan can't serve again.
        """
        self._scales = []
        if self._factors is not None:
            self._factors.drop_given()

    def addresses(self) -> list[int]:
        """Return the addresses of all tensors that the next step will find where they are."""
        addresses: list[int] = self.records["pointers"][:, TENSOR_COLUMNS].flatten().tolist()
        return addresses if self._factors is None else addresses + self._factors.addresses()

    def set_gradients(self, addresses: NDArray[np.uint64]) -> None:
        """Take the gradients of the next step from other memory."""
        self.records["pointers"][:, GRADIENT_COLUMN] = addresses

    def words(self) -> Tensor:
        """Return zeros for the kernels' report: a row for all steps, and one for each."""
        return torch.zeros(
            (1 + len(self.records), len(GpuReport._fields)), dtype=torch.int32, device=self.device
        )

    def memory(self) -> Tensor | None:
        """Return memory for Adafactor's factors, which has to live until the step is taken."""
        return None if self._factors is None else self._factors.memory()

    def fill(
        self,
        slots: Sequence[Slot],
        report: Tensor,
        rows: Sequence[int] | None = None,
        *,
        memory: Tensor | None = None,
    ) -> None:
        """Fill the records with the numbers and keys of a step.

        The addresses of the rows of its report, and of factors, are filled in, too.

        Args:
            slots: whose numbers and counts of steps the records get.
            report: as `words` returns it.
            rows: the row of each slot in the report, without the one for all; None for
                as many as there are slots.
            memory: as `memory` returns it.
        """
        records = self.records
        if self._factors is not None:
            assert memory is not None
            addresses = self._factors.fill(memory)
            records["pointers"][self._factors.owners, _FACTORS_COLUMN] = addresses
        indices = np.arange(len(slots)) if rows is None else np.array(rows)
        offsets = (1 + indices).astype(np.uint64) * np.uint64(report[0].nbytes)
        report_rows = np.uint64(report.data_ptr()) + offsets
        records["pointers"][:, REPORT_COLUMN] = report_rows
        records["keys"] = key_rows(slots)
        set_numbers(records, number_rows(slots), self._directions)
        if self._widenings is not None:
            doublings = self._widenings.records
            gradients = records["pointers"][self._doubling, GRADIENT_COLUMN]
            doublings["pointers"][:, _GRADIENT_OF_WIDENING] = gradients
            doublings["pointers"][:, _REPORT_OF_WIDENING] = report_rows[self._doubling]
            keys = key_rows([slots[i] for i in self._doubling], FOR_RESCALING)
            doublings["keys"] = keys[:, WEIGHT_KEYS]


class TritonStep(TritonRecords):
    """A step that kernels take whole: its records, and the launches of all of them.

    Args:
        slots: the steps, with all their tensors.
        decides: whether the GPU refuses all steps if the square of any gradient is not
            finite.

    Raises:
        KernelsUnavailableError: a kernel can't be compiled.
    """

    def __init__(self, slots: Sequence[Slot], *, decides: bool = False) -> None:
        super().__init__(slots)
        self.launches = self.launches_of(range(len(slots)), check=decides)

    def run(self, slots: Sequence[Slot]) -> PendingValues:
        """Launch the kernels, and return their report without waiting for it.

        The report has a row for all steps and one for each.
        """
        report = self.words()
        memory = self.memory()
        self.fill(slots, report, memory=memory)
        with on_device(self.device):
            run_calls(upload(self.launches, self.device), self.launches, report)
        self.drop_copies()
        return PendingValues(report)

    @property
    def signature(self) -> Any:
        """Everything in the launches but numbers, keys and the addresses of gradients.

        Those of averages are copied with every step, as Adafactor's records are.
        """
        calls = [
            (call.kernel, id(call.chunks), call.facts)
            for _, kind_calls in self.launches
            for call in kind_calls
        ]
        addresses = []
        for i, (records, _) in enumerate(self.launches):
            # the first launches are of the step, later ones double scales
            new_in_every_step = [GRADIENT_COLUMN, REPORT_COLUMN, _FACTORS_COLUMN]
            if i > 0:
                new_in_every_step = [_GRADIENT_OF_WIDENING, _REPORT_OF_WIDENING]
            fixed = np.delete(records["pointers"], new_in_every_step, axis=1)
            addresses.append(fixed.tolist())
        # The graph's memory is of the size that the shapes of its first step need.
        words = 0 if self._factors is None else self._factors.words
        return calls, addresses, words


def give_up(error: KernelsUnavailableError) -> None:
    """Take no further step by kernels, and warn of it."""
    first_line = str(error).strip().splitlines()[0]
    _given_up.append(first_line)
    warnings.warn(
        f"optimizer steps on the GPU run without Triton's kernels: {first_line}; the same "
        "results, slower",
        CompileUnavailableWarning,
        stacklevel=3,
    )


def run_triton(slots: Sequence[Slot], *, decides: bool = False) -> PendingValues | None:
    """Step the slots in place, and return the kernels' report.

    Slots of codes note what the report says of them. With ``decides`` the GPU may
    refuse all steps, and the host does not wait for the report. None is returned if no
    kernel can be compiled.
    """
    try:
        step = TritonStep(slots, decides=decides)
    except KernelsUnavailableError as error:
        give_up(error)
        return None
    report = step.run(slots)
    if not decides and any(slot.spec.storage == WeightStorage.CODES for slot in slots):
        rows = report.values[1:]
        for slot, words in zip(slots, rows, strict=True):
            of_slot = GpuReport(*words)
            if slot.spec.storage == WeightStorage.CODES:
                slot.saturated.append(bool(of_slot.is_saturated))
                slot.has_zero_rows.append(bool(of_slot.has_zero_row))
            if kernel_doubles_scales(slot):
                slot.doubled.append(of_slot.doubled)
                _log_doubled(slot.parameter, of_slot.doubled)
    return report


def kernel_doubles_scales(slot: Slot) -> bool:
    """Return True if the kernel of a step doubles scales that have become too small.

    It does for scales of rows and blocks, but not for those of squares, nor for one of
    a whole parameter.
    """
    parameter = slot.parameter
    return (
        isinstance(parameter, FP8Tensor)
        and slot.spec.storage == WeightStorage.CODES
        and parameter.kept_scale.dim() > 0
        and not isinstance(parameter.block_size, tuple)
    )


def _widenings(slots: Sequence[Slot], doubling: Sequence[int]) -> Widenings | None:
    """Return records for doubling scales, and what their kernels are compiled for.

    Keys, gradients and report rows are filled in later. None is returned if there are
    none.

    Args:
        slots: of a step.
        doubling: the positions of those whose scales may double.
    """
    if not doubling:
        return None
    records = np.zeros(len(doubling), dtype=WIDENING_DTYPE)
    widenings = []
    for record, i in zip(records, doubling, strict=True):
        slot = slots[i]
        parameter = slot.parameter
        assert isinstance(parameter, FP8Tensor)
        scale = parameter.kept_scale
        bits = slot.spec.residual_bits
        first = slot.spec.first_moment
        # those of the gradient and of the report are new in every step
        addresses = {
            "codes": slot.tensors["weight"].data_ptr(),
            "residual": slot.tensors["residual"].data_ptr() if bits else 0,
            "scales": scale.data_ptr(),
            "moment": slot.tensors[first].data_ptr() if first else 0,
        }
        for name, address in addresses.items():
            record["pointers"][WIDENING.column(name)] = address
        record["rows"] = scale.numel()
        record["length"] = slot.view.numel // scale.numel()
        gradient = _DTYPES[slot.tensors["gradient"].dtype]
        moments = slot.spec.moments if first else ""
        are_exponents = scale.dtype is torch.uint8
        widenings.append(widening_of(parameter.format, bits, are_exponents, gradient, moments))
    return Widenings(records, widenings, doubling)


def _scale(slot: Slot) -> Tensor | None:
    """Return the scale as a kernel reads it, or None for ordinary floats.

    It is one value, one per row or one per element; for blocks it is exponents.
    """
    if slot.kept_scale is None or slot.spec.storage == WeightStorage.PLAIN:
        return None
    if slot.view.row_dims == slot.view.dims and slot.scale is not None:
        return row_view(slot.scale, slot.weight.shape, slot.view).contiguous()
    return slot.kept_scale.contiguous()


def kind_of(slot: Slot, places: Sequence[int] = ()) -> tuple[int, int, int, Kind]:
    """Return how a slot is walked over, and the kind of its kernel.

    Args:
        slot: of the parameter.
        places: the addresses that the kernel reads and writes.

    Returns:
        The number of rows, their length, the number of rows that share a scale, and the
        kind. The rows need not be those of the parameter.
    """
    view = slot.view
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    repeats = view.repeats
    scales = TileScales.ONE
    if slot.kept_scale is not None and view.row_dims:
        scales = TileScales.ELEMENT if view.row_dims == view.dims else TileScales.ROW
    if not slot.spec.blockwise:
        # rows of the view are blocks of moments, which this step does not have: join
        # them to whole rows
        rows, length, repeats, scales = _cut(rows // repeats, length * repeats, scales)
    columns = _factored_columns(slot)
    is_cut = False
    if columns and not slot.spec.blockwise and scales in (TileScales.ONE, TileScales.ELEMENT):
        # into pieces of rows that have a factor each
        piece = _piece_of(columns)
        is_cut = piece > 0
        rows, length = (length // piece, piece) if is_cut else (rows, length)
    # a row whose largest gradient is needed, and which is too long for one program
    is_long = slot.spec.blockwise and length > _LONGEST
    is_tiled = not is_long and (scales is TileScales.ROW or slot.spec.blockwise or is_cut)
    width = 1 << (length - 1).bit_length() if is_tiled else _ELEMENTS
    is_aligned = length % 16 == 0 and not any(place % 16 for place in places)
    tile = _tile(
        rows=_ELEMENTS // width if is_tiled else 1,
        width=_LONGEST if is_long else width,
        length=length if is_tiled else 0,
        scales=scales,
        aligned=is_aligned,
        long=is_long,
    )
    weight, gradient = slot.tensors["weight"].dtype, slot.tensors["gradient"].dtype
    exponents = (
        slot.kept_scale is not None
        and slot.kept_scale.dtype is torch.uint8
        and scales is not TileScales.ELEMENT
    )
    in_rows = is_tiled and columns > 0 and columns % length == 0
    spec = kernel_spec(slot.spec, weight, gradient, exponents, in_rows)
    return rows, length, repeats, (spec, tile)


def _factored_columns(slot: Slot) -> int:
    """Return the length of rows that have a factor of Adafactor's, or 0."""
    if slot.spec.preconditioner == Preconditioner.NONE:
        return 0
    return matrices_of(slot.parameter.shape, slot.group["matrix_shape"]).columns


# the same tile for parameters of one kind, so that its hash is computed once
_tile = lru_cache(maxsize=1024)(Tile)


def _cut(rows: int, length: int, scales: TileScales) -> tuple[int, int, int, TileScales]:
    """Cut rows into pieces, where moments are not in blocks.

    Returns:
        The number of pieces, their length, the number of pieces (of elements for a
        ``run``) that share a scale, and the way in which scales are shared, as in
        :class:`Tile`.
    """
    if scales is not TileScales.ROW:
        return 1, rows * length, 1, scales
    piece = _piece_of(length)
    if not piece:
        return 1, rows * length, length, TileScales.RUN
    return rows * length // piece, piece, length // piece, scales


def _piece_of(length: int) -> int:
    """Return the length of the pieces that rows are cut into, or 0 for no such piece."""
    return next((piece for piece in _PIECES if length % piece == 0), 0)


@lru_cache(maxsize=1024)
def kernel_spec(
    spec: Spec,
    weight: torch.dtype,
    gradient: torch.dtype,
    exponents: bool = False,
    in_rows: bool = False,
) -> KernelSpec:
    """Return what the kernel of a step is compiled for.

    Args:
        spec: the fixed parts of the step.
        weight: dtype of the weight in memory.
        gradient: dtype of the gradient.
        exponents: scales are stored as exponents, one byte each.
        in_rows: each row of a tile is a part of a row that has a factor of Adafactor's.
    """
    fmt = format_of(spec.fmt or MOMENT_FORMAT)
    is_direction = spec.storage == WeightStorage.DIRECTION
    is_on_grid = spec.storage in (WeightStorage.CODES, WeightStorage.GRID)
    return KernelSpec(
        direction=spec.direction,
        storage=str(WeightStorage.PLAIN if is_direction else spec.storage),
        writeback=spec.writeback,
        moments=str(spec.moments if spec.moment_names else MomentStorage.FLOAT32),
        geometry=str(spec.geometry),
        stiffness=str(spec.stiffness),
        metric=str(spec.metric),
        decays=spec.decays,
        nesterov=spec.nesterov,
        maximize=spec.maximize,
        first="exp_avg" in spec.moment_names or "momentum_buffer" in spec.moment_names,
        second="exp_avg_sq" in spec.moment_names,
        amsgrad=spec.amsgrad,
        exact=spec.scale_is_power_of_two,
        draws=spec.draws_for_weight and (spec.rule.rounding == "stochastic"),
        residual_bits=spec.residual_bits if is_on_grid else 0,
        fixed_point=fmt.in_fixed_point(spec.residual_bits),
        weight=_DTYPES[weight],
        gradient=_DTYPES[gradient],
        format=fmt,
        moment_format=format_of(spec.first_format),
        fitted=spec.fitted,
        exponents=exponents,
        factored=spec.preconditioner != Preconditioner.NONE,
        in_rows=in_rows,
    )


class PendingVerdict(NamedTuple):
    """A step that a GPU decides on, and that the host has not counted."""

    #: The kernels' report, which reading waits for.
    report: PendingValues
    #: The versions of the parameters' codes after the step, or None in inference mode.
    versions: dict[Tensor, int | None]
    #: The backward pass that the step belongs to, if it is taken in one.
    backward_pass: BackwardPass | None


def count_verdict(optimizer: Any, verdict: PendingVerdict) -> None:
    """Wait for a step that a GPU decides on, and count it, or its backward pass."""
    versions = verdict.versions
    backward_pass = verdict.backward_pass
    (refused, *_), *rows = verdict.report.values
    reports = [GpuReport(*words) for words in rows]
    if backward_pass is not None:
        optimizer._note_pass(backward_pass)
    if refused:
        culprits = [
            parameter
            for parameter, report in zip(versions, reports, strict=True)
            if report.is_nonfinite
        ]
        if backward_pass is None:
            optimizer._count_skipped(culprits)
        else:
            optimizer._count_skipped_pass(backward_pass, culprits)
    elif backward_pass is None:
        optimizer.skipped_in_row = 0
    for (parameter, version), report in zip(versions.items(), reports, strict=True):
        if report.doubled:
            optimizer.widened_scales += report.doubled
            _log_doubled(parameter, report.doubled)
        if not report.has_zero_row and isinstance(parameter, FP8Tensor):
            # until its codes change, every scale is known to have a weight that is not 0
            parameter.filled = version


def _log_doubled(parameter: Tensor, doubled: int) -> None:
    if doubled and isinstance(parameter, FP8Tensor):
        scales = parameter.kept_scale.numel()
        _LOG.info(
            "%s of shape %s saturates: %d of %d scales changed, by 2^%+d to 2^+1",
            parameter.format.name,
            tuple(parameter.shape),
            doubled,
            scales,
            int(doubled == scales),
        )
