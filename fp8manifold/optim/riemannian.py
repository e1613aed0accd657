"""RiemannianAdam and RiemannianSGD: geoopt's signatures, with steps counted in ULPs on
this library's manifolds.
"""

import math
from typing import Any, Final

import geoopt
import torch
from torch import Tensor

from fp8manifold._base.float_bits import working_dtype
from fp8manifold._encoded.storage import expand_scale
from fp8manifold._numerics.charts import Retraction
from fp8manifold._numerics.stiffness import bounded_share, reference_stiffness, stiffness_bounds
from fp8manifold._ranks import local_of, spread
from fp8manifold.optim._agreement import in_every_process
from fp8manifold.optim._checks import check_first_moment, lr_of, options_in
from fp8manifold.optim._directions import DIRECTIONS, MOMENT_NAMES
from fp8manifold.optim._finite import squares_are_finite
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Parameters, Slot, is_quantized, manifold_of, stiffness_field
from fp8manifold.optim._spec import BOUNDS
from fp8manifold.optim._writeback import rounds_at_random, to_half
from fp8manifold.optim.stiffness import adam_numbers, check_momentum, sgd_numbers
from fp8manifold.random_bits import Draws, draw_range

__all__ = ["RiemannianAdam", "RiemannianSGD"]

_POWERS: Final = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_LARGEST_EXPONENT: Final = 126  # of a power of two whose reciprocal is a float32, too


def unit_of(slot: Slot, reference: float) -> float:
    """A power of two no less than any stiffness of the bounded chart; next to S_ref
    where there is no bound.
    """
    bounded = slot.metric == "ulp" and math.isfinite(slot.group["clip"])
    largest = stiffness_bounds(reference, 0.0, slot.group["clip"])[1] if bounded else reference
    exponent = math.frexp(largest)[1] - (
        0 if bounded else 1
    )  # above ``largest``: a scale may be no power of two
    return math.ldexp(1.0, min(max(exponent, -_LARGEST_EXPONENT), _LARGEST_EXPONENT))


def change_unit(state: dict[str, Any], unit: float) -> None:
    """Convert the moments to another unit, exactly unless one underflows; a state
    without a unit has 1.
    """
    old, state["unit"] = state.get("unit", 1.0), unit
    for name, power in _POWERS.items() if unit != old else ():
        for each in (name, BOUNDS.get(name, "")):
            kept = state.get(each)
            if kept is None or kept.dtype.itemsize == 1:  # codes are in units of their bounds
                continue
            change = power * (math.frexp(old)[1] - math.frexp(unit)[1])
            for part in range(4):  # the whole factor may be no float32
                local_of(kept).mul_(math.ldexp(1.0, (change + part) // 4))


_EUCLIDEAN = geoopt.Euclidean()
_LR_OWN, _LR_OTHER = 0.5, 1e-3


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """The options, changed in place, with geoopt's ``stabilize`` under this library's
    name.
    """
    every, own = options.pop("stabilize", None), options.get("stabilize_every")
    if every is not None and own not in (None, every):
        raise ValueError(
            f"stabilize={every!r} and stabilize_every={own!r} are one option by two names: pass one"
        )
    if every is not None:
        options["stabilize_every"] = every
    return options


class Riemannian(ManifoldOptimizer):
    """The base of both optimizers: groups of mixed parameters, the bounded chart, and
    the write-back.
    """

    stores_all_moments = False

    def __init__(self, params: Parameters, options: dict[str, Any]) -> None:
        super().__init__(params, _renamed(options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that mixes quantised with ordinary parameters needs
        ``float_lr``.
        """
        if not isinstance(param_group, dict) or isinstance(param_group.get("params", set()), set):
            super().add_param_group(param_group)  # torch says what is wrong with it
        params = _renamed(param_group)["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in param_group["params"]]
        own = [isinstance(p, Tensor) and is_quantized(p) for p in tensors]
        explicit = param_group.get("lr") is not None
        if param_group.get("lr", self.defaults["lr"]) is None:
            param_group["lr"] = _LR_OWN if any(own) else _LR_OTHER
        param_group["own_lr"] = explicit or self.defaults["lr"] is None
        super().add_param_group(param_group)
        kinds = [{is_quantized(p) for p in group["params"]} for group in self.param_groups]
        any_own = any(True in kind for kind in kinds)
        for group, kind in zip(self.param_groups, kinds, strict=True):
            shares_lr = True in kind or (any_own and not group["own_lr"])
            if False in kind and shares_lr and group["float_lr"] is None:
                self.param_groups.pop()
                raise ValueError(
                    f"lr={group['lr']} is in ULPs per step on quantised parameters, and the groups "
                    "have ordinary ones "
                    "too: pass float_lr=... for these (1e-3, say), or put them in a group with its "
                    "own lr"
                )

    def _prepare(self, slot: Slot) -> None:
        if slot.fmt is not None:
            super()._prepare(slot)

    def _take(self, slots: list[Slot]) -> None:
        """Take the steps of ordinary parameters, and of those on other manifolds,
        without a backend.
        """
        for slot in slots:
            if slot.fmt is None:
                self._take_elsewhere(slot)
        super()._take([slot for slot in slots if slot.fmt is not None])

    def _take_elsewhere(self, slot: Slot) -> None:
        """Step a parameter that is not on our manifolds: its rows here, or one row of 0
        where there are none.
        """
        manifold = manifold_of(slot.parameter) or _EUCLIDEAN
        if slot.share is None:
            _store(
                slot,
                slot.parameter,
                self._step_elsewhere(slot, slot.parameter, slot.state, manifold),
            )
            return
        held, rows = {name: local_of(value) for name, value in slot.state.items()}, slot.share.local
        gradient = local_of(slot.parameter.grad)
        if not rows.numel():
            held = {name: value for name, value in held.items() if name not in MOMENT_NAMES}
            rows = torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            gradient = torch.zeros_like(rows)
        rows.grad = gradient
        moved = self._step_elsewhere(slot, rows, held, _EUCLIDEAN)
        rows.grad = None
        _store(slot, rows, moved)
        for name in held.keys() - slot.state.keys():
            slot.state[name] = spread(slot.parameter, held[name][: len(slot.share.local)])

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check the squares of gradients with respect to codes too, which may exceed
        those of the gradients.
        """
        if not super()._may_step(slots):
            return False
        stepped = [slot for slot in slots if slot.fmt is not None and slot.parameter.numel()]
        factors = [
            self._code_factor(slot) for slot in stepped
        ]  # before any of the following may raise

        def here() -> bool:
            each = [
                squares_are_finite(slot, factor)
                for slot, factor in zip(stepped, factors, strict=True)
            ]
            return all(each)

        return in_every_process(self, here)

    def _gradient_factor(self, slot: Slot) -> float:
        return 1.0 if slot.fmt is None else max(self._code_factor(slot), 1.0)

    def _code_factor(self, slot: Slot) -> float:
        """An upper bound of the stiffness in this step's chart, the factor from
        gradients to those of codes.
        """
        reference, due = (
            slot.state.get("reference"),
            slot.steps_done % slot.group["refresh_every"] == 0,
        )
        if reference is None or due or not math.isfinite(slot.group["clip"]):
            return _largest(slot, stiffness_field(slot, slot.metric))
        return stiffness_bounds(reference, slot.group["damping"], slot.group["clip"])[1]

    def _fields(self, slot: Slot) -> dict[str, Any]:
        geometry = "tangent" if slot.retraction == "euclidean" else "exponential"
        return {"direction": self.direction, "metric": slot.metric, "geometry": geometry}

    def _bounded(self, slot: Slot, stiffness: Tensor, reference: float) -> float:
        if slot.metric != "ulp":
            return 0.0
        low, high = stiffness_bounds(reference, slot.group["damping"], slot.group["clip"])
        assert slot.scale is not None
        unit = (
            torch.frexp(expand_scale(slot.scale, slot.block_size, slot.weight.shape)).mantissa * 2
        )
        return bounded_share(stiffness / unit, 1.0, low, high, slot.ranks)

    def _step_elsewhere(
        self, slot: Slot, parameter: Tensor, state: dict[str, Any], manifold: geoopt.Manifold
    ) -> Tensor:
        """The end of a step on another manifold of geoopt's, or in Euclidean space, in
        the working dtype.
        """
        group, point = slot.group, parameter.detach().to(working_dtype(parameter))
        assert parameter.grad is not None
        gradient = parameter.grad.to(point.dtype)
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:  # geoopt's L2 decay
            gradient = gradient + point * group["weight_decay"]
        gradient = manifold.egrad2rgrad(point, gradient)
        direction, first = self._descend_elsewhere(slot, point, gradient, state, manifold)
        lr = lr_of(group) if group["float_lr"] is None else group["float_lr"] * _progress(group)
        if first is None:
            return manifold.retr(point, -lr * direction)  # type: ignore[no-any-return]
        moved: Tensor
        moved, transported = manifold.retr_transp(point, -lr * direction, first)
        first.copy_(transported)
        return moved

    def _descend_elsewhere(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: geoopt.Manifold,
    ) -> tuple[Tensor, Tensor | None]:
        """A direction on another manifold, and the average to transport along it, where
        there is one.
        """
        raise NotImplementedError


def _largest(slot: Slot, field: Tensor) -> float:
    return float(slot.ranks.largest(field.max() if field.numel() else field.new_zeros(())))


def _keep(group: dict[str, Any]) -> float:
    return 1 - float(group["weight_decay"]) * _progress(group)


def _store(slot: Slot, rows: Tensor, moved: Tensor) -> None:
    """Write ordinary values back, with one rounding."""
    if rounds_at_random(rows, slot.group):
        draws = draw_range(slot.offset, moved.numel(), slot.rounding_key, moved.device).view(
            moved.shape
        )
        moved = to_half(moved.contiguous(), rows.dtype, draws)
    rows.copy_(moved)


def _progress(group: dict[str, Any]) -> float:
    """``lr / initial_lr``: how far a schedule has taken the learning rate from what its
    group was made with.
    """
    start = float(
        group["start_lr"]
    )  # schedulers write ``initial_lr``, OneCycleLR the warm-up's start
    return lr_of(group) / start if start else float(lr_of(group) > 0)


class RiemannianAdam(Riemannian):
    r"""Riemannian Adam with geoopt's signature, a drop-in over quantised parameters.

    On this library's manifolds it is Adam in the chart, with the gradient ``S g`` of
    codes and one rounding per step,

    .. math:: w \leftarrow \mathrm{round}\left(\exp_{(1 - \lambda \eta / \eta_0) w}(-\eta \, S \, d)\right),
              \qquad d = \frac{\hat m}{\sqrt{\hat v} + \epsilon S_{ref}}

    so ``lr`` is in **ULPs per step**. The averages are in code coordinates, where
    parallel transport does nothing, in multiples of a power of two next to the
    stiffness (``unit`` in the state). On other manifolds of geoopt's and on ordinary
    parameters the steps are geoopt's, L2 decay included, at ``float_lr``.

    Args:
        params: parameters or groups.
        lr: ULPs per step on our manifolds; by default 0.5, and geoopt's 1e-3 for a
            group without parameters on them.
        betas, eps, weight_decay, amsgrad: as in geoopt; on our manifolds decay is
            decoupled, a fraction ``weight_decay * lr / initial_lr`` of the weight per
            step, where ``initial_lr`` is the one given here.
        stabilize: geoopt's name of ``stabilize_every``; it does not change the
            momentum.
        float_lr: learning rate of the parameters that are not on our manifolds; it
            follows ``lr``'s schedule and is required where a list mixes both kinds.
        writeback, draws: as in :class:`StiffnessAdamW`; None takes the manifold's own,
            and for ordinary bfloat16 and float16 parameters stochastic rounding by
            independent draws. Random bits are the optimizer's.
        retraction: on our manifolds, where a step goes before it is rounded:
            ``exponential``, along the chart, or ``euclidean``, straight in value,
            ``(1 - lambda eta / eta_0) w - eta S d``; None takes the parameter's own,
            ``exponential`` unless :func:`fp8manifold.quantize_model` or the manifold
            was given another.
        damping, clip: bounds of S / S_ref, as powers of two, beyond which the chart of
            ``ulp`` is linear.
        moments, seed, refresh_every, maximize, on_nonfinite, stabilize_every,
            reset_every, flags: as in
            :class:`StiffnessAdamW`; the averages of other parameters are not stored in fewer bits.

    Attributes:
        bounded_share: share of the quantised weights whose S / S_ref met a bound at the
            last refresh.

    Raises:
        TypeError, ValueError: as :class:`StiffnessAdamW`; a mixed list without
            ``float_lr``.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.linspace(0.25, 1, 4)), manifold=manifold)
        >>> optimizer = RiemannianAdam([weight], lr=2.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool((weight < torch.linspace(0.25, 1, 4)).all())
        True

    Source: Becigneul and Ganea 2019; geoopt (Kochurov et al. 2020).
    """

    direction = "adam"

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
        draws: Draws | None = None,
        retraction: Retraction | None = None,
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
        if group["amsgrad"] and group["moments"] != "float32":
            raise ValueError(
                f"amsgrad=True does not go with moments={group['moments']!r}: a maximum can't be "
                "rounded"
            )
        check_first_moment(group)

    def _fields(self, slot: Slot) -> dict[str, Any]:
        return super()._fields(slot) | {"amsgrad": slot.group["amsgrad"]}

    def _refresh(self, slot: Slot) -> None:
        super()._refresh(slot)
        change_unit(slot.state, unit_of(slot, slot.state["reference"]))

    def _code_factor(self, slot: Slot) -> float:
        """The bound in units of the moments; 0 in a bounded chart, where it is at most
        1. Older states lack a unit.
        """
        if "reference" in slot.state and "unit" not in slot.state:
            return super()._code_factor(slot)
        if slot.metric == "ulp" and math.isfinite(slot.group["clip"]):
            return 0.0
        field = stiffness_field(slot, slot.metric)
        return _largest(slot, field) / unit_of(slot, reference_stiffness(field, slot.ranks))

    def _numbers(self, slot: Slot) -> dict[str, float]:
        group, per_unit = slot.group, 1 / slot.state.get("unit", 1.0)
        eps = group["eps"] * slot.state["reference"] * per_unit
        numbers = adam_numbers(lr_of(group), tuple(group["betas"]), eps, slot.age)
        return numbers | {"keep": _keep(group), "per_unit": per_unit}

    def _descend_elsewhere(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: geoopt.Manifold,
    ) -> tuple[Tensor, Tensor | None]:
        group, step, (beta1, beta2) = slot.group, slot.age, slot.group["betas"]
        for name in (
            *DIRECTIONS["adam"].moments,
            *(["max_exp_avg_sq"] if group["amsgrad"] else []),
        ):
            if name not in state:
                state[name] = torch.zeros(point.shape, dtype=point.dtype, device=point.device)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(manifold.component_inner(point, gradient), alpha=1 - beta2)
        if group["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        return (first / (1 - beta1**step)) / (
            (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        ), first


class RiemannianSGD(Riemannian):
    r"""Riemannian SGD with geoopt's signature, over quantised and other parameters.

    On this library's manifolds it is SGD in the chart, with momentum in code
    coordinates and one rounding:

    .. math:: w \leftarrow \mathrm{round}\left(\exp_{(1 - \lambda \eta / \eta_0) w}(-\eta \, S \, b)\right),
              \qquad b = \mu b + (1 - \tau) S g

    Args:
        params: parameters or groups.
        lr: ULPs per step for a code gradient ``S g`` of 1; by default 0.5 on our
            manifolds, 1e-3 elsewhere.
        momentum, dampening, nesterov: as in ``torch.optim.SGD``.
        weight_decay: as in :class:`RiemannianAdam`.
        stabilize, float_lr, writeback, draws, retraction, moments, seed: as in
            :class:`RiemannianAdam`.
        damping, clip, refresh_every, maximize, on_nonfinite: as in :class:`RiemannianAdam`.
        stabilize_every, reset_every, flags: as in :class:`RiemannianAdam`.

    Raises:
        TypeError, ValueError: as :class:`RiemannianAdam`; Nesterov needs momentum and
            no dampening.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> weight = geoopt.ManifoldParameter(manifold.projx(torch.linspace(0.25, 1, 4)), manifold=manifold)
        >>> optimizer = RiemannianSGD([weight], lr=10.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool(weight.sum() < 2.5)
        True

    Source: Bonnabel 2013; geoopt (Kochurov et al. 2020).
    """

    direction = "sgd"

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
        draws: Draws | None = None,
        retraction: Retraction | None = None,
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
        return sgd_numbers(slot) | {"keep": _keep(slot.group), "per_unit": 1.0}

    def _descend_elsewhere(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: geoopt.Manifold,
    ) -> tuple[Tensor, Tensor | None]:
        group, momentum = slot.group, slot.group["momentum"]
        if not momentum:
            return gradient, None
        buffer: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        buffer.mul_(momentum).add_(gradient * (1.0 if slot.age == 1 else 1 - group["dampening"]))
        return gradient + buffer * momentum if group["nesterov"] else buffer, buffer
