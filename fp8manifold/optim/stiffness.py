"""AdamW, SGD and Lion over weights that live on a grid.

    w <- round((1 - lr decay) w  -  lr clamp(S(w) / S_ref)^k d)

A class here is its options, and two answers that the base class asks for in a step of
each parameter (a `Slot`):

- `_fields`: the parts of a step that are fixed: the direction ``d`` by its name, the
  metric ``S``, and the way in which the exponent ``k`` is computed.
- `_numbers`: what changes from step to step, a function of `_step_numbers.py`: rates with
  bias corrections, decay, ``S_ref`` and its bounds.

Nothing is computed on weights here. `ManifoldOptimizer` runs the step, directions are
functions of `_directions.py`, and `_eager_step.py` has the arithmetic.
"""

import math
from typing import Any

from torch import Tensor

from fp8manifold._base.checks import check_choice, check_number
from fp8manifold._interface import MomentStorage, StiffnessPower
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._checks import check_first_moment, options_in
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Parameters, Slot, foreign_manifold_of
from fp8manifold.optim._step_numbers import (
    LARGEST_EXPONENT,
    Schedule,
    adamw_numbers,
    lion_numbers,
    scheduled,
    set_exponents,
    sgd_numbers,
)
from fp8manifold.optim._writeback import WRITEBACKS, rule_of
from fp8manifold.random_bits import Draws

_EXACT_POWERS = {
    0.0: StiffnessPower.NONE,
    0.5: StiffnessPower.SQRT,
    1.0: StiffnessPower.LINEAR,
    2.0: StiffnessPower.SQUARE,
}
"""The exponents whose power is computed exactly."""


class StiffnessOptimizer(ManifoldOptimizer):
    """Base of the optimizers that step by ``w - lr (S / S_ref)^k d``.

    Subclasses give the direction ``d`` and its numbers.
    """

    _apply_schedules = staticmethod(set_exponents)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        # None, a manifold's own rounding, is for the Riemannian optimizers alone
        check_choice("writeback", group["writeback"], WRITEBACKS)
        if "stiffness" in group:
            scheduled("stiffness", group["stiffness"], 0, -LARGEST_EXPONENT, LARGEST_EXPONENT)
            # raises for what is no metric
            chart_of(FloatFormat(4, 3), group["metric"])
        for parameter in group["params"]:
            manifold = foreign_manifold_of(parameter)
            if manifold is not None:
                raise ValueError(
                    f"{type(self).__name__} can't step a parameter on {manifold}: "
                    "use fp8manifold.optim.RiemannianAdam"
                )

    def _fields(self, slot: Slot) -> dict[str, Any]:
        if slot.fmt is None:
            return {"direction": self.direction}
        k = slot.group["stiffness"]
        power = StiffnessPower.ANY
        if not callable(k):
            power = _EXACT_POWERS.get(float(k), StiffnessPower.ANY)
        return {"direction": self.direction, "metric": slot.group["metric"], "stiffness": power}

    def _number_facts(self, slot: Slot) -> tuple[Any, ...]:
        # without an exponent no step reads S_ref
        return () if slot.spec.stiffness == StiffnessPower.NONE else super()._number_facts(slot)


class StiffnessAdamW(StiffnessOptimizer):
    r"""AdamW over weights on a grid, with steps proportional to a power of its spacing.

    .. math:: w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k d \right)

    Here ``d`` is Adam's direction, ``eta`` the learning rate, ``lambda`` the decoupled
    decay, ``S(w)`` the spacing of the grid at ``w`` and ``S_ref`` its mean over the
    tensor. A step is computed in float32 (float64 for float64 parameters) and rounded
    once.

    ``k = 0``, the default, is AdamW with a rounded write-back; ``docs/optimizers.md``
    lists what differs from torch's. ``k = 1`` approximates the Riemannian step.

    Points of a :class:`~fp8manifold.StiffnessManifold` are not rounded. Ordinary
    parameters take plain AdamW steps. Options that ``torch.optim.AdamW`` has too have
    the same defaults.

    Args:
        params: parameters, or groups of them with options of their own, as for any
            ``torch.optim`` optimizer.
        lr: learning rate in value, a number or a tensor of one element.
        betas: decay rates of the running averages.
        eps: added to the denominator.
        weight_decay: decoupled decay, multiplied by ``lr`` in every step.
        stiffness: the exponent k: a number in [-8, 8], or a function of the number of
            steps taken, such as :func:`anneal`.
        metric: what S is: ``ulp``, ``log``, ``euclidean`` or a function S(x, fmt), as
            in :class:`~fp8manifold.StiffnessManifold`.
        writeback: how a step becomes codes. ``nearest`` loses steps below half an ULP.
            ``stochastic`` rounds at random, so that the average result is exact.
            ``residual8`` stores the remainder of rounding to 1/256 of an ULP, in one
            more byte per weight; a new 0 is +0. ``momentum`` adds the rounding error to
            the first average, in units of the step's rate: a rate that rises again later,
            as with warm restarts, multiplies it, and a training can diverge. Ordinary
            bfloat16 and float16 parameters are rounded stochastically under all of them but
            ``nearest``. Finite values saturate.
        draws: random bits of stochastic rounding: ``independent`` in every step, or
            ``dither``, with less noise and a pull towards 0, which makes decay 7% too
            strong in E4M3 and 12% in E5M2 (see :func:`fp8manifold.random_bits`). Draws
            for moments are always independent.
        moments: how the averages are stored. ``float32`` stores them exactly;
            ``bfloat16`` and ``8bit`` round them stochastically. ``8bit`` is E4M3 with a
            scale for each block, and stores the second average as its square root: the
            mean of ``1 / sqrt(v)`` is exact, ``v`` is 4 to 6% too large. Muon's average
            is in E2M5.
        seed: key of all random bits, together with the number of the step and the
            stream of the parameter.
        damping: lower bound of S / S_ref, so that weights near zero keep moving in
            formats of many binades.
        clip: upper bound of S / S_ref, so that outliers do not run away.
        refresh_every: steps between two computations of S_ref and ``bounded_share``.
        maximize: ascend instead of descend.
        on_nonfinite: what happens if a gradient or its square is not finite: ``skip``
            skips the whole step, ``raise`` raises FloatingPointError.
        stabilize_every: project parameters to their manifold every so many steps.
        reset_every: clear the running averages every so many steps.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``,
            which must be False or None.

    Attributes:
        bounded_share: share of the quantised weights whose S / S_ref was at ``damping``
            or ``clip`` at the last refresh.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, an unsupported flag or combination, no
            parameters, or a parameter on another manifold of geoopt's.

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

    Source: Loshchilov and Hutter 2019 for the decoupled decay; the stiffness factor is
    this library's.
    """

    direction = "adam"
    _numbers = staticmethod(adamw_numbers)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        stiffness: Schedule = 0.0,
        metric: Metric = "ulp",
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
        super()._check_group(group)
        check_first_moment(group)


class StiffnessSGD(StiffnessOptimizer):
    r"""SGD with momentum over weights that live on a grid.

    .. math:: b \leftarrow \mu b + (1 - \tau) g, \qquad
              w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k b \right)

    ``mu`` is the momentum and ``tau`` the dampening. The Riemannian step is ``S^2 g``,
    which is ``stiffness=2.0``. Unlike in torch, decay is decoupled.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr, momentum, dampening, nesterov: as in ``torch.optim.SGD``. The momentum
            starts from the first gradient, without dampening.
        weight_decay: decoupled decay, multiplied by ``lr`` in every step.
        stiffness, metric, draws, seed, damping, clip: as in :class:`StiffnessAdamW`.
        writeback: as in :class:`StiffnessAdamW`; ``momentum`` needs 0 < ``momentum`` < 1
            and no Nesterov.
        moments: as in :class:`StiffnessAdamW`; all but ``float32`` need ``momentum`` > 0.
        refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Raises:
        TypeError: as :class:`StiffnessAdamW`.
        ValueError: as :class:`StiffnessAdamW`, or Nesterov without momentum or with
            dampening.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.ones(2), "E4M3", seed=0)
        >>> optimizer = StiffnessSGD([weight], lr=0.25, momentum=0.5)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]

    Source: Bonnabel 2013 for Riemannian SGD; the momentum is torch's.
    """

    direction = "sgd"
    _numbers = staticmethod(sgd_numbers)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        stiffness: Schedule = 0.0,
        metric: Metric = "ulp",
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
        super()._check_group(group)
        check_momentum(group)


def check_momentum(group: dict[str, Any]) -> None:
    """Raise ValueError unless SGD's options of the momentum fit each other.

    These are momentum, dampening, Nesterov, the write-back and the moments.
    """
    momentum = group["momentum"]
    check_number("momentum", momentum, 0.0, math.inf, open_high=True)
    check_number("dampening", group["dampening"], -math.inf)
    if group["nesterov"] and (momentum <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov=True needs momentum > 0 and dampening = 0: momentum={momentum}, "
            f"dampening={group['dampening']}"
        )
    if rule_of(group).injects and (not 0 < momentum < 1 or group["nesterov"]):
        raise ValueError(
            f"writeback={group['writeback']!r} needs 0 < momentum < 1 without Nesterov: "
            f"momentum={momentum}, nesterov={group['nesterov']}"
        )
    if group["moments"] != MomentStorage.FLOAT32 and not momentum:
        raise ValueError(
            f"moments={group['moments']!r} needs momentum > 0 (momentum=0 keeps no moment to store)"
        )


class StiffnessLion(StiffnessOptimizer):
    r"""Lion over weights that live on a grid.

    Lion has one average, and its steps have the same size for all weights of a binade.

    .. math:: w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k
              \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) \right), \\
              m \leftarrow \beta_2 m + (1 - \beta_2) g

    With ``k = 1`` a step is ``lr / S_ref`` ULPs everywhere between the bounds. Ordinary
    parameters take plain Lion steps.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr: learning rate; Lion's is a third to a tenth of AdamW's.
        betas: decay rates of the interpolation and of the average.
        weight_decay: decoupled decay, multiplied by ``lr`` in every step.
        stiffness, metric, draws, moments, seed: as in :class:`StiffnessAdamW`.
        writeback: as in :class:`StiffnessAdamW`, except ``momentum``.
        damping, clip, refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`.

    Example:
        >>> import fp8manifold as fm, torch
        >>> weight = fm.FP8Parameter(torch.ones(2), "E4M3", seed=0)
        >>> optimizer = StiffnessLion([weight], lr=0.25)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.75, 0.75]

    Source: Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms).
    """

    direction = "lion"
    _numbers = staticmethod(lion_numbers)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        stiffness: Schedule = 0.0,
        metric: Metric = "ulp",
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
