"""What the stiffness family shares: a direction, stepped linearly in value with a power of the stiffness."""

from functools import lru_cache
from typing import Any

from torch import Tensor

from fp8manifold._numerics.charts import chart_of
from fp8manifold._numerics.checks import check_choice
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._field import log2_bounded, power_mode
from fp8manifold.optim._grid_optimizer import GridOptimizer
from fp8manifold.optim._kinds import manifold_of, own_manifold
from fp8manifold.optim._plan import Grid
from fp8manifold.optim._schedules import scheduled
from fp8manifold.optim._writeback import WRITEBACKS

__all__ = ["StiffnessOptimizer", "injected"]

_LARGEST_POWER = 8.0


class StiffnessOptimizer(GridOptimizer):
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

    def _check_schedules(self, taken: list[tuple[dict[str, Any], int]]) -> None:
        """Ask for every exponent of the step, once, before anything has changed."""
        self._powers: dict[tuple[int, int], float] = {}
        for group, done in taken:
            if "stiffness" in group and (id(group), done) not in self._powers:
                power = scheduled("stiffness", group["stiffness"], done, -_LARGEST_POWER, _LARGEST_POWER)
                self._powers[id(group), done] = power

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        if grid is None:
            return {"direction": self.direction}
        k = group["stiffness"]
        power = "power" if callable(k) else power_mode(k)
        return {"direction": self.direction, "metric": group["metric"], "stiffness": power}

    def _shared_numbers(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, float]:
        """Decay, and the stiffness of a quantised parameter."""
        numbers = {"keep": 1 - float(group["lr"]) * group["weight_decay"]}
        if "reference" in state:
            numbers |= self._stiffness_numbers(group, state, self._powers[id(group), int(state["step"]) - 1])
        return numbers

    def _stiffness_numbers(self, group: dict[str, Any], state: dict[str, Any], power: float) -> dict[str, float]:
        """S_ref, the bounds and the exponent."""
        return _field_numbers(state["reference"], group["damping"], group["clip"], power)


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
    """``(1 - beta) / beta / rate``: how much of a rounding error an average is given; nothing at rate 0."""
    return (1 - beta) / beta / rate if rate and beta else 0.0
