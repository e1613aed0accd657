"""Products of a quantised layer: by decoded codes, with quantised gradients, of nested
input, or by codes.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from fp8manifold._base.autocast import autocast_dtype, outside_autocast
from fp8manifold._base.reading import refuse_trace
from fp8manifold._encoded.dispatch import DTYPES, FLOAT8
from fp8manifold._encoded.products import (
    codes_to_int8,
    int8_rows,
    round_columns,
    round_rows,
    transpose_bytes,
)
from fp8manifold._encoded.scaled import check_current
from fp8manifold._encoded.storage import dequantize_codes
from fp8manifold._native._arrays import decoded, has_memory, rounded_at
from fp8manifold.formats import FloatFormat
from fp8manifold.nn._scalers import HISTORY, FixedScale, GlobalScale, Scale, Scaler, SharedAmax
from fp8manifold.nn._spec import (
    ALIGNMENT,
    GLOBAL,
    OPERANDS,
    LayerSpec,
    OperandSpec,
    Units,
    why_decoded,
)
from fp8manifold.parameter import FP8Parameter
from fp8manifold.random_bits import DrawKey
from fp8manifold.tensor import FP8Tensor

Rounded = (
    Callable[[Tensor], Tensor] | None
)  #: From a gradient to its quantised values; None leaves it as it is.


def byte_weight(weight: Tensor, fmt: FloatFormat, **how: Any) -> FP8Parameter:
    """The codes of a float weight, with options of :class:`FP8Parameter`."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"a weight has dtype {weight.dtype}: storage='fp8' takes float32 or bfloat16 layers, "
            f"and storage='master' "
            "others too"
        )
    return FP8Parameter(weight.detach(), fmt, requires_grad=weight.requires_grad, **how)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` as by ``torch.nn.functional.linear``; of a weight in codes autograd
    saves the codes.
    """
    if not isinstance(weight, FP8Tensor) or (dtype := _dtype_of_codes(x, weight, bias)) is None:
        return F.linear(x, weight, bias)
    result: Tensor = _CodesLinear.apply(_CAST[dtype](x), weight, bias)
    return result


def _dtype_of_codes(x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype of a product with codes, under autocast that of their device; None
    leaves the product to torch.
    """
    if not _is_simple(x, weight):
        return None
    device = "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype if dtype in DTYPES else None
    dtype = weight.dtype
    return dtype if x.dtype is dtype and (bias is None or bias.dtype is dtype) else None


def _is_simple(x: Tensor, weight: FP8Tensor) -> bool:
    """True unless a tracer, a transform or forward mode has to see the operator itself."""
    codes = weight.codes
    here = codes.is_cpu if x.is_cpu else x.is_cuda and x.device == codes.device
    return here and x.dim() > 1 and forward_ad._current_level < 0 and has_memory(x, codes)


_FEW: Final = 2**21
"""Up to so many weights torch's operators (7 bytes moved per weight) are faster than
Triton's launch from Python.
"""


def _values(weight: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """The values for a product, whose result does not depend on the bits of a NaN."""
    codes, scale, fmt = weight.codes, weight.kept_scale, weight.format
    if weight.block_size is None:
        if (
            dtype is torch.bfloat16
            and is_on_card(codes)
            and codes.numel() <= _FEW
            and (own := FLOAT8.get(fmt))
        ):
            # multiplied in float32, which a scale of no dimensions would not do
            return codes.view(own).bfloat16().mul_(scale if scale.dim() else scale.view(1))
        if (values := decoded(codes, fmt, dtype, scale)) is not None:
            return values
    return dequantize_codes(codes, weight.scale, fmt, dtype, weight.block_size)


def is_on_card(x: Tensor) -> bool:
    return x.is_cuda


_CAST: Final = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float64: Tensor.double,
}
"""Casts without ``Tensor.to``, which takes longer to parse its arguments than to cast
for a small product.
"""


class _CodesLinear(torch.autograd.Function):
    """The product in the dtype of ``x``, in which decoding is exact."""

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
            with outside_autocast(x):
                of_x = torch.mm(gradient, values)
            of_x = of_x.view(shape) if flattens else of_x
        if needs_weight:
            with outside_autocast(x):
                of_weight = torch.mm(gradient.t(), rows)
            of_weight = _CAST[weight.dtype](of_weight)
        if needs_bias:
            of_bias = _CAST[ctx.of_bias](gradient.sum(0))
        return of_x, of_weight, of_bias


def linear_with_rounded_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_activation: Rounded, of_weight: Rounded
) -> Tensor:
    """``x W^T + b`` whose backward pass takes ``G' = of_activation(G)`` in place of its
    gradient G.

    .. math:: dx = G' W, \\qquad dW = \\mathrm{of\\_weight}(G'^T x), \\qquad db = \\sum G

    The weight's gradient is rounded in float32, whatever the products were in.
    """
    result: Tensor = _Linear.apply(x, weight, bias, of_activation, of_weight)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_activation: Rounded,
        of_weight: Rounded,
    ) -> Tensor:
        if not isinstance(weight, FP8Tensor) or (dtype := _dtype_of_codes(x, weight, bias)) is None:
            y = F.linear(x, weight, bias)
        else:
            y = F.linear(
                x.to(dtype), _values(weight, dtype), None if bias is None else bias.to(dtype)
            )
        # in the dtype of the product under autocast, which saves memory
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
        for_x = for_weight = None
        if needs_x:
            simple = (
                isinstance(weight, FP8Tensor) and rows.dtype in DTYPES and _is_simple(rows, weight)
            )
            values = _values(weight, rows.dtype) if simple else weight.to(rows.dtype)
            with outside_autocast(rows):
                for_x = rows @ values
            for_x = for_x.view(x.shape).to(x_dtype)
        if needs_weight:
            with outside_autocast(rows):
                for_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            for_weight = for_weight if ctx.of_weight is None else ctx.of_weight(for_weight.float())
            for_weight = for_weight.to(weight.dtype)
        return for_x, for_weight, for_bias, None, None


def round_gradient(
    gradient: Tensor, *, scaler: Scaler, operand: OperandSpec, key: DrawKey
) -> Tensor:
    """Quantise a gradient; one that holds Inf or NaN becomes NaN, so that no saturation
    hides it.
    """
    blocks, rounding = operand.granularity == "block", operand.rounding or "nearest"
    zero_or_nan = gradient.sum(dtype=torch.float32) * 0.0
    return rounded_at(
        gradient, scaler(gradient) + zero_or_nan, operand.format, rounding, key, blocks=blocks
    )


def scaler_of(operand: OperandSpec, shared: SharedAmax | None) -> Scaler:
    """The scaler of an operand; ``global`` ones share a magnitude."""
    if operand.scale == GLOBAL:
        assert shared is not None
        return GlobalScale(operand.format, shared)
    if operand.scale is not None:
        return FixedScale(operand.scale)
    how: Any = (
        operand.granularity,
        operand.policy,
    )  # filled in, and no squares, which stored weights alone have
    return Scale(operand.format, *how, history=operand.history or HISTORY)


def forbid_fused_operators(layer: Any) -> None:
    """Give the layer a hook that does nothing: torch's fused operators pass by a module
    that has one.

    ``nn.TransformerEncoderLayer`` hands the weights of its linear layers to one fused
    operator in evaluation. Weights in codes that are only decoded need no hook, which
    costs a small layer a tenth of its time.
    """
    scaled = any(getattr(layer, f"{name}_scaler") is not None for name in OPERANDS)
    if layer.storage != "fp8" or layer._units is not None or scaled:
        layer.register_forward_pre_hook(is_called)


def is_called(layer: nn.Module, args: Any) -> None:
    """A forward pre-hook; a function of the module, so that copies and pickles of the
    layer keep it.
    """


def over_nested(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``forward`` of the rows of a nested tensor, which has no padding among them, in
    the same nesting.
    """
    if x.layout == torch.jagged:
        jagged: Any = x
        rows = forward(jagged.values())
        return torch.nested.nested_tensor_from_jagged(
            rows, offsets=jagged.offsets(), lengths=jagged.lengths()
        )
    parts = x.unbind()
    rows = forward(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    split = rows.split([part.numel() // part.shape[-1] for part in parts])
    return torch.nested.as_nested_tensor(
        [row.view(*part.shape[:-1], -1) for row, part in zip(split, parts, strict=True)]
    )


_E4M3: Final = torch.float8_e4m3fn
_LEAST: Final = {"fp8": (8, 9), "int8": (8, 0)}
_LEAST_ROWS: Final = 17  #: Fewest rows of the first matrix of a product of INT8 on a GPU.


def units_on(units: Units | None, spec: LayerSpec, device: torch.device) -> Units | None:
    """The units for codes of a layer on a device, with ``auto`` only fast ones; None
    decodes. Missing ones raise.
    """
    if units is None or (spec.products == "auto" and device.type != "cuda"):
        return None
    why = why_no_units(units, device)
    if why and spec.products != "auto":
        raise RuntimeError(f"products={spec.products!r}: {why}; take products='decoded' or 'auto'")
    return None if why else units


def why_no_units(units: Units, device: torch.device) -> str:
    """The reason why a device can't multiply such codes, or ""; a CPU does it slowly,
    to the same numbers.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return (
            f"{device.type if torch.version.hip is None else 'ROCm'} has no {units.upper()} units"
        )
    found, least = torch.cuda.get_device_capability(device), _LEAST[units]
    needed, own = (".".join(map(str, each)) for each in (least, found))
    if found >= least:
        return ""
    return f"{units.upper()} units begin at compute capability {needed}, and {device} has {own}"


# as torch.compiler.assume_constant_result does, which would load the compiler: a graph
# is for one device
why_no_units._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chosen_products(
    spec: LayerSpec, in_features: int, out_features: int, device: torch.device
) -> str:
    """The choice of ``auto`` for a layer on a device, and why, in words; "" where
    ``products`` is not ``auto``.
    """
    if spec.products != "auto":
        return ""
    why = why_decoded(spec, in_features, out_features)
    if not why and spec.units is not None:
        slow = (
            f"{device.type} has no fast {spec.units.upper()} units"
            if device.type in ("cpu", "meta")
            else ""
        )
        why = slow or why_no_units(spec.units, device)
    return f": decoded, as {why}" if why else f": {spec.units}"


def rounded_input(x: Tensor, units: Units) -> Tensor:
    """The values that a product of codes takes in place of its input ``x``, exact in
    bfloat16.
    """
    codes, scale = _rounded(x.detach().reshape(-1, x.shape[-1]), None, units)
    return (
        ((codes.view(_E4M3) if units == "fp8" else codes).float() * scale).to(x.dtype).view(x.shape)
    )


def linear_from_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, units: Units, spec: LayerSpec
) -> Tensor:
    """``x W^T + b`` of a weight in codes, in the dtype (or autocast dtype) of an
    ``nn.Linear``.

    .. math:: y = p \\, (X C^T) \\, w^T + b, \\qquad dx = q \\, (G C), \\qquad dW = g^T x

    with the weight's codes C and scales w, X and p the codes and scales of the rows of
    x rounded to E4M3 or INT8, G and q those of ``g w``. With
    ``gradient_products="fp8"`` dW is ``r (H X)``, H and r those of the columns of
    ``g p``. Autocast casts the input and the result, and leaves the sums alone.
    """
    if not isinstance(weight, FP8Tensor):
        raise RuntimeError(
            f"products={spec.products!r} multiplies codes, and the weight is a "
            f"{type(weight).__name__}"
        )
    if (
        not torch.compiler.is_compiling()
        and spec.weight is not None
        and weight.format != spec.weight.format
    ):
        raise RuntimeError(
            f"the layer was made for codes of {spec.weight.format.name}, not of "
            f"{weight.format.name}"
        )
    dtype = weight.dtype
    if (cast := autocast_dtype(x)) is not None:
        dtype = cast
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if x.dtype != dtype:
        raise RuntimeError(
            f"the input has dtype {x.dtype}, and the weight {dtype}: they must be the same"
        )
    if not x.dim():
        raise RuntimeError("the input has no dimension, and the last one must be of features")
    if (
        x.shape[-1] != weight.shape[1]
    ):  # before the function: torch 2.11 does not trace a size that it fixes within
        raise RuntimeError(
            f"the input has {x.shape[-1]} features, and the layer takes {weight.shape[1]}"
        )
    check_current(weight)
    refuse_trace()
    result: Tensor = _FromCodes.apply(x, weight, bias, units, spec.gradient_products == "fp8")
    return result


class _FromCodes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: FP8Tensor, bias: Tensor | None, units: Units, rounds: bool
    ) -> Any:
        rows = _rows(x)
        if rounds and rows.shape[0] % ALIGNMENT:
            raise ValueError(
                f"gradient_products='fp8' sums over the rows of the input, {rows.shape[0]}, which "
                f"{ALIGNMENT} does not "
                "divide: pad with rows of zeros, or take gradient_products='bfloat16'"
            )
        operand, p = _rounded(rows, None, units)
        codes, scale = _operand(weight, units)
        y = _product(operand, codes, p, scale, x.dtype, fast=True)
        if bias is not None:
            y = y.add_(bias)
        kept = ((operand, p) if rounds else (rows,)) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(weight, *kept)
        ctx.units, ctx.shape, ctx.rounds = units, x.shape, rounds
        if x.dim() == 2:
            return y
        # no view, as that of nn.Linear is none: FSDP hangs a hook on it
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        g = _rows(gradient)
        for_x = for_weight = said = None
        if ctx.needs_input_grad[0]:
            operand, q = _rounded(g, weight.scale.view(1, -1), ctx.units)
            said, unit = _zero_or_nan(q), weight.format.ulp_min if ctx.units == "int8" else 1.0
            codes = _transposed(weight, ctx.units, g)
            for_x = _product(operand, codes, q, said + unit, g.dtype).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if ctx.rounds:
                for_weight = _rounded_gradient(g, *kept)
            else:  # NaN throughout where the gradient holds one
                said = g.sum(dtype=torch.float32) * 0.0 if said is None else said
                start = said.to(g.dtype).expand(kept[0].shape[1])
                with outside_autocast(g):
                    for_weight = torch.addmm(start, g.t(), kept[0])
            for_weight = for_weight.to(weight.dtype)
        return for_x, for_weight, g.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()


def _zero_or_nan(scales: Tensor) -> Tensor:
    """NaN if a scale is NaN, so that the whole gradient becomes NaN; otherwise 0."""
    return (scales * 0.0).sum()


def _rounded_gradient(g: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """``g^T x`` from columns of ``g p`` rounded to E4M3, and from the codes of x."""
    if not g.shape[0]:
        return g.new_zeros((g.shape[1], x.shape[1]))
    codes, r = round_columns(g, p)
    return _product(codes, transpose_bytes(x).view(_E4M3), r, _zero_or_nan(r) + 1.0, g.dtype)


def _rounded(rows: Tensor, fold: Tensor | None, units: Units) -> tuple[Tensor, Tensor]:
    return round_rows(rows, fold) if units == "fp8" else int8_rows(rows, fold)


def _operand(weight: FP8Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """The codes as numbers of the units, and the scales (1, N) of these numbers."""
    scale = weight.scale.view(1, -1)
    if units == "int8":
        return codes_to_int8(weight.codes), scale * weight.format.ulp_min
    return weight.codes.view(_dtype_of(weight)), scale


def _transposed(weight: FP8Tensor, units: Units, after: Tensor) -> Tensor:
    """The codes as numbers of the units, by columns of the weight."""
    if units == "int8":
        return codes_to_int8(weight.codes, transposed=True, after=after)
    return transpose_bytes(weight.codes, after).view(_dtype_of(weight))


def _dtype_of(weight: FP8Tensor) -> torch.dtype:
    """The dtype of E4M3 or E5M2; looked up in a table it would add many guards to a
    compiled layer.
    """
    return _E4M3 if weight.format.mantissa_bits == 3 else torch.float8_e5m2


def _product(
    a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """``a b^T`` of (M, K) and (N, K), times scales (M, 1) of rows and (1, N) or one of
    columns, rounded once.
    """
    if a.dtype is torch.int8:
        return (_integer_sums(a, b) * rows * columns).to(dtype)
    a = a.view(_E4M3)
    check_operands(a, b)
    if not is_on_card(a):
        with outside_autocast(a):
            sums = a.float() @ b.float().t()
        return (sums * rows * columns).to(dtype)
    if not a.shape[0] or not a.shape[1]:
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    if dtype is torch.bfloat16 and not torch.compiler.is_compiling():
        # expanded to a scale per column: releases of torch lack a product with scales
        # of rows on one side only
        columns = columns.expand(1, b.shape[0]).contiguous()
        return torch._scaled_mm(
            a, b.t(), scale_a=rows, scale_b=columns, out_dtype=dtype, use_fast_accum=fast
        )
    # powers of two after the rounding to bfloat16 give the same bits, and a compiler
    # fuses them with what follows
    one, wide = rows.new_ones(()), dtype if dtype is torch.bfloat16 else torch.float32
    sums = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=fast)
    return (sums * rows * columns).to(dtype)


def check_operands(a: Tensor, b: Tensor) -> None:
    """Check on every device what a GPU requires: a CPU takes any layout and size, and
    two of E5M2.
    """
    assert a.dtype is _E4M3, "no unit multiplies two matrices of E5M2"
    assert a.is_contiguous(), "the first matrix is by rows"
    assert b.is_contiguous(), "the second one, transposed, is by columns"
    assert b.shape[0] % ALIGNMENT == b.shape[1] % ALIGNMENT == 0, f"{ALIGNMENT} divides K and N"


def _integer_sums(a: Tensor, b: Tensor) -> Tensor:
    """Sums of whole numbers, exact in any order, rounded once to float32."""
    if not is_on_card(a):  # some processors' products of INT8 saturate on the way
        return (a.double() @ b.double().t()).float()
    few = max(_LEAST_ROWS - a.shape[0], 0)
    padded = torch.nn.functional.pad(a, (0, 0, 0, few)) if few else a
    return torch._int_mm(padded, b.t())[: a.shape[0]].float()
