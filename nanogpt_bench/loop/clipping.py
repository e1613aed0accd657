"""Clipping by the norm of the whole gradient, before the weights' gradients are
quantised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError


def clipping_of(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> Clipping:
    """Return a run's clipping, and put the optimizer's steps into the backward pass if
    the run wants them there.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    layers = [layer for layer in model.modules() if isinstance(layer, fm.QuantizedLinear)]
    has_format = any(layer.weight_gradient_scaler is not None for layer in layers)
    bound, own = config.optimizer.grad_clip, config.optimizer.clip_by
    if not config.train.step_in_backward:
        if has_format:
            return ClippingFirst(parameters, bound, model, config.train.accumulation)
        return Clipping(parameters, bound)
    if bound and has_format:
        raise BenchError(
            "model.formats: gradient of a weight can't be used with train.step_in_backward and "
            "optimizer.grad_clip, which comes before it; give optimizer.grad_clip 0, or leave it "
            "out"
        )
    summed = config.train.accumulation > 1
    accumulate = "bfloat16" if summed else None
    options: dict[str, Any] = (
        {"clip": own, "max_norm": bound} if own else {"accumulate": accumulate}
    )
    handle = fm.optim.step_in_backward(optimizer, **options)
    if own:
        return ClippingWithin(handle, bound, exact=own == "exact")
    return Clipping(parameters, bound) if summed else Unclipped([], 0.0)


class Clipping:
    """Scales the complete gradient to a norm of at most `bound`; not if `bound` is 0 or
    the norm is not finite.
    """

    def __init__(self, parameters: Sequence[Tensor], bound: float) -> None:
        self._parameters, self._bound = parameters, bound

    def before_backward(self) -> None:
        """Called before every micro-batch's backward pass."""

    def measure(self, loss: Tensor) -> None:
        """Measure the norm by which gradients are clipped, where that takes a backward
        pass before the step's.
        """

    def passed(self) -> None:
        """Called after a backward pass that stepped, before its step ends."""

    def after_backward(self) -> float:
        """Called after every micro-batch's backward pass; return by what its gradient
        was multiplied.
        """
        return 1.0

    def finish(self) -> tuple[float | None, bool]:
        """Return the norm that the step's gradient had before it was clipped, and
        whether it was.
        """
        total = get_total_norm(
            [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        )
        norm = total.item()
        clipped = 0 < self._bound < norm < math.inf
        if clipped:
            clip_grads_with_norm_(self._parameters, self._bound, total)
        return norm, clipped


class Unclipped(Clipping):
    """No clipping: each gradient is freed as soon as its parameter has stepped, and the
    whole norm is not known.
    """

    def finish(self) -> tuple[None, bool]:
        return None, False


class ClippingWithin(Clipping):
    """Clips gradients that step in the backward pass, by the norm of the step before or
    (`exact`) of an extra pass.
    """

    def __init__(self, handle: Any, bound: float, *, exact: bool) -> None:
        groups = handle.optimizer.param_groups
        super().__init__([parameter for group in groups for parameter in group["params"]], bound)
        self._handle, self._exact = handle, exact
        self._seen: tuple[float | None, bool] = None, False

    def measure(self, loss: Tensor) -> None:
        """Measure with `exact`, and in the first step; the pass that steps uses the
        same graph, with its dropout.
        """
        if self._exact or self._before() is None:
            with self._handle.measure():
                loss.backward(retain_graph=True)

    def passed(self) -> None:
        """Note the norm, which is in the placeholders in `grad` until the step ends."""
        norm, before = (
            get_total_norm([p.grad for p in self._parameters if p.grad is not None]).item(),
            self._before(),
        )
        by = norm if self._exact or before is None else before
        self._seen = norm, self._bound < by < math.inf

    def finish(self) -> tuple[float | None, bool]:
        seen, self._seen = self._seen, (None, False)
        return seen

    def _before(self) -> float | None:
        norm: float | None = self._handle.optimizer.param_groups[0].get("previous_norm")
        return norm


class ClippingFirst(Clipping):
    """Clips the float gradient of every micro-batch, then quantises that of the
    weights, and sums in float32.

    The bound of each is `bound` over the number of micro-batches, so that the norm of
    their sum is at most `bound`, except for what rounding adds. A gradient that is not
    finite is left as it is, so that the step is skipped.
    """

    def __init__(
        self, parameters: Sequence[Tensor], bound: float, model: nn.Module, micro_steps: int
    ) -> None:
        super().__init__(parameters, bound)
        self._model, self._micro_steps = model, micro_steps
        self._sums: list[Any] = []
        # Sums of the unclipped gradients, for their norm; one micro-batch needs no copy
        # of it.
        self._unclipped: list[Any] = [None] * len(parameters)
        self._norm, self._clipped = 0.0, False

    def before_backward(self) -> None:
        self._sums = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def after_backward(self) -> float:
        gradients = [parameter.grad for parameter in self._parameters]
        norm = get_total_norm([gradient for gradient in gradients if gradient is not None])
        self._norm = norm.item()
        if self._micro_steps > 1:
            self._unclipped = _added(
                self._unclipped, [None if g is None else g.clone() for g in gradients]
            )
        factor, bound = 1.0, self._bound / self._micro_steps
        if 0 < bound < self._norm < math.inf:
            clip_grads_with_norm_(self._parameters, bound, norm)
            self._clipped, factor = True, bound / (self._norm + 1e-6)  # as in clip_grads_with_norm_
        fm.quantize_weight_gradients(self._model)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            (parameter.grad,) = _added([total], [parameter.grad])
        self._sums = []
        return factor

    def finish(self) -> tuple[float, bool]:
        norm, clipped = self._norm, self._clipped
        if self._micro_steps > 1:
            norm = get_total_norm(
                [gradient for gradient in self._unclipped if gradient is not None]
            ).item()
        self._unclipped, self._clipped = [None] * len(self._parameters), False
        return norm, clipped


def _added(sums: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Add gradients to sums in place; None stands for zero."""
    pairs = zip(sums, gradients, strict=True)
    return [
        one if total is None else total if one is None else total.add_(one) for total, one in pairs
    ]
