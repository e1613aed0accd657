"""RiemannianAdam and RiemannianSGD: geoopt's signatures, with steps counted in ULPs.

A group may mix three kinds of parameters, which step in two ways:

    on a manifold of this library       base class: a slot, its spec, a backend;
    (slot.fmt is set)                   Adam or SGD in the chart, `lr` in ULPs
    on another manifold of geoopt's,    `_step_by_geoopt`: geoopt's own arithmetic
    or an ordinary float tensor         in PyTorch, at `float_lr`
    (slot.fmt is None)

In the chart the gradient is that of codes, ``S g``. ``S`` spans many binades, and so
would the moments. They are stored in multiples of a power of two near ``S_ref``, the
state's ``unit``, and converted whenever ``S_ref`` is computed again.
"""

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from fp8manifold import _geoopt_import
from fp8manifold._geoopt_import import load_geoopt
from fp8manifold._interface import Geometry, MomentStorage
from fp8manifold._numerics.charts import MetricName, Retraction
from fp8manifold._numerics.stiffness import (
    Field,
    bounded_share,
    reference_stiffness,
    stiffness_bounds,
)
from fp8manifold._ranks import local_of, spread
from fp8manifold.optim._agreement import in_every_process
from fp8manifold.optim._checks import check_first_moment, options_in
from fp8manifold.optim._directions import DIRECTIONS, MOMENT_NAMES
from fp8manifold.optim._finite import squares_are_finite
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import Parameters, Slot, is_quantized
from fp8manifold.optim._spec import BOUNDS
from fp8manifold.optim._step_numbers import (
    age_of,
    lr_by_start,
    lr_of,
    riemannian_adam_numbers,
    riemannian_sgd_numbers,
    sgd_direction_numbers,
)
from fp8manifold.optim._stiffness_fields import scale_of_values, stiffness_field
from fp8manifold.optim._writeback import rounds_at_random, to_half
from fp8manifold.optim.stiffness import check_momentum
from fp8manifold.random_bits import Draws, draw_range

if TYPE_CHECKING:
    import geoopt

__all__ = ["RiemannianAdam", "RiemannianSGD"]

_POWERS: Final = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
"""The power of the unit that each moment is stored in."""
_LARGEST_EXPONENT: Final = 126
"""The exponent of the largest power of two whose reciprocal is a normal float32, too."""
_LR_IN_ULPS, _LR_ELSEWHERE = 0.5, 1e-3
"""Default learning rates: on this library's manifolds, and geoopt's."""


@cache
def _euclidean() -> "geoopt.Manifold":
    """Return the manifold of ordinary parameters."""
    return load_geoopt().Euclidean()


def unit_of(slot: Slot, reference: float) -> float:
    """Return the unit that moments are stored in, a power of two.

    In a bounded chart it is no less than any stiffness, so that no square of a gradient
    overflows; without a bound it is next to S_ref.
    """
    is_bounded = slot.metric == MetricName.ULP and math.isfinite(slot.group["clip"])
    if is_bounded:
        largest = stiffness_bounds(reference, 0.0, slot.group["clip"])[1]
        # one above that of ``largest``, as a scale may be no power of two
        exponent = math.frexp(largest)[1]
    else:
        exponent = math.frexp(reference)[1] - 1
    return math.ldexp(1.0, min(max(exponent, -_LARGEST_EXPONENT), _LARGEST_EXPONENT))


def change_unit(state: dict[str, Any], unit: float) -> None:
    """Convert the moments of a state to another unit, exactly unless one underflows.

    A state without a unit has 1.
    """
    old_unit = state.get("unit", 1.0)
    state["unit"] = unit
    if unit == old_unit:
        return
    for name, power in _POWERS.items():
        for entry in (name, BOUNDS.get(name, "")):
            moment = state.get(entry)
            # codes are in units of their bounds
            if moment is None or moment.dtype.itemsize == 1:
                continue
            exponent = power * (math.frexp(old_unit)[1] - math.frexp(unit)[1])
            # in four parts, whose exponents add up to it: the factor may be no float32
            for part in range(4):
                local_of(moment).mul_(math.ldexp(1.0, (exponent + part) // 4))


def _with_library_names(options: dict[str, Any]) -> dict[str, Any]:
    """Rename geoopt's ``stabilize`` among options, in place, and return them."""
    stabilize = options.pop("stabilize", None)
    stabilize_every = options.get("stabilize_every")
    if stabilize is not None and stabilize_every not in (None, stabilize):
        raise ValueError(
            f"stabilize={stabilize!r} and stabilize_every={stabilize_every!r} are one option by "
            "two names: pass one"
        )
    if stabilize is not None:
        options["stabilize_every"] = stabilize
    return options


class Riemannian(ManifoldOptimizer):
    """Base of both optimizers: mixed groups, the bounded chart, and geoopt's steps."""

    stores_all_moments = False

    def __init__(self, params: Parameters, options: dict[str, Any]) -> None:
        super().__init__(params, _with_library_names(options))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        One that mixes quantised with ordinary parameters needs ``float_lr``.
        """
        if not isinstance(param_group, dict) or isinstance(param_group.get("params", set()), set):
            # no dict, a set or no parameters: torch raises, and says what is wrong
            super().add_param_group(param_group)
        params = _with_library_names(param_group)["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in param_group["params"]]
        is_any_quantized = any(isinstance(p, Tensor) and is_quantized(p) for p in tensors)
        has_explicit_lr = param_group.get("lr") is not None
        if param_group.get("lr", self.defaults["lr"]) is None:
            param_group["lr"] = _LR_IN_ULPS if is_any_quantized else _LR_ELSEWHERE
        # False for the default that the optimizer was given, which other groups may have
        param_group["own_lr"] = has_explicit_lr or self.defaults["lr"] is None
        super().add_param_group(param_group)
        self._refuse_shared_lr()
        if not all(map(is_quantized, param_group["params"])):
            # geoopt is imported now, and not in the first step
            _euclidean()

    def _refuse_shared_lr(self) -> None:
        """Raise ValueError, and drop the last group, if an lr in ULPs would step floats.

        An lr is in ULPs if its group has quantised parameters; the optimizer's default
        lr also if any other group has.
        """
        kinds = [{is_quantized(p) for p in group["params"]} for group in self.param_groups]
        is_any_quantized = any(True in kind for kind in kinds)
        for group, kind in zip(self.param_groups, kinds, strict=True):
            is_lr_in_ulps = True in kind or (is_any_quantized and not group["own_lr"])
            if False in kind and is_lr_in_ulps and group["float_lr"] is None:
                self.param_groups.pop()
                raise ValueError(
                    f"lr={group['lr']} is in ULPs per step on quantised parameters, and the groups "
                    "have ordinary ones too: pass float_lr=... for these (1e-3, say), or put them "
                    "in a group with its own lr"
                )

    def _prepare(self, slot: Slot) -> None:
        if slot.fmt is not None:
            super()._prepare(slot)

    def _take(self, slots: list[Slot]) -> None:
        """Take the steps: geoopt's here, the others by a backend."""
        for slot in slots:
            if slot.fmt is None:
                self._take_by_geoopt(slot)
        super()._take([slot for slot in slots if slot.fmt is not None])

    def _largest_factor(self, slots: list[Slot]) -> float:
        return max(map(self._gradient_factor, slots))

    def _are_plannable(self, slots: list[Slot]) -> bool:
        # without these bounds the largest factor of a gradient follows from the weights
        return all(
            slot.metric == MetricName.ULP and math.isfinite(slot.group["clip"]) for slot in slots
        )

    def _number_facts(self, slot: Slot) -> tuple[Any, ...]:
        return (*super()._number_facts(slot), slot.state.get("unit"))

    def _by_geoopt(self, slots: list[Slot]) -> list[int]:
        return [i for i, slot in enumerate(slots) if slot.fmt is None]

    def _take_by_geoopt(self, slot: Slot) -> None:
        """Step a parameter that is not on this library's manifolds.

        Of a sharded one this process steps its rows. If it has none it steps a row of
        zeros, so that its state gets the same entries as in the other processes.
        """
        if slot.share is None:
            parameter: Any = slot.parameter
            # Asked in every step: a plan does not compare it. An ordinary parameter may have
            # such an attribute of the user's.
            is_point = isinstance(parameter, _geoopt_import.tensor_kind)
            manifold = (parameter.manifold if is_point else None) or _euclidean()
            moved = self._step_by_geoopt(slot, slot.parameter, slot.state, manifold)
            _store_floats(slot, slot.parameter, moved)
            return
        local_state = {name: local_of(value) for name, value in slot.state.items()}
        rows = slot.share.local
        gradient = local_of(slot.parameter.grad)
        if not rows.numel():
            for name in MOMENT_NAMES:
                local_state.pop(name, None)
            rows = torch.zeros((1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            gradient = torch.zeros_like(rows)
        rows.grad = gradient
        moved = self._step_by_geoopt(slot, rows, local_state, _euclidean())
        rows.grad = None
        _store_floats(slot, rows, moved)
        for name in local_state.keys() - slot.state.keys():
            new = local_state[name][: len(slot.share.local)]
            slot.state[name] = spread(slot.parameter, new)

    def _may_step(self, slots: list[Slot]) -> bool:
        """Check the squares of gradients with respect to codes too.

        They may exceed those of the gradients.
        """
        if not super()._may_step(slots):
            return False
        stepped = [slot for slot in slots if slot.fmt is not None and slot.parameter.numel()]
        # all-reduces of sharded parameters: before a check raises in one process only
        factors = [self._code_factor(slot) for slot in stepped]

        def may_step_here() -> bool:
            # a list: a later one may have to raise
            verdicts = [
                squares_are_finite(slot, factor)
                for slot, factor in zip(stepped, factors, strict=True)
            ]
            return all(verdicts)

        return in_every_process(self, may_step_here)

    def _gradient_factor(self, slot: Slot) -> float:
        return 1.0 if slot.fmt is None else max(self._code_factor(slot), 1.0)

    def _code_factor(self, slot: Slot) -> float:
        """Return an upper bound of the factor from gradients to those of codes.

        That factor is the stiffness in the chart of this step.
        """
        reference = slot.state.get("reference")
        is_due = slot.steps_done % slot.group["refresh_every"] == 0
        if reference is None or is_due or not math.isfinite(slot.group["clip"]):
            return _largest_stiffness(slot, stiffness_field(slot, slot.metric))
        return stiffness_bounds(reference, slot.group["damping"], slot.group["clip"])[1]

    def _fields(self, slot: Slot) -> dict[str, Any]:
        is_straight = slot.retraction == "euclidean"
        geometry = Geometry.TANGENT if is_straight else Geometry.EXPONENTIAL
        return {"direction": self.direction, "metric": slot.metric, "geometry": geometry}

    def _share_at_bounds(self, slot: Slot, field: Field, reference: float) -> float:
        if slot.metric != MetricName.ULP:
            return 0.0
        low, high = stiffness_bounds(reference, slot.group["damping"], slot.group["clip"])
        # in [1, 2): the bounds are powers of two at a scale of a power of two
        mantissa = torch.frexp(scale_of_values(slot, field)).mantissa * 2
        in_units = replace(field, values=field.values / mantissa)
        return bounded_share(in_units, 1.0, low, high, slot.ranks)

    def _step_by_geoopt(
        self, slot: Slot, parameter: Tensor, state: dict[str, Any], manifold: "geoopt.Manifold"
    ) -> Tensor:
        """Return where a step on another manifold ends, in the working dtype.

        The average, where there is one, is transported there. Ordinary parameters are
        points of Euclidean space.
        """
        group = slot.group
        point = parameter.detach().to(slot.dtype)
        assert parameter.grad is not None
        gradient = parameter.grad.to(point.dtype)
        gradient = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            # geoopt's L2 decay: a decoupled one would leave a sphere
            gradient = gradient + point * group["weight_decay"]
        gradient = manifold.egrad2rgrad(point, gradient)
        direction, average = self._descend_by_geoopt(slot, point, gradient, state, manifold)
        lr = lr_of(group) if group["float_lr"] is None else group["float_lr"] * lr_by_start(group)
        if average is None:
            return manifold.retr(point, -lr * direction)  # type: ignore[no-any-return]
        moved: Tensor
        moved, transported = manifold.retr_transp(point, -lr * direction, average)
        average.copy_(transported)
        return moved

    def _descend_by_geoopt(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: "geoopt.Manifold",
    ) -> tuple[Tensor, Tensor | None]:
        """Return a direction on another manifold, and the average or None.

        The average is the tensor of the state that is to be transported along the step.
        """
        raise NotImplementedError


def _largest_stiffness(slot: Slot, field: Field) -> float:
    """Return the largest stiffness of a parameter, over all processes that have rows."""
    return float(slot.ranks.largest(field.largest()))


def _store_floats(slot: Slot, rows: Tensor, moved: Tensor) -> None:
    """Write ordinary values back, with one rounding where they have fewer bits."""
    if moved.dtype is not rows.dtype and rounds_at_random(rows, slot.group):
        draws = draw_range(slot.offset, moved.numel(), slot.rounding_key, moved.device).view(
            moved.shape
        )
        moved = to_half(moved.contiguous(), rows.dtype, draws)
    rows.copy_(moved)


class RiemannianAdam(Riemannian):
    r"""Riemannian Adam with geoopt's signature, a drop-in over quantised parameters.

    On this library's manifolds it is Adam in the chart, with the gradient ``S g`` of
    codes and one rounding per step,

    .. math:: w \leftarrow \mathrm{round}\left(
              \exp_{(1 - \lambda \eta / \eta_0) w}(-\eta \, S \, d)\right), \qquad
              d = \frac{\hat m}{\sqrt{\hat v} + \epsilon S_{ref}}

    where ``eta`` is ``lr``, ``eta_0`` the ``lr`` given here, and ``lambda`` the decay.
    So ``lr`` is in **ULPs per step**. The averages are in code coordinates, where
    parallel transport does nothing. They are stored in multiples of a power of two near
    the stiffness, ``unit`` in the state.

    On other manifolds of geoopt's, and on ordinary parameters, the steps are geoopt's,
    L2 decay included, at the learning rate ``float_lr``.

    Args:
        params: parameters or groups.
        lr: ULPs per step on this library's manifolds. The default is 0.5, and geoopt's
            1e-3 for a group without parameters on them.
        betas, eps, amsgrad: as in geoopt.
        weight_decay: as in geoopt, except that on this library's manifolds it is
            decoupled: a step takes the fraction ``weight_decay * lr / start_lr`` of
            the weight, where ``start_lr`` is the ``lr`` given here.
        stabilize: geoopt's name of ``stabilize_every``. It does not change the
            momentum.
        float_lr: learning rate of the parameters that are not on this library's
            manifolds. It follows the schedule of ``lr``, and is required if a list
            mixes both kinds.
        writeback, draws: as in :class:`StiffnessAdamW`. None takes the manifold's own;
            for ordinary bfloat16 and float16 parameters None is stochastic rounding by
            independent draws. The random bits are those of the optimizer, not of the
            manifold.
        retraction: where a step goes before it is rounded, on this library's manifolds:
            ``exponential`` goes along the chart, ``euclidean`` straight in value, to
            ``(1 - lambda eta / eta_0) w - eta S d``. None takes the parameter's own,
            which is ``exponential`` unless :func:`fp8manifold.quantize_model` or the
            manifold was given another.
        damping, clip: bounds of S / S_ref, rounded outwards to powers of two, beyond
            which the chart of ``ulp`` is linear.
        moments: as in :class:`StiffnessAdamW`, for parameters on this library's
            manifolds; averages of others are stored in the dtype they are computed in.
        seed, refresh_every, maximize, on_nonfinite: as in :class:`StiffnessAdamW`.
        stabilize_every, reset_every, flags: as in :class:`StiffnessAdamW`.

    Attributes:
        bounded_share: share of the quantised weights whose S / S_ref met a bound at the
            last refresh.

    Raises:
        TypeError: as :class:`StiffnessAdamW`.
        ValueError: as :class:`StiffnessAdamW`, or a list that mixes quantised and
            ordinary parameters without ``float_lr``.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> points = manifold.projx(torch.linspace(0.25, 1, 4))
        >>> weight = geoopt.ManifoldParameter(points, manifold=manifold)
        >>> optimizer = RiemannianAdam([weight], lr=2.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool((weight < torch.linspace(0.25, 1, 4)).all())
        True

    Source: Becigneul and Ganea 2019; geoopt (Kochurov et al. 2020).
    """

    direction = "adam"
    _numbers = staticmethod(riemannian_adam_numbers)

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
        if group["amsgrad"] and group["moments"] != MomentStorage.FLOAT32:
            raise ValueError(
                f"amsgrad=True does not go with moments={group['moments']!r}, which are rounded at "
                "random: a maximum can't be; use moments='float32'"
            )
        check_first_moment(group)

    def _fields(self, slot: Slot) -> dict[str, Any]:
        return super()._fields(slot) | {"amsgrad": slot.group["amsgrad"]}

    def _refresh(self, slot: Slot) -> None:
        super()._refresh(slot)
        change_unit(slot.state, unit_of(slot, slot.state["reference"]))

    def _code_factor(self, slot: Slot) -> float:
        """Return the bound in units of the moments.

        It is 0 in a bounded chart: the bound is at most 1 there, and is not looked for.
        """
        is_older_state = "reference" in slot.state and "unit" not in slot.state
        if is_older_state:
            return super()._code_factor(slot)
        if slot.metric == MetricName.ULP and math.isfinite(slot.group["clip"]):
            # in a bounded chart the unit is no less than any stiffness
            return 0.0
        field = stiffness_field(slot, slot.metric)
        return _largest_stiffness(slot, field) / unit_of(
            slot, reference_stiffness(field, slot.ranks)
        )

    def _descend_by_geoopt(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: "geoopt.Manifold",
    ) -> tuple[Tensor, Tensor | None]:
        """Return geoopt's own Adam, which has other bits than the direction ``adam``.

        The second moment averages inner products in place of squares, and both are
        divided by their bias corrections before eps is added.
        """
        group = slot.group
        step = age_of(slot)
        beta1, beta2 = group["betas"]
        names = DIRECTIONS["adam"].moments
        if group["amsgrad"]:
            names = (*names, "max_exp_avg_sq")
        for name in names:
            if name not in state:
                state[name] = torch.zeros(point.shape, dtype=point.dtype, device=point.device)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(manifold.component_inner(point, gradient), alpha=1 - beta2)
        if group["amsgrad"]:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (first / (1 - beta1**step)) / denominator, first


class RiemannianSGD(Riemannian):
    r"""Riemannian SGD with geoopt's signature, over quantised and other parameters.

    On this library's manifolds it is SGD in the chart, with momentum in code
    coordinates and one rounding:

    .. math:: b \leftarrow \mu b + (1 - \tau) S g, \qquad
              w \leftarrow \mathrm{round}\left(
              \exp_{(1 - \lambda \eta / \eta_0) w}(-\eta \, S \, b)\right)

    where ``mu`` is the momentum, ``tau`` the dampening, and the rest as in
    :class:`RiemannianAdam`.

    Args:
        params: parameters or groups.
        lr: ULPs per step for a code gradient ``S g`` of 1. The default is 0.5 on this
            library's manifolds, 1e-3 elsewhere.
        momentum, dampening, nesterov: as in ``torch.optim.SGD``.
        weight_decay: as in :class:`RiemannianAdam`.
        stabilize, float_lr, writeback, draws, retraction, moments, seed: as in
            :class:`RiemannianAdam`.
        damping, clip, refresh_every, maximize, on_nonfinite: as in :class:`RiemannianAdam`.
        stabilize_every, reset_every, flags: as in :class:`RiemannianAdam`.

    Raises:
        TypeError: as :class:`RiemannianAdam`.
        ValueError: as :class:`RiemannianAdam`, or Nesterov without momentum or with
            dampening.

    Example:
        >>> import fp8manifold as fm, geoopt
        >>> manifold = fm.FP8Manifold("E4M3", rounding="stochastic")
        >>> points = manifold.projx(torch.linspace(0.25, 1, 4))
        >>> weight = geoopt.ManifoldParameter(points, manifold=manifold)
        >>> optimizer = RiemannianSGD([weight], lr=10.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> bool(weight.sum() < 2.5)
        True

    Source: Bonnabel 2013; geoopt (Kochurov et al. 2020).
    """

    direction = "sgd"
    _numbers = staticmethod(riemannian_sgd_numbers)

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

    def _descend_by_geoopt(
        self,
        slot: Slot,
        point: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        manifold: "geoopt.Manifold",
    ) -> tuple[Tensor, Tensor | None]:
        group = slot.group
        if not group["momentum"]:
            return gradient, None
        buffer: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        moments = {"momentum_buffer": buffer}
        numbers = sgd_direction_numbers(slot)
        sgd = DIRECTIONS["sgd"].descend
        descent = sgd(gradient, moments, numbers, nesterov=group["nesterov"])
        buffer.copy_(descent.moments["momentum_buffer"])
        return descent.direction, buffer
