"""A plan: a step that is prepared once, and taken again while all that it was made from stays.

To prepare a step (specs, views, addresses, checks) takes longer than a small model's
arithmetic, and most steps differ from the one before in gradients and numbers alone. A step
is *steady* if preparing it changes nothing: it is no first step, nothing is due, and native
code or a GPU's kernels take all of it::

    step t     is_steady(slots)  -> make_plan(slots) -> plan.run()
               run() ends with _seal(): it notes identities, addresses and versions
    step t+1   plan.is_stale()   -> is anything not as it was noted?
                   yes: plan anew, or take the step without a plan
                   no:  plan.run() writes new gradients, numbers and keys into its records

``is_stale`` is the only place that asks whether all is as it was. It compares everything
that a plan is made from: groups, options, states and attributes by identity, tensors by
address, version, size and dtype.

A plan must not keep alive what a user lets go, and must not use what is gone. So between
steps it has no tensor, only ids. Weak references drop the plan (``alive`` becomes empty)
when a tensor dies whose id could then be another's.

On the CPU a plan runs a `NativePlan`. A GPU decides by itself whether it takes a steady
step: kernels look at the gradients, and the host reads their report later
(``optimizer._pending_verdicts``). It waits at once only where a group raises, or where a
whole parameter has one scale: S_ref changes when that doubles. Muon's products lie between
its launches (`TritonMuonStep`).
"""

import weakref
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from inspect import isfunction
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold._interface import GpuReport, KernelDirection, NativeReport, WeightStorage
from fp8manifold.optim._agreement import in_every_process, is_distributed
from fp8manifold.optim._checks import CHANGING, are_same, check_lr
from fp8manifold.optim._finite import all_finite, squares_are_finite
from fp8manifold.optim._muon import averages_as_torch
from fp8manifold.optim._native_plan import NativePlan
from fp8manifold.optim._native_step import is_native, sum_of_squares
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._scales import zero_scales
from fp8manifold.optim._slot import Slot, count_step
from fp8manifold.optim._triton_muon import TritonMuonStep, launch_muon_step
from fp8manifold.optim._triton_step import (
    PendingVerdict,
    TritonStep,
    is_triton,
    kernel_doubles_scales,
    launch_steps,
)
from fp8manifold.tensor import FP8Tensor

_GRADIENT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_PERIODS: Final = ("refresh_every", "stabilize_every", "reset_every")
"""Options with a number of steps after which something is due."""
_LARGEST_SUM: Final = float(torch.finfo(torch.float32).max)
"""The largest finite sum of squares in float32."""


class Verdict(Enum):
    """Whether a step is taken."""

    TAKEN = "taken"
    #: a gradient, or its square, is not finite
    SKIPPED = "skipped"
    #: a GPU decides, and its report has not been read
    PENDING = "pending"


def is_steady(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Return True if preparing a step of slots changes nothing.

    The plan may then serve again, and a GPU may decide on the step.
    """
    if not slots or optimizer.observer is not None:
        return False
    if not optimizer.is_planned or _has_replaced_methods(optimizer):
        return False
    device = slots[0].parameter.device
    if on_gpu(device) and (is_distributed() or not optimizer.defers_verdict):
        return False
    return all(map(_is_steady_slot, slots, repeat(device)))


def on_gpu(device: torch.device) -> bool:
    """Return True if steps on the device are taken by kernels."""
    return device.type == "cuda" and _triton.is_available()


def _has_replaced_methods(optimizer: Any) -> bool:
    """Return True if an attribute of the object replaces a method that plans a step."""
    return bool(vars(optimizer).keys() & _methods(optimizer.__class__))


@lru_cache(maxsize=64)
def _methods(kind: Any) -> frozenset[str]:
    """Return the names of private methods of a class."""
    return frozenset(
        name for name in dir(kind) if name.startswith("_") and isfunction(getattr(kind, name))
    )


def _is_steady_slot(slot: Slot, device: torch.device) -> bool:
    group, parameter, state, gradient = slot.group, slot.parameter, slot.state, slot.parameter.grad
    if getattr(state.get("step"), "dtype", None) is not torch.float32 or "stream" not in state:
        return False
    if (
        type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or gradient.dtype not in _GRADIENT_DTYPES
    ):
        return False
    if not parameter.device == gradient.device == device:
        return False
    if not parameter.numel() or slot.share is not None or not slot.in_place:
        return False
    if isinstance(parameter, FP8Tensor) and (
        parameter.remainder is not None or zero_scales(parameter) is not None
    ):
        return False
    periods = [group[name] for name in _PERIODS if group[name]]
    return bool(slot.steps_done) and all(
        isinstance(period, int) and slot.steps_done % period for period in periods
    )


def make_plan(optimizer: Any, slots: list[Slot]) -> "Plan | None":
    """Plan a steady step of slots.

    None is returned unless native code or kernels can take all of it. Nothing has
    changed then.
    """
    try:
        optimizer._check_options()
        optimizer._apply_schedules(slots)
        optimizer._begin(slots)
    except Exception:
        # the step without a plan raises it: in its order, and in every process
        return None
    by_geoopt = optimizer._by_geoopt(slots)
    others = set(by_geoopt)
    native = [i for i in range(len(slots)) if i not in others]
    is_possible = bool(native) and optimizer._are_plannable([slots[i] for i in native])
    if on_gpu(slots[0].device):
        is_possible = is_possible and not by_geoopt and all(map(_is_launched_whole, slots))
    else:
        is_possible = is_possible and all(_is_native_in_place(slots[i]) for i in native)
        is_possible = is_possible and all(_is_summed_in_place(slots[i]) for i in by_geoopt)
    return Plan(optimizer, slots, native, by_geoopt) if is_possible else None


def _is_launched_whole(slot: Slot) -> bool:
    """Return True if kernels take all of a step on a GPU, but for Muon's products."""
    is_matrix = slot.spec.direction == KernelDirection.MUON
    return is_triton(slot) and not (is_matrix and averages_as_torch(slot))


def _is_native_in_place(slot: Slot) -> bool:
    """Return True if native code takes the step without a copy in float32."""
    stored = torch.uint8 if slot.storage == WeightStorage.CODES else torch.float32
    return (
        slot.weight.dtype is stored
        and slot.tensors["gradient"].dtype is torch.float32
        and is_native(slot)
    )


# In a comparison of many tensors a getter of C's is several times as quick as a function.
_GRADIENT: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")
_KIND: Final = attrgetter("dtype", "device", "layout", "shape")
_MEMORY: Final = (Tensor.data_ptr, Tensor.numel, attrgetter("dtype"), Tensor.is_contiguous)
_PARTS: Final = attrgetter(
    "codes",
    "kept_scale",
    "remainder",
    "format",
    "block_size",
    "rounding",
    "draws",
    "retraction",
    "seed",
    "stepped_by",
)
"""Attributes of a tensor of codes that a plan depends on."""
_NO_STATE: Final[dict[str, Any]] = {}


class _Snapshot(NamedTuple):
    """What a plan is made from, as it is at one moment."""

    parameters: list[Any]
    states: list[dict[str, Any]]
    gradients: list[Any]
    #: groups, types, parameters, entries of states, and parts of tensors of codes
    objects: list[Any]
    #: what has to be equal: identities of the objects, options, names and kinds
    facts: tuple[Any, ...]


class _Seal(NamedTuple):
    """What a plan notes at the end of a step, and compares before the next one."""

    facts: tuple[Any, ...]
    #: the positions of tensors among the objects of a snapshot
    positions: list[int]
    #: their addresses, sizes, dtypes and layouts
    memory: list[list[Any]]
    #: positions among these tensors of those that a step changes
    changed_positions: list[int]
    #: whether each gradient begins at a multiple of 16 bytes
    aligned: list[bool]
    #: objects that are no tensors; they live on, so that no other object gets their ids
    objects: list[Any]


class _End(NamedTuple):
    """A slot that may have reached the end of its range in a step."""

    #: position among the slots
    i: int
    is_saturated: bool
    #: whether a scale may have no weight but zeros
    has_zero_row: bool


class Plan:
    """A prepared steady step: slots, records and launches, and what they were made from.

    It is neither saved nor copied.

    Args:
        optimizer: whose step it is.
        slots: the steps of its parameters, which have begun.
        native: the positions of those that native code or kernels take.
        by_geoopt: the positions of the others, which a Riemannian optimizer takes itself.

    Attributes:
        slots: whose steps are planned.
        alive: weak references; empty if the plan may not serve again.
    """

    def __init__(
        self, optimizer: Any, slots: list[Slot], native: list[int], by_geoopt: list[int]
    ) -> None:
        self.slots, self._native, self._by_geoopt = slots, native, by_geoopt
        self._device = slots[0].device
        self.alive: list[weakref.ref[Any]] = []
        self._is_on_gpu = on_gpu(self._device)
        self._coded = [i for i, slot in enumerate(slots) if slot.storage == WeightStorage.CODES]
        self._step: NativePlan | TritonStep | TritonMuonStep | None = None
        self._report: PendingValues | None = None
        self._verdict = Verdict.SKIPPED
        #: what a gradient is multiplied by before its square must be finite
        self._largest_factor = optimizer._largest_factor(slots)
        #: for each native slot the position of the first one with the same numbers
        self._number_twins = _number_twins(optimizer, [slots[i] for i in self._native])
        #: positions of slots whose scales the host doubles, after a report
        self._late: list[int] = []
        self._raises = False
        self._parameters: list[Any] = [slot.parameter for slot in slots]
        changed = [slots[i].changed_tensors for i in self._native]
        self._changed = [*chain.from_iterable(changed)]
        if self._is_on_gpu:
            self._late = [i for i in self._coded if not kernel_doubles_scales(slots[i])]
            self._raises = any(slot.group["on_nonfinite"] == "raise" for slot in slots)
            self._changed += [self._parameters[i].kept_scale for i in self._coded]
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._steps_left = 0
        self._seal_of_last_step: _Seal | None = None
        #: of the step that ``is_stale`` has allowed, until its numbers are computed;
        #: None in the first step, whose slots come with their numbers
        self._snapshot: _Snapshot | None = None

    def run(
        self,
        optimizer: Any,
        *,
        backward_pass: BackwardPass | None = None,
        member: tuple[dict[str, Any], Tensor] | None = None,
    ) -> Verdict:
        """Take the step of all slots, or of none.

        Args:
            optimizer: whose step it is.
            backward_pass: the one that the step belongs to, if it belongs to one.
            member: as for `is_stale`.
        """
        is_new = self._step is None
        if self._snapshot is not None and self._seal_of_last_step is not None:
            self._advance(self._seal_of_last_step, self._snapshot)
        self._verdict = Verdict.SKIPPED
        ends = self._launch(optimizer) if self._is_on_gpu else self._run_on_cpu(optimizer)
        # None: skipped, or taken as a step that is not steady; []: no scale may double
        if ends is not None:
            references = [slot.state.get("reference") for slot in self.slots] if ends else []
            if ends:
                optimizer._widen([self._slot_to_widen(end) for end in ends])
            torch.autograd.graph.increment_version(self._parameters)
            if ends and references != [slot.state.get("reference") for slot in self.slots]:
                # ends of charts and equal numbers follow from S_ref: the next step is
                # planned anew
                self.alive = []
            elif (is_new and optimizer.keeps_plan) or (self.alive and ends):
                # scales that have doubled may be other tensors
                self._seal(optimizer, member)
            self._versions = list(map(_VERSION, self._tensors))
            if self._report is not None:
                versions = _versions_of_weights(self._parameters)
                optimizer._pending_verdicts += (
                    PendingVerdict(self._report, versions, backward_pass),
                )
        self._parameters, self._changed, self._tensors = [], [], []
        self._snapshot = None
        if not self.alive:
            self.slots = []
        for slot in self.slots:
            slot.parameter = slot.state = None  # type: ignore[assignment]
        return self._verdict

    def _run_on_cpu(self, optimizer: Any) -> list[_End] | None:
        """Take the step on the CPU; return the slots at the end of their range.

        None is returned if the step is skipped.
        """
        slots = self.slots
        native = [slots[i] for i in self._native] if self._by_geoopt else slots
        may_step = self._may_step_on_cpu
        if not in_every_process(optimizer, lambda: may_step(optimizer, native)):
            return None
        if self._snapshot is not None:
            self._renew_numbers(optimizer)
        self._verdict = Verdict.TAKEN
        torch._foreach_add_([slot.state["step"] for slot in slots], 1)
        for i in self._by_geoopt:
            optimizer._take_by_geoopt(slots[i])
        assert isinstance(self._step, NativePlan)
        reports = self._step.run(native).tolist()
        torch.autograd.graph.increment_version(self._changed)
        ends = []
        for i, words in zip(self._native, reports, strict=True):
            if slots[i].storage != WeightStorage.CODES:
                continue
            report = NativeReport(*words)
            if report.is_saturated:
                ends.append(_End(i, True, bool(report.has_zero_tile)))
            elif not report.has_zero_tile:
                # every scale has a weight that is not 0: `zero_scales` need not look
                self._parameters[i].filled = self._parameters[i].codes._version
        return ends

    def _launch(self, optimizer: Any) -> list[_End] | None:
        """Launch the step on a GPU; return the slots whose scales the host doubles.

        None is returned if no kernel can be compiled. The step is then taken as one
        that is not steady.
        """
        slots = self.slots
        if self._snapshot is not None:
            self._refresh(optimizer, self._snapshot)
            self._renew_numbers(optimizer)
        # no graph records products
        graph = optimizer._graph if isinstance(self._step, TritonStep) else None
        if isinstance(self._step, TritonStep) and graph is not None:
            report = graph(self._step, slots)
        elif isinstance(self._step, TritonStep | TritonMuonStep):
            report = self._step.run(slots)
        else:
            launch = _launch_first(slots)
            if launch is None:
                if all_finite(optimizer, slots):
                    optimizer._take(count_step(slots))
                    self._verdict = Verdict.TAKEN
                return None
            self._step, report = launch
        self._report, self._verdict = report, Verdict.PENDING
        if self._raises and report.values[0][0]:
            for slot in slots:
                # raises if the options of its group say so
                squares_are_finite(slot)
        count_step(slots, report, added=graph is not None)
        torch.autograd.graph.increment_version(self._changed)
        ends = []
        for i in self._late:
            of_slot = GpuReport(*report.values[1 + i])
            # True: what the report says of rows of zeros is read when it is counted
            ends.append(_End(i, bool(of_slot.is_saturated), True))
        return ends

    def _may_step_on_cpu(self, optimizer: Any, native: list[Slot]) -> bool:
        """Return True if all gradients and their squares are finite.

        The records of the step are made or refreshed before. Nothing else has changed, and
        numbers are computed afterwards, as in a step without a plan.
        """
        if self._snapshot is not None:
            self._refresh(optimizer, self._snapshot)
        if self._step is None:
            self._step = NativePlan(native, self._number_twins)
        assert isinstance(self._step, NativePlan)
        addresses, sizes = self._step.gradients, self._step.sizes
        for i in self._by_geoopt:
            gradient = self.slots[i].parameter.grad
            assert gradient is not None
            addresses = np.append(addresses, np.uint64(gradient.data_ptr()))
            sizes = np.append(sizes, gradient.numel())
        total = sum_of_squares(addresses, sizes, self._step.kernels)
        factor = self._largest_factor
        if total * max(factor, 1.0) ** 2 <= _LARGEST_SUM:
            return True
        if not all_finite(optimizer, self.slots):
            return False
        # a list: a later one may have to raise
        factors = map(optimizer._gradient_factor, native)
        verdicts = list(map(squares_are_finite, native, factors)) if factor > 1 else []
        return all(verdicts)

    def is_stale(self, optimizer: Any, member: tuple[dict[str, Any], Tensor] | None = None) -> bool:
        """Return False if all is as the last step left it, and nothing is due.

        What was found is kept for `run`, which takes the next step. A plan that is stale
        is to be dropped.

        Args:
            optimizer: whose step it is.
            member: the group and the parameter of a step of one parameter alone.
        """
        seal = self._seal_of_last_step
        if not self.alive or seal is None:
            return True
        snapshot = self._look(optimizer, member)
        if snapshot is None or not are_same(snapshot.facts, seal.facts):
            return True
        tensors = [snapshot.objects[i] for i in seal.positions]
        if not self._has_same_memory(tensors, snapshot, seal):
            return True
        if self._steps_left - self._last_steps() <= 0:
            return True
        self._snapshot = snapshot
        return False

    def _last_steps(self) -> int:
        """Return 1 if the last step was taken, else 0. A GPU is waited for."""
        if self._report is None:
            return int(self._verdict is Verdict.TAKEN)
        return int(not self._report.values[0][0])

    def _advance(self, seal: _Seal, snapshot: _Snapshot) -> None:
        """Count the last step, and hold the parameters and tensors of the next one."""
        steps = self._last_steps()
        self._steps_left -= steps
        for slot in self.slots:
            slot.steps_done += steps
        self._parameters = snapshot.parameters
        self._tensors = [snapshot.objects[i] for i in seal.positions]
        self._changed = [self._tensors[i] for i in seal.changed_positions]

    def _refresh(self, optimizer: Any, snapshot: _Snapshot) -> None:
        """Let slots and records refer to the gradients and states of another step."""
        for group in optimizer.param_groups:
            check_lr(group)
        slots = self.slots
        for slot, parameter, state in zip(slots, snapshot.parameters, snapshot.states, strict=True):
            slot.parameter, slot.state = parameter, state
        optimizer._apply_schedules(slots)
        addresses = np.array(list(map(Tensor.data_ptr, snapshot.gradients)), dtype=np.uint64)
        if self._by_geoopt:
            addresses = addresses[self._native]
        assert self._step is not None
        self._step.set_gradients(addresses)

    def _renew_numbers(self, optimizer: Any) -> None:
        """Compute the numbers of a step that is not the first of its plan."""
        self._snapshot = None
        native = [self.slots[i] for i in self._native] if self._by_geoopt else self.slots
        for slot, first in zip(native, self._number_twins, strict=True):
            leader = native[first]
            if slot is leader:
                slot.numbers = optimizer._numbers(slot)
            else:
                slot.numbers = leader.numbers

    def _has_same_memory(self, tensors: list[Tensor], snapshot: _Snapshot, seal: _Seal) -> bool:
        """Return True if memory and values are as the last step left them.

        Gradients may have other addresses, if kernels are as fast there.
        """
        gradients = snapshot.gradients
        if list(map(_VERSION, tensors)) != self._versions or _memory_of(tensors) != seal.memory:
            return False
        if not all(map(Tensor.is_contiguous, gradients)) or any(map(Tensor.is_neg, gradients)):
            return False
        if self._is_on_gpu and _alignments(gradients) != seal.aligned:
            return False
        for i in self._coded:
            parameter = snapshot.parameters[i]
            # the step would fit such scales
            if parameter.filled != parameter.codes._version and zero_scales(parameter) is not None:
                return False
        return True

    def _look(
        self, optimizer: Any, member: tuple[dict[str, Any], Tensor] | None
    ) -> _Snapshot | None:
        """Return what a plan is made from, or None for a step that is not steady."""
        if member is None:
            groups = optimizer.param_groups
            with_gradient = [[p for p in group["params"] if p.grad is not None] for group in groups]
        else:
            groups, with_gradient = [member[0]], [[member[1]]]
        parameters = [*chain.from_iterable(with_gradient)]
        gradients = list(map(_GRADIENT, parameters))
        if len(parameters) != len(self.slots) or {*map(type, gradients)} != {Tensor}:
            return None
        if optimizer.observer is not None or _has_replaced_methods(optimizer):
            return None
        if self._is_on_gpu and is_distributed():
            return None
        states = [optimizer.state.get(p, _NO_STATE) for p in parameters]
        coded = [p for p in parameters if isinstance(p, FP8Tensor)]
        objects = [
            *groups,
            *map(type, parameters),
            *parameters,
            *chain.from_iterable(map(dict.values, states)),
            *chain.from_iterable(map(_PARTS, coded)),
        ]
        facts = (
            type(optimizer),
            on_gpu(self._device),
            list(map(len, with_gradient)),
            [group | CHANGING for group in groups],
            list(map(id, objects)),
            list(map(tuple, states)),
            list(map(_KIND, gradients)),
        )
        return _Snapshot(parameters, states, gradients, objects, facts)

    def _seal(self, optimizer: Any, member: tuple[dict[str, Any], Tensor] | None) -> None:
        """Note what the next step is compared with, if it may reuse this plan."""
        self.alive = []
        snapshot = self._look(optimizer, member)
        if snapshot is None:
            return
        objects = snapshot.objects
        positions = []
        for i, x in enumerate(objects):
            if isinstance(x, Tensor) and not isinstance(x, FP8Tensor):
                positions.append(i)
        tensors = [objects[i] for i in positions]
        if not self._compares_all(tensors + snapshot.gradients):
            return
        if any(tensor.is_inference() for tensor in tensors):
            return
        position_by_address = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
        self._seal_of_last_step = _Seal(
            facts=snapshot.facts,
            positions=positions,
            memory=_memory_of(tensors),
            changed_positions=[position_by_address[x.data_ptr()] for x in self._changed],
            aligned=_alignments(snapshot.gradients),
            objects=[x for x in objects if not isinstance(x, Tensor)],
        )
        self._tensors = tensors
        self._steps_left = min(map(_steps_until_due, self.slots))
        self.alive = _weak_references(objects, snapshot.parameters)
        for slot in self.slots:
            slot.drop_tensors()

    def _compares_all(self, tensors: list[Tensor]) -> bool:
        """Return True if all addresses of the plan are those of tensors that are compared.

        Others are of copies, or of manifolds.
        """
        whole = (WeightStorage.CODES, WeightStorage.PLAIN)
        if any(slot.storage not in whole for slot in self.slots):
            return False
        assert self._step is not None
        addresses = self._step.addresses()
        # 0 is the address of an absent tensor
        return {0, *map(Tensor.data_ptr, tensors)}.issuperset(addresses)

    def _slot_to_widen(self, end: _End) -> Slot:
        """Return a slot with all that doubling its scales needs."""
        slot, parameter = self.slots[end.i], self._parameters[end.i]
        if not slot.tensors:
            slot.tensors, slot.kept_scale = {"weight": parameter.codes}, parameter.kept_scale
        slot.saturated, slot.has_zero_rows = [end.is_saturated], [end.has_zero_row]
        return slot


def _launch_first(
    slots: list[Slot],
) -> tuple[TritonStep | TritonMuonStep, PendingValues] | None:
    """Prepare the launches of a plan, and launch its first step.

    None is returned if no kernel can be compiled.
    """
    if any(slot.spec.direction == KernelDirection.MUON for slot in slots):
        return launch_muon_step(slots)
    return launch_steps(slots, decides=True)


def _number_twins(optimizer: Any, slots: list[Slot]) -> list[int]:
    """Return for each slot the position of the first one whose step has the same numbers."""
    if not optimizer.keeps_plan:
        # a method of the user's may look at anything
        return list(range(len(slots)))
    first: dict[tuple[Any, ...], int] = {}
    twins = []
    for i, slot in enumerate(slots):
        since = slot.state.get("since", 0)
        key = (id(slot.group), slot.steps_done, since, *optimizer._number_facts(slot))
        twins.append(first.setdefault(key, i))
    return twins


def _is_summed_in_place(slot: Slot) -> bool:
    """Return True if C code sums the squares of a gradient where they are."""
    gradient = slot.parameter.grad
    assert gradient is not None
    return gradient.dtype is torch.float32 and gradient.is_contiguous() and not gradient.is_neg()


def _alignments(gradients: list[Tensor]) -> list[bool]:
    """Return for each gradient whether it begins at a multiple of 16 bytes."""
    return [gradient.data_ptr() % 16 == 0 for gradient in gradients]


def _memory_of(tensors: list[Tensor]) -> list[list[Any]]:
    """Return address, size, dtype and layout of tensors, in four lists."""
    return [list(map(fact, tensors)) for fact in _MEMORY]


def _versions_of_weights(parameters: list[Any]) -> dict[Tensor, int | None]:
    """Return the versions of codes and weights; None where none is counted."""
    versions: dict[Tensor, int | None] = {}
    for parameter in parameters:
        weight = parameter.codes if isinstance(parameter, FP8Tensor) else parameter
        versions[parameter] = None if weight.is_inference() else weight._version
    return versions


def _steps_until_due(slot: Slot) -> int:
    """Return the number of steps until a parameter is refreshed, stabilised or reset."""
    periods: list[int] = [slot.group[name] for name in _PERIODS if slot.group[name]]
    return min(period - slot.steps_done % period for period in periods)


def _weak_references(objects: list[Any], parameters: list[Any]) -> list[weakref.ref[Any]]:
    """Return references to all tensors, a list that is cleared when one of them dies.

    There are none to parameters, which live as keys of the states: `Module.to` could not
    swap a tensor with a weak reference.
    """
    references: list[weakref.ref[Any]] = []
    parameter_ids = set(map(id, parameters))
    for x in objects:
        if isinstance(x, Tensor) and id(x) not in parameter_ids:
            references.append(weakref.ref(x, lambda _: references.clear()))
    return references
