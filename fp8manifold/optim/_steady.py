"""Which steps are steady, and planned: those that prepare alike and change nothing in it.

A step is *steady* if preparing it changes nothing: it is no first step, and nothing is due.
If native code or a GPU's kernels take all of it, too, `make_plan` makes a `Plan` of it
(`_plan.py`), which takes all parameters that have a gradient. Without a plan step
parameters of these kinds, and with them all others of the optimizer:

    sharded parameters        their rows are gathered and sent between the parts of a step
    16 bits on the CPU        native code steps copies in float32, some at a time
    float64, strided memory, another kind of gradient, an observer, a metric of logarithms
    or of a user's            PyTorch steps
    Muon's matrices with a stiffness, or with errors in the momentum
                              a plan has no records for them
    a row or block of zeros   the step fits its scale
    a weight that has the rest of its first rounding
                              the step takes it up
    methods of a user's that take part in planning, Fisher's steps
                              they may do anything

These have a plan that is made anew in every step:

    floats on a manifold      the manifold has the scale, of which no state has the address
    a scale for each element, or scales of blocks and squares in one byte
                              the step reads a copy
    other methods of a user's
                              they may look at anything
"""

import logging
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._interface import KernelDirection, WeightStorage
from fp8manifold._triton.launch import KernelsUnavailableError
from fp8manifold.optim import _plan
from fp8manifold.optim._agreement import is_distributed
from fp8manifold.optim._matrices import averages_as_torch
from fp8manifold.optim._native_step import is_native
from fp8manifold.optim._plan import PERIODS, Plan, has_replaced_methods
from fp8manifold.optim._scales import zero_scales
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._triton_step import give_up, is_triton
from fp8manifold.tensor import FP8Tensor

_LOG: Final = logging.getLogger("fp8manifold")
_GRADIENT_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def is_steady(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Return True if preparing a step of slots changes nothing.

    The plan may then serve again, and a GPU may decide on the step.
    """
    if not slots or optimizer.observer is not None:
        return False
    if not optimizer.is_planned or has_replaced_methods(optimizer):
        return False
    device = slots[0].parameter.device
    if _plan.on_gpu(device) and not _may_decide(optimizer, slots):
        return False
    return all(map(_is_steady_slot, slots, repeat(device)))


def _may_decide(optimizer: Any, slots: Sequence[Slot]) -> bool:
    """Return True if a GPU may decide on a step by itself.

    Other processes have to take it too, and geoopt's arithmetic is the host's.
    """
    return optimizer.defers_verdict and not is_distributed() and not optimizer._by_geoopt(slots)


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
    periods = [group[name] for name in PERIODS if group[name]]
    return bool(slot.steps_done) and all(
        isinstance(period, int) and slot.steps_done % period for period in periods
    )


def make_plan(optimizer: Any, slots: list[Slot]) -> Plan | None:
    """Plan a steady step of slots.

    None is returned unless native code or kernels can take all of it. Nothing has
    changed then.
    """
    try:
        optimizer._check_options()
        optimizer._apply_schedules(slots)
        by_geoopt = optimizer._by_geoopt(slots)
        if not all(_has_all_entries(optimizer, slot) for slot in _without(slots, by_geoopt)):
            return None
        optimizer._begin(slots)
        if not _is_plannable(optimizer, slots, by_geoopt):
            return None
        return Plan(optimizer, slots, by_geoopt)
    except KernelsUnavailableError as error:
        give_up(error)
        return None
    except Exception:
        # the step without a plan raises it: in its order, and in every process
        _LOG.debug("a step could not be planned", exc_info=True)
        return None


def _without(slots: list[Slot], positions: list[int]) -> list[Slot]:
    if not positions:
        return slots
    return [slot for i, slot in enumerate(slots) if i not in positions]


def _has_all_entries(optimizer: Any, slot: Slot) -> bool:
    """Return True if preparing a step adds nothing to a parameter's state.

    An entry is missing where an option has changed, and S_ref after `rescale_`. A step that
    adds it must not be refused afterwards, so it is no steady one.
    """
    names = optimizer._spec(slot).state_entries
    if slot.storage != WeightStorage.PLAIN and "reference" not in slot.state:
        return False
    return slot.state.keys() >= set(names)


def _is_plannable(optimizer: Any, slots: list[Slot], by_geoopt: list[int]) -> bool:
    """Return True if native code or kernels take all steps but those of geoopt's."""
    by_kernels = _without(slots, by_geoopt)
    if not by_kernels or not optimizer._are_plannable(by_kernels):
        return False
    if _plan.on_gpu(slots[0].device):
        # kernels look at the squares of gradients themselves
        is_decided = optimizer._largest_factor(slots) <= 1
        return is_decided and all(map(_is_launched_whole, slots))
    return all(map(_is_native_in_place, by_kernels)) and all(
        _is_summed_in_place(slots[i]) for i in by_geoopt
    )


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


def _is_summed_in_place(slot: Slot) -> bool:
    """Return True if C code sums the squares of a gradient where they are."""
    gradient = slot.parameter.grad
    assert gradient is not None
    return gradient.dtype is torch.float32 and gradient.is_contiguous() and not gradient.is_neg()
