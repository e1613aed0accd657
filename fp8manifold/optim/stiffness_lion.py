"""StiffnessLion: Lion whose step is scaled, weight by weight, with a power of the local ULP."""

from typing import Any, Unpack

from torch import Tensor

from fp8manifold.optim._checks import Family, check_betas, lr_of, spelt_out
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._stiffness import StiffnessOptimizer

__all__ = ["StiffnessLion"]


class StiffnessLion(StiffnessOptimizer):
    """Lion over weights that live on a grid: one average, and steps of one size for all weights of a binade.

    .. math:: w \\leftarrow \\mathrm{round}\\left( (1 - \\eta \\lambda) w
              - \\eta \\left( \\mathrm{clamp}(S(w) / S_{ref}, damping, clip) \\right)^k
              \\operatorname{sign}(\\beta_1 m + (1 - \\beta_1) g) \\right), \\quad m = \\beta_2 m + (1 - \\beta_2) g

    ``k = 0``, the default, is Lion with a rounded write-back; with ``k = 1`` a step is ``lr / S_ref`` ULPs everywhere
    between the bounds.  Ordinary parameters get plain Lion.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr: learning rate, Lion's: a third to a tenth of AdamW's.
        betas: of the interpolation, and of the average.
        weight_decay: decoupled decay, times ``lr`` a step.
        stiffness, metric, writeback, draws, moments, seed, damping, clip, refresh_every, maximize,
            on_nonfinite, stabilize_every, reset_every: as in :class:`StiffnessAdamW`, without ``writeback="momentum"``.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.linspace(0.25, 1, 4), "E4M3", seed=0)
        >>> optimizer = StiffnessLion([weight], lr=0.02)
        >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        >>> for _ in range(600):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> bool((weight - 0.5).abs().max() < 0.15)
        True

    Source: Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms).
    """

    direction = "lion"

    @spelt_out()
    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Family],
    ) -> None:
        own = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, own | options)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        super()._check_group(group)

    def _numbers(self, slot: Slot) -> dict[str, float]:
        beta1, beta2 = slot.group["betas"]
        rate = lr_of(slot.group)
        numbers = {"beta1": beta1, "gain1": 1 - beta1, "beta2": beta2, "gain2": 1 - beta2, "rate": rate}
        return numbers | self._shared_numbers(slot)
