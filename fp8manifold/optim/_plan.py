"""A plan: a step that is prepared once, and taken again while all that it was made from stays.

To prepare a step (specs, views, addresses, checks) takes longer than a small model's
arithmetic, and most steps differ from the one before in gradients and numbers alone. Which
steps are planned `_steady.py` says. From then on::

    step t     plan.run()        in a plan's first step slots come with all that it needs;
                                 it ends with _seal: identities and addresses
    step t+1   plan.is_stale()   is anything not as it was noted?
                   yes: plan anew, or take the step without a plan
                   no:  plan.run(): new gradients, numbers and keys, the same records
                     _advance         counts step t: only now is a GPU's verdict known
                     _may_step_here   points slots and records to the new gradients; a rate,
                                      a schedule or a gradient may refuse the step
                     _renew_numbers   of parameters that share them once
                     NativePlan.run   the arithmetic (`_native_step.py`)
                     _widen, _seal    only where a scale may have doubled
                   after every step the versions of all tensors are noted

``is_stale`` is the only place that asks whether all is as it was. It compares everything
that a plan is made from: groups, options, states and attributes by identity, tensors by
address, version, size and dtype.

A plan must not keep alive what a user lets go, and must not use what is gone. So between
steps it has no tensor of its own, only ids, and the dicts of the groups, which have their
parameters. Weak references drop the plan (``alive`` becomes empty)
when a tensor dies whose id could then be another's.

A GPU decides by itself whether it takes a steady step: kernels look at the gradients, and
the host reads their report later (``optimizer._pending_verdicts``). It waits at once only
where a group raises, or where a whole parameter has one scale: S_ref changes when that
doubles. `_launch` runs a `TritonStep` there, or a `TritonMuonStep`, between whose launches
Muon's products lie.
"""

import weakref
from enum import Enum
from functools import lru_cache, partial
from inspect import isfunction
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold._interface import GpuReport, KernelDirection, NativeReport, WeightStorage
from fp8manifold.optim._agreement import in_every_process, is_distributed
from fp8manifold.optim._finite import all_finite, squares_are_finite
from fp8manifold.optim._native_step import NativePlan, sum_of_squares
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._scales import zero_scales
from fp8manifold.optim._slot import Slot, count_step
from fp8manifold.optim._step_numbers import check_lr
from fp8manifold.optim._triton_muon import TritonMuonStep
from fp8manifold.optim._triton_step import (
    PendingVerdict,
    TritonStep,
    kernel_doubles_scales,
)
from fp8manifold.tensor import FP8Tensor

PERIODS: Final = ("refresh_every", "stabilize_every", "reset_every")
"""Options with a number of steps after which something is due."""
CHANGING: Final = dict.fromkeys(("params", "lr", "initial_lr", "previous_norm"))
"""Entries of a group that are not compared as options are, with None in their places.

A rate changes all the time and is checked in every step. Parameters are tensors, of which
a plan compares the identities.
"""
_LARGEST_SUM: Final = float(torch.finfo(torch.float32).max)
"""The largest finite sum of squares in float32."""


class Verdict(Enum):
    """Whether a step is taken."""

    TAKEN = "taken"
    #: a gradient, or its square, is not finite
    SKIPPED = "skipped"
    #: a GPU decides, and its report has not been read
    PENDING = "pending"


def on_gpu(device: torch.device) -> bool:
    """Return True if steps on the device are taken by kernels."""
    return device.type == "cuda" and _triton.is_available()


def has_replaced_methods(optimizer: Any) -> bool:
    """Return True if an attribute of the object replaces a method that plans a step."""
    return bool(vars(optimizer).keys() & _methods(optimizer.__class__))


@lru_cache(maxsize=64)
def _methods(kind: Any) -> frozenset[str]:
    """Return the names of private methods of a class."""
    return frozenset(
        name for name in dir(kind) if name.startswith("_") and isfunction(getattr(kind, name))
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


class _Outcome(NamedTuple):
    """What has become of a step."""

    verdict: Verdict
    #: slots whose scales the host may have to double
    ends: list[_End]
    #: of a GPU's kernels, which the host may read later
    report: PendingValues | None = None


class Plan:
    """A prepared steady step: slots, records and launches, and what they were made from.

    It is neither saved nor copied.

    Args:
        optimizer: whose step it is.
        slots: the steps of its parameters, which have begun.
        by_geoopt: the positions of those that a Riemannian optimizer takes itself. Native
            code or a GPU's kernels take the others.

    Attributes:
        slots: whose steps are planned.
        alive: weak references; empty if the plan may not serve again.
    """

    def __init__(self, optimizer: Any, slots: list[Slot], by_geoopt: list[int]) -> None:
        self.slots = slots
        others = set(by_geoopt)
        self._by_geoopt = by_geoopt
        self._by_kernels = [i for i in range(len(slots)) if i not in others]
        self._kernel_slots = [slots[i] for i in self._by_kernels]
        self._device = slots[0].device
        self.alive: list[weakref.ref[Any]] = []
        self._is_on_gpu = on_gpu(self._device)
        self._coded = [i for i, slot in enumerate(slots) if slot.storage == WeightStorage.CODES]
        #: what a gradient is multiplied by before its square must be finite
        self._largest_factor = optimizer._largest_factor(slots)
        #: for each slot by kernels the position of the first one with the same numbers
        self._number_leaders = _number_leaders(optimizer, self._kernel_slots)
        self._prepared = _make_records(self._kernel_slots, self._number_leaders)
        #: positions of slots whose scales the host doubles, after a report
        self._late: list[int] = []
        self._raises = False
        self._parameters: list[Any] = [slot.parameter for slot in slots]
        self._changed: list[Tensor] = []
        for slot in self._kernel_slots:
            self._changed += slot.changed_tensors
        if self._is_on_gpu:
            self._late = [i for i in self._coded if not kernel_doubles_scales(slots[i])]
            self._raises = any(slot.group["on_nonfinite"] == "raise" for slot in slots)
            self._changed += [self._parameters[i].kept_scale for i in self._coded]
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        #: steps until something is due, counted from the last step, if that was taken
        self._steps_left = 0
        self._seal_of_last_step: _Seal | None = None
        self._last = _Outcome(Verdict.SKIPPED, [])
        #: what ``is_stale`` has seen, for the step that it allows
        self._next: _Snapshot | None = None

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
        self._next = snapshot
        return False

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
        if optimizer.observer is not None or has_replaced_methods(optimizer):
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

    def _last_steps(self) -> int:
        """Return 1 if the last step was taken, else 0; wait for a GPU's verdict."""
        verdict, _, report = self._last
        if report is None:
            return int(verdict is Verdict.TAKEN)
        return int(not report.values[0][0])

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
        # None in the first step, whose slots come with their tensors and numbers
        snapshot, self._next = self._next, None
        if snapshot is not None:
            self._advance(snapshot)
        take = self._launch if self._is_on_gpu else self._run_on_cpu
        outcome = take(optimizer, snapshot)
        self._last = outcome
        if outcome.verdict is not Verdict.SKIPPED:
            has_new_reference = bool(outcome.ends) and self._widen(optimizer, outcome.ends)
            torch.autograd.graph.increment_version(self._parameters)
            if has_new_reference:
                # ends of charts and equal numbers follow from S_ref: the next step is
                # planned anew
                self.alive = []
            elif optimizer.keeps_plan and (snapshot is None or outcome.ends):
                # in a later step too, as scales that have doubled may be other tensors
                self._seal(optimizer, member)
            self._versions = list(map(_VERSION, self._tensors))
            if outcome.report is not None:
                versions = _versions_of_weights(self._parameters)
                optimizer._pending_verdicts += (
                    PendingVerdict(outcome.report, versions, backward_pass),
                )
        self._parameters, self._changed, self._tensors = [], [], []
        for slot in self.slots:
            slot.parameter = slot.state = None  # type: ignore[assignment]
        return outcome.verdict

    def _advance(self, snapshot: _Snapshot) -> None:
        """Count the last step, and hold the parameters and tensors of the next one."""
        seal = self._seal_of_last_step
        assert seal is not None
        steps = self._last_steps()
        self._steps_left -= steps
        for slot in self.slots:
            slot.steps_done += steps
        self._parameters = snapshot.parameters
        self._tensors = [snapshot.objects[i] for i in seal.positions]
        self._changed = [self._tensors[i] for i in seal.changed_positions]

    def _run_on_cpu(self, optimizer: Any, snapshot: _Snapshot | None) -> _Outcome:
        """Take the step on the CPU, unless a gradient is not finite in some process."""
        slots = self.slots
        prepared = self._prepared
        assert isinstance(prepared, NativePlan)
        may_step_here = partial(self._may_step_here, optimizer, prepared, snapshot)
        may_step = (
            in_every_process(optimizer, may_step_here) if is_distributed() else may_step_here()
        )
        if not may_step:
            return _Outcome(Verdict.SKIPPED, [])
        if snapshot is not None:
            self._renew_numbers(optimizer)
        torch._foreach_add_([slot.state["step"] for slot in slots], 1)
        for i in self._by_geoopt:
            optimizer._take_by_geoopt(slots[i])
        reports = prepared.run(self._kernel_slots).tolist()
        torch.autograd.graph.increment_version(self._changed)
        ends = []
        for i, words in zip(self._by_kernels, reports, strict=True):
            if slots[i].storage != WeightStorage.CODES:
                continue
            report = NativeReport(*words)
            if report.is_saturated:
                ends.append(_End(i, True, bool(report.has_zero_tile)))
            elif not report.has_zero_tile:
                # every scale has a weight that is not 0: `zero_scales` need not look
                self._parameters[i].filled = self._parameters[i].codes._version
        return _Outcome(Verdict.TAKEN, ends)

    def _may_step_here(
        self, optimizer: Any, prepared: NativePlan, snapshot: _Snapshot | None
    ) -> bool:
        """Check in this process all that can refuse the step."""
        if snapshot is not None:
            self._point_to(optimizer, snapshot)
        return self._are_gradients_finite(optimizer, prepared)

    def _point_to(self, optimizer: Any, snapshot: _Snapshot) -> None:
        """Let slots and records refer to the gradients and states of another step."""
        for group in optimizer.param_groups:
            check_lr(group)
        slots = self.slots
        for slot, parameter, state in zip(slots, snapshot.parameters, snapshot.states, strict=True):
            slot.parameter, slot.state = parameter, state
        optimizer._apply_schedules(slots)
        addresses = np.array(list(map(Tensor.data_ptr, snapshot.gradients)), dtype=np.uint64)
        if self._by_geoopt:
            addresses = addresses[self._by_kernels]
        self._prepared.set_gradients(addresses)

    def _are_gradients_finite(self, optimizer: Any, prepared: NativePlan) -> bool:
        """Return True if all gradients and their squares are finite.

        Numbers are computed afterwards, but for those of a plan's first step, which
        `_begin` has computed.
        """
        addresses, sizes = prepared.gradients, prepared.sizes
        for i in self._by_geoopt:
            gradient = self.slots[i].parameter.grad
            assert gradient is not None
            addresses = np.append(addresses, np.uint64(gradient.data_ptr()))
            sizes = np.append(sizes, gradient.numel())
        total = sum_of_squares(addresses, sizes, prepared.kernels)
        factor = self._largest_factor
        if total * max(factor, 1.0) ** 2 <= _LARGEST_SUM:
            return True
        if not all_finite(optimizer, self.slots):
            return False
        slots = self._kernel_slots
        # a list: a later one may have to raise
        factors = map(optimizer._gradient_factor, slots)
        verdicts = list(map(squares_are_finite, slots, factors)) if factor > 1 else []
        return all(verdicts)

    def _renew_numbers(self, optimizer: Any) -> None:
        """Compute the numbers of a step that is not the first of its plan."""
        slots = self._kernel_slots
        for slot, first in zip(slots, self._number_leaders, strict=True):
            leader = slots[first]
            if slot is leader:
                slot.numbers = optimizer._numbers(slot)
            else:
                slot.numbers = leader.numbers

    def _launch(self, optimizer: Any, snapshot: _Snapshot | None) -> _Outcome:
        """Launch the step on a GPU, which decides on it."""
        slots = self.slots
        prepared = self._prepared
        assert not isinstance(prepared, NativePlan)
        if snapshot is not None:
            self._point_to(optimizer, snapshot)
            self._renew_numbers(optimizer)
        # no graph records products, nor the first step of a plan
        may_replay = isinstance(prepared, TritonStep) and snapshot is not None
        graph = optimizer._graph if may_replay else None
        report = prepared.run(slots) if graph is None else graph(prepared, slots)
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
        return _Outcome(Verdict.PENDING, ends, report)

    def _widen(self, optimizer: Any, ends: list[_End]) -> bool:
        """Double scales that have become too small; return True if an S_ref has changed."""
        references = [slot.state.get("reference") for slot in self.slots]
        optimizer._widen([self._slot_to_widen(end) for end in ends])
        return references != [slot.state.get("reference") for slot in self.slots]

    def _slot_to_widen(self, end: _End) -> Slot:
        """Return a slot with all that doubling its scales needs."""
        slot, parameter = self.slots[end.i], self._parameters[end.i]
        if not slot.tensors:
            slot.tensors, slot.kept_scale = {"weight": parameter.codes}, parameter.kept_scale
        slot.saturated, slot.has_zero_rows = [end.is_saturated], [end.has_zero_row]
        return slot

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
        addresses = self._prepared.addresses()
        # 0 is the address of an absent tensor
        return {0, *map(Tensor.data_ptr, tensors)}.issuperset(addresses)


def are_same(options: Any, others: Any) -> bool:
    """Return True if options, or collections of them, are equal.

    What can't be compared is not: two tensors or arrays that users put into a group.
    """
    try:
        return bool(options == others)
    except (RuntimeError, TypeError, ValueError):
        return False


def _make_records(
    slots: list[Slot], number_leaders: list[int]
) -> NativePlan | TritonStep | TritonMuonStep:
    """Make the records of all steps, and compile the kernels that take them."""
    if not on_gpu(slots[0].device):
        return NativePlan(slots, number_leaders)
    if any(slot.spec.direction == KernelDirection.MUON for slot in slots):
        return TritonMuonStep(slots)
    return TritonStep(slots, decides=True)


def _number_leaders(optimizer: Any, slots: list[Slot]) -> list[int]:
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
    periods: list[int] = [slot.group[name] for name in PERIODS if slot.group[name]]
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
