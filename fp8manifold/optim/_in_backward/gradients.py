"""Gradients under steps in the backward pass: clipped by a norm, spent without memory,
summed in bfloat16.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8manifold._base.checks import check_choice, check_number
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._slot import steps_taken
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import DrawKey, draw_range

_SPENT: Final = (
    "this gradient has been used and freed: under step_in_backward a parameter's step is taken as "
    "soon as its gradient is there, so gradients cannot be accumulated, clipped, scaled or read; "
    "call optimizer.zero_grad() between backward passes, or give step_in_backward "
    "clip='previous' and max_norm to clip, or accumulate='bfloat16' to accumulate and clip sums"
)
_ZEROED: Final = (
    "zero_grad(set_to_none=False) keeps gradients, as zeros, for the next backward pass to add to: "
    "under step_in_backward they are freed as soon as they are used; call "
    "zero_grad(set_to_none=True), the default"
)
_CLIPPED: Final = (
    "this gradient has been used and freed: clip_grad_norm_ may be called for its result, with the "
    "norm of the whole gradient and the max_norm of step_in_backward, or with inf; it was called "
    "with another factor"
)
_HELD: Final = (
    "this gradient is a sum in bfloat16, kept by step_in_backward(accumulate='bfloat16'): it may "
    "be read, clipped by norm and scaled by one number, but not changed otherwise"
)
_ADD: Final = torch.ops.aten.add_.Tensor
_SCALES: Final = (
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten._foreach_mul_.Tensor,
    torch.ops.aten._foreach_mul_.Scalar,
)
_ZEROING: Final = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_NORMS: Final = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar)


class StandIn(Tensor):
    """A tensor with the shape and dtype of a gradient, without its memory; subclasses
    implement the operators.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor, *_: Any, **__: Any) -> "StandIn":
        return Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    added: Callable[[Tensor], None]
    scaled: Callable[[Any], None]
    zeroed: Callable[[], None]
    asked: Callable[[Any, Any, Any], Any]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dispatch each operator to the stand-in's method. torch detaches gradients
        before it sets them to None.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        each = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        if func is _ADD and isinstance(args[0], StandIn):
            args[0].added(args[1])
        elif func in _SCALES and not isinstance(args[1], list | tuple):
            for one in each:
                (one.scaled if isinstance(one, StandIn) else one.mul_)(args[1])
        elif func in _ZEROING:
            for one in each:
                (one.zeroed if isinstance(one, StandIn) else one.zero_)()
        else:
            found: list[StandIn] = []
            tree_map_only(StandIn, found.append, (args, kwargs))
            return found[0].asked(func, args, kwargs)
        return None if func._schema.name.startswith("aten::_foreach") else args[0]


class SpentGradient(StandIn):
    """A gradient that has been used and freed: shape and dtype, and an error for nearly
    every operator.

    ``clip_grad_norm_`` may read its ``norm``, where it was measured, and scale it where
    ``may_scale`` knows the factor.
    """

    def __init__(
        self,
        parameter: Tensor,
        norm: Tensor | None = None,
        may_scale: Callable[[float], bool] | None = None,
    ) -> None:
        self.norm_before, self.may_scale = norm, may_scale

    def added(self, gradient: Tensor) -> None:
        raise RuntimeError(_SPENT)

    def scaled(self, factor: Any) -> None:
        """Change nothing if the gradient was clipped by this factor before its use;
        refuse any other.
        """
        if self.may_scale is None:
            raise RuntimeError(_SPENT)
        if (isinstance(factor, Tensor) and factor.dim()) or not self.may_scale(float(factor)):
            raise RuntimeError(_CLIPPED)

    def zeroed(self) -> None:
        raise RuntimeError(_ZEROED)

    def asked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the 2-norm where it is known; refuse everything else."""
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        whole = len(args) < 3 and not kwargs.get("dim") and not kwargs.get("keepdim")
        if func not in _NORMS or order != 2 or not whole or self.norm_before is None:
            raise RuntimeError(_SPENT)
        if func is _NORMS[0]:
            return self.norm_before
        return [
            one.norm_before if isinstance(one, SpentGradient) else torch.linalg.vector_norm(one)
            for one in args[0]
        ]


FOR_SUMS: Final = 4  #: A fourth key word, which separates the draws of sums from those of steps.


class GradientSum(StandIn):
    r"""The sum of the gradients of several backward passes, in bfloat16, rounded
    stochastically after each.

    .. math:: s_1 = \mathrm{round}(g_1), \qquad s_i = \mathrm{round}(s_{i-1} + g_i)

    Read, it is a tensor of the gradient's dtype. A number that it is multiplied by is
    stored beside the sum.
    """

    def __init__(self, parameter: Tensor, words: tuple[int, int, int]) -> None:
        self.words, self.count = words, 0
        self.factor: Tensor | None = None
        assert parameter.grad is not None
        self.held = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
        self.added(parameter.grad)

    def added(self, gradient: Tensor) -> None:
        """Add a gradient, and round the sum to bfloat16 once."""
        if self.factor is not None:
            raise RuntimeError(
                f"{_HELD}; this one was scaled already, and another gradient comes: clip after the "
                "last"
            )
        key = DrawKey((*self.words, FOR_SUMS, self.count))
        draws = draw_range(0, self.held.numel(), key, self.held.device).view(self.held.shape)
        self.held.copy_(to_half(self.held.float() + gradient.float(), torch.bfloat16, draws))
        self.count += 1

    def scaled(self, factor: Any) -> None:
        """Multiply the factor that is stored beside the sum."""
        if isinstance(factor, Tensor) and factor.dim():
            raise RuntimeError(_HELD)
        factor = torch.as_tensor(factor, dtype=torch.float32, device=self.held.device)
        self.factor = factor if self.factor is None else self.factor * factor

    def zeroed(self) -> None:
        self.held.zero_()
        self.factor = None

    def value(self) -> Tensor:
        """A copy of the scaled sum in the parameter's dtype."""
        whole = self.held.to(self.dtype, copy=True)
        return whole if self.factor is None else whole.mul_(self.factor)

    def asked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply an operator that changes nothing to the sum's value."""
        if func._schema.is_mutable:
            raise RuntimeError(_HELD)
        return func(*tree_map_only(GradientSum, GradientSum.value, args), **kwargs)


class Accumulation:
    """The accumulated gradients of an optimizer's parameters between two calls of
    ``optimizer.step()``.
    """

    def __init__(self) -> None:
        self._twins: dict[Tensor, int] = {}

    def take(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Put a sum in the place of a parameter's first gradient."""
        state = optimizer.state.get(parameter, {})
        stream = state.get("stream")
        if stream is None:  # take the one that the parameter's first step would give it
            if parameter not in self._twins:
                self._twins = twins([p for each in optimizer.param_groups for p in each["params"]])
            twin, alone, begun = (
                self._twins[parameter],
                len(self._twins) == 1,
                optimizer.streams_begun,
            )
            stream = new_stream(parameter, twin, optimizer.state, begun, draws=True, alone=alone)
        parameter.grad = GradientSum(
            parameter, (group["seed"], steps_taken(state) + 1, int(stream))
        )

    def finish(self, optimizer: Any) -> None:
        """Step by all sums, and free them; if one is not finite, skip every step and
        leave the sums.
        """
        self._twins = {}
        members = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        summed = [(group, p) for group, p in members if isinstance(p.grad, GradientSum)]
        if not summed:
            return
        if not optimizer._may_step([optimizer._slot(group, p) for group, p in summed]):
            optimizer._count_skipped()
            return
        optimizer.skipped_in_row = 0
        backward_pass = BackwardPass()
        for group, p in summed:
            p.grad = p.grad.value()
            optimizer.step_alone(group, p, backward_pass)
            p.grad = SpentGradient(p)


_KINDS: Final = ("previous", "exact")
_FIRSTS: Final = ("refuse", "measure")
_CLOSE: Final = 1e-5  # relative difference of two sums of the same squares in another order


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm of a gradient, of shape (), in float32 or in the gradient's dtype
    where that is wider.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(
        gradient, dtype=None if dtype is gradient.dtype else dtype
    )
    return norm


def clip_factor(total: Tensor, max_norm: float) -> Tensor:
    r"""The factor of ``clip_grad_norm_``, at most 1.

    .. math:: c = \min(1, \mathrm{max\_norm} / (\lVert g \rVert + 10^{-6}))
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class Clipping:
    """The norm of every gradient of the step under way, and the factor that clips them.

    Its arguments are those of :func:`step_in_backward`. With ``previous`` every group
    holds the last finite norm as ``previous_norm``, None before the first.
    """

    def __init__(self, kind: str, max_norm: float | None, first: str) -> None:
        check_choice("clip", kind, _KINDS)
        check_choice("first", first, _FIRSTS)
        if max_norm is None:
            raise ValueError(
                f"clip={kind!r} needs max_norm, what the norm of the whole gradient is clipped to"
            )
        check_number("max_norm", max_norm, 0.0, math.inf, open_low=True)
        if first != "refuse" and kind != "previous":
            raise ValueError(
                f"first={first!r} is for clip='previous': every step of clip={kind!r} has its own "
                "pass"
            )
        self.kind, self.max_norm, self.first = kind, float(max_norm), first
        self.measuring = False
        self.norms: dict[
            tuple[int, int], Tensor
        ] = {}  # by the index of a group, and that of a parameter there
        self.is_left_out = (
            False  # the pass under way steps nothing: it only measures, or its norm is not finite
        )
        self._measured: Tensor | None = None
        self._now: Tensor | None = None
        # what the norm so far may be before it clips more than the previous one does
        self._limit = math.inf
        self._so_far: Tensor | None = None
        self._passes: list[BackwardPass] = []

    def watch(self, groups: list[dict[str, Any]]) -> None:
        """Add ``previous_norm`` to groups without one: that of the other groups, else
        None.
        """
        if self.kind == "previous":
            known = next(
                (group["previous_norm"] for group in groups if "previous_norm" in group), None
            )
            for group in groups:
                group.setdefault("previous_norm", known)

    def forget(self) -> None:
        self.norms, self._measured, self.is_left_out = {}, None, False
        self._so_far, self._passes = None, []

    def forget_broken(self) -> None:
        """Forget the step under way if an exception ended a backward pass of it: its
        norm is that of a part.
        """
        if any(backward_pass.has_failed for backward_pass in self._passes):
            self.forget()

    def lets(
        self,
        gradient: Tensor,
        place: tuple[int, int],
        groups: list[dict[str, Any]],
        backward_pass: BackwardPass,
    ) -> bool:
        """Measure the norm of a gradient and clip it in place; True if its parameter
        may step.
        """
        self.forget_broken()
        if place in self.norms:
            end = (
                "measure() takes the norm of one backward pass"
                if self.measuring
                else "call optimizer.step() after"
            )
            raise RuntimeError(
                "a second backward pass before the step of the first has ended, under "
                f"clip={self.kind!r}: "
                f"{end}{'' if self.measuring else ' each, which ends a step and keeps its norm'}"
            )
        if not self.norms:
            self._now = None if self.measuring else self._factor(groups)
        if backward_pass not in self._passes:
            self._passes.append(backward_pass)
        norm = self.norms[place] = norm_of(gradient)
        if self._now is None or self.is_left_out:
            return False
        if self._now != 1:
            gradient.mul_(self._now)
        if self._limit < math.inf:
            excess = self._excess(norm)
            if not (excess.is_cpu and excess == 1):  # a GPU is not waited for
                gradient.mul_(excess)
        return True

    def _excess(self, norm: Tensor) -> Tensor:
        """The factor by which the norm so far clips a gradient more than the previous
        norm does: 1 below the limit, NaN for a norm that is not finite.
        """
        finite = norm.nan_to_num(0.0, 0.0)
        if self._so_far is None:
            self._so_far = finite
        else:
            self._so_far = torch.hypot(self._so_far.to(norm.device), finite)
        limit = torch.tensor(self._limit, dtype=norm.dtype)
        # the difference is 0, or NaN
        return limit / torch.clamp(self._so_far, min=self._limit) + (norm - norm)

    def measured(self, groups: list[dict[str, Any]]) -> bool:
        """Take over the norm of a pass that only measured; False if it is not finite
        and would be the previous one.
        """
        if not self.norms:
            raise RuntimeError(
                "measure() has seen no gradient: no backward pass ran in it that reaches a "
                "parameter"
            )
        total, self.norms = self._total(), {}
        self._passes = []
        if self.kind == "exact":
            self._measured = total.cpu()
            return True
        return _keep(total, groups)

    def end(self, groups: list[dict[str, Any]]) -> bool:
        """End a step and store its norm for the next; True if the step was skipped, as
        the norm is not finite.
        """
        self.forget_broken()
        is_skipped = self.is_left_out and self.kind == "exact"
        if self.norms and self.kind == "previous":
            is_kept = _keep(self._total(), groups)
            is_skipped = self.is_left_out and not is_kept
        self.forget()
        return is_skipped

    def is_done_by(self, factor: float) -> bool:
        """True for 1, and for the factor of ``clip_grad_norm_`` in this step, whose
        gradients are clipped already.
        """
        if factor == 1:
            return True
        own = float(clip_factor(self._total(), self.max_norm)) if self.norms else math.inf
        return math.isclose(factor, own, rel_tol=_CLOSE) or (math.isnan(factor) and math.isnan(own))

    def _factor(self, groups: list[dict[str, Any]]) -> Tensor | None:
        """The factor of the pass that begins; None for a pass that only measures the
        first norm.
        """
        self._limit = math.inf
        if math.isinf(self.max_norm):
            return torch.ones(())
        if self.kind == "exact":
            if self._measured is None:
                raise RuntimeError(_without_norm("exact", "each step"))
            self.is_left_out = not math.isfinite(self._measured)
            return clip_factor(self._measured, self.max_norm)
        known = groups[0].get("previous_norm")
        if known is not None:
            self._limit = max(known * (1 + _CLOSE), self.max_norm)
            return clip_factor(torch.tensor(known, dtype=torch.float32), self.max_norm)
        if self.first == "refuse":
            more = (
                ", or give step_in_backward(first='measure'), which takes no step in the first pass"
            )
            raise RuntimeError(_without_norm("previous", "the first step") + more)
        self.is_left_out = True
        return None

    def _total(self) -> Tensor:
        """The norm of all gradients of the step, in the order in which
        ``clip_grad_norm_`` reduces the parameters.
        """
        norms = [self.norms[place] for place in sorted(self.norms)]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device) for norm in norms])
        )
        return total


def _without_norm(kind: str, when: str) -> str:
    return (
        f"clip={kind!r} has no norm to clip by: before {when} take it with `with handle.measure(): "
        "loss.backward()`, "
        "which takes no step"
    )


def _keep(total: Tensor, groups: list[dict[str, Any]]) -> bool:
    """Write the norm to all groups; one that is not finite leaves the previous one, and
    returns False.
    """
    norm = float(total)
    if not math.isfinite(norm):
        return False
    for group in groups:
        group["previous_norm"] = norm
    return True
