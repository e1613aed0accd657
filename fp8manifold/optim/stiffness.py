"""The stiffness family: AdamW, SGD and Lion over weights that live on a grid."""

import math
from functools import lru_cache
from typing import Any

from torch import Tensor

from fp8manifold._base.checks import check_choice, check_number
from fp8manifold._numerics.charts import Metric, chart_of
from fp8manifold._numerics.stiffness import log2_bounded
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._checks import (
    Schedule,
    check_first_moment,
    lr_of,
    options_in,
    scheduled,
)
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Parameters, Slot, manifold_of, stiffness_manifold_of
from fp8manifold.optim._writeback import WRITEBACKS, rule_of
from fp8manifold.random_bits import Draws

_LARGEST_POWER = 8.0
_MODES = {0.0: "none", 1.0: "linear", 0.5: "sqrt", 2.0: "square"}
"""Exponents whose power is computed exactly; any other goes through :func:`exp2_exact`."""


class StiffnessOptimizer(ManifoldOptimizer):
    """``w - lr (S / S_ref)^k d``, of which subclasses give the direction ``d`` and its
    numbers.
    """

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_choice("writeback", group["writeback"], WRITEBACKS)  # None is for manifolds
        if "stiffness" in group:
            scheduled("stiffness", group["stiffness"], 0, -_LARGEST_POWER, _LARGEST_POWER)
            chart_of(FloatFormat(4, 3), group["metric"])
        for parameter in group["params"]:
            if manifold_of(parameter) is not None and stiffness_manifold_of(parameter) is None:
                raise ValueError(
                    f"{type(self).__name__} can't step a parameter on {manifold_of(parameter)}: "
                    "use fp8manifold.optim.RiemannianAdam"
                )

    def _check_schedules(self, slots: list[Slot]) -> None:
        """Set the exponent of each slot; a schedule is called once for all parameters
        with as many steps.
        """
        powers: dict[tuple[int, int], float] = {}
        for slot in slots:
            power, key = slot.group.get("stiffness", 0.0), (id(slot.group), slot.steps_done)
            if callable(power):
                if key not in powers:
                    powers[key] = scheduled(
                        "stiffness", power, slot.steps_done, -_LARGEST_POWER, _LARGEST_POWER
                    )
                power = powers[key]
            slot.power = power

    def _fields(self, slot: Slot) -> dict[str, Any]:
        if slot.fmt is None:
            return {"direction": self.direction}
        k = slot.group["stiffness"]
        mode = "power" if callable(k) else _MODES.get(float(k), "power")
        return {"direction": self.direction, "metric": slot.group["metric"], "stiffness": mode}

    def _shared_numbers(self, slot: Slot) -> dict[str, float]:
        """Decay, and for a quantised parameter S_ref, its bounds and the exponent."""
        group, state = slot.group, slot.state
        numbers = {"keep": 1 - lr_of(group) * group["weight_decay"]}
        if "reference" in state:
            numbers |= _field_numbers(
                state["reference"], group[self.damping_option], group["clip"], slot.power
            )
        return numbers


@lru_cache(maxsize=4096)
def _field_numbers(reference: float, damping: float, clip: float, power: float) -> dict[str, float]:
    return {
        "inverse_reference": 1 / reference,
        "log_reference": log2_bounded(reference),
        "low": damping,
        "high": clip,
        "log_low": log2_bounded(damping),
        "log_high": log2_bounded(clip),
        "power": power,
    }


def injected(rate: float, beta: float) -> float:
    """``(1 - beta) / beta / rate``: how much of a rounding error a moment is given;
    nothing at rate 0.
    """
    return (1 - beta) / beta / rate if rate and beta else 0.0


@lru_cache(maxsize=256)
def adam_numbers(lr: float, betas: tuple[float, float], eps: float, step: int) -> dict[str, float]:
    """Adam's numbers, with its bias corrections in the rate and in eps."""
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    rate = lr * correction / (1 - beta1**step)
    return {
        "beta1": beta1,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "eps": eps * correction,
        "rate": rate,
        "inject": injected(rate, beta1),
    }


class StiffnessAdamW(StiffnessOptimizer):
    r"""AdamW over weights on a grid, with steps proportional to a power of the local
    spacing.

    .. math:: w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k d \right)

    with Adam's direction ``d``, learning rate ``eta``, decoupled decay ``lambda`` and
    ``S_ref`` the mean of ``S``; computed in float32 (float64 for float64 parameters)
    and rounded once. ``k = 0``, the default, is AdamW with a rounded write-back
    (``docs/optimizers.md`` lists what differs from torch's); ``k = 1`` approximates the
    Riemannian step. Points of a :class:`~fp8manifold.StiffnessManifold` are not
    rounded, and ordinary parameters get plain AdamW.

    Args:
        params: parameters, or groups of them with options of their own, as for any
            ``torch.optim`` optimizer.
        lr: learning rate in value, a number or a tensor of one element.
        betas: decay rates of the running averages.
        eps: added to the denominator.
        weight_decay: decoupled decay, times ``lr`` per step.
        stiffness: the exponent k: a number, or a function of the steps taken, such as
            :func:`anneal`.
        metric: what S is: ``ulp``, ``log``, ``euclidean`` or a function S(x, fmt).
        writeback: ``nearest``, ``stochastic``, ``residual8`` (a byte per weight for the
            remainder of rounding, to 1/256 of an ULP; a new 0 is +0) or ``momentum``
            (the error is added to the first average). Ordinary bfloat16 and float16
            parameters are rounded stochastically under all but ``nearest``; finite
            values saturate.
        draws: ``independent``, or ``dither``, with less noise and a pull towards 0:
            decay is 7% too strong in E4M3, 12% in E5M2
            (:func:`fp8manifold.random_bits`). Draws for moments are always independent.
        moments: the averages in ``float32``, ``bfloat16`` or ``8bit`` (block-wise E4M3,
            the second as its square root; Muon's in E2M5), the last two rounded
            stochastically: in 8 bits ``1 / sqrt(v)`` is right in the mean, ``v`` 4 to
            6% too large.
        seed: key of all random bits, with the step count and the parameter's stream.
        damping: lower bound of S / S_ref, so that weights near zero keep moving in
            formats of many binades.
        clip: upper bound of S / S_ref, so that outliers do not run away.
        refresh_every: steps between two computations of S_ref (and of
            ``bounded_share``).
        maximize: ascend instead.
        on_nonfinite: ``skip`` skips the whole step if a gradient is not finite,
            ``raise`` raises.
        stabilize_every: project parameters to their manifold every so many steps.
        reset_every: clear the running averages every so many steps.
        flags: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``,
            which must be False or None.

    Attributes:
        bounded_share: share of the quantised weights whose ratio was at ``damping`` or
            ``clip`` at the last refresh.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range, an unsupported flag or combination, no
            parameters, another manifold.

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

    Options that ``torch.optim.AdamW`` has too have the same defaults.

    Source: Loshchilov and Hutter 2019 for the decoupled decay; the stiffness factor is
    this library's.
    """

    direction = "adam"

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

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group = slot.group
        numbers = adam_numbers(lr_of(group), tuple(group["betas"]), group["eps"], slot.age)
        return numbers | self._shared_numbers(slot)


class StiffnessSGD(StiffnessOptimizer):
    r"""SGD with momentum over weights that live on a grid.

    .. math:: b = \mu b + (1 - \tau) g, \qquad w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k b \right)

    The Riemannian step is ``S^2 g``: ``stiffness=2.0``. Unlike in torch, decay is
    decoupled.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr, momentum, dampening, nesterov: as in ``torch.optim.SGD``; the buffer starts
            from the first gradient.
        weight_decay: decoupled decay, times ``lr`` per step.
        stiffness, metric, draws, seed, damping, clip: as in :class:`StiffnessAdamW`.
        writeback, moments: as in :class:`StiffnessAdamW`; ``writeback="momentum"`` and ``moments`` need
            ``momentum`` > 0, the former without Nesterov.
        refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`; Nesterov needs momentum and
            no dampening.

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

    def _numbers(self, slot: Slot) -> dict[str, float]:
        return sgd_numbers(slot) | self._shared_numbers(slot)


def momentum_numbers(rate: float, momentum: float, gain: float) -> dict[str, float]:
    """Numbers of a step by one average, which is given ``gain`` of the gradient."""
    return {"beta1": momentum, "gain1": gain, "rate": rate, "inject": injected(rate, momentum)}


def sgd_numbers(slot: Slot) -> dict[str, float]:
    """SGD's numbers; the buffer starts from the gradient without dampening."""
    group = slot.group
    return momentum_numbers(
        lr_of(group), group["momentum"], 1.0 if slot.age == 1 else 1 - group["dampening"]
    )


def check_momentum(group: dict[str, Any]) -> None:
    """Raise ValueError unless momentum, dampening and Nesterov fit each other, the
    write-back and the moments.
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
    if group["moments"] != "float32" and not momentum:
        raise ValueError(
            f"moments={group['moments']!r} needs momentum > 0: without it there is no momentum to "
            "store"
        )


class StiffnessLion(StiffnessOptimizer):
    r"""Lion over weights that live on a grid: one average, and steps of the same size
    for all weights of a binade.

    .. math:: w \leftarrow \mathrm{round}\left( (1 - \eta \lambda) w
              - \eta \left( \mathrm{clamp}(S(w) / S_{ref}, damping, clip) \right)^k
              \operatorname{sign}(\beta_1 m + (1 - \beta_1) g) \right), \quad m = \beta_2 m + (1 - \beta_2) g

    With ``k = 1`` a step is ``lr / S_ref`` ULPs everywhere between the bounds. Ordinary
    parameters get plain Lion.

    Args:
        params: parameters or groups, quantised and ordinary ones mixed.
        lr: learning rate, Lion's: a third to a tenth of AdamW's.
        betas: of the interpolation, and of the average.
        weight_decay: decoupled decay, times ``lr`` per step.
        stiffness, metric, draws, moments, seed: as in :class:`StiffnessAdamW`.
        writeback: as in :class:`StiffnessAdamW`, without ``writeback="momentum"``.
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

    def _numbers(self, slot: Slot) -> dict[str, float]:
        beta1, beta2 = slot.group["betas"]
        rate = lr_of(slot.group)
        numbers = {
            "beta1": beta1,
            "gain1": 1 - beta1,
            "beta2": beta2,
            "gain2": 1 - beta2,
            "rate": rate,
        }
        return numbers | self._shared_numbers(slot)
