"""RiemannianAdam and RiemannianSGD: geoopt's signatures, with steps counted in ULPs on this library's manifolds."""

import math
from typing import Any, Unpack

import geoopt
import torch
from torch import Tensor

from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold.optim._accepted import check_first_average
from fp8manifold.optim._directions import DIRECTIONS
from fp8manifold.optim._field import reference_stiffness
from fp8manifold.optim._job import Job, Parameters
from fp8manifold.optim._options import Charted, check_betas, check_finite, spelt_out
from fp8manifold.optim._plan import Grid, grid_of, stiffness_field
from fp8manifold.optim._riemannian import Riemannian, with_l2
from fp8manifold.optim._units import change_unit, unit_of
from fp8manifold.optim.stiffness_adamw import adam_numbers
from fp8manifold.optim.stiffness_sgd import check_momentum, momentum_numbers

__all__ = ["RiemannianAdam", "RiemannianSGD"]


class RiemannianAdam(Riemannian):
    """Riemannian Adam with geoopt's signature, a drop-in over quantised parameters.

    On this library's manifolds it is Adam in the chart: with gradient ``S g`` of the code, one rounding a step,

    .. math:: w \\leftarrow \\mathrm{round}\\left(\\exp_{(1 - \\lambda \\eta / \\eta_0) w}(-\\eta \\, S \\, d)\\right),
              \\qquad d = \\frac{\\hat m}{\\sqrt{\\hat v} + \\epsilon S_{ref}}

    so ``lr`` is in **ULPs a step** (default 0.5).  The averages live in code coordinates, where parallel transport
    does nothing, in multiples of a power of two next to the stiffness (``unit`` in the state), so that no size of
    weights takes their squares out of float32.  On other manifolds of geoopt's and on ordinary parameters it takes
    geoopt's steps, L2 decay included, at ``float_lr``, without touching ``.grad``.

    Args:
        params: parameters or groups.
        lr: ULPs a step on our manifolds; by default 0.5 there, and geoopt's 1e-3 for a group without any.
        betas, eps, weight_decay, amsgrad: as in geoopt; on our manifolds decay is decoupled, a fraction
            ``weight_decay * lr / initial_lr`` of the weight a step, ``initial_lr`` being the one given here.
        stabilize: project every so many steps (geoopt's name of ``stabilize_every``).
        float_lr: learning rate of the parameters that are not on our manifolds; it follows ``lr``'s schedule and is
            required where a list mixes both kinds.
        writeback, draws, moments: as in :class:`StiffnessAdamW`; a write-back of None takes the manifold's own rounding
            and ``draws`` of None its own, with stochastic and independent ones for ordinary bfloat16 and float16
            parameters.  The random bits are the optimizer's (seed,
            step, position of the parameter), not the manifold's counter.  Parameters elsewhere have float32 averages.
        seed: key of all random bits.
        damping, clip: bounds of S / S_ref, taken to powers of two, inside which the chart is the format's own; outside
            it is linear.  Metrics other than ``ulp`` are not bounded.
        refresh_every: steps between two computations of S_ref.
        compile, maximize, on_nonfinite, stabilize_every, reset_every: as in :class:`StiffnessAdamW`.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Attributes:
        bounded_share: share of the quantised weights that met a bound at the last refresh.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, an unsupported torch flag, no parameters, a mixed list without
            ``float_lr``.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.linspace(0.25, 1, 4)), manifold=manifold)
        >>> optimizer = RiemannianAdam([weight], lr=0.5)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - 0.5).abs().max() < 0.15)
        True

    Source: Becigneul and Ganea 2019; geoopt (Kochurov et al. 2020).
    """

    direction = "adam"

    @spelt_out(writeback=None, draws=None)
    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        stabilize: int | None = None,
        float_lr: float | None = None,
        **options: Unpack[Charted],
    ) -> None:
        own = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "float_lr": float_lr,
        }
        super().__init__(params, own | options | ({} if stabilize is None else {"stabilize_every": stabilize}))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_betas(group["betas"])
        check_finite("eps", group["eps"])

        if group["amsgrad"] and group["moments"] != "float32":
            raise ValueError(f"amsgrad=True does not go with moments={group['moments']!r}: a maximum can't be rounded")
        check_first_average(group)

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        return super()._traits(group, parameter, grid) | {"amsgrad": group["amsgrad"]}

    def _refresh(self, group: dict[str, Any], grid: Grid, state: dict[str, Any]) -> None:
        super()._refresh(group, grid, state)
        change_unit(state, unit_of(group, grid, state["reference"]))

    def _code_factor(self, group: dict[str, Any], parameter: Tensor) -> float:
        """Nothing exceeds its unit where the chart is bounded; states of older versions have none yet."""
        state = self.state.get(parameter, {})
        if "reference" in state and "unit" not in state:
            return super()._code_factor(group, parameter)
        grid = grid_of(parameter)
        if grid.metric == "ulp" and math.isfinite(group["clip"]):
            return 0.0
        field = stiffness_field(grid, grid.metric)
        largest = float(grid.ranks.largest(field.max() if field.numel() else field.new_zeros(())))
        return largest / unit_of(group, grid, reference_stiffness(field, grid.ranks))

    def _numbers(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], job: Job) -> dict[str, float]:
        step = int(state["step"]) - state.get("since", 0)
        per_unit = 1 / state.get("unit", 1.0)
        eps = group["eps"] * state["reference"] * per_unit
        numbers = adam_numbers(float(group["lr"]), tuple(group["betas"]), eps, step)
        return numbers | self._progress_numbers(group) | {"per_unit": per_unit}

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> Tensor:
        _make_averages(group, parameter, state)
        beta1, beta2 = group["betas"]
        step = int(state["step"]) - state.get("since", 0)
        point = parameter.detach().to(working_dtype(parameter))
        gradient = manifold.egrad2rgrad(point, with_l2(_ascending(group, parameter), point, group))
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(manifold.component_inner(point, gradient), alpha=1 - beta2)
        if group["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        direction = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt_().add_(group["eps"]))
        moved: Tensor
        moved, transported = manifold.retr_transp(point, -self._learning_rate_elsewhere(group) * direction, first)
        first.copy_(transported)
        return moved


class RiemannianSGD(Riemannian):
    """Riemannian SGD with geoopt's signature, over quantised and other parameters.

    On this library's manifolds it is SGD in the chart: the code moves by ``-lr S g`` ULPs, momentum is kept in code
    coordinates and starts from the first gradient there, decay is decoupled, and the result is rounded once:

    .. math:: w \\leftarrow \\mathrm{round}\\left(\\exp_{(1 - \\lambda \\eta / \\eta_0) w}(-\\eta \\, S \\, b)\\right),
              \\qquad b = \\mu b + (1 - \\tau) S g

    Args:
        params: parameters or groups.
        lr: ULPs a step for a code gradient ``S g`` of 1; by default 0.5 on our manifolds, 1e-3 elsewhere.
        momentum, dampening, nesterov: as in ``torch.optim.SGD``.
        weight_decay: as in :class:`RiemannianAdam`.
        stabilize, float_lr, writeback, draws, moments, seed, damping, clip, refresh_every, compile, maximize,
            on_nonfinite, stabilize_every, reset_every: as in :class:`RiemannianAdam`.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Raises:
        TypeError, ValueError: as :class:`RiemannianAdam`; Nesterov needs momentum and no dampening.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.linspace(0.25, 1, 4)), manifold=manifold)
        >>> optimizer = RiemannianSGD([weight], lr=10.0)
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - 0.5).abs().max() < 0.1)
        True

    Source: Bonnabel 2013; geoopt (Kochurov et al. 2020).
    """

    direction = "sgd"

    @spelt_out(writeback=None, draws=None)
    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        stabilize: int | None = None,
        *,
        float_lr: float | None = None,
        **options: Unpack[Charted],
    ) -> None:
        own = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "float_lr": float_lr,
        }
        super().__init__(params, own | options | ({} if stabilize is None else {"stabilize_every": stabilize}))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_momentum(group)

    def _traits(self, group: dict[str, Any], parameter: Tensor, grid: Grid | None) -> dict[str, Any]:
        averages = {"averages": bool(group["momentum"]), "nesterov": group["nesterov"]}
        return super()._traits(group, parameter, grid) | averages

    def _numbers(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], job: Job) -> dict[str, float]:
        first = int(state["step"]) - state.get("since", 0) == 1
        numbers = momentum_numbers(float(group["lr"]), group, first=first) | self._progress_numbers(group)
        return numbers | {"per_unit": 1.0}

    def _momentum(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor) -> Tensor:
        """The direction off our manifolds, in place where there is a buffer."""
        momentum, nesterov = group["momentum"], group["nesterov"]
        if not momentum:
            return gradient
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = gradient.clone()
        else:
            state["momentum_buffer"].mul_(momentum).add_(gradient * (1 - group["dampening"]))
        buffer: Tensor = state["momentum_buffer"]
        return gradient + buffer * momentum if nesterov else buffer

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> Tensor:
        point = parameter.detach().to(working_dtype(parameter))
        gradient = manifold.egrad2rgrad(point, with_l2(_ascending(group, parameter), point, group))
        direction = self._momentum(group, state, gradient)
        step = -self._learning_rate_elsewhere(group) * direction
        if not group["momentum"]:
            reached: Tensor = manifold.retr(point, step)
            return reached
        moved: Tensor
        moved, transported = manifold.retr_transp(point, step, state["momentum_buffer"])
        state["momentum_buffer"].copy_(transported)
        return moved


def _ascending(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """The gradient in the working dtype, turned around where the objective is maximised."""
    assert parameter.grad is not None
    gradient = parameter.grad.to(working_dtype(parameter))
    return -gradient if group["maximize"] else gradient


def _make_averages(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
    for name in (*DIRECTIONS["adam"].averages, *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        if name not in state:
            state[name] = torch.zeros(parameter.shape, dtype=working_dtype(parameter), device=parameter.device)
