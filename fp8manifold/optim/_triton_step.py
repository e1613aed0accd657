"""Steps on a GPU by Triton kernels: the records of native code, one launch for all parameters of a kind, pending steps.

A pending step is launched, with a verdict that the host has not read yet: the GPU decides by itself whether a step is
taken and which scales double.  Weights, codes, scales and moments are therefore those of a step on the CPU for whatever
reads them there.  The host's counts are corrected before they are visible: at the start of the parameter's next step,
and on every read of ``state``, ``skipped_steps``, ``skipped_in_row`` or ``widened_scales``, thus by ``state_dict``,
copies and pickling.
"""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._numerics.records import JOB
from fp8manifold._triton.kinds import SAID, WIDENED, KernelSpec, Tile, format_of, widening_of
from fp8manifold._triton.launch import KernelsUnavailableError, Kind, Said, Widenings, double, launch
from fp8manifold.optim._native_step import has_code, places_of
from fp8manifold.optim._slot import FOR_RESCALING, Slot, key_rows, number_rows, row_view
from fp8manifold.optim._spec import MOMENT_FORMAT, Spec
from fp8manifold.random_bits import round_key_rows
from fp8manifold.tensor import FP8Tensor

_ELEMENTS: Final = 2048
"""Elements of a program: 16 a thread, so that a thread loads and stores bytes by 128 bits."""
_LONGEST: Final = 1024
"""The longest row with moments in blocks that one program steps at once."""
_PIECES: Final = (256, 128, 64, 32, 16)
_DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.uint8: "uint8"}
_LOG: Final = logging.getLogger("fp8manifold")


class CompileUnavailableWarning(UserWarning):
    """Steps on a GPU run without Triton's kernels: the same results, slower."""


def is_triton(slot: Slot) -> bool:
    """True for a step that a Triton kernel runs: one that native code has, on an NVIDIA GPU."""
    weight, gradient = slot.tensors["weight"], slot.tensors["gradient"]
    return (
        weight.device.type == "cuda"
        and gradient.device == weight.device
        and gradient.dtype in _DTYPES
        and has_code(slot)
        and not _given_up
        and _triton.is_available()
    )


class Launched(NamedTuple):
    """The number of launches of some steps, and their kernels' verdicts, readable once these have run."""

    launches: int
    said: Said

    @property
    def refused(self) -> bool:
        """True if the kernels refused the steps.  The host waits for the GPU."""
        return self.said.read()[0]


def run_triton(slots: Sequence[Slot], *, check: bool = False, widens: bool = False) -> Launched | None:
    """Step the slots in place.  None where kernels can't be compiled: nothing changes, and the process warns once.

    The host waits for the GPU once, at the end, for the verdict and for the slots that reached the end of their range.
    With ``widens`` it does not wait.

    Args:
        slots: the slots to step, on one device, of disjoint memory.
        check: refuse all steps where the square of any gradient is not finite.
        widens: double scales on the GPU, one scale for each row or block.
    """
    said = Said(len(slots), slots[0].device)
    scales = [_scale(slot) for slot in slots]
    records, kinds = _records(slots, scales, said)
    records["keys"], records["hyper"] = key_rows(slots), number_rows(slots)
    widenings = _widenings(slots, said) if widens else None
    try:
        count = launch(records, kinds, said.on_card, check=check, widenings=widenings)
    except KernelsUnavailableError as error:
        _give_up(error)
        return None
    said.send()
    if not widens and (check or any(slot.spec.storage == "codes" for slot in slots)):
        refused, words = said.read()
        for slot, (reached, _, _, emptied) in zip(slots, words, strict=True):
            if slot.spec.storage == "codes" and not refused:
                slot.reached.append(bool(reached))
                slot.emptied.append(bool(emptied))
    return Launched(count, said)


def doubles_on_card(slot: Slot) -> bool:
    """True where a kernel doubles the scales of codes on an NVIDIA GPU: of rows or blocks that one process holds."""
    return (
        slot.device.type == "cuda"
        and has_rows(slot)
        and slot.share is None
        and slot.view.numel <= 2**32
        and not _given_up
        and _triton.is_available()
    )


def has_rows(slot: Slot) -> bool:
    """True for codes with a scale a row or a block of it: neither one for all, nor one for a square of several rows."""
    held = slot.parameter
    return isinstance(held, FP8Tensor) and held.kept_scale.dim() > 0 and not isinstance(held.block_size, tuple)


def double_on_card(slots: Sequence[Slot]) -> dict[Slot, int]:
    """Double full scales in one launch a format and device, and say of each slot how many.

    The host waits for the numbers. Where the kernel can't be compiled nothing changes, and there are no numbers.
    """
    found: dict[Slot, int] = {}
    for device in dict.fromkeys(slot.device for slot in slots):
        found |= _double_there([slot for slot in slots if slot.device == device])
    return found


def _double_there(slots: Sequence[Slot]) -> dict[Slot, int]:
    """The same of slots on one device."""
    said = Said(len(slots), slots[0].device)
    said.on_card[1::SAID] = 1
    widenings = _widenings(slots, said)
    assert widenings is not None
    try:
        double(widenings, said.on_card)
    except KernelsUnavailableError as error:
        _give_up(error)
        return {}
    said.send()
    found = {slot: doubled for slot, (_, doubled, *_) in zip(slots, said.read()[1], strict=True)}
    for slot, doubled in found.items():
        _tell(slot.parameter, doubled)
    return found


def _widenings(slots: Sequence[Slot], said: Said) -> Widenings | None:
    """The records for doubling the scales of slots with codes; None without such a slot."""
    places = [i for i, slot in enumerate(slots) if slot.spec.storage == "codes"]
    if not places:
        return None
    records, made = np.zeros(len(places), dtype=WIDENED), []
    for record, i in zip(records, places, strict=True):
        slot, held = slots[i], slots[i].parameter
        assert isinstance(held, FP8Tensor)
        bits, scale = slot.spec.residual_bits, held.kept_scale
        residual = slot.tensors["residual"].data_ptr() if bits else 0
        record["pointers"] = (slot.tensors["weight"].data_ptr(), residual, scale.data_ptr(), said.place(i))
        record["rows"], record["length"] = scale.numel(), slot.view.numel // scale.numel()
        made.append(widening_of(held.format, bits, scale.dtype is torch.uint8))
    words = [slots[i].key for i in places]
    streams = np.array([stream for *_, stream in words], dtype=np.uint64)
    records["keys"][:, :3] = round_key_rows([each[:2] for each in words], streams, FOR_RESCALING)
    return records, made


def _records(slots: Sequence[Slot], scales: Sequence[Tensor | None], said: Said) -> tuple[NDArray[np.void], list[Kind]]:
    """One record a slot, still without keys and numbers, and the kernel of each."""
    records = np.zeros(len(slots), dtype=JOB)
    kinds, pointers, facts, sizes = [], [], [], []
    for i, (slot, scale) in enumerate(zip(slots, scales, strict=True)):
        places = [0, *places_of(slot, slot.tensors["gradient"], scale, kept=True)]
        rows, length, repeats, kind = kind_of(slot, places)
        kinds.append(kind)
        pointers.append([*places, said.place(i)])
        sizes.append((rows, length))
        facts.append((0, repeats, *slot.ends))
    records["pointers"], records["facts"] = np.array(pointers, dtype=np.uint64), facts
    records["rows"], records["length"] = zip(*sizes, strict=True)
    return records, kinds


_given_up: Final[list[str]] = []
"""The first line of the error for which kernels were given up, after its warning."""


def _give_up(error: Exception) -> None:
    _given_up.append(first_line := str(error).strip().splitlines()[0])
    warnings.warn(
        f"optimizer steps on the GPU run without Triton's kernels: {first_line}; the same results, slower",
        CompileUnavailableWarning,
        stacklevel=3,
    )


def _scale(slot: Slot) -> Tensor | None:
    """The scale as the kernel reads it: one value, one a row, or one an element; of blocks the exponents."""
    if slot.kept_scale is None or slot.spec.storage == "plain":
        return None
    if slot.view.row_dims == slot.view.dims and slot.scale is not None:
        return row_view(slot.scale, slot.weight.shape, slot.view).contiguous()
    return slot.kept_scale.contiguous()


def kind_of(slot: Slot, places: Sequence[int] = ()) -> tuple[int, int, int, Kind]:
    """The number of rows, their length, the rows that share a scale, and the kernel of a slot."""
    view = slot.view
    rows, length = view.dims if len(view.dims) == 2 else (1, view.dims[0])
    repeats, scales = view.repeats, "one"
    if slot.kept_scale is not None and view.row_dims:
        scales = "element" if view.row_dims == view.dims else "row"
    if not slot.spec.blockwise:
        # blocks are those of moments, which this step does not read: join them to whole rows
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
    exponents = slot.kept_scale is not None and slot.kept_scale.dtype is torch.uint8 and scales != "element"
    return rows, length, repeats, (kernel_spec(slot.spec, weight, gradient, exponents), tile)


_tile = lru_cache(maxsize=1024)(Tile)
"""The same tile for parameters of one kind, so that its hash is made once."""


def _cut(rows: int, length: int, scales: str) -> tuple[int, int, int, str]:
    """The number of rows, their length, the rows that share a scale and how, without moments in blocks."""
    if scales != "row":
        return 1, rows * length, 1, scales
    piece = next((piece for piece in _PIECES if length % piece == 0), 0)
    if not piece:
        return 1, rows * length, length, "run"
    return rows * length // piece, piece, length // piece, scales


@lru_cache(maxsize=1024)
def kernel_spec(spec: Spec, weight: torch.dtype, gradient: torch.dtype, exponents: bool = False) -> KernelSpec:
    fmt = format_of(spec.fmt or MOMENT_FORMAT)
    return KernelSpec(
        direction=spec.direction,
        storage="plain" if spec.storage == "direction" else spec.storage,
        writeback=spec.writeback,
        moments=spec.moments if spec.stores else "float32",
        geometry=spec.geometry,
        stiffness=spec.stiffness,
        metric=str(spec.metric),
        decays=spec.decays,
        nesterov=spec.nesterov,
        maximize=spec.maximize,
        first="exp_avg" in spec.stores or "momentum_buffer" in spec.stores,
        second="exp_avg_sq" in spec.stores,
        amsgrad=spec.amsgrad,
        exact=spec.scale_is_power_of_two,
        draws=spec.draws_for_weight and (spec.rule.rounding == "stochastic"),
        extra=spec.residual_bits if spec.storage in ("codes", "grid") else 0,
        fixed=fmt.fixed(spec.residual_bits),
        weight=_DTYPES[weight],
        gradient=_DTYPES[gradient],
        format=fmt,
        average=format_of(spec.first_format),
        fitted=spec.fitted,
        exponents=exponents,
    )


class Count:
    """A descriptor for an optimizer's count: reading it settles the pending steps first."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the attribute's name."""
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> int:
        """The count after all pending steps; 0 on the class, as on a new optimizer."""
        if optimizer is None:
            return 0
        optimizer._settle()
        number: int = optimizer.__dict__.get(self._name, 0)
        return number

    def __set__(self, optimizer: Any, number: int) -> None:
        """Set the count after all pending steps."""
        optimizer._settle()
        optimizer.__dict__[self._name] = number


@dataclass(eq=False)
class Pending:
    """A launched step.  It holds no gradient."""

    said: Said
    parameters: list[Tensor]
    #: the parameters' ``step`` tensors, incremented already
    steps: list[Tensor]
    #: whether it is the step of one parameter, in a backward pass
    alone: bool
    #: versions of codes after the step was launched, by their parameters
    versions: dict[FP8Tensor, int]

    def has(self, parameter: Tensor) -> bool:
        """True if the step includes the parameter."""
        return any(each is parameter for each in self.parameters)


def pending_of(slots: Sequence[Slot], said: Said, *, alone: bool) -> Pending:
    """The pending step of some slots.

    Args:
        slots: the slots launched, in the order of ``said``.
        said: the kernels' verdicts.
        alone: whether it is the step of one parameter, in a backward pass.
    """
    parameters = [slot.parameter for slot in slots]
    versions = {p: p.codes._version for p in parameters if isinstance(p, FP8Tensor) and not p.codes.is_inference()}
    return Pending(said, parameters, [slot.state["step"] for slot in slots], alone, versions)


def settle(optimizer: Any, pending: Pending) -> None:
    """Wait for a step's verdict, and count the step as taken, with the scales that doubled, or as skipped.

    Warns:
        RuntimeWarning: a skipped step, as ``step`` and :func:`step_in_backward` warn.
    """
    refused, words = pending.said.read()
    for parameter, (*_, emptied) in zip(pending.parameters, words, strict=True):
        if isinstance(parameter, FP8Tensor) and parameter in pending.versions and not emptied:
            parameter.filled = pending.versions[parameter]
    if refused:
        torch._foreach_add_(pending.steps, -1)
        culprits = [p for p, (_, _, bad, _) in zip(pending.parameters, words, strict=True) if bad]
        optimizer._count_skipped(culprits, alone=pending.alone)
        return
    if not pending.alone:
        optimizer.skipped_in_row = 0
    for parameter, (_, doubled, *_) in zip(pending.parameters, words, strict=True):
        if doubled and isinstance(parameter, FP8Tensor):
            optimizer.widened_scales += doubled
            _tell(parameter, doubled)


def _tell(parameter: Tensor, doubled: int) -> None:
    if doubled and isinstance(parameter, FP8Tensor):
        scales = parameter.kept_scale.numel()
        _LOG.info(
            "%s of shape %s saturates: %d of %d scales changed, by 2^%+d to 2^+1",
            *(parameter.format.name, tuple(parameter.shape), doubled, scales, int(doubled == scales)),
        )
