"""Quantise and dequantise in one go, with a straight-through gradient."""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fp8manifold._checks import check_choice
from fp8manifold._float_bits import working_dtype
from fp8manifold._rounding import Rounding
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.grid import round_to_grid
from fp8manifold.scaling import ROUNDING_OF_SCALES, Granularity, amax_scale

__all__ = ["STE", "STES", "fake_quantize"]

STE = Literal["identity", "clipped", "relu", "none"]
STES: Final = ("identity", "clipped", "relu", "none")


def fake_quantize(
    x: Tensor,
    fmt: FormatLike,
    scale: Tensor | float | None = None,
    *,
    granularity: Granularity = "tensor",
    axis: int = 0,
    pow2: bool = False,
    ste: STE = "identity",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    step: int = 0,
    stream: int = 0,
) -> Tensor:
    """The value that ``x`` has after a round trip through the format, in ``x``'s dtype.

    .. math:: Q(x) = s \\cdot \\mathrm{round}(x / s)

    The derivative of ``Q`` is zero almost everywhere; the straight-through estimator stands in for it.

    Args:
        x: float tensor of any shape.
        fmt: a format or its name.
        scale: positive, broadcasting against ``x``; None takes :func:`amax_scale` of ``x``.
        granularity, axis, pow2: of that scale.
        ste: gradient of ``Q``: ``identity`` (1), ``clipped`` (1 within the range, 0 where ``x`` saturates), ``relu``
            (1 for positive ``x``, 0 elsewhere), ``none`` (0, the true derivative).
        rounding, seed, step, stream: as in :func:`round_to_grid`.

    Returns:
        Tensor like ``x``.  NaN stays NaN, Inf saturates, an empty tensor stays empty.

    Raises:
        TypeError: ``x`` is not a float tensor.
        ValueError: an unknown option, or a scale that is not positive or does not broadcast to ``x``.

    Example:
        >>> x = torch.tensor([0.1, 1000.0], requires_grad=True)
        >>> y = fake_quantize(x, "E4M3", scale=1.0, ste="clipped")
        >>> y.tolist()
        [0.1015625, 448.0]
        >>> y.sum().backward()
        >>> x.grad.tolist()
        [1.0, 0.0]

    Source: Bengio, Leonard, Courville 2013; Yin et al. 2019 (arXiv 1903.05662) for the variants.
    """
    fmt = as_format(fmt)
    check_choice("ste", ste, STES)
    working_dtype(x)
    given = amax_scale(x, fmt, granularity, axis=axis, pow2=pow2) if scale is None else _as_scale(x, scale)
    options = {"rounding": rounding, "seed": seed, "step": step, "stream": stream}
    apply: Callable[..., Tensor] = _FakeQuantize.apply  # typed in some releases of torch only
    return apply(x, given, fmt, ste, options)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, fmt: FloatFormat, ste: str, options: dict[str, Any]) -> Tensor:
        ctx.ste = ste
        work = working_dtype(x)
        units = x.to(work) / scale.to(work)
        if ste == "clipped":
            ctx.save_for_backward(units.abs() <= fmt.max * ROUNDING_OF_SCALES)
        elif ste == "relu":
            ctx.save_for_backward(x > 0)
        return (round_to_grid(units, fmt, **options) * scale.to(work)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.ste == "none":
            gradient = torch.zeros_like(gradient)
        elif ctx.ste != "identity":
            (passes,) = ctx.saved_tensors
            gradient = gradient.masked_fill(~passes, 0.0)
        return gradient, None, None, None, None


def _as_scale(x: Tensor, scale: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=x.device).detach()
    try:
        fits = torch.broadcast_shapes(x.shape, tensor.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"scale of shape {tuple(tensor.shape)} does not fit x of shape {tuple(x.shape)}")
    if not torch.compiler.is_compiling() and not bool(((tensor > 0) & tensor.isfinite()).all()):
        bad = tensor[~((tensor > 0) & tensor.isfinite())][0].item() if tensor.dim() else tensor.item()
        raise ValueError(f"scale holds {bad}: every entry must be finite and positive")
    return tensor
