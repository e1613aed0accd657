"""Matrix products of quantised operands as operators of torch, on the hardware's FP8
units where it has them.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fp8manifold._base.autocast import autocast_dtype, outside_autocast
from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._native._arrays import encoded_units, rounded_at
from fp8manifold.fake_quant import as_scale
from fp8manifold.formats import FormatLike, as_format
from fp8manifold.nn._spec import ALIGNMENT, NONE, is_none
from fp8manifold.scaling import amax_scale

__all__ = ["fp8_mm"]

ProductGranularity = Literal["tensor", "channel"]
_GRANULARITIES: Final = ("tensor", "channel")
_HARDWARE: Final = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
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
    """The product of two matrices, each quantised first.

    .. math:: C = s_a s_b \\, Q(A / s_a) \\, Q(B / s_b)

    Its gradients are products of the same kind, in which the gradient G of C is
    quantised too:
    :math:`dA = Q(G) Q(B)^T` and :math:`dB = Q(A)^T Q(G)`.  Rounding is to nearest; gradients pass unchanged.

    ``torch._scaled_mm`` multiplies E4M3 and E5M2 (but not two of E5M2) on CUDA devices
    of compute capability 9.0 or later, if both dimensions of the second matrix are
    multiples of 16; everywhere else the exact values are multiplied in float32 (float64
    for float64 operands). Compilers treat ``torch.ops.fp8manifold.fp8_mm`` as one node.

    Args:
        a, b: float matrices ``(M, K)`` and ``(K, N)``.
        a_format, b_format: of the operands; an operand with None (or ``"none"``) is not
            quantised.
        gradient_format: of G; None does not quantise it.
        granularity: one scale for each matrix (``tensor``), or for each row of the
            first and each column of the second (``channel``), with which the gradients'
            products quantise all three matrices again.
        a_scale, b_scale: positive scales of the forward product, with ``tensor`` also
            of the backward ones: numbers, or float32 of shape ``()``; with ``channel``
            ``(M, 1)`` and ``(1, N)``. None takes
            :func:`fp8manifold.amax_scale`.
        pow2: round measured scales up to powers of two.
        out_dtype: of the result; if None the dtype of autocast, whose operands are
            quantised as they are, or without it that of ``a``.

    Returns:
        ``(M, N)``, empty where M or N is 0. NaN in an operand is NaN in what depends on
        it, Inf saturates, -0 counts as 0; a sum over nothing (K = 0) is 0. A quantised
        G with Inf or NaN makes both gradients NaN, so that saturation does not hide it.

    Raises:
        TypeError: an operand that is no float tensor.
        ValueError: shapes that do not fit, an unknown format or granularity, or a scale
            that is not positive.

    Example:
        >>> a, b = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0], [448.0]])
        >>> fp8_mm(a, b, a_scale=1.0, b_scale=1.0).tolist()
        [[897.0]]

    Source: Micikevicius et al. 2022 (FP8 Formats for Deep Learning).
    """
    check_choice("granularity", granularity, _GRANULARITIES)
    for name, x in (("a", a), ("b", b)):
        working_dtype(x, name)
        if x.dim() != 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: it must be a matrix, of two dimensions"
            )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} can't be multiplied: a "
            f"must have as many "
            "columns as b has rows"
        )
    if not (out_dtype or a.dtype).is_floating_point:
        raise TypeError(f"out_dtype={out_dtype} must be a float dtype")
    formats = (_name_of(a_format), _name_of(b_format), _name_of(gradient_format))
    left = None if a_scale is None else _given_scale(a, a_scale, granularity, 0)
    right = None if b_scale is None else _given_scale(b, b_scale, granularity, 1)
    out_dtype = out_dtype or autocast_dtype(a) or a.dtype
    return _product(a, b, (left, right), formats, granularity, pow2, out_dtype)


def _product(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    formats: tuple[str, str, str],
    granularity: ProductGranularity,
    *how: Any,
) -> Tensor:
    """The operator, with scales measured where none are given, and 1 for an operand
    that is not quantised.
    """
    left, right = (
        _measured_scale(x, fmt, granularity, axis, how[0])
        if scale is None or fmt == NONE
        else scale
        for axis, (x, scale, fmt) in enumerate(zip((a, b), scales, formats[:2], strict=True))
    )
    result: Tensor = _fp8_mm(a, b, left, right, *formats, granularity, *how)
    return result


def _name_of(fmt: FormatLike | None) -> str:
    return NONE if fmt is None or is_none(fmt) else as_format(fmt).name


def _measured_scale(
    x: Tensor, fmt: str, granularity: ProductGranularity, axis: int, pow2: bool
) -> Tensor:
    """The scale of a matrix, ``()`` or one for each index of ``axis``; 1 for an operand
    that is not quantised.
    """
    if fmt == NONE:
        return torch.ones((), device=x.device)
    return amax_scale(x, fmt, granularity, axis=axis, pow2=pow2)


def _given_scale(
    x: Tensor, scale: Tensor | float, granularity: ProductGranularity, axis: int
) -> Tensor:
    shape, line = ((x.shape[0], 1), "row") if axis == 0 else ((1, x.shape[1]), "column")
    given = as_scale(x, scale)
    if granularity == "tensor":
        if given.numel() != 1:
            raise ValueError(
                f"scale has shape {tuple(given.shape)}: granularity='tensor' needs a single number"
            )
        return given.reshape(())
    try:
        return given.expand(shape).contiguous()
    except RuntimeError:
        raise ValueError(
            f"scale of shape {tuple(given.shape)} does not fit {shape}, one per {line}"
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
    if _has_units_for(a, b, a_format, b_format):
        left, right = _codes_of(a, a_scale, a_format), _codes_of(b, b_scale, b_format)
        return _hardware_product(left, right, a_scale, b_scale, out_dtype)
    left, right = _units(a, a_scale, a_format), _units(b, b_scale, b_format)
    work = torch.promote_types(left.dtype, right.dtype)
    with outside_autocast(a):
        product = left.to(work) @ right.to(work)
    return product.mul_(a_scale).mul_(b_scale).to(out_dtype)


@_fp8_mm.register_fake
def _(a: Tensor, b: Tensor, *how: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=how[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, a_scale, b_scale, *ctx.formats, ctx.granularity, ctx.pow2, _ = inputs
    ctx.save_for_backward(a, b, a_scale, b_scale)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b, a_scale, b_scale = ctx.saved_tensors
    a_format, b_format, g_format = ctx.formats
    if ctx.granularity == "channel":
        a_scale = b_scale = None  # they are of rows and columns that these products sum over
    options = (ctx.granularity, ctx.pow2)
    for_a = for_b = None
    zero_or_nan = (gradient * 0.0).sum(
        dtype=torch.float32
    )  # so that no saturation hides that it holds Inf or NaN
    if ctx.needs_input_grad[0]:
        g_scale = _measured_scale(gradient, g_format, ctx.granularity, 0, ctx.pow2) + zero_or_nan
        for_a = _product(
            gradient, b.t(), (g_scale, b_scale), (g_format, b_format, g_format), *options, a.dtype
        )
    if ctx.needs_input_grad[1]:
        g_scale = _measured_scale(gradient, g_format, ctx.granularity, 1, ctx.pow2) + zero_or_nan
        for_b = _product(
            a.t(), gradient, (a_scale, g_scale), (a_format, g_format, g_format), *options, b.dtype
        )
    return for_a, for_b, *(None,) * 8


_fp8_mm.register_autograd(_backward, setup_context=_setup_context)


def _in_own_order(x: Tensor, scale: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Apply ``rounded`` to a matrix in the order of its memory, which may be that of
    its transpose.
    """
    if not x.is_contiguous() and x.t().is_contiguous():
        return rounded(x.t(), scale.t() if scale.dim() == 2 else scale).t()
    return rounded(x, scale)


def _units(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    if fmt == NONE:
        return x.to(working_dtype(x))
    return _in_own_order(
        x, scale, lambda part, unit: rounded_at(part, unit, as_format(fmt), rescale=False)
    )


def _codes_of(x: Tensor, scale: Tensor, fmt: str) -> Tensor:
    def rounded(part: Tensor, unit: Tensor) -> Tensor:
        codes = encoded_units(
            part.float() if part.dtype == torch.float16 else part, as_format(fmt), unit
        )
        if codes is None:
            return rounded_at(part, unit, as_format(fmt), rescale=False).to(_HARDWARE[fmt])
        return codes.view(_HARDWARE[fmt])

    if not scale.dim():
        return _in_own_order(x, scale, rounded)
    if (
        scale.shape[1] == 1
    ):  # a kernel has a scale for each row: it walks over rows, whatever the order of memory
        return rounded(x.contiguous(), scale)
    return rounded(x.t().contiguous(), scale.t()).t()


def _has_units_for(a: Tensor, b: Tensor, a_format: str, b_format: str) -> bool:
    if (
        a.device.type != "cuda"
        or torch.version.hip is not None
        or not {a_format, b_format} <= set(_HARDWARE)
    ):
        return False
    aligned = b.shape[0] % ALIGNMENT == b.shape[1] % ALIGNMENT == 0
    fits = aligned and min(*a.shape, *b.shape) > 0 and a_format + b_format != "E5M2E5M2"
    return fits and torch.cuda.get_device_capability(a.device) >= (9, 0)


def _hardware_product(
    left: Tensor, right: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The product on the device's FP8 units, which take the first matrix by rows and
    the second by columns.

    The units apply the scales and write ``out_dtype``: scales of whole matrices always,
    those of rows and columns only for bfloat16, as some releases of torch have them for
    no other dtype.
    """
    left, right = left.contiguous(), right.t().contiguous().t()
    by_rows = bool(a_scale.dim() or b_scale.dim())
    if out_dtype in ((torch.bfloat16,) if by_rows else _OUT):
        a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
        return torch._scaled_mm(left, right, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype)
    one = torch.ones((), device=left.device)
    product = torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product.mul_(a_scale).mul_(b_scale).to(out_dtype)
