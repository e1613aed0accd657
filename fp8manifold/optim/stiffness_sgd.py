"""StiffnessSGD: SGD whose step is scaled, weight by weight, with a power of the local ULP."""

import math
from typing import Any, Unpack

from torch import Tensor

from fp8manifold._base.checks import check_number
from fp8manifold.optim._checks import Family, lr_of, spelt_out
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._stiffness import StiffnessOptimizer, injected
from fp8manifold.optim._writeback import rule_of

__all__ = ["StiffnessSGD", "check_momentum", "momentum_numbers"]


class StiffnessSGD(StiffnessOptimizer):
    """SGD with momentum over weights that live on a grid.

    .. math:: b = \\mu b + (1 - \\tau) g, \\qquad w \\leftarrow \\mathrm{round}\\left( (1 - \\eta \\lambda) w
              - \\eta \\left( \\mathrm{clamp}(S(w) / S_{ref}, damping, clip) \\right)^k b \\right)

    ``k = 0``, the default, is SGD with a rounded write-back.  A gradient is a covector, so that its Riemannian step is
    ``S^2 g``: ``stiffness=2.0``.  Unlike ``torch.optim.SGD`` the decay is decoupled from the gradient.  Ordinary
    parameters get plain SGD with the same learning rate.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr: learning rate, SGD's.
        momentum, dampening, nesterov: as in ``torch.optim.SGD``; the buffer starts from the first gradient.
        weight_decay: decoupled decay, times ``lr`` a step.
        stiffness, metric, writeback, draws, moments, seed, damping, clip, refresh_every, maximize,
            on_nonfinite, stabilize_every, reset_every: as in :class:`StiffnessAdamW`; ``writeback="momentum"``
            and ``moments`` need ``momentum`` > 0, the former without Nesterov.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`; Nesterov needs momentum and no dampening.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.linspace(0.25, 1, 4), "E4M3", seed=0)
        >>> optimizer = StiffnessSGD([weight], lr=0.1, momentum=0.5)
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - 0.5).abs().max() < 0.1)
        True

    Source: Bonnabel 2013 for Riemannian SGD; the momentum is torch's.
    """

    direction = "sgd"

    @spelt_out()
    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-1,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Family],
    ) -> None:
        own = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, own | options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_momentum(group)

    def _fields(self, slot: Slot) -> dict[str, Any]:
        moments = {"has_moments": bool(slot.group["momentum"]), "nesterov": slot.group["nesterov"]}
        return super()._fields(slot) | moments

    def _numbers(self, slot: Slot) -> dict[str, float]:
        numbers = momentum_numbers(lr_of(slot.group), slot.group, first=slot.age == 1)
        return numbers | self._shared_numbers(slot)


def momentum_numbers(rate: float, group: dict[str, Any], *, first: bool) -> dict[str, float]:
    """SGD's numbers; the buffer starts from the whole gradient."""
    momentum = group["momentum"]
    gain = 1.0 if first else 1 - group["dampening"]
    return {"beta1": momentum, "gain1": gain, "rate": rate, "inject": injected(rate, momentum)}


def check_momentum(group: dict[str, Any]) -> None:
    """Raise ValueError unless momentum, dampening and Nesterov fit each other, the write-back and the moments."""
    momentum = group["momentum"]
    check_number("momentum", momentum, 0.0, math.inf, open_high=True)
    check_number("dampening", group["dampening"], -math.inf)
    if group["nesterov"] and (momentum <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov=True needs momentum > 0 and dampening = 0: momentum={momentum}, dampening={group['dampening']}"
        )
    if rule_of(group).injects and (not 0 < momentum < 1 or group["nesterov"]):
        raise ValueError(
            f"writeback={group['writeback']!r} needs 0 < momentum < 1 without Nesterov: momentum={momentum}, "
            f"nesterov={group['nesterov']}"
        )
    if group["moments"] != "float32" and not momentum:
        raise ValueError(f"moments={group['moments']!r} needs momentum > 0: without it there is no momentum to store")
