"""A linear layer whose gradients are quantised in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8manifold._numerics.scaled_rounding import rounded_at
from fp8manifold.nn._codes_linear import product, values_in
from fp8manifold.nn._scalers import Scaler
from fp8manifold.nn._spec import OperandSpec
from fp8manifold.random_bits import Stream

__all__ = ["Rounded", "linear_with_rounded_gradients", "round_gradient"]

Rounded = Callable[[Tensor], Tensor] | None
"""From a gradient to its quantised values; None leaves it as it is."""


def linear_with_rounded_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_activation: Rounded, of_weight: Rounded
) -> Tensor:
    """``x W^T + b`` whose backward pass takes ``G' = of_activation(G)`` in place of the gradient G that arrives.

    .. math:: dx = G' W, \\qquad dW = \\mathrm{of\\_weight}(G'^T x), \\qquad db = \\sum G

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``; autograd keeps a weight of one byte as codes.
        bias: ``(out,)``, or None; its gradient is left alone.
        of_activation, of_weight: take and give a matrix; the weight's in float32, whatever the products were in.
    """
    apply: Callable[..., Tensor] = _Linear.apply  # typed in some releases of torch only
    return apply(x, weight, bias, of_activation, of_weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of_activation: Rounded, of_weight: Rounded
    ) -> Tensor:
        y = product(x, weight, bias)
        # what the products were in under autocast, and less to keep
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        ctx.of_activation, ctx.of_weight = of_activation, of_weight
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_bias = rows.sum(0).to(bias_dtype) if needs_bias else None
        if ctx.of_activation is not None:
            rows = ctx.of_activation(rows)
        for_x = (rows @ values_in(weight, rows)).view(x.shape).to(x_dtype) if needs_x else None
        for_weight = _weight_gradient(rows, x, ctx.of_weight, weight.dtype) if needs_weight else None
        return for_x, for_weight, for_bias, None, None


def _weight_gradient(rows: Tensor, x: Tensor, rounded: Rounded, dtype: torch.dtype) -> Tensor:
    product = rows.t() @ x.reshape(-1, x.shape[-1])
    return product.to(dtype) if rounded is None else rounded(product.float()).to(dtype)


def round_gradient(gradient: Tensor, *, scaler: Scaler, operand: OperandSpec, key: Stream) -> Tensor:
    """Quantise a gradient; one that holds Inf or NaN becomes NaN, so that no saturation hides it."""
    blocks, rounding = operand.granularity == "block", operand.rounding or "nearest"
    zero_or_nan = gradient.sum(dtype=torch.float32) * 0.0
    return rounded_at(gradient, scaler(gradient) + zero_or_nan, operand.format, rounding, key, blocks=blocks)
