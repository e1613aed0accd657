"""The product of a quantised layer: over codes, with quantised gradients, of nested input, in no fused operator."""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from fp8manifold._encoded.dispatch import DTYPES, FLOAT8
from fp8manifold._encoded.storage import dequantize_codes
from fp8manifold._native._arrays import decoded, has_memory, rounded_at
from fp8manifold.formats import FloatFormat
from fp8manifold.nn._scalers import HISTORY, FixedScale, GlobalScale, Scale, Scaler, SharedAmax
from fp8manifold.nn._spec import GLOBAL, OperandSpec
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Stream
from fp8manifold.tensor import FP8Tensor

Rounded = Callable[[Tensor], Tensor] | None
"""From a gradient to its quantised values; None leaves it as it is."""


def byte_weight(weight: Tensor, fmt: FloatFormat, **how: Any) -> FP8Parameter:
    """The codes of a float weight at a scale of its own, with options of :class:`FP8Parameter`."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"a weight has dtype {weight.dtype}: storage='fp8' takes float32 or bfloat16 layers")
    return FP8Parameter(weight.detach(), fmt, requires_grad=weight.requires_grad, **how)


# Products with codes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``, as ``torch.nn.functional.linear`` has it; of a weight in codes autograd keeps the codes."""
    if not isinstance(weight, FP8Tensor) or (dtype := _dtype_of_codes(x, weight, bias)) is None:
        return F.linear(x, weight, bias)
    result: Tensor = _CodesLinear.apply(_CAST[dtype](x), weight, bias)
    return result


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same where autograd does not look on."""
    if not isinstance(weight, FP8Tensor) or (dtype := _dtype_of_codes(x, weight, bias)) is None:
        return F.linear(x, weight, bias)
    return F.linear(x.to(dtype), _values(weight, dtype), None if bias is None else bias.to(dtype))


def values_in(weight: Tensor, x: Tensor) -> Tensor:
    """The values of a weight, in codes or not, in the dtype of ``x``: of codes without a copy of them."""
    if isinstance(weight, FP8Tensor) and x.dtype in DTYPES and _is_simple(x, weight):
        return _values(weight, x.dtype)
    return weight.to(x.dtype)


def _dtype_of_codes(x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> torch.dtype | None:
    """What codes are decoded into for a product, as autocast has it on their device; None where torch sees to it."""
    if not _is_simple(x, weight):
        return None
    device = "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype if dtype in DTYPES else None
    dtype = weight.dtype
    return dtype if x.dtype is dtype and (bias is None or bias.dtype is dtype) else None


def _is_simple(x: Tensor, weight: FP8Tensor) -> bool:
    """Whether nobody looks on who has to see the operator itself: a tracer, a transform, forward mode."""
    codes = weight.codes
    here = codes.is_cpu if x.is_cpu else x.is_cuda and x.device == codes.device
    return here and x.dim() > 1 and forward_ad._current_level < 0 and has_memory(x, codes)


_FEW: Final = 2**21
"""Weights that a card has decoded, 7 bytes moved each, before Python would have launched a kernel that moves 3."""


def _values(weight: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """The values for a product, of which a card makes the same whatever the bits of a NaN are."""
    codes, scale, fmt = weight.codes, weight.kept_scale, weight.format
    if weight.block_size is None:
        if dtype is torch.bfloat16 and _is_on_card(codes) and codes.numel() <= _FEW and (own := FLOAT8.get(fmt)):
            # in float32, as a scale of no dimensions would not have it
            return codes.view(own).bfloat16().mul_(scale if scale.dim() else scale.view(1))
        if (values := decoded(codes, fmt, dtype, scale)) is not None:
            return values
    return dequantize_codes(codes, weight.scale, fmt, dtype, weight.block_size)


def _is_on_card(codes: Tensor) -> bool:
    return codes.is_cuda


_CAST: Final = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float64: Tensor.double,
}
"""``Tensor.to`` without a look for what else its arguments may be, which takes longer than a small product's cast."""


class _CodesLinear(torch.autograd.Function):
    """In the dtype of ``x``, into which decoding is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        dtype = x.dtype
        if bias is not None:
            ctx.of_bias = bias.dtype
            bias = _CAST[dtype](bias)
        return F.linear(x, _values(weight, dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        shape, rows = x.shape, x
        if flattens := len(shape) > 2:
            rows, gradient = x.reshape(-1, shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = of_bias = None
        if needs_x:  # a second derivative needs the weight itself
            values = weight.to(x.dtype) if torch.is_grad_enabled() else _values(weight, x.dtype)
            of_x = torch.mm(gradient, values)
            of_x = of_x.view(shape) if flattens else of_x
        if needs_weight:
            of_weight = _CAST[weight.dtype](torch.mm(gradient.t(), rows))
        if needs_bias:
            of_bias = _CAST[ctx.of_bias](gradient.sum(0))
        return of_x, of_weight, of_bias


def linear_with_rounded_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_activation: Rounded, of_weight: Rounded
) -> Tensor:
    """``x W^T + b`` whose backward pass takes ``G' = of_activation(G)`` in place of the gradient G that arrives.

    .. math:: dx = G' W, \\qquad dW = \\mathrm{of\\_weight}(G'^T x), \\qquad db = \\sum G

    The weight's gradient is rounded in float32, whatever the products were in.
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


def scale_of(scaler: Scaler, x: Tensor, repeats: bool) -> Tensor:
    """The scale of an operand; it is not remembered twice."""
    return scaler.preview(x) if repeats else scaler(x)


def scaler_of(operand: OperandSpec, shared: SharedAmax | None) -> Scaler:
    """What gives an operand its scale; ``global`` ones share a magnitude."""
    if operand.scale == GLOBAL:
        assert shared is not None
        return GlobalScale(operand.format, shared)
    if operand.scale is not None:
        return FixedScale(operand.scale)
    assert operand.granularity is not None
    assert operand.policy is not None
    assert operand.granularity != "square"  # which stored weights alone have
    return Scale(operand.format, operand.granularity, operand.policy, history=operand.history or HISTORY)


def forbid_fused_operators(layer: Any) -> None:
    """Give the layer a hook that does nothing: torch's fused operators pass by a module that has one.

    ``nn.TransformerEncoderLayer`` hands the weights of its linear layers to one fused operator in evaluation, which
    would pass over what a quantised layer does to weight and input.  Weights in codes that are only decoded need none:
    they are decoded for any operator, and a hook costs a small layer a tenth of its time.
    """
    scalers = (
        layer.weight_scaler,
        layer.activation_scaler,
        layer.activation_gradient_scaler,
        layer.weight_gradient_scaler,
    )
    if layer.storage != "fp8" or layer._units is not None or scalers != (None,) * 4:
        layer.register_forward_pre_hook(_is_called)


def is_our_hook(hook: object) -> bool:
    return hook is _is_called


def _is_called(layer: nn.Module, args: Any) -> None:
    """A forward pre-hook; a function of the module, so that copies and pickles of the layer keep it."""


def over_nested(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``forward`` of the rows of a nested tensor, which has no padding among them, in the same nesting.

    ``nn.TransformerEncoder`` makes nested tensors of a padded batch.
    """
    if x.layout == torch.jagged:
        jagged: Any = x
        rows = forward(jagged.values())
        return torch.nested.nested_tensor_from_jagged(rows, offsets=jagged.offsets(), lengths=jagged.lengths())
    parts = x.unbind()
    rows = forward(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    split = rows.split([part.numel() // part.shape[-1] for part in parts])
    return torch.nested.as_nested_tensor(
        [row.view(*part.shape[:-1], -1) for row, part in zip(split, parts, strict=True)]
    )
