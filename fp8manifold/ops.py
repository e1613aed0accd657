"""Matrix products of quantised operands as operators of torch.

`fp8_mm` checks its arguments and measures the scales that are not given. `_fp8_mm` is
the operator: it quantises both matrices and multiplies their codes on the hardware's
FP8 units, where it has them, or else the values. The backward pass makes two products
of the same kind, with the quantised gradient.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from fp8manifold._base.autocast import autocast_dtype, outside_autocast
from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._native._arrays import encode_on_gpu, round_at_scale
from fp8manifold.fake_quant import as_scale
from fp8manifold.formats import FormatLike, as_format
from fp8manifold.nn._spec import ALIGNMENT, NONE, is_none
from fp8manifold.scaling import amax_scale

__all__ = ["fp8_mm"]

ProductGranularity = Literal["tensor", "channel"]
_GRANULARITIES: Final = ("tensor", "channel")
#: Dtypes of the formats that the hardware multiplies.
_HARDWARE: Final = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
#: Dtypes that the hardware writes.
_OUT: Final = (torch.float32, torch.bfloat16, torch.float16)


def fp8_mm(
    a: Tensor,
    b: Tensor,
    *,
    a_format: FormatLike | None = "E4M3",
    b_format: FormatLike | None = "E4M3",
    gradient_format: FormatLike | None = "E5M2",
    granularity: ProductGranularity = "tensor",
    a_scale: Tensor | float | None = None,
    b_scale: Tensor | float | None = None,
    pow2: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Return the product of two matrices, each quantised first.

    .. math:: C = s_a s_b \, Q(A / s_a) \, Q(B / s_b)

    Its gradients are products of the same kind, in which the gradient G of C is
    quantised too: :math:`dA = Q(G) Q(B)^T` and :math:`dB = Q(A)^T Q(G)`. Rounding is to
    nearest; gradients pass through it unchanged.

    ``torch._scaled_mm`` multiplies E4M3 and E5M2 (but not two of E5M2) on CUDA devices
    of compute capability 9.0 or later, if both dimensions of the second matrix are
    multiples of 16; everywhere else the exact values are multiplied in float32 (float64
    for float64 operands). Compilers treat ``torch.ops.fp8manifold.fp8_mm`` as one node.

    Args:
        a: a float matrix ``(M, K)``.
        b: a float matrix ``(K, N)``.
        a_format: the format of ``a``; None (or ``"none"``) does not quantise it.
        b_format: the format of ``b``, likewise.
        gradient_format: the format of G; None does not quantise it.
        granularity: one scale for each matrix (``tensor``), or for each row of the
            first and each column of the second (``channel``), with which the gradients'
            products quantise all three matrices again.
        a_scale: a positive scale of ``a`` in the forward product, with ``tensor`` also
            in the backward one: a number, or float32 of shape ``()``; with ``channel``
            ``(M, 1)``. None takes :func:`fp8manifold.amax_scale`.
        b_scale: the scale of ``b``, likewise; with ``channel`` ``(1, N)``.
        pow2: round measured scales up to powers of two.
        out_dtype: the dtype of the result. None takes that of autocast, whose operands
            are quantised as they are, or without autocast that of ``a``.

    Returns:
        ``(M, N)``, empty where M or N is 0. NaN in an operand is NaN in what depends on
        it, Inf saturates, -0 counts as 0; a sum over nothing (K = 0) is 0. A quantised
        G with Inf or NaN makes both gradients NaN, so that saturation does not hide it.

    Raises:
        TypeError: an operand that is not a float tensor.
        ValueError: shapes that do not fit, an unknown format or granularity, or a scale
            that is not positive.

    Example:
        >>> a, b = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0], [448.0]])
        >>> fp8_mm(a, b, a_scale=1.0, b_scale=1.0).tolist()
        [[897.0]]

    Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning).
    """
    check_choice("granularity", granularity, _GRANULARITIES)
    _check_is_matrix("a", a)
    _check_is_matrix("b", b)
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} can't be multiplied: a "
            "must have as many columns as b has rows"
        )
    if not (out_dtype or a.dtype).is_floating_point:
        raise TypeError(f"out_dtype={out_dtype} must be a float dtype")
    formats = _Formats(
        _format_name_or_none(a_format),
        _format_name_or_none(b_format),
        _format_name_or_none(gradient_format),
    )
    left_scale = None if a_scale is None else _given_scale(a, a_scale, granularity, axis=0)
    right_scale = None if b_scale is None else _given_scale(b, b_scale, granularity, axis=1)
    options = _Options(granularity, pow2, out_dtype or autocast_dtype(a) or a.dtype)
    return _scaled_product(a, b, left_scale, right_scale, formats, options)


class _Formats(NamedTuple):
    """Names of the formats of a product, ``"none"`` for what is not quantised."""

    left: str
    right: str
    gradient: str


class _Options(NamedTuple):
    """Options of a product besides its formats and scales, as `fp8_mm` has them."""

    granularity: ProductGranularity
    pow2: bool
    out_dtype: torch.dtype


def _check_is_matrix(name: str, x: Tensor) -> None:
    # refuses other dtypes
    working_dtype(x, name)
    if x.dim() != 2:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: it must be a matrix, of two dimensions"
        )


def _scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    formats: _Formats,
    options: _Options,
) -> Tensor:
    """Call the operator, with scales measured where they are None.

    The scale of an operand that is not quantised is 1, whatever is given.
    """
    granularity, pow2, out_dtype = options
    if a_scale is None or formats.left == NONE:
        a_scale = _measured_scale(a, formats.left, granularity, 0, pow2)
    if b_scale is None or formats.right == NONE:
        b_scale = _measured_scale(b, formats.right, granularity, 1, pow2)
    result: Tensor = _fp8_mm(a, b, a_scale, b_scale, *formats, granularity, pow2, out_dtype)
    return result


def _format_name_or_none(fmt: FormatLike | None) -> str:
    return NONE if fmt is None or is_none(fmt) else as_format(fmt).name


def _measured_scale(
    x: Tensor, fmt: str, granularity: ProductGranularity, axis: int, pow2: bool
) -> Tensor:
    """Return the scale of a matrix: ``()``, or one for each index of ``axis``.

    It is 1 for an operand that is not quantised.
    """
    if fmt == NONE:
        return torch.ones((), device=x.device)
    return amax_scale(x, fmt, granularity, axis=axis, pow2=pow2)


def _given_scale(
    x: Tensor, scale: Tensor | float, granularity: ProductGranularity, axis: int
) -> Tensor:
    """Return a caller's scale in the shape that the operator takes, or refuse it."""
    scale = as_scale(x, scale)
    if granularity == "tensor":
        if scale.numel() != 1:
            raise ValueError(
                f"scale has shape {tuple(scale.shape)}: granularity='tensor' needs a single number"
            )
        return scale.reshape(())
    shape = (x.shape[0], 1) if axis == 0 else (1, x.shape[1])
    try:
        return scale.expand(shape).contiguous()
    except RuntimeError:
        line = "row" if axis == 0 else "column"
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} does not fit {shape}, one per {line}"
        ) from None


@torch.library.custom_op("fp8manifold::fp8_mm", mutates_args=())
def _fp8_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_format: str,
    b_format: str,
    gradient_format: str,
    granularity: str,
    pow2: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    if _has_hardware_for(a, b, a_format, b_format):
        left_codes = _codes_of(a, a_scale, a_format)
        right_codes = _codes_of(b, b_scale, b_format)
        return _hardware_product(left_codes, right_codes, a_scale, b_scale, out_dtype)
    left = _grid_values(a, a_scale, a_format)
    right = _grid_values(b, b_scale, b_format)
    work = torch.promote_types(left.dtype, right.dtype)
    with outside_autocast(a):
        product = left.to(work) @ right.to(work)
    return product.mul_(a_scale).mul_(b_scale).to(out_dtype)


@_fp8_mm.register_fake
def _(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    out_dtype = rest[-1]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, a_scale, b_scale, *formats, granularity, pow2, _ = inputs
    ctx.formats = _Formats(*formats)
    ctx.granularity = granularity
    ctx.pow2 = pow2
    ctx.save_for_backward(a, b, a_scale, b_scale)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b, a_scale, b_scale = ctx.saved_tensors
    formats, granularity, pow2 = ctx.formats, ctx.granularity, ctx.pow2
    if granularity == "channel":
        # they are of rows and columns that these products sum over
        a_scale = None
        b_scale = None
    for_a = None
    for_b = None
    # added to a scale, so that no saturation hides that the gradient holds Inf or NaN
    zero_or_nan = (gradient * 0.0).sum(dtype=torch.float32)
    if ctx.needs_input_grad[0]:
        scale = _measured_scale(gradient, formats.gradient, granularity, 0, pow2) + zero_or_nan
        for_a = _scaled_product(
            gradient,
            b.t(),
            scale,
            b_scale,
            _Formats(formats.gradient, formats.right, formats.gradient),
            _Options(granularity, pow2, a.dtype),
        )
    if ctx.needs_input_grad[1]:
        scale = _measured_scale(gradient, formats.gradient, granularity, 1, pow2) + zero_or_nan
        for_b = _scaled_product(
            a.t(),
            gradient,
            a_scale,
            scale,
            _Formats(formats.left, formats.gradient, formats.gradient),
            _Options(granularity, pow2, b.dtype),
        )
    # scales, formats and options have no gradients
    return for_a, for_b, *(None,) * 8


_fp8_mm.register_autograd(_backward, setup_context=_setup_context)


def _in_memory_order(
    x: Tensor, scale: Tensor, quantize: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply a rounding to a matrix in the order of its memory.

    That may be the order of its transpose.
    """
    if x.is_contiguous() or not x.t().is_contiguous():
        return quantize(x, scale)
    transposed_scale = scale.t() if scale.dim() == 2 else scale
    return quantize(x.t(), transposed_scale).t()


def _grid_values(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Return the rounded values divided by their scale, or the values as they are."""
    if fmt == NONE:
        return x.to(working_dtype(x))

    def quantize(part: Tensor, part_scale: Tensor) -> Tensor:
        return round_at_scale(part, part_scale, as_format(fmt), rescale=False)

    return _in_memory_order(x, scale, quantize)


def _codes_of(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    """Return the codes of a matrix, in the dtype that the units multiply."""

    def quantize(part: Tensor, part_scale: Tensor) -> Tensor:
        floats = part.float() if part.dtype == torch.float16 else part
        codes = encode_on_gpu(floats, as_format(fmt), part_scale)
        if codes is None:
            units = round_at_scale(part, part_scale, as_format(fmt), rescale=False)
            return units.to(_HARDWARE[fmt])
        return codes.view(_HARDWARE[fmt])

    if not scale.dim():
        return _in_memory_order(x, scale, quantize)
    # a kernel has a scale for each row, so it needs rows, whatever the memory's order
    if scale.shape[1] == 1:
        return quantize(x.contiguous(), scale)
    return quantize(x.t().contiguous(), scale.t()).t()


def _has_hardware_for(a: Tensor, b: Tensor, a_format: str, b_format: str) -> bool:
    if a.device.type != "cuda" or torch.version.hip is not None:
        return False
    if a_format not in _HARDWARE or b_format not in _HARDWARE:
        return False
    if a_format == b_format == "E5M2":
        return False
    is_aligned = b.shape[0] % ALIGNMENT == 0 and b.shape[1] % ALIGNMENT == 0
    is_empty = min(*a.shape, *b.shape) == 0
    if not is_aligned or is_empty:
        return False
    return torch.cuda.get_device_capability(a.device) >= (9, 0)


def _hardware_product(
    left: Tensor, right: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Return the product on the device's FP8 units.

    They take the first matrix by rows and the second by columns, apply the scales and
    write ``out_dtype``: scales of whole matrices always, those of rows and columns only
    for bfloat16, as some releases of torch have them for no other dtype.
    """
    left = left.contiguous()
    right = right.t().contiguous().t()
    has_lines = bool(a_scale.dim() or b_scale.dim())
    applies_scales = out_dtype is torch.bfloat16 if has_lines else out_dtype in _OUT
    if applies_scales:
        a_scale = a_scale.contiguous()
        b_scale = b_scale.contiguous()
        return torch._scaled_mm(left, right, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype)
    one = torch.ones((), device=left.device)
    product = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product.mul_(a_scale).mul_(b_scale).to(out_dtype)
