"""Steady steps: planned once, and taken again as long as everything that the plan was
made from is unchanged.

A step is steady where planning it changes nothing: no first step, nothing due, one
process, one device, native code or a GPU's kernels. A GPU decides by itself whether it
takes one, and the host reads the verdict later.
"""

import math
import weakref
from collections.abc import Sequence
from functools import lru_cache
from inspect import isfunction
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._base.reading import PendingValues
from fp8manifold.optim._agreement import is_distributed
from fp8manifold.optim._checks import CHANGING, are_same, check_lr
from fp8manifold.optim._finite import all_finite, squares_are_finite
from fp8manifold.optim._native_step import NativeStep, is_native, sum_of_squares
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

_GRADIENTS: Final = (torch.float32, torch.bfloat16, torch.float16)
_DUE: Final = ("refresh_every", "stabilize_every", "reset_every")


def is_steady(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """True where planning a step changes nothing, so that the plan may serve again and
    a GPU may decide on it.
    """
    if (
        not slots
        or is_distributed()
        or optimizer.observer is not None
        or not optimizer.defers_verdict
    ):
        return False
    if vars(optimizer).keys() & _methods(optimizer.__class__):
        return False
    device = slots[0].parameter.device
    return all(map(_is_steady_slot, slots, repeat(device)))


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and _triton.is_available()


def _is_steady_slot(slot: Slot, device: torch.device) -> bool:
    group, parameter, state, gradient = slot.group, slot.parameter, slot.state, slot.parameter.grad
    if getattr(state.get("step"), "dtype", None) is not torch.float32 or "stream" not in state:
        return False
    if (
        type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or gradient.dtype not in _GRADIENTS
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
    due = [group[name] for name in _DUE if group[name]]
    return bool(slot.steps_done) and all(
        isinstance(every, int) and slot.steps_done % every for every in due
    )


def plan_steady(optimizer: Any, slots: list[Slot]) -> "SteadyPlan | None":
    """The plan of a steady step; None unless native code or kernels can take all of it."""
    optimizer._check_options()
    optimizer._check_schedules(slots)
    optimizer._begin(slots)
    takes = is_triton if on_gpu(slots[0].device) else _is_taken_in_place
    return SteadyPlan(slots) if all(map(takes, slots)) else None


def _is_taken_in_place(slot: Slot) -> bool:
    stored = torch.uint8 if slot.storage == "codes" else torch.float32
    return (
        slot.weight.dtype is stored
        and slot.tensors["gradient"].dtype is torch.float32
        and is_native(slot)
    )


_GRADIENT: Final = attrgetter("grad")
_VERSION: Final = attrgetter("_version")
_KIND: Final = attrgetter("dtype", "device", "layout", "shape")
_FACTS: Final = (Tensor.data_ptr, Tensor.numel, attrgetter("dtype"), Tensor.is_contiguous)
_PARTS: Final = attrgetter(
    *(
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
)
_FILLED: Final = attrgetter("filled")
_CODES_VERSION: Final = attrgetter("codes._version")
_NO_STATE: Final[dict[str, Any]] = {}


@lru_cache(maxsize=64)
def _methods(kind: Any) -> frozenset[str]:
    """The names of methods that plan a step, which an attribute of an optimizer may
    replace.
    """
    return frozenset(
        name for name in dir(kind) if name.startswith("_") and isfunction(getattr(kind, name))
    )


class SteadyPlan:
    """The table of a steady step: slots, records and launches, with everything that
    they were made from.

    It is neither saved nor copied. It serves again after a comparison of all of that:
    groups, options, states and attributes by identity, tensors by address, version,
    size and dtype. Between steps it holds no tensor.
    """

    def __init__(self, slots: list[Slot]) -> None:
        self.slots, self._device = slots, slots[0].device
        self._step: NativeStep | TritonStep | None = None
        self._said: PendingValues | None = None
        self._taken: bool | None = False
        self.alive: list[weakref.ref[Any]] = []
        self._coded = [i for i, slot in enumerate(slots) if slot.storage == "codes"]
        self._late, self._raises = [], False
        self._parameters: list[Any] = [slot.parameter for slot in slots]
        self._changed = [*chain.from_iterable(slot.changed_tensors for slot in slots)]
        if on_gpu(self._device):
            self._late = [i for i in self._coded if not doubles_on_card(slots[i])]
            self._raises = any(slot.group["on_nonfinite"] == "raise" for slot in slots)
            self._changed += [self._parameters[i].kept_scale for i in self._coded]
        self._tensors: list[Tensor] = []

    def take(self, optimizer: Any, backward_pass: BackwardPass | None = None) -> bool | None:
        """Take the step of all, or of none if a gradient or its square is not finite;
        None where a GPU decides. ``backward_pass`` is the one that the step belongs to.

        The host reads the verdict later, but waits if a group raises, or if a whole
        parameter has one scale: its S_ref changes when the scale doubles.
        """
        is_new, self._taken = self._step is None, False
        ends = self._on_card(optimizer) if on_gpu(self._device) else self._here(optimizer)
        if ends is not None:
            if ends:
                optimizer._widen([self._whole(*end) for end in ends])
            torch.autograd.graph.increment_version(self._parameters)
            if (is_new and backward_pass is None and optimizer.keeps_plan) or (self.alive and ends):
                self._seal(optimizer)
            self._versions = list(map(_VERSION, self._tensors))
            if self._said is not None:
                held = [p.codes if isinstance(p, FP8Tensor) else p for p in self._parameters]
                left = [None if x.is_inference() else x._version for x in held]
                versions = dict(zip(self._parameters, left, strict=True))
                optimizer._pending_verdicts += (
                    PendingVerdict(self._said, versions, backward_pass),
                )
        self._parameters, self._changed, self._tensors = [], [], []
        self.slots = self.slots if self.alive else []
        for slot in self.slots:
            slot.parameter = slot.state = None  # type: ignore[assignment]
        return self._taken

    def _here(self, optimizer: Any) -> list[tuple[int, bool, bool]] | None:
        """Take a step on the CPU; the slots with a weight at the end of its range."""
        slots = self.slots
        step = self._step if isinstance(self._step, NativeStep) else NativeStep(slots)
        total = sum_of_squares(
            step.records["pointers"][:, 2], step.records["rows"] * step.records["length"]
        )
        self._taken = (total is not None and math.isfinite(total)) or all_finite(optimizer, slots)
        if not self._taken:
            return None
        self._step = step
        count_step(slots)
        found = step.run(slots).tolist()
        torch.autograd.graph.increment_version(self._changed)
        ends = []
        for i in self._coded:
            reached, emptied = found[i]
            if reached:
                ends.append((i, True, bool(emptied)))
            elif not emptied:
                self._parameters[i].filled = self._parameters[i].codes._version
        return ends

    def _on_card(self, optimizer: Any) -> list[tuple[int, bool, bool]] | None:
        """Launch a step; the slots whose scales don't double on the GPU, and whether
        they have reached an end.
        """
        slots, graph = self.slots, optimizer._graph if isinstance(self._step, TritonStep) else None
        if isinstance(self._step, TritonStep):
            said = self._step.run(slots) if graph is None else graph(self._step, slots)
        elif (found := launch_steps(slots, decides=True)) is not None:
            self._step, said = found
        else:
            if all_finite(optimizer, slots):
                optimizer._take(count_step(slots))
                self._taken = True
            return None
        self._said, self._taken = said, None
        if self._raises and said.values[0][0]:
            for slot in slots:
                squares_are_finite(slot)  # raises if the group's options say so
        count_step(slots, said, added=graph is not None)
        torch.autograd.graph.increment_version(self._changed)
        return [(i, bool(said.values[1 + i][0]), True) for i in self._late]

    def serves(self, optimizer: Any) -> bool:
        """True if all is as the step before has left it, and nothing is due; the next
        step is prepared then.
        """
        if not self.alive or (found := self._look(optimizer)) is None:
            return False
        parameters, states, gradients, held, seen = found
        if not are_same(seen, self._seen):
            return False
        tensors = [held[i] for i in self._places]
        if list(map(_VERSION, tensors)) != self._versions or _facts_of(tensors) != self._facts:
            return False
        if not all(map(Tensor.is_contiguous, gradients)) or any(map(Tensor.is_neg, gradients)):
            return False
        places = np.array(list(map(Tensor.data_ptr, gradients)), dtype=np.uint64)
        if isinstance(self._step, TritonStep) and not np.array_equal(
            places % 16 == 0, self._aligned
        ):
            return False
        coded = [parameters[i] for i in self._coded]
        left = zip(coded, map(_FILLED, coded), map(_CODES_VERSION, coded), strict=True)
        if any(filled != version and zero_scales(p) is not None for p, filled, version in left):
            return False
        taken = int(bool(self._taken) if self._said is None else not self._said.values[0][0])
        self._left -= taken
        if self._left <= 0:
            return False
        for group in optimizer.param_groups:
            check_lr(group)
        for slot, parameter, state in zip(self.slots, parameters, states, strict=True):
            slot.steps_done, slot.parameter, slot.state = slot.steps_done + taken, parameter, state
        optimizer._check_schedules(self.slots)
        for slot in self.slots:
            slot.numbers = optimizer._numbers(slot)
        assert self._step is not None
        self._step.records["pointers"][:, 2] = places
        self._parameters, self._tensors = parameters, tensors
        self._changed = [tensors[i] for i in self._steps]
        return True

    def _look(self, optimizer: Any) -> tuple[Any, ...] | None:
        """Parameters, states, gradients, all that a plan is made from, and the
        identities to compare; or None.
        """
        groups = optimizer.param_groups
        each = [[p for p in group["params"] if p.grad is not None] for group in groups]
        parameters = [*chain.from_iterable(each)]
        gradients = list(map(_GRADIENT, parameters))
        if (
            len(parameters) != len(self.slots)
            or {*map(type, gradients)} != {Tensor}
            or is_distributed()
        ):
            return None
        if optimizer.observer is not None or vars(optimizer).keys() & _methods(optimizer.__class__):
            return None
        states = [optimizer.state.get(p, _NO_STATE) for p in parameters]
        coded = [p for p in parameters if isinstance(p, FP8Tensor)]
        held = [
            *groups,
            *map(type, parameters),
            *parameters,
            *chain.from_iterable(map(dict.values, states)),
        ]
        held += chain.from_iterable(map(_PARTS, coded))
        names, options = list(map(tuple, states)), [group | CHANGING for group in groups]
        here = (type(optimizer), on_gpu(self._device), *map(len, each))
        seen = (here, options, list(map(id, held)), names, list(map(_KIND, gradients)))
        return parameters, states, gradients, held, seen

    def _seal(self, optimizer: Any) -> None:
        """Record what the next step is compared with, if it may reuse this plan."""
        self.alive = []
        if (found := self._look(optimizer)) is None:
            return
        parameters, _, gradients, held, seen = found
        places = [
            i for i, x in enumerate(held) if isinstance(x, Tensor) and not isinstance(x, FP8Tensor)
        ]
        tensors = [held[i] for i in places]
        assert self._step is not None
        # all addresses of the plan must be those of tensors that are compared, not of
        # copies or of manifolds
        plain = all(slot.storage in ("codes", "plain") for slot in self.slots)
        compared = {0, *(tensor.data_ptr() for tensor in tensors + gradients)}
        plain = plain and compared.issuperset(
            self._step.records["pointers"][:, 1:10].flatten().tolist()
        )
        if not plain or any(tensor.is_inference() for tensor in tensors):
            return
        known = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
        self._steps = [known[tensor.data_ptr()] for tensor in self._changed]
        self._places, self._tensors, self._seen, self._facts = (
            places,
            tensors,
            seen,
            _facts_of(tensors),
        )
        self._aligned = np.array([gradient.data_ptr() % 16 == 0 for gradient in gradients])
        self._kept = [
            x for x in held if not isinstance(x, Tensor)
        ]  # held, so that no other object gets their id
        every = [
            (slot.group[name], slot.steps_done)
            for slot in self.slots
            for name in _DUE
            if slot.group[name]
        ]
        self._left = min(period - done % period for period, done in every)
        # no weak reference to a parameter, or `to` could not swap it: parameters live
        # as keys of the states
        own, alive = set(map(id, parameters)), list[weakref.ref[Any]]()
        alive += [
            weakref.ref(x, lambda _: alive.clear())
            for x in held
            if isinstance(x, Tensor) and id(x) not in own
        ]
        self.alive = alive
        for slot in self.slots:
            vars(slot).pop("scale", None)
            slot.tensors, slot.kept_scale = {}, None

    def _whole(self, i: int, reached: bool, emptied: bool) -> Slot:
        """A slot with all that doubling its scales needs."""
        slot, held = self.slots[i], self._parameters[i]
        if not slot.tensors:
            slot.tensors, slot.kept_scale = {"weight": held.codes}, held.kept_scale
        slot.saturated, slot.has_zero_rows = [reached], [emptied]
        return slot


def _facts_of(tensors: list[Tensor]) -> list[list[Any]]:
    return [list(map(fact, tensors)) for fact in _FACTS]
