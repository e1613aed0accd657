"""Products of a layer straight from its codes, on units of eight bits: forward, and both gradients."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8manifold._encoded.products import codes_to_int8, int8_rows, round_columns, round_rows, transpose_bytes
from fp8manifold._encoded.scaled import check_current
from fp8manifold.nn._spec import ALIGNMENT, LayerSpec, Units, why_decoded
from fp8manifold.tensor import FP8Tensor

_E4M3: Final = torch.float8_e4m3fn
_LEAST: Final = {"fp8": (8, 9), "int8": (8, 0)}
_LEAST_ROWS: Final = 17
"""Of the first matrix of a product of INT8 on a card."""


def units_on(units: Units | None, spec: LayerSpec, device: torch.device) -> Units | None:
    """What multiplies the codes of a layer on a device: with ``auto`` only where that is fast; None decodes them.

    Raises:
        RuntimeError: the device has no such units, and they were asked for by name.
    """
    if units is None or (spec.products == "auto" and device.type != "cuda"):
        return None
    why = why_no_units(units, device)
    if why and spec.products != "auto":
        raise RuntimeError(f"products={spec.products!r}: {why}; take products='decoded' or 'auto'")
    return None if why else units


def why_no_units(units: Units, device: torch.device) -> str:
    """Why a device can't multiply such codes, or nothing; a CPU does it slowly, to the same numbers."""
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device.type if torch.version.hip is None else 'ROCm'} has no {units.upper()} units"
    found, least = torch.cuda.get_device_capability(device), _LEAST[units]
    needed, own = (".".join(map(str, each)) for each in (least, found))
    if found >= least:
        return ""
    return f"{units.upper()} units begin at compute capability {needed}, and {device} has {own}"


# what torch.compiler.assume_constant_result says, which loads the compiler: a graph is of one device
why_no_units._dynamo_marked_constant = True  # type: ignore[attr-defined]


def chosen_products(spec: LayerSpec, in_features: int, out_features: int, device: torch.device) -> str:
    """What ``auto`` takes for a layer on a device, and why not codes; nothing where it was told by name."""
    if spec.products != "auto":
        return ""
    why = why_decoded(spec, in_features, out_features)
    if not why and spec.units is not None:
        slow = f"{device.type} has no fast {spec.units.upper()} units" if device.type in ("cpu", "meta") else ""
        why = slow or why_no_units(spec.units, device)
    return f": decoded, as {why}" if why else f": {spec.units}"


def rounded_input(x: Tensor, units: Units) -> Tensor:
    """The values that such a product takes in place of its input ``x``, exact in bfloat16."""
    codes, scale = _rounded(x.detach().reshape(-1, x.shape[-1]), None, units)
    return ((codes.view(_E4M3) if units == "fp8" else codes).float() * scale).to(x.dtype).view(x.shape)


def linear_from_codes(x: Tensor, weight: Tensor, bias: Tensor | None, units: Units, spec: LayerSpec) -> Tensor:
    """``x W^T + b`` of a weight in codes, in the dtype (or autocast dtype) of an ``nn.Linear``.

    .. math:: y = p \\, (X C^T) \\, w^T + b, \\qquad dx = q \\, (G C), \\qquad dW = g^T x

    with the codes C at their scales w as they are, (X, p) the rows of x rounded to E4M3 or INT8, and (G, q) those of
    ``g w``.  With ``gradient_products="fp8"`` dW is ``r (H X)`` of (H, r), the columns of ``g p``.
    """
    if not isinstance(weight, FP8Tensor):
        raise RuntimeError(f"products={spec.products!r} multiplies codes, and the weight is a {type(weight).__name__}")
    if not torch.compiler.is_compiling() and spec.weight is not None and weight.format != spec.weight.format:
        raise RuntimeError(f"the layer was made for codes of {spec.weight.format.name}, not of {weight.format.name}")
    device, dtype = x.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if x.dtype != dtype:
        raise RuntimeError(f"the input has dtype {x.dtype}, and the weight {dtype}: they must be one")
    check_current(weight)
    result: Tensor = _FromCodes.apply(x, weight, bias, units, spec.gradient_products == "fp8")
    return result


class _FromCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FP8Tensor, bias: Tensor | None, units: Units, rounds: bool) -> Any:
        rows = _rows(x)
        if rounds and rows.shape[0] % ALIGNMENT:
            raise ValueError(
                f"gradient_products='fp8' sums over the rows of the input, {rows.shape[0]}, which {ALIGNMENT} does not "
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
            made = _rounded_gradient(g, *kept) if ctx.rounds else _gradient(g, kept[0], said)
            for_weight = made.to(weight.dtype)
        return for_x, for_weight, g.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()


def _zero_or_nan(scales: Tensor) -> Tensor:
    """NaN where one of them is, so that all of a gradient shows it; otherwise 0."""
    return (scales * 0.0).sum()


def _gradient(g: Tensor, x: Tensor, said: Tensor | None) -> Tensor:
    """``g^T x``, and NaN throughout where ``said`` is: it is 0 otherwise."""
    said = g.sum(dtype=torch.float32) * 0.0 if said is None else said
    return torch.addmm(said.to(g.dtype).expand(x.shape[1]), g.t(), x)


def _rounded_gradient(g: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """The same of columns of ``g p`` rounded to E4M3, and of the codes of x as they are."""
    if not g.shape[0]:
        return g.new_zeros((g.shape[1], x.shape[1]))
    codes, r = round_columns(g, p)
    return _product(codes, transpose_bytes(x).view(_E4M3), r, _zero_or_nan(r) + 1.0, g.dtype)


def _rounded(rows: Tensor, fold: Tensor | None, units: Units) -> tuple[Tensor, Tensor]:
    return round_rows(rows, fold) if units == "fp8" else int8_rows(rows, fold)


def _operand(weight: FP8Tensor, units: Units) -> tuple[Tensor, Tensor]:
    """The codes as numbers of the units, and the scales (1, N) of what they stand for."""
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
    """Of E4M3 or E5M2: no other format has units.  A look into a table would be many guards of a compiled layer."""
    return _E4M3 if weight.format.mantissa_bits == 3 else torch.float8_e5m2


def _product(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a b^T`` of (M, K) and (N, K), times scales (M, 1) of rows and (1, N) or one of columns, rounded once."""
    if a.dtype is torch.int8:
        return (_integer_sums(a, b) * rows * columns).to(dtype)
    a = a.view(_E4M3)
    check_operands(a, b)
    if not is_on_card(a):
        return ((a.float() @ b.float().t()) * rows * columns).to(dtype)
    if not a.shape[0] or not a.shape[1]:
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    if dtype is torch.bfloat16 and not torch.compiler.is_compiling():
        # one scale for each of both, or the release of torch knows no such product
        columns = columns.expand(1, b.shape[0]).contiguous()
        return torch._scaled_mm(a, b.t(), scale_a=rows, scale_b=columns, out_dtype=dtype, use_fast_accum=fast)
    # powers of two after the rounding to bfloat16 give the same bits, and a compiler fuses them with what follows
    one, wide = rows.new_ones(()), dtype if dtype is torch.bfloat16 else torch.float32
    sums = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=fast)
    return (sums * rows * columns).to(dtype)


def is_on_card(x: Tensor) -> bool:
    """Whether torch's own products of eight bits are taken."""
    return x.device.type == "cuda"


def check_operands(a: Tensor, b: Tensor) -> None:
    """What a card takes, said everywhere: a CPU takes any layout and size, and two of E5M2."""
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
