"""Steps on a GPU by Triton kernels: the records of native code, one launch for all
parameters of a kind.

The verdict on a steady step is left to the GPU, and the host reads the kernels' report
at the parameter's next step.
"""

import logging
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold._triton.kinds import (
    REPORT_WORDS,
    WIDENED,
    KernelSpec,
    Tile,
    format_of,
    widening_of,
)
from fp8manifold._triton.launch import KernelsUnavailableError, Kind, Widenings, launch, launches_of
from fp8manifold.optim._native_step import (
    addresses_of,
    has_kernel,
    key_rows,
    number_rows,
    records_of,
)
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._slot import FOR_RESCALING, Slot, row_view
from fp8manifold.optim._spec import MOMENT_FORMAT, Spec
from fp8manifold.tensor import FP8Tensor

_ELEMENTS: Final = (
    2048  #: Elements of a program: 16 per thread, so that it loads and stores bytes by 128 bits.
)
_LONGEST: Final = 1024  #: The longest row with moments in blocks that one program steps at once.
_PIECES: Final = (256, 128, 64, 32, 16)
_DTYPES: Final = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint8: "uint8",
}
_LOG: Final = logging.getLogger("fp8manifold")


class CompileUnavailableWarning(UserWarning):
    """Steps on a GPU run without Triton's kernels: the same results, slower."""


def is_triton(slot: Slot) -> bool:
    """True for a step that a Triton kernel runs: one that native code has, on an NVIDIA
    GPU.
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


class TritonStep:
    """The launches of some steps, in place, on one device, of disjoint memory; they
    serve the same parameters again.

    With ``decides`` the GPU refuses all of them if the square of any gradient is not
    finite.
    """

    def __init__(self, slots: Sequence[Slot], *, decides: bool = False) -> None:
        self._scales = [_scale(slot) for slot in slots]
        jobs, kinds = [], []
        for slot, scale in zip(slots, self._scales, strict=True):
            places = [0, *addresses_of(slot, slot.tensors["gradient"], scale, kept=True)]
            rows, length, repeats, kind = kind_of(slot, places)
            kinds.append(kind)
            jobs.append(([*places, 0], rows, length, (0, repeats, *slot.chart_ends)))
        self.records = records_of(jobs)
        self._doubling = [i for i, slot in enumerate(slots) if doubles_on_card(slot)]
        self._widenings = _widenings([slots[i] for i in self._doubling])
        self._device = slots[0].device
        self.launches = launches_of(
            self.records, kinds, self._device, check=decides, widenings=self._widenings
        )

    def run(self, slots: Sequence[Slot]) -> PendingValues:
        """Launch the kernels; their report has a row for all steps and one for each,
        and is not waited for.
        """
        said = self.words()
        self.fill(slots, said)
        launch(self.launches, said)
        self._scales = []  # copies, which a table does not serve with
        return PendingValues(said)

    def words(self) -> Tensor:
        """Zeros for the kernels' report: a row for all steps, and one for each."""
        return torch.zeros(
            (1 + len(self.records), REPORT_WORDS), dtype=torch.int32, device=self._device
        )

    @property
    def signature(self) -> Any:
        """Everything in the launches but numbers, keys and the places of gradients."""
        calls = [
            (kernel, id(chunks), facts)
            for _, some in self.launches
            for kernel, chunks, facts in some
        ]
        places = [records["pointers"][:, :-1].tolist() for records, _ in self.launches]
        return calls, [
            [row[:2] + row[3:] for row in places[0]],
            *([row[:3] + row[4:] for row in rows] for rows in places[1:]),
        ]

    def fill(self, slots: Sequence[Slot], said: Tensor) -> None:
        """Fill the records with the numbers and keys of a step, and with the addresses
        of its kernels' reports.
        """
        records, places = (
            self.records,
            said.data_ptr() + said[0].nbytes * np.arange(1, 1 + len(slots), dtype=np.uint64),
        )
        records["pointers"][:, -1] = places
        records["keys"], records["hyper"] = key_rows(slots), number_rows(slots)
        if self._widenings is not None:
            doubled = self._widenings[0]
            doubled["pointers"][:, 3] = records["pointers"][self._doubling, 2]
            doubled["pointers"][:, -1] = places[self._doubling]
            doubled["keys"] = key_rows([slots[i] for i in self._doubling], FOR_RESCALING)[:, :4]


def launched(slots: Sequence[Slot], *, decides: bool) -> tuple[TritonStep, PendingValues] | None:
    """A step that has been launched, and its kernels' report; None, with one warning,
    if no kernel can be compiled.
    """
    try:
        step = TritonStep(slots, decides=decides)
        return step, step.run(slots)
    except KernelsUnavailableError as error:
        _given_up.append(first_line := str(error).strip().splitlines()[0])
        warnings.warn(
            f"optimizer steps on the GPU run without Triton's kernels: {first_line}; the same "
            "results, slower",
            CompileUnavailableWarning,
            stacklevel=2,
        )
        return None


def run_triton(slots: Sequence[Slot], *, decides: bool = False) -> PendingValues | None:
    """Step the slots in place and take the kernels' report to those with codes; None if
    no kernel can be compiled.

    With ``decides`` the GPU may refuse all steps, and the host does not wait for the
    report.
    """
    found = launched(slots, decides=decides)
    if found is None or decides:
        return found and found[1]
    said = found[1]
    if any(slot.spec.storage == "codes" for slot in slots):
        for slot, (reached, doubled, _, emptied) in zip(slots, said.values[1:], strict=True):
            if slot.spec.storage == "codes":
                slot.saturated.append(bool(reached))
                slot.has_zero_rows.append(bool(emptied))
            if doubles_on_card(slot):
                slot.doubled.append(doubled)
                _log_doubled(slot.parameter, doubled)
    return said


def doubles_on_card(slot: Slot) -> bool:
    """True for a step whose kernel doubles scales: of rows or blocks, of neither a
    whole parameter nor a square.
    """
    held = slot.parameter
    return (
        isinstance(held, FP8Tensor)
        and slot.spec.storage == "codes"
        and held.kept_scale.dim() > 0
        and not isinstance(held.block_size, tuple)
    )


def _widenings(slots: Sequence[Slot]) -> Widenings | None:
    """The records for doubling the scales of rows and blocks of codes, still without
    keys; None without any.
    """
    if not slots:
        return None
    records, made = np.zeros(len(slots), dtype=WIDENED), []
    for record, slot in zip(records, slots, strict=True):
        held, bits = slot.parameter, slot.spec.residual_bits
        assert isinstance(held, FP8Tensor)
        scale, residual = held.kept_scale, slot.tensors["residual"].data_ptr() if bits else 0
        first = slot.spec.first_moment
        average = slot.tensors[first].data_ptr() if first else 0
        record["pointers"] = (
            slot.tensors["weight"].data_ptr(),
            residual,
            scale.data_ptr(),
            0,
            average,
            0,
        )
        record["rows"], record["length"] = scale.numel(), slot.view.numel // scale.numel()
        gradient, moments = (
            _DTYPES[slot.tensors["gradient"].dtype],
            slot.spec.moments if first else "",
        )
        made.append(widening_of(held.format, bits, scale.dtype is torch.uint8, gradient, moments))
    return records, made


_given_up: Final[
    list[str]
] = []  #: The first line of the error for which kernels were given up, after its warning.


def _scale(slot: Slot) -> Tensor | None:
    """The scale as the kernel reads it: one value, one per row, or one per element; for
    blocks the exponents.
    """
    if slot.kept_scale is None or slot.spec.storage == "plain":
        return None
    if slot.view.row_dims == slot.view.dims and slot.scale is not None:
        return row_view(slot.scale, slot.weight.shape, slot.view).contiguous()
    return slot.kept_scale.contiguous()


def kind_of(slot: Slot, places: Sequence[int] = ()) -> tuple[int, int, int, Kind]:
    """The number of rows, their length, the rows that share a scale, and the kernel of
    a slot.
    """
    view = slot.view
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    repeats, scales = view.repeats, "one"
    if slot.kept_scale is not None and view.row_dims:
        scales = "element" if view.row_dims == view.dims else "row"
    if not slot.spec.blockwise:
        # blocks are those of moments, which this step does not read: join them to whole
        # rows
        rows, length, repeats, scales = _cut(rows // repeats, length * repeats, scales)
    long = slot.spec.blockwise and length > _LONGEST
    tiled = (scales == "row" and not long) or (slot.spec.blockwise and not long)
    width = _ELEMENTS if not tiled else 1 << (length - 1).bit_length()
    aligned = length % 16 == 0 and not any(place % 16 for place in places)
    tile = _tile(
        rows=1 if long or not tiled else _ELEMENTS // width,
        width=_LONGEST if long else width,
        length=length if tiled else 0,
        scales=scales,
        aligned=aligned,
        long=long,
    )
    weight, gradient = slot.tensors["weight"].dtype, slot.tensors["gradient"].dtype
    exponents = (
        slot.kept_scale is not None and slot.kept_scale.dtype is torch.uint8 and scales != "element"
    )
    return rows, length, repeats, (kernel_spec(slot.spec, weight, gradient, exponents), tile)


_tile = lru_cache(maxsize=1024)(
    Tile
)  # the same one for parameters of one kind, so that its hash is made once


def _cut(rows: int, length: int, scales: str) -> tuple[int, int, int, str]:
    """The number of rows, their length, the rows that share a scale and how, without
    moments in blocks.
    """
    if scales != "row":
        return 1, rows * length, 1, scales
    piece = next((piece for piece in _PIECES if length % piece == 0), 0)
    if not piece:
        return 1, rows * length, length, "run"
    return rows * length // piece, piece, length // piece, scales


@lru_cache(maxsize=1024)
def kernel_spec(
    spec: Spec, weight: torch.dtype, gradient: torch.dtype, exponents: bool = False
) -> KernelSpec:
    fmt = format_of(spec.fmt or MOMENT_FORMAT)
    return KernelSpec(
        direction=spec.direction,
        storage="plain" if spec.storage == "direction" else spec.storage,
        writeback=spec.writeback,
        moments=spec.moments if spec.moment_names else "float32",
        geometry=spec.geometry,
        stiffness=spec.stiffness,
        metric=str(spec.metric),
        decays=spec.decays,
        nesterov=spec.nesterov,
        maximize=spec.maximize,
        first="exp_avg" in spec.moment_names or "momentum_buffer" in spec.moment_names,
        second="exp_avg_sq" in spec.moment_names,
        amsgrad=spec.amsgrad,
        exact=spec.scale_is_power_of_two,
        draws=spec.draws_for_weight and (spec.rule.rounding == "stochastic"),
        residual_bits=spec.residual_bits if spec.storage in ("codes", "grid") else 0,
        fixed_point=fmt.in_fixed_point(spec.residual_bits),
        weight=_DTYPES[weight],
        gradient=_DTYPES[gradient],
        format=fmt,
        moment_format=format_of(spec.first_format),
        fitted=spec.fitted,
        exponents=exponents,
    )


def count_decided(
    optimizer: Any,
    said: PendingValues,
    versions: dict[Tensor, int | None],
    backward_pass: BackwardPass | None,
) -> None:
    """Wait for a step that a GPU has decided on, and count it, or the backward pass
    that it belongs to; ``versions`` are those of the codes after it.
    """
    (refused, *_), *words = said.values
    if backward_pass is not None:
        optimizer._hear(backward_pass)
    if refused:
        culprits = [
            parameter for parameter, (_, _, bad, _) in zip(versions, words, strict=True) if bad
        ]
        if backward_pass is None:
            optimizer._count_skipped(culprits)
        else:
            optimizer._count_skipped_pass(backward_pass, culprits)
    elif backward_pass is None:
        optimizer.skipped_in_row = 0
    for (parameter, version), (_, doubled, _, emptied) in zip(versions.items(), words, strict=True):
        if doubled:
            optimizer.widened_scales += doubled
            _log_doubled(parameter, doubled)
        if not emptied and isinstance(parameter, FP8Tensor):
            parameter.filled = version


def _log_doubled(parameter: Tensor, doubled: int) -> None:
    if doubled and isinstance(parameter, FP8Tensor):
        scales = parameter.kept_scale.numel()
        _LOG.info(
            "%s of shape %s saturates: %d of %d scales changed, by 2^%+d to 2^+1",
            *(
                parameter.format.name,
                tuple(parameter.shape),
                doubled,
                scales,
                int(doubled == scales),
            ),
        )
