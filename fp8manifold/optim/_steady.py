"""Steady steps: planned once, and taken again while all that the plan was made from stays.

To plan a step (specs, views, pointers, checks) takes longer than a small model's
arithmetic. Most steps differ from the one before in gradients and numbers alone. A step is
*steady* if planning it changes nothing: it is no first step, nothing is due, there is one
process and one device, and native code or a GPU's kernels take all of it::

    step t     is_steady(slots)  -> plan_steady(slots) -> plan.take()
               take() ends with _seal(): it notes identities, addresses and versions
    step t+1   plan.serves()     -> are they all as noted?
                   yes: new gradients, numbers and keys, then plan.take()
                   no:  plan anew

Of the library's optimizers only those of `stiffness.py` have steady steps: the others
override a method of `_PLANNING` (`_optimizer.py`).

The plan must not keep alive what a user lets go, and must not use what is gone. So between
steps it has no tensor, only ids. Weak references drop the plan (``alive`` becomes empty)
when a tensor dies whose id could then be another's.

A GPU decides by itself whether it takes a steady step: kernels look at the gradients, and
the host reads their report later (``optimizer._pending_verdicts``). It waits at once only where a
group raises, or where a whole parameter has one scale: S_ref changes when that doubles.
"""

import math
import weakref
from collections.abc import Sequence
from functools import lru_cache
from inspect import isfunction
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold.optim._agreement import is_distributed
from fp8manifold.optim._checks import CHANGING, are_same, check_lr
from fp8manifold.optim._finite import all_finite, squares_are_finite
from fp8manifold.optim._native_step import (
    GRADIENT_COLUMN,
    TENSOR_COLUMNS,
    NativeStep,
    is_native,
    sum_of_squares,
)
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._scales import zero_scales
from fp8manifold.optim._slot import Slot, count_step
from fp8manifold.optim._triton_step import (
    PendingVerdict,
    TritonStep,
    doubles_on_card,
    is_triton,
    launch_steps,
)
from fp8manifold.tensor import FP8Tensor

_GRADIENT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_PERIODS: Final = ("refresh_every", "stabilize_every", "reset_every")
"""Options with a number of steps after which something is due."""


def is_steady(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Return True if planning a step of slots changes nothing.

    The plan may then serve again, and a GPU may decide on the step.
    """
    if not slots or is_distributed() or optimizer.observer is not None:
        return False
    if not optimizer.defers_verdict or _has_replaced_methods(optimizer):
        return False
    device = slots[0].parameter.device
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


def plan_steady(optimizer: Any, slots: list[Slot]) -> "SteadyPlan | None":
    """Plan a steady step; return None unless native code or kernels can take all of it."""
    optimizer._check_options()
    optimizer._check_schedules(slots)
    optimizer._begin(slots)
    takes = is_triton if on_gpu(slots[0].device) else _is_native_in_place
    return SteadyPlan(slots) if all(map(takes, slots)) else None


def _is_native_in_place(slot: Slot) -> bool:
    """Return True if native code takes the step without a copy in float32."""
    stored = torch.uint8 if slot.storage == "codes" else torch.float32
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


class _End(NamedTuple):
    """A slot that may have reached the end of its range in a step."""

    #: position among the slots
    i: int
    is_saturated: bool
    has_zero_row: bool


class SteadyPlan:
    """The plan of a steady step: slots, records and launches, and what they were made from.

    It is neither saved nor copied. It serves again after a comparison of everything that
    it was made from: groups, options, states and attributes by identity, tensors by
    address, version, size and dtype. Between steps it has no tensor.

    Attributes:
        slots: whose steps are planned.
        alive: weak references; empty if the plan may not serve again.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots, self._device = slots, slots[0].device
        self.alive: list[weakref.ref[Any]] = []
        self._step: NativeStep | TritonStep | None = None
        self._report: PendingValues | None = None
        #: the last verdict: None where a GPU decides
        self._taken: bool | None = False
        self._coded = [i for i, slot in enumerate(slots) if slot.storage == "codes"]
        #: positions of slots whose scales the host doubles, after a report
        self._late: list[int] = []
        self._raises = False
        self._parameters: list[Any] = [slot.parameter for slot in slots]
        self._changed = [*chain.from_iterable(slot.changed_tensors for slot in slots)]
        if on_gpu(self._device):
            self._late = [i for i in self._coded if not doubles_on_card(slots[i])]
            self._raises = any(slot.group["on_nonfinite"] == "raise" for slot in slots)
            self._changed += [self._parameters[i].kept_scale for i in self._coded]
        self._tensors: list[Tensor] = []
        # `_seal` sets the other attributes that `serves` reads; `take` sets _versions

    def take(self, optimizer: Any, backward_pass: BackwardPass | None = None) -> bool | None:
        """Take the step of all slots, or of none.

        Args:
            optimizer: whose step it is.
            backward_pass: the one that the step belongs to, if it belongs to one.

        Returns:
            True if it is taken, False if a gradient or its square is not finite, and
            None where a GPU decides.
        """
        is_new, self._taken = self._step is None, False
        ends = self._launch(optimizer) if on_gpu(self._device) else self._run(optimizer)
        # None: skipped, or taken as a step that is not steady; []: no scale may double
        if ends is not None:
            if ends:
                optimizer._widen([self._slot_to_widen(end) for end in ends])
            torch.autograd.graph.increment_version(self._parameters)
            may_seal = is_new and backward_pass is None and optimizer.keeps_plan
            # scales that have doubled are new tensors
            if may_seal or (self.alive and ends):
                self._seal(optimizer)
            self._versions = list(map(_VERSION, self._tensors))
            if self._report is not None:
                versions = _versions_of_weights(self._parameters)
                optimizer._pending_verdicts += (
                    PendingVerdict(self._report, versions, backward_pass),
                )
        self._parameters, self._changed, self._tensors = [], [], []
        if not self.alive:
            self.slots = []
        for slot in self.slots:
            slot.parameter = slot.state = None  # type: ignore[assignment]
        return self._taken

    def _run(self, optimizer: Any) -> list[_End] | None:
        """Take the step on the CPU; return the slots at the end of their range.

        None is returned if the step is skipped.
        """
        slots = self.slots
        step = self._step if isinstance(self._step, NativeStep) else NativeStep(slots)
        addresses = step.records["pointers"][:, GRADIENT_COLUMN]
        total = sum_of_squares(addresses, step.records["rows"] * step.records["length"])
        self._taken = (total is not None and math.isfinite(total)) or all_finite(optimizer, slots)
        if not self._taken:
            return None
        self._step = step
        count_step(slots)
        reports = step.run(slots).tolist()
        torch.autograd.graph.increment_version(self._changed)
        ends = []
        for i in self._coded:
            is_saturated, has_zero_row = reports[i]
            if is_saturated:
                ends.append(_End(i, True, bool(has_zero_row)))
            elif not has_zero_row:
                # every scale has a weight that is not 0: `zero_scales` need not look
                self._parameters[i].filled = self._parameters[i].codes._version
        return ends

    def _launch(self, optimizer: Any) -> list[_End] | None:
        """Launch the step on a GPU; return the slots whose scales the host doubles.

        None is returned if no kernel can be compiled. The step is then taken as one
        that is not steady.
        """
        slots = self.slots
        graph = optimizer._graph if isinstance(self._step, TritonStep) else None
        if isinstance(self._step, TritonStep):
            report = self._step.run(slots) if graph is None else graph(self._step, slots)
        else:
            launch = launch_steps(slots, decides=True)
            if launch is None:
                if all_finite(optimizer, slots):
                    optimizer._take(count_step(slots))
                    self._taken = True
                return None
            self._step, report = launch
        self._report, self._taken = report, None
        if self._raises and report.values[0][0]:
            for slot in slots:
                # raises if the options of its group say so
                squares_are_finite(slot)
        count_step(slots, report, added=graph is not None)
        torch.autograd.graph.increment_version(self._changed)
        return [_End(i, bool(report.values[1 + i][0]), True) for i in self._late]

    def serves(self, optimizer: Any) -> bool:
        """Return True if all is as the last step left it, and nothing is due.

        The next step is prepared then.
        """
        if not self.alive:
            return False
        snapshot = self._look(optimizer)
        if snapshot is None or not are_same(snapshot.facts, self._facts):
            return False
        tensors = [snapshot.objects[i] for i in self._positions]
        addresses = np.array(list(map(Tensor.data_ptr, snapshot.gradients)), dtype=np.uint64)
        if not self._has_same_memory(tensors, snapshot, addresses):
            return False
        if self._report is None:
            steps_taken = int(bool(self._taken))
        else:
            steps_taken = int(not self._report.values[0][0])
        self._steps_left -= steps_taken
        if self._steps_left <= 0:
            return False
        for group in optimizer.param_groups:
            check_lr(group)
        for slot, parameter, state in zip(
            self.slots, snapshot.parameters, snapshot.states, strict=True
        ):
            slot.steps_done += steps_taken
            slot.parameter, slot.state = parameter, state
        optimizer._check_schedules(self.slots)
        for slot in self.slots:
            slot.numbers = optimizer._numbers(slot)
        assert self._step is not None
        self._step.records["pointers"][:, GRADIENT_COLUMN] = addresses
        self._parameters, self._tensors = snapshot.parameters, tensors
        self._changed = [tensors[i] for i in self._changed_positions]
        return True

    def _has_same_memory(
        self, tensors: list[Tensor], snapshot: _Snapshot, addresses: NDArray[np.uint64]
    ) -> bool:
        """Return True if memory and values are as the last step left them.

        Gradients may have other addresses (``addresses``), if kernels are as fast there.
        """
        gradients = snapshot.gradients
        if list(map(_VERSION, tensors)) != self._versions or _memory_of(tensors) != self._memory:
            return False
        if not all(map(Tensor.is_contiguous, gradients)) or any(map(Tensor.is_neg, gradients)):
            return False
        if isinstance(self._step, TritonStep) and (addresses % 16 == 0).tolist() != self._aligned:
            return False
        for i in self._coded:
            parameter = snapshot.parameters[i]
            # the step would fit such scales
            if parameter.filled != parameter.codes._version and zero_scales(parameter) is not None:
                return False
        return True

    def _look(self, optimizer: Any) -> _Snapshot | None:
        """Return what a plan is made from, or None for a step that is not steady."""
        groups = optimizer.param_groups
        with_gradient = [[p for p in group["params"] if p.grad is not None] for group in groups]
        parameters = [*chain.from_iterable(with_gradient)]
        gradients = list(map(_GRADIENT, parameters))
        if len(parameters) != len(self.slots) or {*map(type, gradients)} != {Tensor}:
            return None
        if is_distributed() or optimizer.observer is not None or _has_replaced_methods(optimizer):
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

    def _seal(self, optimizer: Any) -> None:
        """Note what the next step is compared with, if it may reuse this plan."""
        self.alive = []
        snapshot = self._look(optimizer)
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
        self._changed_positions = [position_by_address[x.data_ptr()] for x in self._changed]
        self._positions, self._tensors = positions, tensors
        self._facts, self._memory = snapshot.facts, _memory_of(tensors)
        self._aligned = [gradient.data_ptr() % 16 == 0 for gradient in snapshot.gradients]
        # they live on, so that no other object gets their ids
        self._objects = [x for x in objects if not isinstance(x, Tensor)]
        self._steps_left = min(map(_steps_until_due, self.slots))
        self.alive = _weak_references(objects, snapshot.parameters)
        for slot in self.slots:
            vars(slot).pop("scale", None)
            slot.tensors, slot.kept_scale = {}, None

    def _compares_all(self, tensors: list[Tensor]) -> bool:
        """Return True if all addresses of the plan are those of tensors that are compared.

        Others are of copies, or of manifolds.
        """
        assert self._step is not None
        if any(slot.storage not in ("codes", "plain") for slot in self.slots):
            return False
        addresses = self._step.records["pointers"][:, TENSOR_COLUMNS].flatten().tolist()
        # 0 is the address of an absent tensor
        return {0, *map(Tensor.data_ptr, tensors)}.issuperset(addresses)

    def _slot_to_widen(self, end: _End) -> Slot:
        """Return a slot with all that doubling its scales needs."""
        slot, parameter = self.slots[end.i], self._parameters[end.i]
        if not slot.tensors:
            slot.tensors, slot.kept_scale = {"weight": parameter.codes}, parameter.kept_scale
        slot.saturated, slot.has_zero_rows = [end.is_saturated], [end.has_zero_row]
        return slot


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
