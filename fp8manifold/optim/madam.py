"""Madam: multiplicative steps, additive near zero."""

import math
from typing import Any

from torch import Tensor

from fp8manifold._base.checks import check_number
from fp8manifold.optim._checks import check_betas, check_finite, lr_of, options_in
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim.stiffness import StiffnessOptimizer, adam_numbers
from fp8manifold.random_bits import Draws

__all__ = ["Madam"]


class Madam(StiffnessOptimizer):
    """Steps that multiply a weight, for formats whose values are spaced multiplicatively.

    .. math:: w \\leftarrow \\mathrm{round}\\left( w \\, e^{-\\operatorname{sign}(w) \\eta d} \\right)
              \\text{ where } |w| \\ge f, \\qquad \\mathrm{round}(w - f \\eta d) \\text{ elsewhere}, \\qquad
              d = \\mathrm{clamp}(g / \\sqrt{\\hat v}, -c, c)

    A multiplicative step can't change a sign, nor leave zero.  So below the floor ``f = escape * 2^M S_ref`` it
    becomes additive: the two have the same value and slope where they meet.  The step is taken in value and rounded
    once; on a logarithmic chart stochastic rounding would be biased.

    Ordinary parameters (norms, embeddings, biases) get AdamW at ``float_lr``, since zeros are common there.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr: learning rate: the share by which a weight changes in a step, times ``d``.
        betas: of ordinary parameters; the second one is that of ``v`` everywhere.
        eps: added to the denominator.
        weight_decay: decoupled decay, times ``lr`` (``float_lr`` for ordinary parameters) a step.
        float_lr: learning rate of ordinary parameters; it follows ``lr``'s schedule.
        max_direction: the bound ``c``.
        escape: the floor, as a share of the tensor's mean binade.
        writeback, draws, moments, seed, damping, clip, refresh_every, maximize, on_nonfinite,
            stabilize_every, reset_every: as in :class:`StiffnessAdamW`, without ``writeback="momentum"``; ``damping``
            and ``clip`` only say what ``bounded_share`` counts.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.tensor([-1.0, 0.0, 0.25, 1.0]), "E7M0", seed=0)
        >>> optimizer = Madam([weight], lr=0.05)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight > 0.2).all())  # also those that started at -1 and 0
        True

    Source: Bernstein et al. 2020 (arXiv 2006.14560); the additive escape is this library's.
    """

    direction = "madam"

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        float_lr: float = 1e-3,
        max_direction: float = 10.0,
        escape: float = 2.0**-4,
        writeback: str = "stochastic",
        draws: Draws = "independent",
        moments: str = "float32",
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
        super().__init__(params, options_in(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        check_finite("eps", group["eps"])
        check_finite("float_lr", group["float_lr"])
        check_number("max_direction", group["max_direction"], 0.0, open_low=True)
        check_number("escape", group["escape"], 0.0, open_low=True)
        super()._check_group(group)

    def _fields(self, slot: Slot) -> dict[str, Any]:
        return {"direction": "adam"} if slot.fmt is None else {"direction": "madam", "geometry": "multiplicative"}

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group, lr, start = slot.group, lr_of(slot.group), slot.group["start_lr"]
        if slot.fmt is None:
            lr = group["float_lr"] * (lr / start if start else 1.0)
        numbers = adam_numbers(lr, tuple(group["betas"]), group["eps"], slot.age)
        numbers = numbers | {"keep": 1 - lr * group["weight_decay"]}
        if slot.fmt is None:
            return numbers
        return numbers | {
            "rate": lr,
            "correction": math.sqrt(1 - group["betas"][1] ** slot.age),
            "largest": group["max_direction"],
            "floor": group["escape"] * slot.state["reference"] * 2.0**slot.fmt.mantissa_bits,
        }
