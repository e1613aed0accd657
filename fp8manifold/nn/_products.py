"""Products of a quantised layer.

There are three kinds, each a function of autograd with a backward pass of its own.

1. `linear` decodes the weight's codes for each product and saves the codes, not the
   values.
2. `linear_with_rounded_gradients` does so too, and quantises the gradients of the
   output and of the weight.
3. `linear_from_codes` multiplies the codes as they are, on FP8 or INT8 units. Input and
   gradient are rounded row by row to numbers of these units. `units_on` decides whether
   a device has them.

`over_nested` applies a layer to a nested tensor, and `forbid_fused_operators` keeps
torch from passing by a layer that does more than decode.
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
from fp8manifold._native._arrays import decode_by_kernel, has_memory, round_at_scale
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

#: From a gradient to its quantised values; None leaves it as it is.
GradientRounding = Callable[[Tensor], Tensor] | None


def byte_weight(weight: Tensor, fmt: FloatFormat, **options: Any) -> FP8Parameter:
    """Return the codes of a float weight, with options of :class:`FP8Parameter`."""
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"a weight has dtype {weight.dtype}: storage='codes' takes float32 or bfloat16 layers "
            "(fm.load reads them so with dtype=), and storage='master' others too"
        )
    return FP8Parameter(weight.detach(), fmt, requires_grad=weight.requires_grad, **options)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W^T + b`` as ``torch.nn.functional.linear`` does.

    Of a weight in codes autograd saves the codes.
    """
    dtype = _dtype_of_codes(x, weight, bias) if isinstance(weight, FP8Tensor) else None
    if dtype is None:
        return F.linear(x, weight, bias)
    if x.dtype is not dtype:
        x = _CAST[dtype](x)
    result: Tensor = _CodesLinear.apply(x, weight, bias)
    return result


def _dtype_of_codes(x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a product with decoded codes, under autocast its dtype.

    None leaves the product to torch.
    """
    if not _is_simple(x, weight):
        return None
    device = "cpu" if x.is_cpu else "cuda"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype if dtype in DTYPES else None
    dtype = weight.dtype
    return dtype if x.dtype is dtype and (bias is None or bias.dtype is dtype) else None


def _is_simple(x: Tensor, weight: FP8Tensor) -> bool:
    """Return False if a tracer, a transform or forward mode has to see the operator."""
    codes = weight.codes
    on_one_device = codes.is_cpu if x.is_cpu else x.is_cuda and x.device == codes.device
    return on_one_device and x.dim() > 1 and forward_ad._current_level < 0 and has_memory(x, codes)


#: Up to so many weights torch's operators (7 bytes moved per weight) are faster than
#: Triton's launch from Python.
_SMALL: Final = 2**21


def _values(weight: FP8Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values for a product, whose result ignores the bits of a NaN."""
    codes, scale, fmt = weight.codes, weight.kept_scale, weight.format
    if weight.block_size is None:
        is_small = dtype is torch.bfloat16 and is_on_card(codes) and codes.numel() <= _SMALL
        float8 = FLOAT8.get(fmt) if is_small else None
        if float8 is not None:
            # torch multiplies in float32 only if the scale has a dimension
            line_scale = scale if scale.dim() else scale.view(1)
            return codes.view(float8).bfloat16().mul_(line_scale)
        values = decode_by_kernel(codes, fmt, dtype, scale)
        if values is not None:
            return values
    return dequantize_codes(codes, weight.scale, fmt, dtype, weight.block_size)


def is_on_card(x: Tensor) -> bool:
    # a function, so that tests can pretend that a tensor is there
    return x.is_cuda


#: Casts without ``Tensor.to``, which takes longer to parse its arguments than to cast
#: for a small product.
_CAST: Final = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float64: Tensor.double,
}


class _CodesLinear(torch.autograd.Function):
    """The product in the dtype of ``x``, in which decoding is exact."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FP8Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        dtype = x.dtype
        if bias is not None:
            ctx.bias_dtype = bias.dtype
            if bias.dtype is not dtype:
                bias = _CAST[dtype](bias)
        return F.linear(x, _values(weight, dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        rows = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        # not in a context that does nothing: it takes a small layer as long as a product
        if torch.is_autocast_enabled("cpu" if rows.is_cpu else "cuda"):
            with outside_autocast(rows):
                for_x, for_weight = _gradients_of_product(ctx, rows)
        else:
            for_x, for_weight = _gradients_of_product(ctx, rows)
        for_bias = None
        if ctx.needs_input_grad[2]:
            for_bias = rows.sum(0)
            if for_bias.dtype is not ctx.bias_dtype:
                for_bias = _CAST[ctx.bias_dtype](for_bias)
        return for_x, for_weight, for_bias


def _gradients_of_product(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight by that of the output, as a matrix."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    for_x = None
    for_weight = None
    if needs_x:
        # a second derivative needs the weight itself
        is_differentiated = torch.is_grad_enabled()
        values = weight.to(x.dtype) if is_differentiated else _values(weight, x.dtype)
        for_x = torch.mm(gradient, values)
        # freed before the weight's gradient, which is as large
        del values
        if x.dim() > 2:
            for_x = for_x.view(x.shape)
    if needs_weight:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        for_weight = torch.mm(gradient.t(), rows)
        if for_weight.dtype is not weight.dtype:
            for_weight = _CAST[weight.dtype](for_weight)
    return for_x, for_weight


def linear_with_rounded_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    round_output_gradient: GradientRounding,
    round_weight_gradient: GradientRounding,
) -> Tensor:
    r"""Return ``x W^T + b``, with gradients that are quantised in the backward pass.

    .. math:: G' = Q_g(G), \qquad dx = G' W, \qquad dW = Q_{gW}(G'^T x), \qquad
              db = \sum G

    :math:`Q_g` is ``round_output_gradient``, and :math:`Q_{gW}` is
    ``round_weight_gradient``. The weight's gradient is rounded in float32, whatever the
    products were in.
    """
    result: Tensor = _RoundedGradientsLinear.apply(
        x, weight, bias, round_output_gradient, round_weight_gradient
    )
    return result


class _RoundedGradientsLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        round_output_gradient: GradientRounding,
        round_weight_gradient: GradientRounding,
    ) -> Tensor:
        dtype = _dtype_of_codes(x, weight, bias) if isinstance(weight, FP8Tensor) else None
        if dtype is None:
            y = F.linear(x, weight, bias)
        else:
            bias_for_product = None if bias is None else bias.to(dtype)
            y = F.linear(x.to(dtype), _values(weight, dtype), bias_for_product)  # type: ignore[arg-type]
        # in the dtype of the product under autocast, which saves memory
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.round_output_gradient = round_output_gradient
        ctx.round_weight_gradient = round_weight_gradient
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_x = None
        for_weight = None
        for_bias = None
        if needs_bias:
            for_bias = rows.sum(0).to(ctx.bias_dtype)
        if ctx.round_output_gradient is not None:
            rows = ctx.round_output_gradient(rows)
        if needs_x:
            is_decoded = (
                isinstance(weight, FP8Tensor) and rows.dtype in DTYPES and _is_simple(rows, weight)
            )
            values = _values(weight, rows.dtype) if is_decoded else weight.to(rows.dtype)
            with outside_autocast(rows):
                for_x = rows @ values
            # freed before the weight's gradient, which is as large
            del values
            for_x = for_x.view(x.shape).to(ctx.x_dtype)
        if needs_weight:
            with outside_autocast(rows):
                for_weight = rows.t() @ x.reshape(-1, x.shape[-1])
            if ctx.round_weight_gradient is not None:
                for_weight = ctx.round_weight_gradient(for_weight.float())
            for_weight = for_weight.to(weight.dtype)
        return for_x, for_weight, for_bias, None, None


def round_gradient(
    gradient: Tensor, *, scaler: Scaler, operand: OperandSpec, key: DrawKey
) -> Tensor:
    """Quantise a gradient.

    One that holds Inf or NaN becomes NaN, so that no saturation hides it.
    """
    zero_or_nan = gradient.sum(dtype=torch.float32) * 0.0
    return round_at_scale(
        gradient,
        scaler(gradient) + zero_or_nan,
        operand.format,
        operand.rounding or "nearest",
        key,
        blocks=operand.granularity == "block",
    )


def scaler_of(operand: OperandSpec, shared: SharedAmax | None) -> Scaler:
    """Return the scaler of an operand; ``global`` ones share a magnitude."""
    if operand.scale == GLOBAL:
        assert shared is not None
        return GlobalScale(operand.format, shared)
    if operand.scale is not None:
        return FixedScale(operand.scale)
    # both are filled in; squares are for stored weights, which have no scaler
    granularity: Any = operand.granularity
    policy: Any = operand.policy
    return Scale(operand.format, granularity, policy, history=operand.history or HISTORY)


def forbid_fused_operators(layer: Any) -> None:
    """Give the layer a hook that does nothing, so that torch calls it.

    ``nn.TransformerEncoderLayer`` hands the weights of its linear layers to one fused
    operator in evaluation, unless a layer has hooks. Weights in codes that are only
    decoded need no hook, which costs a small layer a tenth of its time.
    """
    has_scalers = any(getattr(layer, f"{name}_scaler") is not None for name in OPERANDS)
    if layer.storage != "codes" or layer._units is not None or has_scalers:
        layer.register_forward_pre_hook(is_called)


def is_called(layer: nn.Module, args: Any) -> None:
    """Do nothing, as a forward pre-hook.

    It is a function of this module, so that copies and pickles of the layer keep it.
    """


def over_nested(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``forward`` to the rows of a nested tensor, and nest the result alike.

    There is no padding among the rows.
    """
    if x.layout == torch.jagged:
        jagged: Any = x
        rows = forward(jagged.values())
        return torch.nested.nested_tensor_from_jagged(
            rows, offsets=jagged.offsets(), lengths=jagged.lengths()
        )
    parts = x.unbind()
    rows = forward(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    rows_of_parts = rows.split([part.numel() // part.shape[-1] for part in parts])
    outputs = []
    for part, part_rows in zip(parts, rows_of_parts, strict=True):
        outputs.append(part_rows.view(*part.shape[:-1], -1))
    return torch.nested.as_nested_tensor(outputs)


_E4M3: Final = torch.float8_e4m3fn
#: The first compute capability with units of a kind.
_FIRST_CAPABILITY: Final[dict[Units, tuple[int, int]]] = {"fp8": (8, 9), "int8": (8, 0)}
#: Fewest rows of the first matrix of a product of INT8 on a GPU.
_FEWEST_ROWS: Final = 17


def units_on(units: Units | None, spec: LayerSpec, device: torch.device) -> Units | None:
    """Return the units for codes of a layer on a device; None decodes the codes.

    ``auto`` takes only fast ones.

    Raises:
        RuntimeError: the device lacks units that the specification demands.
    """
    if units is None or (spec.products == "auto" and device.type != "cuda"):
        return None
    reason = why_no_units(units, device)
    if not reason:
        return units
    if spec.products == "auto":
        return None
    raise RuntimeError(f"products={spec.products!r}: {reason}; take products='decoded' or 'auto'")


def why_no_units(units: Units, device: torch.device) -> str:
    """Return why a device can't multiply such codes, or "".

    A CPU does it slowly, to the same numbers.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if torch.version.hip is not None:
        return f"ROCm has no {units.upper()} units"
    if device.type != "cuda":
        return f"{device.type} has no {units.upper()} units"
    capability = torch.cuda.get_device_capability(device)
    first = _FIRST_CAPABILITY[units]
    if capability >= first:
        return ""
    return (
        f"{units.upper()} units begin at compute capability {first[0]}.{first[1]}, and {device} "
        f"has {capability[0]}.{capability[1]}"
    )


# as torch.compiler.assume_constant_result does, which would load the compiler: a graph
# is for one device
why_no_units._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chosen_products(
    spec: LayerSpec, in_features: int, out_features: int, device: torch.device
) -> str:
    """Return the end of a line on what ``auto`` chose for a layer on a device, and why.

    It is "" where ``products`` is not ``auto``.
    """
    if spec.products != "auto":
        return ""
    reason = why_decoded(spec, in_features, out_features)
    if not reason and spec.units is not None:
        if device.type in ("cpu", "meta"):
            reason = f"{device.type} has no fast {spec.units.upper()} units"
        else:
            reason = why_no_units(spec.units, device)
    return f": decoded, as {reason}" if reason else f": {spec.units}"


def rounded_input(x: Tensor, units: Units) -> Tensor:
    """Return what a product of codes takes in place of its input ``x``.

    The values are exact in bfloat16.
    """
    codes, scale = _rounded_rows(x.detach().reshape(-1, x.shape[-1]), units)
    numbers = codes.view(_E4M3) if units == "fp8" else codes
    return (numbers.float() * scale).to(x.dtype).view(x.shape)


def linear_from_codes(
    x: Tensor, weight: Tensor, bias: Tensor | None, units: Units, spec: LayerSpec
) -> Tensor:
    r"""Return ``x W^T + b`` of a weight in codes, in the dtype of an ``nn.Linear``.

    .. math:: y = p \, (X C^T) \, w^T + b, \qquad dx = q \, (G C), \qquad dW = g^T x

    C and w are the codes and scales of the weight. X and p are those of the rows of x,
    rounded to E4M3 or INT8. G and q are those of ``g w``, where g is the output's
    gradient. With ``gradient_products="fp8"`` dW is ``r (H X)``, where H and r are
    those of the columns of ``g p``. Autocast casts the input and the result, and leaves
    the sums alone.
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
    dtype_of_autocast = autocast_dtype(x)
    if dtype_of_autocast is not None:
        dtype = dtype_of_autocast
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype != dtype:
        raise RuntimeError(
            f"the input has dtype {x.dtype}, but the weight {dtype}: they must be the same"
        )
    if not x.dim():
        raise RuntimeError("the input has no dimension; its last one must be the features")
    # before the function: torch 2.11 does not trace a size that it fixes within
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"the input has {x.shape[-1]} features, but the layer takes {weight.shape[1]}"
        )
    check_current(weight)
    refuse_trace()
    result: Tensor = _FromCodes.apply(x, weight, bias, units, spec.gradient_products == "fp8")
    return result


class _FromCodes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: FP8Tensor,
        bias: Tensor | None,
        units: Units,
        rounds_weight_gradient: bool,
    ) -> Any:
        rows = _rows(x)
        if rounds_weight_gradient and rows.shape[0] % ALIGNMENT:
            raise ValueError(
                f"gradient_products='fp8' sums over the rows of the input, {rows.shape[0]}, which "
                f"{ALIGNMENT} does not divide: pad with rows of zeros, or take "
                "gradient_products='bfloat16'"
            )
        x_codes, x_scales = _rounded_rows(rows, units)
        codes, scale = _operand(weight, units)
        y = _code_product(x_codes, codes, x_scales, scale, x.dtype, fast=True)
        if bias is not None:
            y = y.add_(bias)
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight)
        elif rounds_weight_gradient:
            ctx.save_for_backward(weight, x_codes, x_scales)
        else:
            ctx.save_for_backward(weight, rows)
        ctx.units = units
        ctx.shape = x.shape
        ctx.rounds_weight_gradient = rounds_weight_gradient
        if x.dim() == 2:
            return y
        # no view, as that of nn.Linear is none: FSDP hangs a hook on it
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # of x: its codes and scales, its rows, or nothing, as the weight's gradient
        # needs
        weight, *parts_of_x = ctx.saved_tensors
        g = _rows(gradient)
        for_x = None
        for_weight = None
        for_bias = None
        # 0, or NaN if the gradient holds one: as a term or factor of each sum, it makes
        # all of it NaN
        zero_or_nan = None
        if ctx.needs_input_grad[0]:
            g_codes, g_scales = _rounded_rows(g, ctx.units, weight.scale.view(1, -1))
            zero_or_nan = _zero_or_nan(g_scales)
            unit = weight.format.ulp_min if ctx.units == "int8" else 1.0
            codes = _codes_by_columns(weight, ctx.units, g)
            for_x = _code_product(g_codes, codes, g_scales, zero_or_nan + unit, g.dtype).view(
                ctx.shape
            )
        if ctx.needs_input_grad[1]:
            if ctx.rounds_weight_gradient:
                x_codes, x_scales = parts_of_x
                for_weight = _rounded_gradient(g, x_codes, x_scales)
            else:
                (rows,) = parts_of_x
                if zero_or_nan is None:
                    zero_or_nan = g.sum(dtype=torch.float32) * 0.0
                start = zero_or_nan.to(g.dtype).expand(rows.shape[1])
                with outside_autocast(g):
                    for_weight = torch.addmm(start, g.t(), rows)
            for_weight = for_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            for_bias = g.sum(0)
        return for_x, for_weight, for_bias, None, None


def _rows(x: Tensor) -> Tensor:
    """Return a contiguous matrix of the rows of the last dimension."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()


def _zero_or_nan(scales: Tensor) -> Tensor:
    """Return NaN if a scale is NaN, to make a whole gradient NaN; otherwise 0."""
    return (scales * 0.0).sum()


def _rounded_gradient(g: Tensor, x_codes: Tensor, x_scales: Tensor) -> Tensor:
    """Return ``g^T x`` from columns of ``g p`` rounded to E4M3, and x's codes."""
    if not g.shape[0]:
        return g.new_zeros((g.shape[1], x_codes.shape[1]))
    codes, scales = round_columns(g, x_scales)
    x_columns = transpose_bytes(x_codes).view(_E4M3)
    return _code_product(codes, x_columns, scales, _zero_or_nan(scales) + 1.0, g.dtype)


def _rounded_rows(
    rows: Tensor, units: Units, column_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of rows, times ``column_scales`` if there are any."""
    if units == "fp8":
        return round_rows(rows, column_scales)
    return int8_rows(rows, column_scales)


def _operand(weight: FP8Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """Return the codes as numbers of the units, and scales (1, N) of these numbers."""
    scale = weight.scale.view(1, -1)
    if units == "int8":
        return codes_to_int8(weight.codes), scale * weight.format.ulp_min
    return weight.codes.view(_dtype_of(weight)), scale


def _codes_by_columns(weight: FP8Tensor, units: Units, dependency: Tensor) -> Tensor:
    """Return the codes as numbers of the units, by columns of the weight.

    A graph computes them only after ``dependency``, so as not to save them.
    """
    if units == "int8":
        return codes_to_int8(weight.codes, transposed=True, after=dependency)
    return transpose_bytes(weight.codes, dependency).view(_dtype_of(weight))


def _dtype_of(weight: FP8Tensor) -> torch.dtype:
    """Return the dtype of E4M3 or E5M2."""
    # looked up in a table it would add many guards to a compiled layer
    return _E4M3 if weight.format.mantissa_bits == 3 else torch.float8_e5m2


def _code_product(
    a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """Return ``a b^T`` of (M, K) and (N, K), times scales, rounded once.

    Args:
        a: the first matrix.
        b: the second one, transposed.
        rows: scales (M, 1) of the rows.
        columns: scales (1, N) of the columns, or one.
        dtype: of the result.
        fast: whether the units may sum with fewer bits.
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
    one = rows.new_ones(())
    wide = dtype if dtype is torch.bfloat16 else torch.float32
    sums = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=fast)
    return (sums * rows * columns).to(dtype)


def check_operands(a: Tensor, b: Tensor) -> None:
    """Check on every device what a GPU requires.

    A CPU takes any layout and size, and two matrices of E5M2.
    """
    assert a.dtype is _E4M3, "no unit multiplies two matrices of E5M2"
    assert a.is_contiguous(), "the first matrix is by rows"
    assert b.is_contiguous(), "the second one, transposed, is by columns"
    assert b.shape[0] % ALIGNMENT == b.shape[1] % ALIGNMENT == 0, f"{ALIGNMENT} divides K and N"


def _integer_sums(a: Tensor, b: Tensor) -> Tensor:
    """Return sums of whole numbers, exact in any order, rounded once to float32."""
    # some processors' products of INT8 saturate on the way
    if not is_on_card(a):
        return (a.double() @ b.double().t()).float()
    missing_rows = max(_FEWEST_ROWS - a.shape[0], 0)
    padded = torch.nn.functional.pad(a, (0, 0, 0, missing_rows)) if missing_rows else a
    return torch._int_mm(padded, b.t())[: a.shape[0]].float()
