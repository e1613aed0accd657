"""Weights of one byte in a layer: held as codes, and products with them without a float copy to keep."""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8manifold._encoded.dispatch import DTYPES
from fp8manifold._encoded.storage import dequantize_codes
from fp8manifold._encoded.traits import Rounding
from fp8manifold._native._arrays import has_memory
from fp8manifold.formats import FloatFormat
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import Draws
from fp8manifold.scaling import StoredGranularity
from fp8manifold.tensor import FP8Tensor


def byte_weight(
    weight: Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    seed: int,
    draws: Draws,
    *,
    granularity: StoredGranularity,
    headroom: float | None,
    keep_remainder: bool,
) -> FP8Parameter:
    """The codes of a float weight at a scale of its own.

    Args:
        weight: float32 or bfloat16.
        fmt: format of the codes.
        rounding, seed, draws: of what others write into it.
        granularity, headroom: of the scale.
        keep_remainder: whether what rounding leaves is kept.

    Raises:
        TypeError: another dtype.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"a weight has dtype {weight.dtype}: storage='fp8' takes float32 or bfloat16 layers")
    return FP8Parameter(
        weight.detach(),
        fmt,
        granularity=granularity,
        headroom=headroom,
        rounding=rounding,
        seed=seed,
        draws=draws,
        keep_remainder=keep_remainder,
        requires_grad=weight.requires_grad,
    )


# Products with codes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b``, as ``torch.nn.functional.linear`` has it; of a weight in codes autograd keeps the codes.

    Args:
        x: ``(..., in)``.
        weight: ``(out, in)``, in codes or not.
        bias: ``(out,)``, or None.
    """
    if not isinstance(weight, FP8Tensor) or not _is_simple(x, weight):
        return F.linear(x, weight, bias)
    if (cast := _in_one_dtype(x, weight, bias)) is None:
        return F.linear(x, weight, bias)
    result: Tensor = _CodesLinear.apply(cast[0], weight, cast[1])
    return result


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same where autograd does not look on."""
    simple = isinstance(weight, FP8Tensor) and _is_simple(x, weight)
    cast = _in_one_dtype(x, weight, bias) if simple else None
    return F.linear(x, weight, bias) if cast is None else F.linear(cast[0], _values(weight, cast[0].dtype), cast[1])


def values_in(weight: Tensor, x: Tensor) -> Tensor:
    """The values of a weight, in codes or not, in the dtype of ``x``: of codes without a copy of them."""
    if isinstance(weight, FP8Tensor) and x.dtype in DTYPES and _is_simple(x, weight):
        return _values(weight, x.dtype)
    return weight.to(x.dtype)


def _in_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """Input and bias in the dtype of the product, as autocast has it on their device; None where codes have no such."""
    device, dtype = x.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    return None if x.dtype != dtype or dtype not in DTYPES else (x, bias)


_DEVICES: Final = ("cpu", "cuda")


def _is_simple(x: Tensor, weight: FP8Tensor) -> bool:
    """Whether nobody looks on who has to see the operator itself: a tracer, a transform, forward mode."""
    here = x.device == weight.device and x.device.type in _DEVICES
    seen = here and has_memory(x) and has_memory(weight.codes)
    return seen and x.dim() > 1 and torch.autograd.forward_ad._current_level < 0


def _values(weight: Any, dtype: torch.dtype) -> Tensor:
    return dequantize_codes(weight.codes, weight.scale, weight.format, dtype, weight.block_size)


class _CodesLinear(torch.autograd.Function):
    """In the dtype of ``x``, into which decoding is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, _values(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, gradient = x.reshape(-1, x.shape[-1]), gradients[0].reshape(-1, gradients[0].shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:  # a second derivative needs the weight itself
            values = weight.to(x.dtype) if torch.is_grad_enabled() else _values(weight, x.dtype)
            of_x = (gradient @ values).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.t() @ rows).to(weight.dtype)
        return of_x, of_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None
