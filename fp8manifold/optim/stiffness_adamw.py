"""StiffnessAdamW: AdamW whose step is scaled, weight by weight, with a power of the local ULP."""

from typing import Any

import torch
from torch import Tensor

from fp8manifold._charts import Metric, chart_of
from fp8manifold._checks import check_choice, check_int, check_number
from fp8manifold._float_bits import working_dtype
from fp8manifold.formats import FloatFormat
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
from fp8manifold.optim._directions import adam
from fp8manifold.optim._field import bounded_share, power_of_ratio, reference_stiffness
from fp8manifold.optim._schedules import Schedule, scheduled
from fp8manifold.optim._writeback import WRITEBACKS

__all__ = ["StiffnessAdamW"]


class StiffnessAdamW(ManifoldOptimizer):
    """AdamW over weights that live on a grid, with steps proportional to a power of the local spacing.

    .. math:: w \\leftarrow \\mathrm{round}\\left( (1 - \\eta \\lambda) w
              - \\eta \\left( \\mathrm{clamp}(S(w) / S_{ref}, damping, clip) \\right)^k d \\right)

    with Adam's direction ``d`` (of size about 1), learning rate ``eta``, decoupled decay ``lambda`` and ``S_ref`` the
    mean of ``S`` over the tensor.  Everything is computed in float32 (float64 for float64 parameters) and rounded
    once.  ``k = 0`` is AdamW with a rounded write-back, ``k = 1`` approximates the Riemannian step.

    A parameter on an :class:`~fp8manifold.FP8Manifold` is rounded to its grid, one on a
    :class:`~fp8manifold.StiffnessManifold` is stepped without rounding, and an ordinary one gets plain AdamW with the
    same learning rate; all may share a list.

    Args:
        params: parameters, or groups of them with options of their own, as for any ``torch.optim`` optimizer.
        lr: learning rate in value, AdamW's: a number or a tensor of one element.
        betas: decay rates of the running averages.
        eps: added to the denominator.
        weight_decay: decoupled decay, times ``lr`` a step.
        stiffness: the exponent k: a number, or a function of the number of steps taken, such as :func:`anneal`.
        metric: what S is: ``ulp``, ``log``, ``euclidean`` or a function S(x, fmt).
        writeback: ``stochastic`` or ``nearest``.
        seed: key of the stochastic write-back; its bits also depend on the step and on the parameter's position.
        damping: lower bound of S / S_ref, so that weights near zero keep moving in formats of many binades.
        clip: upper bound of S / S_ref, so that outliers do not run away.
        refresh_every: steps between two computations of S_ref (and of ``bounded_share``).
        maximize: ascend instead.
        on_nonfinite: ``skip`` leaves out a whole step with a gradient that is not finite, ``raise`` raises.
        stabilize_every: project parameters to their manifold every so many steps.
        reset_every: clear the running averages every so many steps.

    Attributes:
        bounded_share: share of the quantised weights whose ratio met ``damping`` or ``clip`` at the last refresh.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, an unsupported torch flag, no parameters, or a parameter on a manifold of
            another library (use :class:`RiemannianAdam` there).

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3")
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.linspace(-1, 1, 5)), manifold=manifold)
        >>> optimizer = StiffnessAdamW([weight], lr=0.05)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - 0.5).abs().max() < 0.15)
        True

    Warning:
        Other ``torch.optim`` AdamW defaults differ: here ``betas=(0.9, 0.95)`` and ``weight_decay=0``.

    Source: Loshchilov and Hutter 2019 for the decoupled decay; the stiffness factor is this library's.
    """

    preconditioner = frozenset({"exp_avg", "exp_avg_sq"})

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        stiffness: Schedule = 1.0,
        metric: Metric = "ulp",
        writeback: str = "stochastic",
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
            "stiffness": stiffness,
            "metric": metric,
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
            on_nonfinite=on_nonfinite,
            stabilize_every=stabilize_every,
            reset_every=reset_every,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_betas(group["betas"])
        check_finite("eps", group["eps"])
        check_number("damping", group["damping"], 0.0, 1.0)
        check_number("clip", group["clip"], 1.0)
        check_int("refresh_every", group["refresh_every"], 1, 2**62)
        check_choice("writeback", group["writeback"], WRITEBACKS)
        scheduled("stiffness", group["stiffness"], 0, -8.0, 8.0)
        chart_of(FloatFormat(4, 3), group["metric"])
        for parameter in group["params"]:
            if manifold_of(parameter) is not None and own_manifold(parameter) is None:
                raise ValueError(
                    f"{type(self).__name__} can't step a parameter on {manifold_of(parameter)}: "
                    "use fp8manifold.optim.RiemannianAdam"
                )

    def _check_schedules(self) -> None:
        """Ask for every exponent of the step, once, before anything has changed."""
        self._exponents: dict[Tensor, float] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and own_manifold(parameter) is not None:
                    done = int(self.state[parameter]["step"]) if parameter in self.state else 0
                    self._exponents[parameter] = scheduled("stiffness", group["stiffness"], done, -8.0, 8.0)

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        if "exp_avg" not in state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(parameter.shape, dtype=working_dtype(parameter), device=parameter.device)
        step = int(state["step"])
        direction = adam(
            self._gradient(group, parameter),
            state["exp_avg"],
            state["exp_avg_sq"],
            None,
            betas=group["betas"],
            eps=group["eps"],
            step=step - state.get("since", 0),
        )
        before = parameter.detach().to(working_dtype(parameter))
        manifold = own_manifold(parameter)
        lr = float(group["lr"])
        if manifold is None:
            parameter.copy_(_descend(before, direction, lr, group["weight_decay"]))
            return
        stiffness = self._stiffness(group, manifold, before, state, step)
        direction *= power_of_ratio(
            stiffness, state["reference"], self._exponents[parameter], group["damping"], group["clip"]
        )
        target = _descend(before, direction, lr, group["weight_decay"])
        self._write(group, parameter, state, target, stiffness)

    def _stiffness(
        self, group: dict[str, Any], manifold: StiffnessManifold, x: Tensor, state: dict[str, Any], step: int
    ) -> Tensor:
        """The field S of the group's metric, its reference refreshed when that is due."""
        scale = manifold.scale.to(x.dtype)
        stiffness = chart_of(manifold.format, group["metric"]).stiffness(x / scale) * scale
        if (step - 1) % group["refresh_every"] == 0:
            state["reference"] = reference_stiffness(stiffness)
            state["bounded"] = bounded_share(stiffness, state["reference"], group["damping"], group["clip"])
        return stiffness


def _descend(w: Tensor, direction: Tensor, lr: float, weight_decay: float) -> Tensor:
    """``(1 - lr wd) w - lr d``; overwrites the direction."""
    kept = w * (1 - lr * weight_decay) if weight_decay else w
    return kept - direction.mul_(lr)
