"""Gradients under steps in the backward pass: spent, summed, clipped.

After its step a parameter's ``grad`` is a `StandIn`, a tensor without the memory of a
gradient. torch sends each operator on it to `__torch_dispatch__`:

    StandIn       SpentGradient      used and freed. Adding, reading and zeroing raise;
                                     `clip_grad_norm_` may read its norm and scale it by
                                     the factor that it was clipped by.
                  GradientSum        accumulate="bfloat16": autograd's additions go into
                                     a sum in bfloat16; it may be read and scaled.

`Accumulation` puts sums in the place of first gradients, and steps by them in
``optimizer.step()``. `Clipping` knows the norms of the step under way, by which each
gradient is clipped before its step. `InBackward` in ``__init__.py`` calls both.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8manifold._base.checks import check_choice, check_number
from fp8manifold._base.param_groups import parameters_of
from fp8manifold.optim._passes import BackwardPass
from fp8manifold.optim._slot import steps_taken
from fp8manifold.optim._streams import new_stream, twins
from fp8manifold.optim._writeback import to_half
from fp8manifold.random_bits import FOR_SUMS, DrawKey, draw_range

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
_SUMMED: Final = (
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
    """A tensor with the shape and dtype of a gradient, without its memory.

    Subclasses say what operators on it do.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor, *_: Any, **__: Any) -> "StandIn":
        return Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def memory(self) -> Tensor | None:
        """What there is in place of the gradient's memory."""
        return None

    def element_size(self) -> int:
        """Return the bytes of a number in that memory."""
        return 0 if self.memory is None else self.memory.element_size()

    @property
    def itemsize(self) -> int:  # type: ignore[override]  # a field of torch's stubs
        """The bytes of a number in that memory."""
        return self.element_size()

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # the same
        """The bytes of that memory."""
        return 0 if self.memory is None else self.memory.nbytes

    # What subclasses define, and when it is called.

    #: A gradient is added to it in place.
    on_add: Callable[[Tensor], None]
    #: It is multiplied in place.
    on_scale: Callable[[Any], None]
    #: It is set to zero in place.
    on_zero: Callable[[], None]
    #: Any other operator is applied to it: function, arguments, keyword arguments.
    on_other: Callable[[Any, Any, Any], Any]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the method of the stand-in for an operator.

        Operators on lists may have ordinary gradients beside stand-ins.
        """
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            # torch detaches a gradient before it sets it to None
            return args[0]
        is_on_lists = bool(args) and isinstance(args[0], list | tuple)
        tensors = args[0] if is_on_lists else args[:1]
        if func is _ADD and isinstance(args[0], StandIn):
            args[0].on_add(args[1])
        elif func in _SCALES and not isinstance(args[1], list | tuple):
            for tensor in tensors:
                if isinstance(tensor, StandIn):
                    tensor.on_scale(args[1])
                else:
                    tensor.mul_(args[1])
        elif func in _ZEROING:
            for tensor in tensors:
                if isinstance(tensor, StandIn):
                    tensor.on_zero()
                else:
                    tensor.zero_()
        else:
            stand_ins: list[StandIn] = []
            tree_map_only(StandIn, stand_ins.append, (args, kwargs))
            return stand_ins[0].on_other(func, args, kwargs)
        # operators on lists return nothing, those on a tensor the tensor
        return None if func._schema.name.startswith("aten::_foreach") else args[0]


class SpentGradient(StandIn):
    """A gradient that has been used and freed.

    It has shape and dtype, and raises for nearly every operator. `clip_grad_norm_` may
    read its norm, if it was measured, and scale it, if ``may_scale`` accepts the factor.
    """

    def __init__(
        self,
        parameter: Tensor,
        norm: Tensor | None = None,
        may_scale: Callable[[float], bool] | None = None,
    ) -> None:
        # before clipping; ``norm`` is a method of tensors
        self.norm_before = norm
        self.may_scale = may_scale

    def on_add(self, gradient: Tensor) -> None:
        raise RuntimeError(_SPENT)

    def on_scale(self, factor: Any) -> None:
        """Do nothing if the gradient was clipped by this factor; refuse any other."""
        if self.may_scale is None:
            raise RuntimeError(_SPENT)
        if (isinstance(factor, Tensor) and factor.dim()) or not self.may_scale(float(factor)):
            raise RuntimeError(_CLIPPED)

    def on_zero(self) -> None:
        raise RuntimeError(_ZEROED)

    def on_other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the 2-norm of the whole gradient, if it is known; refuse all else."""
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        is_whole = len(args) < 3 and not kwargs.get("dim") and not kwargs.get("keepdim")
        if func not in _NORMS or order != 2 or not is_whole or self.norm_before is None:
            raise RuntimeError(_SPENT)
        if func is _NORMS[0]:
            return self.norm_before
        return [
            g.norm_before if isinstance(g, SpentGradient) else torch.linalg.vector_norm(g)
            for g in args[0]
        ]


class GradientSum(StandIn):
    r"""The sum of the gradients of several backward passes, in bfloat16.

    It is rounded stochastically after each.

    .. math:: s_1 = \mathrm{round}(g_1), \qquad s_i = \mathrm{round}(s_{i-1} + g_i)

    Operators read it as a tensor in the dtype of the gradient. A number that it is
    multiplied by is stored beside the sum.

    Args:
        parameter: has the first gradient.
        words: seed, step and stream, the key of the draws.
    """

    def __init__(self, parameter: Tensor, words: tuple[int, int, int]) -> None:
        self.words = words
        self.count = 0
        self.factor: Tensor | None = None
        assert parameter.grad is not None
        self.stored = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
        self.on_add(parameter.grad)

    @property
    def memory(self) -> Tensor:
        """The sum in bfloat16."""
        return self.stored

    def on_add(self, gradient: Tensor) -> None:
        """Add a gradient, and round the sum to bfloat16 once."""
        if self.factor is not None:
            raise RuntimeError(
                f"{_SUMMED}; this one was scaled already, and another gradient comes: clip after "
                "the last"
            )
        key = DrawKey((*self.words, FOR_SUMS, self.count))
        draws = draw_range(0, self.stored.numel(), key, self.stored.device)
        total = self.stored.float() + gradient.float()
        self.stored.copy_(to_half(total, torch.bfloat16, draws.view(self.stored.shape)))
        self.count += 1

    def on_scale(self, factor: Any) -> None:
        """Multiply the factor that is stored beside the sum."""
        if isinstance(factor, Tensor) and factor.dim():
            raise RuntimeError(_SUMMED)
        factor = torch.as_tensor(factor, dtype=torch.float32, device=self.stored.device)
        self.factor = factor if self.factor is None else self.factor * factor

    def on_zero(self) -> None:
        self.stored.zero_()
        self.factor = None

    def value(self) -> Tensor:
        """Return a copy of the scaled sum, in the dtype of the parameter."""
        copy = self.stored.to(self.dtype, copy=True)
        return copy if self.factor is None else copy.mul_(self.factor)

    def on_other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Apply an operator to the value of the sum; refuse one that changes it."""
        if func._schema.is_mutable:
            raise RuntimeError(_SUMMED)
        return func(*tree_map_only(GradientSum, GradientSum.value, args), **kwargs)


class Accumulation:
    """The sums of gradients between two calls of ``optimizer.step()``."""

    def __init__(self) -> None:
        # as `twins` counts them, computed once in a step
        self._twins: dict[Tensor, int] = {}

    def take(self, optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
        """Put a sum in the place of a parameter's first gradient."""
        state = optimizer.state.get(parameter, {})
        stream = state.get("stream")
        if stream is None:
            # a stream for the sum alone; that of the parameter's first step may be another
            if parameter not in self._twins:
                self._twins = twins(parameters_of(optimizer))
            stream = new_stream(
                parameter,
                self._twins[parameter],
                optimizer.state,
                optimizer.streams_begun,
                draws=True,
                alone=len(self._twins) == 1,
            )
        words = (group["seed"], steps_taken(state) + 1, int(stream))
        parameter.grad = GradientSum(parameter, words)

    def finish(self, optimizer: Any) -> None:
        """Step with the accumulated gradients, and free them.

        If any is not finite, skip all steps and leave the sums.
        """
        self._twins = {}
        summed = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p.grad, GradientSum):
                    summed.append((group, p))
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
# the relative difference of two sums of the same squares in another order
_CLOSE: Final = 1e-5


def norm_of(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a gradient, of shape ().

    It is in float32, or in the dtype of the gradient if that is wider.
    """
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(
        gradient, dtype=None if dtype is gradient.dtype else dtype
    )
    return norm


def clip_factor(total: Tensor, max_norm: float) -> Tensor:
    r"""Return the factor of ``clip_grad_norm_``, at most 1.

    .. math:: c = \min(1, \mathrm{max\_norm} / (\lVert g \rVert + 10^{-6}))
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


class Clipping:
    """The norms of the gradients of the step under way, and the factor that clips them.

    A step under way is one or more backward passes, until ``optimizer.step()`` ends it::

                              exact                    previous
        handle.measure()      norm -> _exact_norm      norm -> previous_norm of all groups
        first gradient        no norm: refused         no norm: refused, or the step only
                                                       measures (``first="measure"``)
        each gradient         clipped by _exact_norm   clipped by previous_norm, and by the
                                                       norm so far where that is larger
        optimizer.step()                               norm -> previous_norm of all groups

    A norm that is not finite is not stored, and a step by it is left out.

    Args:
        kind: ``exact`` or ``previous``, ``clip`` of :func:`step_in_backward`.
        max_norm: as there.
        first: as there.
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
        self.kind = kind
        self.max_norm = float(max_norm)
        self.first = first
        # the pass under way is one under `measure`, which takes norms alone
        self.takes_no_step = False
        # by the index of a group, and that of a parameter there
        self.norms: dict[tuple[int, int], Tensor] = {}
        # the pass under way was to step, and steps nothing: it has no norm to clip by,
        # or one that is not finite
        self.is_left_out = False
        # with ``exact``: the norm of the whole gradient, from a pass under `measure`
        self._exact_norm: Tensor | None = None
        # the factor of the step under way; None if it only measures
        self._step_factor: Tensor | None = None
        # what the norm so far may be before it clips more than the previous one does
        self._limit = math.inf
        self._norm_so_far: Tensor | None = None
        self._passes: list[BackwardPass] = []

    def share_previous_norm(self, groups: list[dict[str, Any]]) -> None:
        """Add ``previous_norm`` to groups without one, from the other groups, or None."""
        if self.kind == "previous":
            norms = [group["previous_norm"] for group in groups if "previous_norm" in group]
            norm = norms[0] if norms else None
            for group in groups:
                group.setdefault("previous_norm", norm)

    def forget(self) -> None:
        """Forget the step under way."""
        self.norms = {}
        self._exact_norm = None
        self.is_left_out = False
        self._norm_so_far = None
        self._passes = []

    def forget_failed_pass(self) -> None:
        """Forget the step under way if an exception ended a backward pass of it.

        Its norm is that of a part of the gradient.
        """
        if any(backward_pass.has_failed for backward_pass in self._passes):
            self.forget()

    def measure_and_clip(
        self,
        gradient: Tensor,
        place: tuple[int, int],
        groups: list[dict[str, Any]],
        backward_pass: BackwardPass,
    ) -> bool:
        """Measure the norm of a gradient, and clip it in place.

        Args:
            gradient: of a parameter.
            place: the index of the parameter's group, and of the parameter in it.
            groups: the groups of the optimizer.
            backward_pass: the pass under way.

        Returns:
            True if the parameter may step.
        """
        self.forget_failed_pass()
        if place in self.norms:
            if self.takes_no_step:
                advice = "measure() takes the norm of one backward pass"
            else:
                advice = "call optimizer.step() after each, which ends a step and keeps its norm"
            raise RuntimeError(
                "a second backward pass before the step of the first has ended, under "
                f"clip={self.kind!r}: {advice}"
            )
        if not self.norms:
            self._step_factor = None if self.takes_no_step else self._factor_of_step(groups)
        if backward_pass not in self._passes:
            self._passes.append(backward_pass)
        norm = norm_of(gradient)
        self.norms[place] = norm
        if self._step_factor is None or self.is_left_out:
            return False
        if self._step_factor != 1:
            gradient.mul_(self._step_factor)
        if self._limit < math.inf:
            factor = self._factor_of_norm_so_far(norm)
            # on a GPU the comparison would wait
            is_one = factor.is_cpu and factor == 1
            if not is_one:
                gradient.mul_(factor)
        return True

    def _factor_of_norm_so_far(self, norm: Tensor) -> Tensor:
        """Add a norm to that so far, and return what that clips by beyond the previous one.

        It is 1 below the limit, and NaN for a norm that is not finite.
        """
        finite = norm.nan_to_num(0.0, 0.0)
        if self._norm_so_far is None:
            self._norm_so_far = finite
        else:
            self._norm_so_far = torch.hypot(self._norm_so_far.to(norm.device), finite)
        limit = torch.tensor(self._limit, dtype=norm.dtype, device="cpu")
        zero_or_nan = norm - norm
        return limit / torch.clamp(self._norm_so_far, min=self._limit) + zero_or_nan

    def end_measurement(self, groups: list[dict[str, Any]]) -> bool:
        """Take over the norm of a pass that only measured.

        Returns:
            False if it is not finite, and would have been the previous norm.
        """
        if not self.norms:
            raise RuntimeError(
                "measure() has seen no gradient: no backward pass ran in it that reaches a "
                "parameter"
            )
        total = self._total_norm()
        self.norms = {}
        self._passes = []
        if self.kind == "exact":
            self._exact_norm = total.cpu()
            return True
        return _store_norm(total, groups)

    def end(self, groups: list[dict[str, Any]]) -> bool:
        """End a step, and store its norm for the next one.

        Returns:
            True if the step was skipped, because the norm is not finite.
        """
        self.forget_failed_pass()
        is_skipped = self.is_left_out and self.kind == "exact"
        if self.norms and self.kind == "previous":
            is_finite = _store_norm(self._total_norm(), groups)
            is_skipped = self.is_left_out and not is_finite
        self.forget()
        return is_skipped

    def has_clipped_by(self, factor: float) -> bool:
        """Return True if the gradients of this step are clipped by a factor already.

        They are by 1, and by that of ``clip_grad_norm_`` for this step.
        """
        if factor == 1:
            return True
        expected = math.inf
        if self.norms:
            expected = float(clip_factor(self._total_norm(), self.max_norm))
        are_nan = math.isnan(factor) and math.isnan(expected)
        return are_nan or math.isclose(factor, expected, rel_tol=_CLOSE)

    def _factor_of_step(self, groups: list[dict[str, Any]]) -> Tensor | None:
        """Return the factor of the step that begins, or None if it only measures."""
        self._limit = math.inf
        if math.isinf(self.max_norm):
            return torch.ones((), device="cpu")
        if self.kind == "exact":
            if self._exact_norm is None:
                raise RuntimeError(_without_norm("exact", "each step"))
            self.is_left_out = not math.isfinite(self._exact_norm)
            return clip_factor(self._exact_norm, self.max_norm)
        previous_norm = groups[0].get("previous_norm")
        if previous_norm is not None:
            # Beyond it the norm so far clips further: the product of both factors is
            # max_norm over that norm.
            self._limit = max(previous_norm * (1 + _CLOSE), self.max_norm)
            norm = torch.tensor(previous_norm, dtype=torch.float32, device="cpu")
            return clip_factor(norm, self.max_norm)
        if self.first == "refuse":
            raise RuntimeError(
                _without_norm("previous", "the first step")
                + ", or give step_in_backward(first='measure'), which takes no step in the first "
                "pass"
            )
        self.is_left_out = True
        return None

    def _total_norm(self) -> Tensor:
        """Return the norm of all gradients of the step.

        It is summed in the order in which ``clip_grad_norm_`` reduces the parameters.
        """
        norms = [self.norms[place] for place in sorted(self.norms)]
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device) for norm in norms])
        )
        return total


def _without_norm(kind: str, when: str) -> str:
    return (
        f"clip={kind!r} has no norm to clip by: before {when} take it with `with handle.measure(): "
        "loss.backward()`, which takes no step"
    )


def _store_norm(total: Tensor, groups: list[dict[str, Any]]) -> bool:
    """Write a norm to all groups as the previous one, and return True.

    One that is not finite is not written, and False is returned.
    """
    norm = float(total)
    if not math.isfinite(norm):
        return False
    for group in groups:
        group["previous_norm"] = norm
    return True
