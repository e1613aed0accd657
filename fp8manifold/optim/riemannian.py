"""RiemannianAdam and RiemannianSGD: geoopt's signatures, with steps counted in ULPs on this library's manifolds."""

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
    check_betas,
    check_finite,
    manifold_of,
    own_manifold,
    reject_flags,
)
from fp8manifold.optim._directions import adam, sgd
from fp8manifold.optim._field import bounded_share, reference_stiffness
from fp8manifold.optim._writeback import WRITEBACKS

__all__ = ["RiemannianAdam", "RiemannianSGD"]

_EUCLIDEAN = geoopt.Euclidean()
_LR_OWN, _LR_OTHER = 0.5, 1e-3


class _Riemannian(ManifoldOptimizer):
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


class RiemannianAdam(_Riemannian):
    """Riemannian Adam with geoopt's signature, a drop-in over quantised parameters.

    On this library's manifolds it is Adam in the chart: with gradient ``S g`` of the code, one rounding a step,

    .. math:: w \\leftarrow \\mathrm{round}\\left(\\exp_{(1 - \\lambda \\eta / \\eta_0) w}(-\\eta \\, S \\, d)\\right),
              \\qquad d = \\frac{\\hat m}{\\sqrt{\\hat v} + \\epsilon S_{ref}}

    so ``lr`` is in **ULPs a step** (default 0.5).  The averages live in code coordinates, where parallel transport
    does nothing.  On other manifolds of geoopt's and on ordinary parameters it takes geoopt's steps, L2 decay
    included, at ``float_lr``, without touching ``.grad``.

    Args:
        params: parameters or groups.
        lr: ULPs a step on our manifolds; by default 0.5 there, and geoopt's 1e-3 for a group without any.
        betas, eps, weight_decay, amsgrad: as in geoopt; on our manifolds decay is decoupled, a fraction
            ``weight_decay * lr / initial_lr`` of the weight a step, ``initial_lr`` being the one given here.
        stabilize: project every so many steps (geoopt's name of ``stabilize_every``).
        float_lr: learning rate of the parameters that are not on our manifolds; it follows ``lr``'s schedule and is
            required where a list mixes both kinds.
        writeback: ``nearest`` or ``stochastic``; None takes the manifold's own rounding.  The random bits are the
            optimizer's (seed, step, position of the parameter), not the manifold's counter.
        seed: key of the stochastic write-back.
        damping, clip: bounds of S / S_ref, taken to powers of two, inside which the chart is the format's own; outside
            it is linear.  Metrics other than ``ulp`` are not bounded.
        refresh_every: steps between two computations of S_ref.
        maximize, on_nonfinite, stabilize_every, reset_every: as in :class:`StiffnessAdamW`.

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

    preconditioner = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})

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
        writeback: str | None = None,
        seed: int = 0,
        damping: float = 2.0**-8,
        clip: float = 2.0**4,
        refresh_every: int = 100,
        maximize: bool = False,
        on_nonfinite: str = "skip",
        stabilize_every: int | None = None,
        reset_every: int | None = None,
        **flags: Any,
    ) -> None:
        reject_flags(type(self).__name__, flags)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "writeback": writeback,
            "seed": seed,
            "damping": damping,
            "clip": clip,
            "refresh_every": refresh_every,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            float_lr=float_lr,
            on_nonfinite=on_nonfinite,
            stabilize_every=stabilize_every if stabilize is None else stabilize,
            reset_every=reset_every,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_betas(group["betas"])
        check_finite("eps", group["eps"])

    def _direction(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], gradient: Tensor) -> Tensor:
        _make_averages(group, parameter, state)
        return adam(
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("max_exp_avg_sq"),
            betas=group["betas"],
            eps=group["eps"] * state["reference"],
            step=int(state["step"]) - state.get("since", 0),
        )

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> None:
        _make_averages(group, parameter, state)
        beta1, beta2 = group["betas"]
        step = int(state["step"]) - state.get("since", 0)
        point = parameter.detach().to(working_dtype(parameter))
        gradient = manifold.egrad2rgrad(point, _with_l2(self._gradient(group, parameter), point, group))
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(manifold.component_inner(point, gradient), alpha=1 - beta2)
        if group["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        direction = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt_().add_(group["eps"]))
        moved, transported = manifold.retr_transp(point, -self._learning_rate_elsewhere(group) * direction, first)
        parameter.copy_(moved)
        first.copy_(transported)


class RiemannianSGD(_Riemannian):
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
        stabilize, float_lr, writeback, seed, damping, clip, refresh_every, maximize, on_nonfinite, stabilize_every,
            reset_every: as in :class:`RiemannianAdam`.

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

    preconditioner = frozenset({"momentum_buffer"})

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
        writeback: str | None = None,
        seed: int = 0,
        damping: float = 2.0**-8,
        clip: float = 2.0**4,
        refresh_every: int = 100,
        maximize: bool = False,
        on_nonfinite: str = "skip",
        stabilize_every: int | None = None,
        reset_every: int | None = None,
        **flags: Any,
    ) -> None:
        reject_flags(type(self).__name__, flags)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "writeback": writeback,
            "seed": seed,
            "damping": damping,
            "clip": clip,
            "refresh_every": refresh_every,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            float_lr=float_lr,
            on_nonfinite=on_nonfinite,
            stabilize_every=stabilize_every if stabilize is None else stabilize,
            reset_every=reset_every,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_finite("momentum", group["momentum"])
        check_number("dampening", group["dampening"], -math.inf)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening = 0: "
                f"momentum={group['momentum']}, dampening={group['dampening']}"
            )

    def _direction(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], gradient: Tensor) -> Tensor:
        momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
        if momentum and "momentum_buffer" not in state:
            state["momentum_buffer"] = gradient.clone()
            return gradient * (1 + momentum) if nesterov else gradient
        buffer = state["momentum_buffer"] if momentum else None
        return sgd(gradient, buffer, momentum=momentum, dampening=dampening, nesterov=nesterov)

    def _step_elsewhere(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> None:
        point = parameter.detach().to(working_dtype(parameter))
        gradient = manifold.egrad2rgrad(point, _with_l2(self._gradient(group, parameter), point, group))
        direction = self._direction(group, parameter, state, gradient)
        step = -self._learning_rate_elsewhere(group) * direction
        if not group["momentum"]:
            parameter.copy_(manifold.retr(point, step))
            return
        moved, transported = manifold.retr_transp(point, step, state["momentum_buffer"])
        state["momentum_buffer"].copy_(transported)
        parameter.copy_(moved)


def _make_averages(group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
    names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    for name in names:
        if name not in state:
            state[name] = torch.zeros(parameter.shape, dtype=working_dtype(parameter), device=parameter.device)


def _with_l2(gradient: Tensor, point: Tensor, group: dict[str, Any]) -> Tensor:
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
