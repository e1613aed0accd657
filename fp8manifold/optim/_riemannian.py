"""What the Riemannian optimizers share: groups of mixed parameters, the bounded chart, one step on either kind."""

import math
from typing import Any

import geoopt
import torch
from torch import Tensor

from fp8manifold._numerics.charts import Metric
from fp8manifold._ranks import Share, local_of, share_of, spread
from fp8manifold.optim._agreement import in_every_process
from fp8manifold.optim._directions import AVERAGES
from fp8manifold.optim._field import bounded_share
from fp8manifold.optim._finite import squares_are_finite
from fp8manifold.optim._geometry import bounds
from fp8manifold.optim._grid_optimizer import GridOptimizer
from fp8manifold.optim._halves import rounds_at_random, to_half
from fp8manifold.optim._job import Job, Member
from fp8manifold.optim._options import check_finite
from fp8manifold.optim._plan import Grid, expanded, grid_of, is_quantized, manifold_of, stiffness_field
from fp8manifold.random_bits import draw_range, stream_of

__all__ = ["Riemannian", "with_l2"]

_EUCLIDEAN = geoopt.Euclidean()
_LR_OWN, _LR_OTHER = 0.5, 1e-3


class Riemannian(GridOptimizer):
    """Groups of mixed parameters, the bounded chart, and the write-back, shared by the two optimizers."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that mixes quantised with ordinary parameters needs ``float_lr``."""
        if not isinstance(param_group, dict) or isinstance(param_group.get("params", set()), set):
            super().add_param_group(param_group)  # torch says what is wrong with it
        if "stabilize" in param_group:
            param_group["stabilize_every"] = param_group.pop("stabilize")
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in param_group["params"]]
        own = [isinstance(p, Tensor) and is_quantized(p) for p in tensors]
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
        kinds = [{is_quantized(p) for p in group["params"]} for group in self.param_groups]
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

    def _plan(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> Job | None:
        if is_quantized(parameter):
            return super()._plan(group, parameter, state)
        share, manifold = share_of(parameter), manifold_of(parameter) or _EUCLIDEAN
        if share is None:
            moved = self._step_elsewhere(group, parameter, state, manifold)
            _store(parameter, moved, group, state, 0)
        else:
            self._step_rows(group, parameter, state, share)
        return None

    def _step_rows(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], share: Share) -> None:
        """The same of this process' rows of an ordinary parameter; where it has none, of one row of 0."""
        held, rows = {name: local_of(value) for name, value in state.items()}, share.local
        gradient = local_of(parameter.grad)
        if not rows.numel():
            held = {name: value for name, value in held.items() if name not in AVERAGES}
            rows = torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            gradient = torch.zeros_like(rows)
        rows.grad = gradient
        moved = self._step_elsewhere(group, rows, held, _EUCLIDEAN)
        rows.grad = None
        _store(rows, moved, group, state, share.offset)
        for name in held.keys() - state.keys():
            state[name] = spread(parameter, held[name][: len(share.local)])

    def _stores_moments(self, parameter: Tensor) -> bool:
        return is_quantized(parameter)

    def _ready(self, members: list[Member]) -> bool:
        """Finite squares of the gradient with respect to codes too, where it may exceed the gradient."""
        if not super()._ready(members):
            return False
        stepped = [(group, p) for group, p in members if p.numel() and is_quantized(p)]
        factors = [self._code_factor(group, p) for group, p in stepped]  # before any of the following may raise

        def here() -> bool:
            each = [squares_are_finite(*member, factor) for member, factor in zip(stepped, factors, strict=True)]
            return all(each)

        return in_every_process(self, here)

    def _gradient_factor(self, group: dict[str, Any], parameter: Tensor) -> float:
        return max(self._code_factor(group, parameter), 1.0) if is_quantized(parameter) else 1.0

    def _code_factor(self, group: dict[str, Any], parameter: Tensor) -> float:
        """An upper bound of what the gradient is multiplied by to be one with respect to codes."""
        return self._largest_stiffness(group, parameter)

    def _largest_stiffness(self, group: dict[str, Any], parameter: Tensor) -> float:
        """An upper bound of the stiffness in this step's chart; exact where the step is going to look at it anew."""
        state = self.state.get(parameter, {})
        reference, due = state.get("reference"), int(state.get("step", 0)) % group["refresh_every"] == 0
        if reference is None or due or not math.isfinite(group["clip"]):
            grid = grid_of(parameter)
            field = stiffness_field(grid, grid.metric)
            return float(grid.ranks.largest(field.max() if field.numel() else field.new_zeros(())))
        return bounds(reference, group["damping"], group["clip"])[1]

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        assert grid is not None
        geometry = "tangent" if grid.retraction == "euclidean" else "exponential"
        return {"direction": self.direction, "metric": grid.metric, "geometry": geometry}

    def _metric(self, group: dict[str, Any], grid: Grid) -> Metric:
        return grid.metric

    def _bounded(self, group: dict[str, Any], grid: Grid, stiffness: Tensor, reference: float) -> float:
        if grid.metric != "ulp":
            return 0.0
        low, high = bounds(reference, group["damping"], group["clip"])
        assert grid.scale is not None
        unit = torch.frexp(expanded(grid.scale, grid.weight.shape, grid.block_size)).mantissa * 2
        return bounded_share(stiffness / unit, 1.0, low, high, grid.ranks)

    def _progress_numbers(self, group: dict[str, Any]) -> dict[str, float]:
        """Decay as a share of the weight a step, which follows the schedule of ``lr``."""
        return {"keep": 1 - group["weight_decay"] * _progress(group)}

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> Tensor:
        """Where a step on another manifold of geoopt's, or in Euclidean space, leads, in the working dtype."""
        raise NotImplementedError

    def _learning_rate_elsewhere(self, group: dict[str, Any]) -> float:
        """``float_lr`` follows the schedule of ``lr``; without one, ``lr`` itself."""
        return float(group["lr"]) if group["float_lr"] is None else group["float_lr"] * _progress(group)


def _store(parameter: Tensor, moved: Tensor, group: dict[str, Any], state: dict[str, Any], offset: int) -> None:
    """Write back what is no number of ours, with one rounding."""
    if rounds_at_random(parameter, group):
        key = stream_of(group.get("draws") or "independent", group["seed"], int(state["step"]), state["stream"])
        draws = draw_range(offset, moved.numel(), key, moved.device).view(moved.shape)
        moved = to_half(moved.contiguous(), parameter.dtype, draws)
    parameter.copy_(moved)


def with_l2(gradient: Tensor, point: Tensor, group: dict[str, Any]) -> Tensor:
    """geoopt's L2 decay, without writing into the gradient."""
    return gradient + point * group["weight_decay"] if group["weight_decay"] else gradient


def _progress(group: dict[str, Any]) -> float:
    """``lr / initial_lr``: how far a schedule has taken the learning rate from what its group was made with.

    A key of our own keeps that: schedulers write theirs, ``initial_lr``, and OneCycleLR puts the warm-up's start there.
    """
    start = float(group["start_lr"])
    return float(group["lr"]) / start if start else 1.0
