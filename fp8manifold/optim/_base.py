"""What our optimizers share: parameter kinds, checks, state layout, skipped steps and the observer of a step."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import geoopt
import torch
from torch import Tensor

from fp8manifold._checks import check_choice, check_int, check_number
from fp8manifold._float_bits import working_dtype
from fp8manifold.manifolds import StiffnessManifold
from fp8manifold.optim._writeback import write_back

__all__ = [
    "ManifoldOptimizer",
    "StepView",
    "check_betas",
    "check_finite",
    "manifold_of",
    "own_manifold",
    "reject_flags",
]

UNSUPPORTED_FLAGS: Final = ("foreach", "fused", "capturable", "differentiable")

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class StepView:
    """What an observer sees of one quantised parameter in one step; the tensors are detached and not to be changed."""

    parameter: Tensor
    before: Tensor
    target: Tensor
    """The value requested, before the write-back rounds it."""
    after: Tensor
    stiffness: Tensor
    """One ULP at ``before``."""


def manifold_of(parameter: Tensor) -> geoopt.Manifold | None:
    """The manifold a parameter lives on, or None for an ordinary one."""
    return parameter.manifold if isinstance(parameter, geoopt.ManifoldTensor) else None


class ManifoldOptimizer(torch.optim.Optimizer):
    """Base of the library's optimizers: subclasses say how one parameter is stepped.

    Attributes:
        observer: called with a :class:`StepView` for every quantised parameter in every step; None costs nothing.
        skipped_steps: number of steps left out because a gradient was not finite.
    """

    observer: Callable[[StepView], None] | None = None
    skipped_steps: int = 0
    preconditioner: frozenset[str] = frozenset()
    """Names of the state tensors that ``reset_every`` clears."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        on_nonfinite: str,
        stabilize_every: int | None,
        reset_every: int | None,
    ) -> None:
        options = {"on_nonfinite": on_nonfinite, "stabilize_every": stabilize_every, "reset_every": reset_every}
        super().__init__(params, defaults | options)

    @property
    def bounded_share(self) -> float:
        """Share of the quantised weights whose S / S_ref met ``damping`` or ``clip`` at the last refresh."""
        shares = [(p.numel(), float(s["bounded"])) for p, s in self.state.items() if "bounded" in s]
        return sum(n * share for n, share in shares) / max(sum(n for n, _ in shares), 1)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        If any gradient is not finite, or so large that its square is not, nothing changes at all, step counts
        included: the step is counted in ``skipped_steps``, or a ``FloatingPointError`` is raised
        (``on_nonfinite="raise"``).  Gradients are never modified.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result, or None.

        Raises:
            ValueError: a sparse or complex gradient.
            FloatingPointError: a gradient is not finite and ``on_nonfinite`` is ``raise``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_schedules()
        if not self._all_finite():
            self.skipped_steps += 1
            return loss
        stream = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self._step_parameter(group, parameter, self._begin(group, parameter, stream))
                stream += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checking its options and parameters like the constructor's."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise ValueError(f"a parameter has dtype {parameter.dtype}: only real floats can be stepped")
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The state, with everything a bit-exact resume needs; schedules (functions) are left to the constructor."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in [name for name, value in group.items() if callable(value)]:
                del group[name]
        saved["skipped_steps"] = self.skipped_steps
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; tensors keep the dtype they were saved in.

        Raises:
            ValueError: the state of another optimizer.
        """
        schedules = [{k: v for k, v in group.items() if callable(v)} for group in self.param_groups]
        for group, ours in zip(state_dict["param_groups"], schedules, strict=False):
            if missing := [name for name in self.defaults if name not in group and name not in ours]:
                raise ValueError(
                    f"this state is not one of {type(self).__name__}: its parameter groups lack {', '.join(missing)}"
                )
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "skipped_steps"})
        for group, ours in zip(self.param_groups, schedules, strict=True):
            group.update({name: value for name, value in ours.items() if name not in group})
        self._restore_dtypes(state_dict)
        self.skipped_steps = int(state_dict.get("skipped_steps", 0))

    def _restore_dtypes(self, state_dict: dict[str, Any]) -> None:
        """torch casts loaded state to the parameter's dtype; ours is wider than a bfloat16 parameter."""
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in zip(saved_ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if name == "step" else parameter.device
                    self.state[parameter][name] = value.detach().to(device, copy=True)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise unless the options of a group are valid; subclasses add their own."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}: a number or a tensor of one element is needed")
        check_finite("lr", lr.item() if isinstance(lr, Tensor) else lr)
        check_finite("weight_decay", group["weight_decay"])
        if "seed" in group:
            check_int("seed", group["seed"], 0, 2**64 - 1)
        check_choice("on_nonfinite", group["on_nonfinite"], ("skip", "raise"))
        for name in ("stabilize_every", "reset_every"):
            if group[name] is not None:
                check_int(name, group[name], 1, 2**62)
        reject_flags(type(self).__name__, {name: group[name] for name in UNSUPPORTED_FLAGS if name in group})
        group.setdefault("start_lr", float(lr))

    def _step_parameter(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _begin(self, group: dict[str, Any], parameter: Tensor, stream: int) -> dict[str, Any]:
        """The parameter's state with its step count advanced; stabilised and reset when that is due."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["stream"] = stream
        done = int(state["step"])
        state["step"] += 1
        if done and group["stabilize_every"] and done % group["stabilize_every"] == 0:
            manifold = manifold_of(parameter)
            if manifold is not None:
                parameter.copy_(manifold.projx(parameter))
        if done and group["reset_every"] and done % group["reset_every"] == 0:
            for name in self.preconditioner & state.keys():
                state[name].zero_()
            state["since"] = done
        return state

    def _check_schedules(self) -> None:
        """Raise before anything has changed if a schedule has left its range."""

    def _all_finite(self) -> bool:
        """One sum of squares a tensor, and an exact check only where that is not finite."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse or parameter.grad.is_complex():
                    raise ValueError(f"{type(self).__name__} takes dense real gradients only")
                if not _square_is_finite(parameter.grad):
                    if group["on_nonfinite"] == "raise":
                        raise FloatingPointError(
                            f"a gradient of shape {tuple(parameter.shape)} is not finite, or its square is not"
                        )
                    return False
        return True

    def _gradient(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """The gradient in the working dtype, turned around where the objective is maximised."""
        gradient = parameter.grad
        assert gradient is not None
        gradient = gradient.to(working_dtype(parameter))
        return -gradient if group["maximize"] else gradient

    def _write(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any], target: Tensor, stiffness: Tensor
    ) -> None:
        """Round the requested value once, in the working dtype, and store it."""
        manifold = own_manifold(parameter)
        assert manifold is not None
        writeback = group["writeback"] or getattr(manifold, "rounding", "nearest")
        step, stream = int(state["step"]), state["stream"]
        after = write_back(target, manifold, writeback, seed=group["seed"], step=step, stream=stream)
        if self.observer is not None:
            before = parameter.detach().clone()
            self.observer(StepView(parameter, before, target, after, stiffness))
        parameter.copy_(after)


def own_manifold(parameter: Tensor) -> StiffnessManifold | None:
    """The parameter's manifold where it is one of this library's."""
    manifold = manifold_of(parameter)
    return manifold if isinstance(manifold, StiffnessManifold) else None


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, inf)."""
    check_number(name, value, 0.0, math.inf, open_high=True)


def check_betas(betas: Any) -> None:
    """Raise unless ``betas`` is a pair of numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, 0.0, 1.0, open_high=True)


def reject_flags(optimizer: str, flags: dict[str, Any]) -> None:
    """Raise ValueError for a flag of torch's that would be ignored, TypeError for any other keyword."""
    for name, value in flags.items():
        if name not in UNSUPPORTED_FLAGS:
            nearest = difflib.get_close_matches(name, UNSUPPORTED_FLAGS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{optimizer} got an unexpected keyword argument {name!r}{hint}")
        if value:
            raise ValueError(f"{name}={value!r} is not supported by {optimizer}: leave it out")


def _square_is_finite(gradient: Tensor) -> bool:
    flat = gradient.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    if bool(torch.dot(flat, flat).isfinite()):
        return True
    return bool((flat * flat).isfinite().all())
