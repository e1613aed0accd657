"""StiffnessAdamW: AdamW whose step is scaled, weight by weight, with a power of the local ULP."""

from typing import Any, Unpack

from torch import Tensor

from fp8manifold.optim._checks import Family, check_betas, check_finite, check_first_moment, lr_of, spelt_out
from fp8manifold.optim._slot import Parameters, Slot
from fp8manifold.optim._stiffness import StiffnessOptimizer, adam_numbers


class StiffnessAdamW(StiffnessOptimizer):
    """AdamW over weights that live on a grid, with steps proportional to a power of the local spacing.

    .. math:: w \\leftarrow \\mathrm{round}\\left( (1 - \\eta \\lambda) w
              - \\eta \\left( \\mathrm{clamp}(S(w) / S_{ref}, damping, clip) \\right)^k d \\right)

    with Adam's direction ``d`` (of size about 1), learning rate ``eta``, decoupled decay ``lambda`` and ``S_ref`` the
    mean of ``S`` over the tensor.  Everything is computed in float32 (float64 for float64 parameters) and rounded
    once.  ``k = 0``, the default, is AdamW with a rounded write-back; ``k = 1`` approximates the Riemannian step.

    An :class:`~fp8manifold.FP8Parameter` and a parameter on an :class:`~fp8manifold.FP8Manifold` are rounded to their
    grid, one on a :class:`~fp8manifold.StiffnessManifold` is stepped without rounding, and an ordinary one gets plain
    AdamW with the same learning rate; all may share a list.

    Args:
        params: parameters, or groups of them with options of their own, as for any ``torch.optim`` optimizer.
        lr: learning rate in value, AdamW's: a number or a tensor of one element.
        betas: decay rates of the running averages.
        eps: added to the denominator.
        weight_decay: decoupled decay, times ``lr`` a step.
        stiffness: the exponent k, 0 for AdamW: a number, or a function of the steps taken, such as :func:`anneal`.
        metric: what S is: ``ulp``, ``log``, ``euclidean`` or a function S(x, fmt).
        writeback: how what was asked for becomes a point of the grid.  ``nearest`` and ``stochastic`` round.
            ``residual8`` keeps what rounding leaves in a byte a weight, rounded stochastically to 1/256 of an ULP (a -0
            becomes +0).  ``momentum`` rounds stochastically and gives the error to the first average.  Ordinary
            bfloat16 and float16 parameters are rounded to their dtype: to nearest under ``nearest``, stochastically
            under all others, finite values saturating.
        draws: random draws of one weight, step by step: ``independent``, or ``dither``, which spreads them evenly, so
            that less noise adds up, and pulls weights towards 0: decay is 7% too strong in E4M3, 12% in E5M2
            (:func:`fp8manifold.random_bits`).  Those of moments are independent.  A weight's own ``draws`` are for
            optimizers that have none.
        moments: how the averages are stored: ``float32``, ``bfloat16`` or ``8bit`` (block-wise E4M3, the second as its
            square root; of Muon E2M5), the last two with stochastic rounding that is right in the mean.  Of the second
            average in 8 bits that is ``1 / sqrt(v)``, which a step goes with; ``v`` itself is 4 to 6% above.  float64
            parameters have float64 averages under ``float32``.
        seed: key of all random bits; they also depend on the step and on the parameter's position.
        damping: lower bound of S / S_ref, so that weights near zero keep moving in formats of many binades.
        clip: upper bound of S / S_ref, so that outliers do not run away.
        refresh_every: steps between two computations of S_ref (and of ``bounded_share``).
        maximize: ascend instead.
        on_nonfinite: ``skip`` leaves out a whole step with a gradient that is not finite, ``raise`` raises.
        stabilize_every: project parameters to their manifold every so many steps.
        reset_every: clear the running averages every so many steps.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, which must be False or None.

    Attributes:
        bounded_share: share of the quantised weights whose ratio met ``damping`` or ``clip`` at the last refresh.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, an unsupported torch flag or combination, no parameters, or a parameter on
            a manifold of another library (use :class:`RiemannianAdam` there).

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.linspace(-1, 1, 5), "E4M3", seed=0)
        >>> optimizer = StiffnessAdamW([weight], lr=0.05)
        >>> for _ in range(300):
        ...     optimizer.zero_grad()
        ...     (weight - 0.5).square().sum().backward()
        ...     optimizer.step()
        >>> bool((weight - 0.5).abs().max() < 0.15)
        True

    What differs from ``torch.optim.AdamW``:

    ==================  ==================================  ========================================================
    option              ``torch.optim.AdamW``               here
    ==================  ==================================  ========================================================
    ``betas``           (0.9, 0.999)                        (0.9, 0.95)
    ``weight_decay``    0.01                                0.0; decoupled alike, times ``lr``
    ``eps``             1e-8, added to sqrt(v / (1 - b^t))  the same
    write-back          each operation rounds in place      float32 (float64) throughout, rounded once
    averages            in the parameter's dtype            float32, bfloat16 or 8 bits (``moments``)
    non-finite          steps, and the weights become NaN   the step is left out and counted (``on_nonfinite``)
    ``amsgrad``         offered                             not offered
    torch's flags       ``foreach``, ``fused``, ...         refused: native code steps all parameters in one call
    ==================  ==================================  ========================================================

    With ``betas=(0.9, 0.999), weight_decay=0.01`` the steps of float32 parameters are torch's to within rounding.

    Source: Loshchilov and Hutter 2019 for the decoupled decay; the stiffness factor is this library's.
    """

    direction = "adam"

    @spelt_out()
    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Family],
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, own | options)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_betas(group["betas"])
        check_finite("eps", group["eps"])
        super()._check_group(group)
        check_first_moment(group)

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group = slot.group
        numbers = adam_numbers(lr_of(group), tuple(group["betas"]), group["eps"], slot.age)
        return numbers | self._shared_numbers(slot)
