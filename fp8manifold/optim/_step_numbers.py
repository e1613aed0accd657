"""The numbers of a step: what changes from one step of a parameter to the next.

They are floats by name, computed on the host (`NUMBERS` lists the names)::

    options, S_ref, age, exponent of a slot
        -> adamw_numbers(slot)    {"beta1": 0.9, "rate": 0.0012, ...}; an optimizer's class
                                  names its function (``_numbers``)
        -> number_rows(slots)     a row of float32 for each slot
        -> set_numbers(records)   the rows in records of native code and of kernels

Schedules may write a learning rate at any time, so it is read and checked here. The keys
of a step's random bits, which are new in every step too, are `StepKeys` of
``random_bits.py``.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8manifold._base.checks import check_number
from fp8manifold._base.reading import read_cached
from fp8manifold._interface import NUMBERS, POSITIONS
from fp8manifold._numerics.stiffness import log2_bounded
from fp8manifold.optim._matrices import MatrixShape, adjusted_rate, size_of_matrices
from fp8manifold.optim._slot import Slot

Schedule = float | Callable[[int], float]
"""A number, or a function of the number of steps taken so far (0 at the first step)."""
LARGEST_EXPONENT: Final = 8.0
"""The largest exponent of S / S_ref, and the largest one below 0."""
LARGEST_NUMBER: Final = float(torch.finfo(torch.float32).max)
"""The largest option: the numbers of a step are float32."""
_EPS: Final = POSITIONS["eps"]
_RATE: Final = POSITIONS["rate"]


# What the numbers follow from


def check_lr(group: dict[str, Any]) -> None:
    """Check the learning rate, which a schedule may have set since the group was made."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"lr has shape {tuple(lr.shape)}: a number or a tensor of one element is needed"
        )
    # most steps have a float that is in range
    if type(lr) is not float or not 0 <= lr <= LARGEST_NUMBER:
        number = read_cached(lr, Tensor.item) if isinstance(lr, Tensor) else lr
        check_number("lr", number, 0.0, LARGEST_NUMBER)


def lr_of(group: dict[str, Any]) -> float:
    """Return the learning rate of a group.

    A tensor on a GPU is waited for once after each change.
    """
    lr = group["lr"]
    return float(read_cached(lr, Tensor.item) if isinstance(lr, Tensor) else lr)


def lr_by_start(group: dict[str, Any]) -> float:
    """Return ``lr / start_lr``: the factor of a schedule in this step.

    ``start_lr`` is the lr that the group was given when it was added. ``initial_lr``
    may differ, because schedulers write it, and OneCycleLR writes that of its warm-up.
    """
    start = float(group["start_lr"])
    return lr_of(group) / start if start else float(lr_of(group) > 0)


def age_of(slot: Slot) -> int:
    """Return the number of this step since the slot's moments were cleared, from 1."""
    return slot.steps_done + 1 - int(slot.state.get("since", 0))


def scheduled(name: str, value: Schedule, step: int, low: float, high: float) -> float:
    """Return the value of a schedule at a step; raise unless it is in [low, high]."""
    current = value(step) if callable(value) else value
    check_number(name, current, low, high)
    return current


def set_exponents(slots: Sequence[Slot]) -> None:
    """Set the stiffness exponent of each slot, or raise if a schedule has left its range.

    A schedule is called once for all parameters of a group with as many steps.
    """
    exponents: dict[tuple[int, int], float] = {}
    for slot in slots:
        exponent = slot.group.get("stiffness", 0.0)
        if callable(exponent):
            key = (id(slot.group), slot.steps_done)
            if key not in exponents:
                exponents[key] = scheduled(
                    "stiffness", exponent, slot.steps_done, -LARGEST_EXPONENT, LARGEST_EXPONENT
                )
            exponent = exponents[key]
        slot.power = exponent


# The numbers of each optimizer


def adamw_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of StiffnessAdamW."""
    group = slot.group
    numbers = adam_numbers(lr_of(group), tuple(group["betas"]), group["eps"], age_of(slot))
    return numbers | shared_numbers(slot)


def sgd_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of StiffnessSGD."""
    return sgd_direction_numbers(slot) | shared_numbers(slot)


def lion_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of StiffnessLion."""
    beta1, beta2 = slot.group["betas"]
    numbers = {
        "beta1": beta1,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "rate": lr_of(slot.group),
    }
    return numbers | shared_numbers(slot)


def muon_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of StiffnessMuon: of a matrix, or of Adam beside it.

    A rate depends on the shape of the matrix.
    """
    group = slot.group
    lr = lr_of(group)
    shared = shared_numbers(slot)
    if group["direction"] == "adam":
        return adam_numbers(lr, tuple(group["betas"]), group["adam_eps"], age_of(slot)) | shared
    rows, columns = size_of_matrices(slot.parameter.shape, group["matrix_shape"])
    if group["matrix_shape"] == MatrixShape.TRANSPOSED:
        rows, columns = columns, rows
    rate = adjusted_rate(lr, group["adjust_lr_fn"], rows, columns)
    momentum = group["momentum"]
    return momentum_numbers(rate, momentum, 1 - momentum) | shared


def adafactor_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of StiffnessAdafactor; the rate falls with the root of the age."""
    group = slot.group
    age = age_of(slot)
    gain = age ** group["beta2_decay"]
    eps, least_size = group["eps"]
    momentum = group["momentum"]
    rate = min(lr_of(group), age**-0.5)
    numbers = {
        "beta2": 1 - gain,
        "gain2": gain,
        "eps": torch.finfo(slot.dtype).eps if eps is None else eps,
        "least_size": least_size,
        "most": group["d"],
    }
    return numbers | momentum_numbers(rate, momentum, 1 - momentum) | shared_numbers(slot)


def riemannian_adam_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of RiemannianAdam, whose moments are in units of the state's."""
    group = slot.group
    per_unit = 1 / slot.state.get("unit", 1.0)
    eps = group["eps"] * slot.state["reference"] * per_unit
    numbers = adam_numbers(lr_of(group), tuple(group["betas"]), eps, age_of(slot))
    return numbers | {"keep": kept_by_schedule(group), "per_unit": per_unit}


def riemannian_sgd_numbers(slot: Slot) -> dict[str, float]:
    """Return the numbers of RiemannianSGD."""
    return sgd_direction_numbers(slot) | {"keep": kept_by_schedule(slot.group), "per_unit": 1.0}


# Those of a direction, of decay, and of the stiffness


@lru_cache(maxsize=256)
def adam_numbers(lr: float, betas: tuple[float, float], eps: float, step: int) -> dict[str, float]:
    """Return Adam's numbers, with its bias corrections in the rate and in eps."""
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    rate = lr * correction / (1 - beta1**step)
    return {
        "beta1": beta1,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "eps": eps * correction,
        "rate": rate,
        "inject": injected(rate, beta1),
    }


def sgd_direction_numbers(slot: Slot) -> dict[str, float]:
    """Return SGD's numbers; the momentum starts from the gradient without dampening."""
    group = slot.group
    gain = 1.0 if age_of(slot) == 1 else 1 - group["dampening"]
    return momentum_numbers(lr_of(group), group["momentum"], gain)


def momentum_numbers(rate: float, momentum: float, gain: float) -> dict[str, float]:
    """Return the numbers of a step by one average; ``gain`` multiplies its gradient."""
    return {"beta1": momentum, "gain1": gain, "rate": rate, "inject": injected(rate, momentum)}


def injected(rate: float, beta: float) -> float:
    """Return how much of a rounding error goes into a moment: ``(1 - beta) / beta / rate``.

    It is 0 if rate or beta is 0.
    """
    return (1 - beta) / beta / rate if rate and beta else 0.0


def shared_numbers(slot: Slot, damping: str = "damping") -> dict[str, float]:
    """Return decay, and for a quantised parameter S_ref, its bounds and the exponent.

    Args:
        slot: the parameter's step.
        damping: the name of the option that is the lower bound of S / S_ref.
    """
    group, state = slot.group, slot.state
    numbers = {"keep": 1 - lr_of(group) * group["weight_decay"]}
    if "reference" in state:
        numbers |= _stiffness_numbers(state["reference"], group[damping], group["clip"], slot.power)
    return numbers


@lru_cache(maxsize=4096)
def _stiffness_numbers(
    reference: float, damping: float, clip: float, power: float
) -> dict[str, float]:
    return {
        "inverse_reference": 1 / reference,
        "log_reference": log2_bounded(reference),
        "low": damping,
        "high": clip,
        "log_low": log2_bounded(damping),
        "log_high": log2_bounded(clip),
        "power": power,
    }


def kept_by_schedule(group: dict[str, Any]) -> float:
    """Return the factor that decay leaves of a weight where ``lr`` counts ULPs."""
    return 1 - float(group["weight_decay"]) * lr_by_start(group)


# As native code and kernels have them


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
