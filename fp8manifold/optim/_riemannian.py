"""What the Riemannian optimizers share: groups of mixed parameters, the bounded chart, one step on either kind."""

import math
from typing import Any

import geoopt
import torch
from torch import Tensor

from fp8manifold._charts import Chart, UlpChart
from fp8manifold._checks import check_choice, check_int, check_number
from fp8manifold._float_bits import working_dtype
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.optim._base import (
    ManifoldOptimizer,
    Parameters,
    check_finite,
    manifold_of,
    own_manifold,
)
from fp8manifold.optim._field import bounded_share, reference_stiffness
from fp8manifold.optim._writeback import WRITEBACKS

__all__ = ["Riemannian", "with_l2"]

_EUCLIDEAN = geoopt.Euclidean()
_LR_OWN, _LR_OTHER = 0.5, 1e-3


class Riemannian(ManifoldOptimizer):
    """Groups of mixed parameters, the bounded chart, and the write-back, shared by the two optimizers."""

    def __init__(self, params: Parameters, defaults: dict[str, Any], *, float_lr: float | None, **options: Any) -> None:
        super().__init__(params, defaults | {"float_lr": float_lr}, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that mixes quantised with ordinary parameters needs ``float_lr``."""
        if not isinstance(param_group, dict) or isinstance(param_group.get("params", set()), set):
            super().add_param_group(param_group)  # torch says what is wrong with it
        if "stabilize" in param_group:
            param_group["stabilize_every"] = param_group.pop("stabilize")
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in param_group["params"]]
        own = [isinstance(p, Tensor) and own_manifold(p) is not None for p in tensors]
        explicit = param_group.get("lr") is not None
        if param_group.get("lr", self.defaults["lr"]) is None:
            param_group["lr"] = _LR_OWN if any(own) else _LR_OTHER
        param_group["own_lr"] = explicit or self.defaults["lr"] is None
        super().add_param_group(param_group)
        if clash := self._mixes_units():
            self.param_groups.pop()
            raise ValueError(clash)

    def _mixes_units(self) -> str | None:
        """Why some group would step ordinary parameters with a learning rate in ULPs, if one would."""
        kinds = [{own_manifold(p) is not None for p in group["params"]} for group in self.param_groups]
        any_own = any(True in kind for kind in kinds)
        for group, kind in zip(self.param_groups, kinds, strict=True):
            shares_lr = True in kind or (any_own and not group["own_lr"])
            if False in kind and shares_lr and group["float_lr"] is None:
                return (
                    f"lr={group['lr']} is in ULPs a step on quantised parameters, and these groups hold ordinary ones "
                    "too: pass float_lr=... for them (1e-3, say), or put them in a group with an lr of its own"
                )
        return None

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["float_lr"] is not None:
            check_finite("float_lr", group["float_lr"])
        check_number("damping", group["damping"], 0.0, 1.0)
        check_number("clip", group["clip"], 1.0)
        check_int("refresh_every", group["refresh_every"], 1, 2**62)
        if group["writeback"] is not None:
            check_choice("writeback", group["writeback"], WRITEBACKS)

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        manifold = own_manifold(parameter)
        if manifold is None:
            self._step_elsewhere(group, parameter, state, manifold_of(parameter) or _EUCLIDEAN)
            return
        before = parameter.detach().to(working_dtype(parameter))
        self._refresh(group, manifold, before, state)
        chart, unit = _bounded_chart(group, manifold, before.dtype, state["reference"])
        gradient = self._gradient(group, parameter) * (chart.stiffness(before / unit) * unit)
        steps = self._direction(group, parameter, state, gradient) * -float(group["lr"])
        decay = group["weight_decay"] * _progress(group)
        start = before * (1 - decay) if decay else before
        limit = manifold.scale.to(before.dtype) * manifold.format.max
        if getattr(manifold, "retraction", "exponential") == "euclidean":
            moved = start + steps * (chart.stiffness(start / unit) * unit)
        else:
            moved = torch.where(steps == 0, start, chart.shift(start / unit, steps) * unit)
        target = torch.minimum(torch.maximum(moved, -limit), limit)
        self._write(group, parameter, state, target, manifold.stiffness(before))

    def _refresh(self, group: dict[str, Any], manifold: StiffnessManifold, x: Tensor, state: dict[str, Any]) -> None:
        """Compute S_ref and the bounded share when that is due."""
        if (int(state["step"]) - 1) % group["refresh_every"]:
            return
        stiffness = manifold.stiffness(x)
        state["reference"] = reference_stiffness(stiffness)
        bounded = manifold.metric == "ulp"
        low, high = _bounds(group, state["reference"]) if bounded else (0.0, math.inf)
        unit, _ = _unit_and_exponent(manifold.scale.to(x.dtype))
        state["bounded"] = bounded_share(stiffness / unit, 1.0, low, high)

    def _direction(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], gradient: Tensor) -> Tensor:
        """The step's direction in chart coordinates, from the gradient with respect to them."""
        raise NotImplementedError

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> None:
        """A step on another manifold of geoopt's, or in Euclidean space."""
        raise NotImplementedError

    def _learning_rate_elsewhere(self, group: dict[str, Any]) -> float:
        """``float_lr`` follows the schedule of ``lr``; without one, ``lr`` itself."""
        return float(group["lr"]) if group["float_lr"] is None else group["float_lr"] * _progress(group)


def with_l2(gradient: Tensor, point: Tensor, group: dict[str, Any]) -> Tensor:
    """geoopt's L2 decay, without writing into the gradient."""
    return gradient + point * group["weight_decay"] if group["weight_decay"] else gradient


def _progress(group: dict[str, Any]) -> float:
    """``lr / initial_lr``: how far a schedule has taken the learning rate from what its group was made with.

    A key of our own keeps that: schedulers write theirs, ``initial_lr``, and OneCycleLR puts the warm-up's start there.
    """
    start = float(group["start_lr"])
    return float(group["lr"]) / start if start else 1.0


def _bounds(group: dict[str, Any], reference: float) -> tuple[float, float]:
    """The powers of two between which the stiffness is kept: the bounds rounded outwards."""
    low = 2.0 ** math.floor(math.log2(group["damping"] * reference)) if group["damping"] else 0.0
    high = 2.0 ** math.ceil(math.log2(group["clip"] * reference)) if math.isfinite(group["clip"]) else math.inf
    return low, high


def _bounded_chart(
    group: dict[str, Any], manifold: StiffnessManifold, dtype: torch.dtype, reference: float
) -> tuple[Chart, Tensor]:
    """The chart whose stiffness stays within the bounds, and the unit of value it is in.

    The unit is the scale without its power of two, which goes into the chart's ends instead: there the bounds,
    common to the tensor, meet the smallest exponents, which differ from channel to channel.
    """
    scale = manifold.scale.to(dtype)
    if manifold.metric != "ulp":
        return manifold._chart, scale
    fmt = manifold.format
    unit, exponent = _unit_and_exponent(scale)
    low, high = _bounds(group, reference)
    lowest = exponent + fmt.emin
    highest = exponent + fmt.emax
    if low:
        lowest = lowest.clamp(min=int(math.log2(low)) + fmt.mantissa_bits)
    if math.isfinite(high):
        highest = highest.clamp(max=int(math.log2(high)) + fmt.mantissa_bits)
    return UlpChart(fmt.mantissa_bits, lowest, torch.maximum(highest, lowest)), unit


def _unit_and_exponent(scale: Tensor) -> tuple[Tensor, Tensor]:
    """A scale as ``unit * 2^exponent`` with ``unit`` in [1, 2)."""
    mantissa, exponent = torch.frexp(scale)
    return mantissa * 2, exponent - 1
