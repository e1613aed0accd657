"""StiffnessOptimizer, the base of optimizers whose step is scaled with a power of the stiffness, and their numbers."""

import math
from functools import lru_cache
from typing import Any

from fp8manifold._base.checks import check_choice
from fp8manifold._numerics.charts import chart_of
from fp8manifold._numerics.stiffness import log2_bounded
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._checks import lr_of, scheduled
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Slot, manifold_of, own_manifold
from fp8manifold.optim._writeback import WRITEBACKS

_LARGEST_POWER = 8.0
_MODES = {0.0: "none", 1.0: "linear", 0.5: "sqrt", 2.0: "square"}
"""Exponents whose power is computed exactly; any other goes through :func:`exp2_exact`."""


class StiffnessOptimizer(ManifoldOptimizer):
    """``w - lr (S / S_ref)^k d``: subclasses name the direction ``d`` and give its numbers."""

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("writeback", group["writeback"], WRITEBACKS)  # None is for manifolds
        if "stiffness" in group:
            scheduled("stiffness", group["stiffness"], 0, -_LARGEST_POWER, _LARGEST_POWER)
            chart_of(FloatFormat(4, 3), group["metric"])
        for parameter in group["params"]:
            if manifold_of(parameter) is not None and own_manifold(parameter) is None:
                raise ValueError(
                    f"{type(self).__name__} can't step a parameter on {manifold_of(parameter)}: "
                    "use fp8manifold.optim.RiemannianAdam"
                )

    def _check_schedules(self, slots: list[Slot]) -> None:
        """Set the exponent of each slot; a schedule is called once a step, for all parameters that are as far."""
        powers: dict[tuple[int, int], float] = {}
        for slot in slots:
            power, key = slot.group.get("stiffness", 0.0), (id(slot.group), slot.done)
            if callable(power):
                if key not in powers:
                    powers[key] = scheduled("stiffness", power, slot.done, -_LARGEST_POWER, _LARGEST_POWER)
                power = powers[key]
            slot.power = power

    def _fields(self, slot: Slot) -> dict[str, Any]:
        if slot.fmt is None:
            return {"direction": self.direction}
        k = slot.group["stiffness"]
        mode = "power" if callable(k) else _MODES.get(float(k), "power")
        return {"direction": self.direction, "metric": slot.group["metric"], "stiffness": mode}

    def _shared_numbers(self, slot: Slot) -> dict[str, float]:
        """Decay, and of a quantised parameter S_ref, its bounds and the exponent."""
        group, state = slot.group, slot.state
        numbers = {"keep": 1 - lr_of(group) * group["weight_decay"]}
        if "reference" in state:
            numbers |= _field_numbers(state["reference"], group[self.damping_option], group["clip"], slot.power)
        return numbers


@lru_cache(maxsize=4096)
def _field_numbers(reference: float, damping: float, clip: float, power: float) -> dict[str, float]:
    return {
        "inverse_reference": 1 / reference,
        "log_reference": log2_bounded(reference),
        "low": damping,
        "high": clip,
        "log_low": log2_bounded(damping),
        "log_high": log2_bounded(clip),
        "power": power,
    }


def injected(rate: float, beta: float) -> float:
    """``(1 - beta) / beta / rate``: how much of a rounding error a moment is given; nothing at rate 0."""
    return (1 - beta) / beta / rate if rate and beta else 0.0


@lru_cache(maxsize=256)
def adam_numbers(lr: float, betas: tuple[float, float], eps: float, step: int) -> dict[str, float]:
    """Adam's numbers, with its bias corrections in the rate and in eps."""
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
