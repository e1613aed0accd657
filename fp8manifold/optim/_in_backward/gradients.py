"""Gradients under steps in the backward pass: spent ones without memory, and sums in bfloat16."""

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8manifold.optim._slot import Slot, steps_taken
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import Stream, draw_range

_SPENT: Final = (
    "this gradient has been used and freed: under step_in_backward a parameter's step is taken as soon as its gradient "
    "is there, so gradients cannot be accumulated, clipped, scaled or read; call optimizer.zero_grad() between "
    "backward passes, or give step_in_backward clip or accumulate"
)
_ZEROED: Final = (
    "zero_grad(set_to_none=False) keeps gradients, as zeros, for the next backward pass to add to: under "
    "step_in_backward they are freed as soon as they are used; call zero_grad(set_to_none=True), the default"
)
_CLIPPED: Final = (
    "this gradient has been used and freed: clip_grad_norm_ may be called for its result, with the norm of the whole "
    "gradient and the max_norm of step_in_backward, or with inf; it was called with another factor"
)
_HELD: Final = (
    "this gradient is a sum in bfloat16, kept by step_in_backward(accumulate='bfloat16'): it may be read, clipped by "
    "norm and scaled by one number, but not changed otherwise"
)
_ADD: Final = torch.ops.aten.add_.Tensor
_SCALES: Final = (torch.ops.aten.mul_.Tensor, torch.ops.aten._foreach_mul_.Tensor, torch.ops.aten._foreach_mul_.Scalar)
_ZEROING: Final = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
_NORMS: Final = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar)


class StandIn(Tensor):
    """A tensor with the shape and dtype of a gradient, without its memory; subclasses implement the operators."""

    @staticmethod
    def __new__(cls, parameter: Tensor, *_: Any, **__: Any) -> "StandIn":
        return Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def added(self, gradient: Tensor) -> None:
        raise NotImplementedError

    def scaled(self, factor: Any) -> None:
        raise NotImplementedError

    def zeroed(self) -> None:
        raise NotImplementedError

    def asked(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dispatch each operator to the stand-in's method.  torch detaches gradients before it sets them to None."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        each = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
        if func is _ADD and isinstance(args[0], StandIn):
            args[0].added(args[1])
        elif func in _SCALES and not isinstance(args[1], list | tuple):
            _one_by_one(each, lambda one: one.scaled(args[1]), lambda one: one.mul_(args[1]))
        elif func in _ZEROING:
            _one_by_one(each, lambda one: one.zeroed(), lambda one: one.zero_())
        else:
            return next(one for one in _stand_ins(args, kwargs)).asked(func, args, kwargs)
        return None if func._schema.name.startswith("aten::_foreach") else args[0]


def _one_by_one(each: Any, ours: Callable[[StandIn], None], others: Callable[[Tensor], object]) -> None:
    for one in each:
        if isinstance(one, StandIn):
            ours(one)
        else:
            others(one)


def _stand_ins(args: Any, kwargs: Any) -> list[StandIn]:
    found: list[StandIn] = []
    tree_map_only(StandIn, found.append, (args, kwargs))
    return found


class SpentGradient(StandIn):
    """A gradient that has been used and freed: shape and dtype, and an error for nearly every operator.

    Args:
        parameter: the parameter whose gradient it was.
        norm: the gradient's 2-norm where it was measured, which ``clip_grad_norm_`` may read.
        may_scale: returns whether a factor is that of the clipping done already; None refuses every factor.
    """

    def __init__(
        self, parameter: Tensor, norm: Tensor | None = None, may_scale: Callable[[float], bool] | None = None
    ) -> None:
        self.norm_before, self.may_scale = norm, may_scale

    def added(self, gradient: Tensor) -> None:
        raise RuntimeError(_SPENT)

    def scaled(self, factor: Any) -> None:
        """Change nothing if the gradient was clipped by this factor before its use; refuse any other."""
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
        return [one.norm_before if isinstance(one, SpentGradient) else torch.linalg.vector_norm(one) for one in args[0]]


FOR_SUMS: Final = 4
"""The fourth key word: sums draw from streams of their own, apart from those of steps."""


class GradientSum(StandIn):
    """The sum of the gradients of several backward passes, in bfloat16, each rounded stochastically to it.

    .. math:: s_1 = \\mathrm{round}(g_1), \\qquad s_i = \\mathrm{round}(s_{i-1} + g_i)

    It reads as a tensor of the gradient's dtype.  A scalar that it is multiplied by is kept beside it.

    Args:
        parameter: the parameter, with its first gradient in ``grad``.
        words: key words of the draws: seed, step and stream.
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
            raise RuntimeError(f"{_HELD}; this one was scaled already, and another gradient comes: clip after the last")
        key = Stream((*self.words, FOR_SUMS, self.count))
        draws = draw_range(0, self.held.numel(), key, self.held.device).view(self.held.shape)
        self.held.copy_(to_half(self.held.float() + gradient.float(), torch.bfloat16, draws))
        self.count += 1

    def scaled(self, factor: Any) -> None:
        """Multiply the factor that is kept beside the sum."""
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
    """The accumulated gradients of an optimizer's parameters between two calls of ``optimizer.step()``."""

    def __init__(self, optimizer: Any) -> None:
        self._of = weakref.ref(optimizer)
        self._twins: dict[Tensor, int] = {}

    @property
    def optimizer(self) -> Any:
        optimizer = self._of()
        assert optimizer is not None
        return optimizer

    def take(self, group: dict[str, Any], parameter: Tensor) -> None:
        words = (group["seed"], self._steps(parameter) + 1, self._stream(parameter))
        parameter.grad = GradientSum(parameter, words)

    def finish(self) -> None:
        """Step every parameter that has accumulated a gradient, and free the sums."""
        members = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        self._step_sums([self.optimizer._slot(group, p) for group, p in members if isinstance(p.grad, GradientSum)])
        self._twins = {}

    def _step_sums(self, slots: list[Slot]) -> None:
        """Step by the sums in ``grad``.  Where one is not finite, skip every step and keep all sums."""
        if not slots:
            return
        if not self.optimizer._may_step(slots):
            self.optimizer._count_skipped()
            return
        self.optimizer.skipped_in_row = 0
        for group, p in [(slot.group, slot.parameter) for slot in slots]:
            assert isinstance(p.grad, GradientSum)
            p.grad = p.grad.value()
            self.optimizer.step_alone(group, p)
            p.grad = SpentGradient(p)

    def _steps(self, parameter: Tensor) -> int:
        return steps_taken(self.optimizer.state.get(parameter, {}))

    def _stream(self, parameter: Tensor) -> int:
        """The parameter's stream of draws; before its first step, the stream that the step would assign."""
        state = self.optimizer.state.get(parameter, {})
        if "stream" in state:
            return int(state["stream"])
        if parameter not in self._twins:
            everyone = [p for group in self.optimizer.param_groups for p in group["params"]]
            self._twins = twins(everyone)
        alone, begun = len(self._twins) == 1, self.optimizer.streams_begun
        return new_stream(parameter, self._twins[parameter], self.optimizer.state, begun, draws=True, alone=alone)
