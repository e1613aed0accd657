"""What rounding would lose of an optimizer's next step, before it is taken.

`lost_updates` copies one parameter after the other, in a wider dtype and with its state,
lets a copy of the optimizer step it (`_Twin`), and looks which of the updates rounding to
nearest would undo.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8manifold._ranks import share_of
from fp8manifold.grid import round_to_grid
from fp8manifold.optim._directions import MOMENT_NAMES
from fp8manifold.optim._eager_step import StepView
from fp8manifold.optim._factors import STATISTIC_NAMES
from fp8manifold.optim._optimizer import ManifoldOptimizer
from fp8manifold.optim._slot import manifold_of
from fp8manifold.optim._writeback import rounds_at_random
from fp8manifold.optim.stiffness_adafactor import StiffnessAdafactor
from fp8manifold.optim.wrapper import needs_closure
from fp8manifold.tensor import FP8Tensor

__all__ = ["ReportedUpdate", "UpdateReport", "lost_updates"]

_WIDER: Final = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
}
"""The dtype in which an update is computed, by that in which the weight is stored."""
_AVERAGES: Final = frozenset((*MOMENT_NAMES, *STATISTIC_NAMES))
"""Entries of this library's states that are float64 for float64 parameters."""
_SMALL: Final = 2.0**-10
"""A factor of the gradient by which normalised updates hardly change."""
_TOLERANCE: Final = 0.01
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, Tensor)
"""Types of attributes that are copied: a step of the copy can't change the original's."""
_HOOKED: Final = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""The code that torch puts around ``step``, which calls hooks before and after it."""


@dataclass(frozen=True)
class ReportedUpdate:
    """The next update of one parameter."""

    #: its name in the model
    name: str
    #: its dtype, such as ``bfloat16``, or its format
    dtype: str
    #: whether it has fewer than two dimensions, as the weights of norms
    is_vector: bool
    #: count of its weights
    weights: int
    #: count of those that the update would change, before it is rounded
    updated: int
    #: count of those whose update is below half their spacing
    below: int
    #: the write-back of the optimizer, such as ``nearest`` or ``stochastic``
    rounding: str

    @property
    def below_share(self) -> float:
        """Share of the updates that are below half a spacing; 0 if there are none."""
        return self.below / self.updated if self.updated else 0.0

    @property
    def lost(self) -> int:
        """Number of updates that are lost; only rounding to nearest loses any."""
        return self.below if self.rounding == "nearest" else 0

    @property
    def lost_share(self) -> float:
        """Share of the updates that are lost; 0 if there are none."""
        return self.lost / self.updated if self.updated else 0.0


@dataclass(frozen=True)
class UpdateReport:
    """The next update of every parameter; its string is a table."""

    #: parameters, vectors of 16 bits first, such as norms, and then in the model's order
    parameters: tuple[ReportedUpdate, ...]
    #: False if updates follow from the learning rate alone
    has_gradients: bool

    @property
    def lost_share(self) -> float:
        """Share of all updates that are lost; 0 if there are none."""
        updated = sum(row.updated for row in self.parameters)
        return sum(row.lost for row in self.parameters) / updated if updated else 0.0

    def __str__(self) -> str:
        """Return a table with a line for each parameter, and a line for all."""
        rows = [("parameter", "dtype", "weights", "below half", "lost", "rounding")]
        for row in self.parameters:
            below, lost = f"{row.below_share:.1%}", f"{row.lost_share:.1%}"
            rows.append((row.name, row.dtype, f"{row.weights:,}", below, lost, row.rounding))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, dtype, *numbers, rounding in rows:
            cells = [name.ljust(widths[0]), dtype.ljust(widths[1])]
            cells += [cell.rjust(width) for cell, width in zip(numbers, widths[2:], strict=False)]
            lines.append("  ".join([*cells, rounding]))
        source = "" if self.has_gradients else ", by the learning rate alone"
        return "\n".join([*lines, f"lost: {self.lost_share:.1%} of all updates{source}"])


def lost_updates(model: nn.Module, optimizer: torch.optim.Optimizer) -> UpdateReport:
    r"""Say which part of an optimizer's next step rounding would lose.

    .. math:: \Delta_i \ne 0 \quad\text{and}\quad \operatorname{round}(w_i + \Delta_i) = w_i,
        \qquad\text{so}\quad |\Delta_i| \le S(w_i) / 2

    where ``Delta`` is the update before it is rounded and ``S`` the spacing of the dtype
    at the weight. In bfloat16 ``S(1) / 2`` is 0.002 downwards and 0.004 upwards, so a norm's
    weights at 1 stay under AdamW with rates up to 0.001. Optimizers of this library round
    bfloat16 and float16 stochastically: there such an update is made so often that the
    average is exact, and none is lost.

    Call it after a backward pass and before the step. Parameters without a gradient are
    left out. If none has one, updates are those of a first step with gradients of equal
    magnitude and random signs, which for Adam are the learning rate; optimizers whose
    updates grow with the gradient, such as SGD, are refused then.

    Neither model nor optimizer changes. A step of each parameter is taken on a copy, one
    after the other, in float64 (float32 for codes that an optimizer of this library
    steps). Hooks of steps are not called, except torch's global ones where a subclass's
    step calls ``super().step()``. A parameter whose gradient is not finite, so that the
    step is skipped, has no update.

    Args:
        model: any model, of floats in bfloat16, float16 or float32, or in codes.
        optimizer: one of torch or of this library, over parameters of the model.

    Returns:
        The report; NaN updates count as not lost, and an empty parameter has none.

    Raises:
        TypeError: ``model`` or ``optimizer`` is of another type; an optimizer that needs
            a closure, wraps another one, steps on a manifold of geoopt, or steps
            parameters together; one whose step reads an attribute of its own that is
            neither a number, a string, a tensor nor a tuple of these.
        ValueError: the optimizer has no parameter of the model; there is no gradient and
            the update follows its magnitude; a sharded parameter, or a dtype without a
            wider one.

    Example:
        >>> import fp8manifold as fm
        >>> model = nn.LayerNorm(4, dtype=torch.bfloat16)
        >>> print(fm.lost_updates(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
        parameter  dtype     weights  below half    lost  rounding
        weight     bfloat16        4      100.0%  100.0%  nearest
        bias       bfloat16        4        0.0%    0.0%  nearest
        lost: 50.0% of all updates, by the learning rate alone

    Source: Zamirai et al. 2020 (Revisiting BFloat16 Training): rounding to nearest
    cancels updates.
    """
    _check(model, optimizer)
    members = _members(model, optimizer)
    has_gradients = any(member.parameter.grad is not None for member in members)
    rows = []
    for member in members:
        parameter = member.parameter
        if not has_gradients:
            _check_normalised(optimizer, member)
            rows.append(_reported(optimizer, member, _signs(parameter), is_first=True))
        elif parameter.grad is not None:
            rows.append(_reported(optimizer, member, parameter.grad, is_first=False))
    rows.sort(key=lambda row: not (row.is_vector and row.dtype in ("bfloat16", "float16")))
    return UpdateReport(tuple(rows), has_gradients)


@dataclass(frozen=True)
class _Member:
    """A parameter of the model that an optimizer steps."""

    name: str
    parameter: Tensor
    group: dict[str, Any]


def _check(model: Any, optimizer: Any) -> None:
    """Raise TypeError unless a copy of the optimizer can step copies of parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {name}")
    wrapped = getattr(optimizer, "optimizer", None)
    if isinstance(wrapped, torch.optim.Optimizer):
        raise TypeError(f"{name} wraps an optimizer: pass that one, {type(wrapped).__name__}")
    if needs_closure(optimizer):
        raise TypeError(f"{name} computes its update from several losses, so it can't be foreseen")
    if any(base.__module__.startswith("geoopt.") for base in type(optimizer).__mro__):
        raise TypeError(f"{name} steps on manifolds: pass an optimizer of fp8manifold or torch")
    if isinstance(optimizer, ManifoldOptimizer):
        if not optimizer.steps_alone:
            raise TypeError(f"{name} steps parameters together, but here one is stepped alone")
    elif type(optimizer).__getstate__ is not torch.optim.Optimizer.__getstate__:
        raise TypeError(f"{name} has a state of its own kind, which can't be copied safely")


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[_Member]:
    """Return the parameters that are stepped, in the model's order."""
    groups = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups[id(parameter)] = group
    members = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in groups or not parameter.requires_grad:
            continue
        if share_of(parameter) is not None:
            raise ValueError(f"{name!r} is sharded: look at a model of one process")
        if parameter.dtype not in _WIDER:
            raise ValueError(
                f"{name!r} is in {parameter.dtype}, but bfloat16, float16 or float32 is needed"
            )
        members.append(_Member(name, parameter, groups[id(parameter)]))
    if not members:
        raise ValueError(f"this {type(optimizer).__name__} trains no parameter of the model")
    return members


def _signs(parameter: Tensor) -> Tensor:
    """Return 1 and -1 at random, by a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu")
    return (signs * 2.0 - 1.0).to(device=parameter.device, dtype=parameter.dtype)


def _check_normalised(optimizer: torch.optim.Optimizer, member: _Member) -> None:
    """Raise ValueError if an update follows the magnitude of the gradient."""
    weight = nn.Parameter(torch.zeros(4, 4, device=member.parameter.device))
    gradient = _signs(weight)
    updates = [
        _Twin(optimizer, member.group, weight, {}, torch.float32).step(gradient * factor)
        for factor in (1.0, _SMALL)
    ]
    if not torch.allclose(updates[0], updates[1], rtol=_TOLERANCE, atol=0.0):
        raise ValueError(
            f"there is no gradient, and the update of {type(optimizer).__name__} depends on its "
            "magnitude: call lost_updates after a backward pass"
        )


def _reported(
    optimizer: torch.optim.Optimizer, member: _Member, gradient: Tensor, *, is_first: bool
) -> ReportedUpdate:
    """Return what becomes of the next update of a parameter."""
    group = member.group
    parameter: Any = member.parameter
    state = {} if is_first else optimizer.state.get(parameter, {})
    is_coded = isinstance(parameter, FP8Tensor)
    if not is_coded and manifold_of(parameter) is not None:
        raise ValueError(
            f"{member.name!r} is on a manifold in floats: ordinary weights or codes are needed"
        )
    if is_coded and isinstance(optimizer, ManifoldOptimizer):
        before, update = _observed(optimizer, member, state, gradient)
    else:
        before = _widened(parameter)
        copied = nn.Parameter(before.clone())
        update = _Twin(optimizer, group, copied, state, parameter.dtype).step(gradient)
    is_updated = update != 0
    is_undone = _rounded(before + update, parameter) == _rounded(before, parameter)
    return ReportedUpdate(
        member.name,
        parameter.format.name if is_coded else str(parameter.dtype).removeprefix("torch."),
        is_vector=parameter.dim() < 2,
        weights=parameter.numel(),
        updated=int(is_updated.sum()),
        below=int((is_updated & is_undone).sum()),
        rounding=_rounding(optimizer, parameter, group),
    )


def _widened(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    if isinstance(values, FP8Tensor):
        values = values.dequantize()
    return values.to(_WIDER[parameter.dtype])


def _rounded(values: Tensor, parameter: Tensor) -> Tensor:
    """Return values as the parameter would store them, rounded to nearest."""
    if isinstance(parameter, FP8Tensor):
        scale = parameter.expanded_scale().to(values.dtype)
        return round_to_grid(values / scale, parameter.format) * scale
    return values.to(parameter.dtype)


def _rounding(optimizer: torch.optim.Optimizer, parameter: Any, group: dict[str, Any]) -> str:
    """Return the name of the rule by which an optimizer writes a parameter."""
    is_ours = isinstance(optimizer, ManifoldOptimizer)
    if isinstance(parameter, FP8Tensor):
        return str(group["writeback"] if is_ours else parameter.rounding)
    return "stochastic" if is_ours and rounds_at_random(parameter, group) else "nearest"


def _observed(
    optimizer: ManifoldOptimizer, member: _Member, state: dict[str, Any], gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return weights in codes, and the update that a copy of the optimizer requests.

    A step that is skipped, or has no weights, is not observed: its update is 0.
    """
    views: list[StepView] = []
    parameter: Any = member.parameter
    copied = parameter.detach().clone().requires_grad_()
    # a parameter's remainder begins its residual
    copied.remainder = parameter.remainder
    twin = _Twin(optimizer, member.group, copied, state, parameter.dtype)
    twin.optimizer.observer = views.append
    twin.step(gradient)
    if not views:
        before = _widened(parameter)
        return before, torch.zeros_like(before)
    (view,) = views
    return view.before, view.target - view.before


class _Twin:
    """A copy of an optimizer that steps the copy of one parameter.

    Args:
        optimizer: whose class, counts and options it has.
        group: of the parameter.
        parameter: the copy, which may have a wider dtype.
        state: of the parameter; it is copied.
        dtype: in which the parameter is stored.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        parameter: Tensor,
        state: dict[str, Any],
        dtype: torch.dtype,
    ) -> None:
        self.parameter = parameter
        self.optimizer: Any = object.__new__(type(optimizer))
        entries = {name: self._copied(name, value, dtype) for name, value in state.items()}
        state_of_twin: dict[Any, Any] = defaultdict(dict)
        if entries:
            state_of_twin[parameter] = entries
        options = {name: _cloned(value) for name, value in group.items()}
        _fix_eps(optimizer, options, dtype)
        parts = _plain_attributes(optimizer) | optimizer.__getstate__()
        parts["state"] = state_of_twin
        parts["param_groups"] = [options | {"params": [parameter]}]
        if isinstance(optimizer, ManifoldOptimizer):
            # a skipped step of the twin is nothing to warn of
            parts["warn_after"] = 0
        self.optimizer.__setstate__(parts)

    def _copied(self, name: str, value: Any, dtype: torch.dtype) -> Any:
        """Return a copy of an entry of the state, in the dtype that the step needs.

        Torch's moments have the parameter's dtype. Those of this library have a dtype
        of their own, except that they are float64 for float64 parameters.
        """
        value = _cloned(value)
        if not isinstance(value, Tensor) or self.parameter.dtype == dtype:
            return value
        if isinstance(self.optimizer, ManifoldOptimizer):
            is_widened = value.dtype is torch.float32 and name in _AVERAGES
        else:
            is_widened = value.dtype == dtype and name != "step"
        return value.to(self.parameter.dtype) if is_widened else value

    def step(self, gradient: Tensor) -> Tensor:
        """Step, and return the difference that it makes."""
        before = self.parameter.detach().clone()
        self.parameter.grad = gradient.detach().to(self.parameter.dtype, copy=True)
        try:
            _unhooked_step(self.optimizer)(self.optimizer)
        except AttributeError as error:
            if error.obj is not self.optimizer:
                raise
            raise TypeError(
                f"{type(self.optimizer).__name__} uses its attribute {error.name!r} in a step, and "
                "it can't be copied safely"
            ) from error
        return self.parameter.detach() - before


def _fix_eps(optimizer: torch.optim.Optimizer, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Replace Adafactor's None for ``eps[0]``, which a wider dtype would make smaller.

    Torch's takes the epsilon of the dtype of the parameter, this library's float32's.
    """
    if not isinstance(optimizer, torch.optim.Adafactor | StiffnessAdafactor):
        return
    eps, least_size = options["eps"]
    if eps is None:
        computed_in = torch.float32 if isinstance(optimizer, StiffnessAdafactor) else dtype
        options["eps"] = (torch.finfo(computed_in).eps, least_size)


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that a subclass may need and that a copy can safely have."""
    return {name: _cloned(value) for name, value in vars(optimizer).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def _unhooked_step(optimizer: torch.optim.Optimizer) -> Any:
    """Return the function of a step without torch's global hooks, which others own."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "__code__", None) is _HOOKED else step


def _cloned(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(_cloned(part) for part in value)
    return value.detach().clone() if isinstance(value, Tensor) else value
