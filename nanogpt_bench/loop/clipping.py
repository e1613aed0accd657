"""Clipping by the norm of the whole gradient.

The gradient of a step is complete once all its micro-batches have passed backward.
Which class clips depends on when weights' gradients change or vanish:

- `Clipping` clips the complete gradient before the optimizer steps.
- `ClippingFirst` clips every micro-batch's gradient before the weights' gradients are
  quantised.
- `ClippingWithin` serves steps in the backward pass, after which no gradient is left:
  the norm is that of the step before, or of an extra backward pass.
- `Unclipped` serves such steps without clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.system.errors import BenchError


def build_clipping(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> Clipping:
    """Return a run's clipping.

    If the run has its steps in the backward pass, the optimizer is put there.
    """
    parameters = _parameters(optimizer)
    layers = [layer for layer in model.modules() if isinstance(layer, fm.QuantizedLinear)]
    has_format = any(layer.weight_gradient_scaler is not None for layer in layers)
    bound = config.optimizer.grad_clip
    clip_by = config.optimizer.clip_by
    if not config.train.step_in_backward:
        if has_format:
            return ClippingFirst(parameters, bound, model, config.train.accumulation)
        return Clipping(parameters, bound)
    if bound and has_format:
        raise BenchError(
            "model.formats: a format for a weight's gradient can't be used with "
            "train.step_in_backward and optimizer.grad_clip, since clipping comes before it; give "
            "optimizer.grad_clip 0, or leave the format out"
        )
    if clip_by:
        handle = fm.optim.step_in_backward(optimizer, clip=clip_by, max_norm=bound)
        return ClippingWithin(handle, bound, exact=clip_by == "exact")
    if config.train.accumulation > 1:
        fm.optim.step_in_backward(optimizer, accumulate="bfloat16")
        return Clipping(parameters, bound)
    fm.optim.step_in_backward(optimizer, accumulate=None)
    # It uses neither parameters nor a bound.
    return Unclipped([], 0.0)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def _total_norm(gradients: Iterable[Tensor | None]) -> Tensor:
    return get_total_norm([gradient for gradient in gradients if gradient is not None])


class GradientNorm(NamedTuple):
    """The norm of a step's gradient before clipping, None if it is not known."""

    norm: float | None
    was_clipped: bool


class Clipping:
    """Scales the complete gradient to a norm of at most `bound`.

    It does not if `bound` is 0 or the norm is not finite.
    """

    def __init__(self, parameters: Sequence[Tensor], bound: float) -> None:
        self._parameters = parameters
        self._bound = bound

    def before_backward(self) -> None:
        """Called before every micro-batch's backward pass."""

    def measure(self, loss: Tensor) -> None:
        """Measure the norm by which gradients are clipped.

        It takes a backward pass before the step's, where the class needs one.
        """

    def passed(self) -> None:
        """Called after a backward pass in which parameters stepped.

        The step has not ended yet.
        """

    def after_backward(self) -> float:
        """Called after every micro-batch's backward pass.

        Returns the factor by which its gradient was multiplied.
        """
        return 1.0

    def finish(self) -> GradientNorm:
        """Clip, and return the norm that the step's gradient had before."""
        total = _total_norm(parameter.grad for parameter in self._parameters)
        norm = total.item()
        was_clipped = 0 < self._bound < norm < math.inf
        if was_clipped:
            clip_grads_with_norm_(self._parameters, self._bound, total)
        return GradientNorm(norm, was_clipped)


class Unclipped(Clipping):
    """No clipping: each gradient is freed as soon as its parameter has stepped.

    The norm of the whole gradient is not known.
    """

    def finish(self) -> GradientNorm:
        return GradientNorm(None, was_clipped=False)


class ClippingWithin(Clipping):
    """Clips gradients that step in the backward pass.

    They are clipped by the norm of the step before or, with `exact`, of an extra pass.
    """

    def __init__(self, handle: Any, bound: float, *, exact: bool) -> None:
        super().__init__(_parameters(handle.optimizer), bound)
        self._handle = handle
        self._exact = exact
        self._norm = GradientNorm(None, was_clipped=False)

    def measure(self, loss: Tensor) -> None:
        """Measure with `exact`, and in the first step.

        The pass that steps uses the same graph, with its dropout.
        """
        if self._exact or self._previous_norm() is None:
            with self._handle.measure():
                loss.backward(retain_graph=True)

    def passed(self) -> None:
        """Note the norm, which is in the placeholders in `grad` until the step ends."""
        norm = _total_norm(parameter.grad for parameter in self._parameters).item()
        previous_norm = self._previous_norm()
        norm_to_clip = norm if self._exact or previous_norm is None else previous_norm
        self._norm = GradientNorm(norm, self._bound < norm_to_clip < math.inf)

    def finish(self) -> GradientNorm:
        norm = self._norm
        self._norm = GradientNorm(None, was_clipped=False)
        return norm

    def _previous_norm(self) -> float | None:
        norm: float | None = self._handle.optimizer.param_groups[0].get("previous_norm")
        return norm


class ClippingFirst(Clipping):
    """Clips every micro-batch's float gradient, then quantises that of the weights.

    The quantised gradients are summed in float32. The bound of each is `bound` over the
    number of micro-batches, so that the norm of their sum is at most `bound`, except
    for what rounding adds. A gradient that is not finite is left as it is, so that the
    step is skipped.
    """

    def __init__(
        self, parameters: Sequence[Tensor], bound: float, model: nn.Module, micro_steps: int
    ) -> None:
        super().__init__(parameters, bound)
        self._model = model
        self._micro_steps = micro_steps
        #: sums of the quantised gradients of earlier micro-batches
        self._sums: list[Tensor | None] = []
        #: sums of the unclipped gradients, for their norm; one micro-batch needs none
        self._unclipped: list[Tensor | None] = [None] * len(parameters)
        #: norm of the last micro-batch's gradient
        self._last_norm = 0.0
        self._was_clipped = False

    def before_backward(self) -> None:
        self._sums = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def after_backward(self) -> float:
        gradients = [parameter.grad for parameter in self._parameters]
        norm = _total_norm(gradients)
        self._last_norm = norm.item()
        if self._micro_steps > 1:
            for index, gradient in enumerate(gradients):
                copied = None if gradient is None else gradient.clone()
                self._unclipped[index] = _add(self._unclipped[index], copied)
        factor = 1.0
        bound = self._bound / self._micro_steps
        if 0 < bound < self._last_norm < math.inf:
            clip_grads_with_norm_(self._parameters, bound, norm)
            self._was_clipped = True
            # as in clip_grads_with_norm_
            factor = bound / (self._last_norm + 1e-6)
        fm.quantize_weight_gradients(self._model)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = _add(total, parameter.grad)
        self._sums = []
        return factor

    def finish(self) -> GradientNorm:
        norm = self._last_norm
        if self._micro_steps > 1:
            norm = _total_norm(self._unclipped).item()
        result = GradientNorm(norm, self._was_clipped)
        self._unclipped = [None] * len(self._parameters)
        self._was_clipped = False
        return result


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a gradient to a sum in place; None stands for zero."""
    if total is None:
        return gradient
    if gradient is None:
        return total
    return total.add_(gradient)
