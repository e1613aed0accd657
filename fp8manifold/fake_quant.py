"""Quantise and dequantise in one go, with a straight-through gradient.

::

    forward     x -> x / s -> nearest value of the format -> times s
    backward    gradient of the result, times the estimator's 0 or 1

The true derivative of rounding is zero almost everywhere, and would stop all training.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
from torch import Tensor

from fp8manifold import scaling
from fp8manifold._base.checks import check_choice
from fp8manifold._base.float_bits import working_dtype
from fp8manifold._native._arrays import round_at_scale
from fp8manifold._numerics.codec import ROUNDINGS, Rounding
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.random_bits import DrawKey, check_words

__all__ = ["STE", "STES", "as_scale", "fake_quantize", "quantize_at"]

STE = Literal["identity", "clipped", "relu", "none"]
STES: Final = ("identity", "clipped", "relu", "none")


def fake_quantize(
    x: Tensor,
    fmt: FormatLike,
    scale: Tensor | float | None = None,
    *,
    granularity: scaling.Granularity = "tensor",
    axis: int = 0,
    pow2: bool = False,
    ste: STE = "identity",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    step: int = 0,
    stream: int = 0,
) -> Tensor:
    r"""Return the value of ``x`` after a round trip through the format, in its dtype.

    .. math:: Q(x) = s \cdot \mathrm{round}(x / s)

    The derivative of ``Q`` is zero almost everywhere. The straight-through estimator
    replaces it.

    Args:
        x: float tensor of any shape.
        fmt: a format or its name.
        scale: positive. It broadcasts against ``x``, or with granularity ``block``
            against its blocks of 32. None takes :func:`amax_scale` of ``x``.
        granularity: ``tensor``, ``channel`` or ``block``, as in :func:`amax_scale`.
        axis: the channel axis.
        pow2: round a measured scale (``scale=None``) up to a power of two.
        ste: gradient of ``Q``: ``identity`` (1), ``clipped`` (1 within the range, 0
            where ``x`` saturates), ``relu`` (1 for positive ``x``, 0 elsewhere),
            ``none`` (0, the true derivative).
        rounding: as in :func:`round_to_grid`.
        seed: key word of the random bits of ``stochastic``.
        step: key word of an optimizer's step.
        stream: key word of a parameter.

    Returns:
        Tensor like ``x``. NaN stays NaN, Inf saturates, -0 is preserved if the layout
        has it, and empty stays empty.

    Raises:
        TypeError, ValueError: ``x`` is not a float tensor; an unknown option; a scale
            that does not fit; no ``seed``.

    Example:
        >>> fake_quantize(torch.tensor([0.1, 1000.0]), "E4M3", scale=1.0).tolist()
        [0.1015625, 448.0]

    Source: Bengio, Leonard, Courville 2013; Yin et al. 2019 (arXiv 1903.05662) for the
    variants.
    """
    fmt = as_format(fmt)
    check_choice("ste", ste, STES)
    check_choice("rounding", rounding, ROUNDINGS)
    check_choice("granularity", granularity, scaling.GRANULARITIES)
    work = working_dtype(x)
    blocks = granularity == "block"
    if scale is None:
        amax = scaling.wide_amax(x, granularity, axis)
        scales = scaling.scale_of_amax(amax, fmt, pow2=pow2 or blocks)
    else:
        scales = as_scale(x, scale, blocks, work)
    key = None
    if rounding == "stochastic":
        if seed is None:
            raise ValueError("rounding='stochastic' needs seed=...")
        check_words(seed=seed, step=step, stream=stream)
        key = DrawKey((seed, step, stream))
    return quantize_at(x, scales, fmt, ste, rounding, key, blocks=blocks)


def quantize_at(
    x: Tensor,
    scale: Tensor,
    fmt: FloatFormat,
    ste: str = "identity",
    rounding: Rounding = "nearest",
    key: DrawKey | None = None,
    *,
    blocks: bool = False,
) -> Tensor:
    """Return :func:`fake_quantize` at a scale that has been checked."""
    # Only some releases of torch have a type for it.
    apply: Callable[..., Tensor] = _FakeQuantize.apply
    return apply(x, scale, fmt, ste, rounding, key, blocks)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        fmt: FloatFormat,
        ste: str,
        rounding: Rounding,
        key: DrawKey | None,
        blocks: bool,
    ) -> Tensor:
        ctx.ste = ste
        if ste == "clipped":
            work = working_dtype(x)
            element_scales = scale.repeat_interleave(scaling.BLOCK_SIZE, -1) if blocks else scale
            units = (x.to(work) / element_scales.to(work)).abs()
            ctx.save_for_backward(units <= fmt.max * scaling.ROUNDING_OF_SCALES)
        elif ste == "relu":
            ctx.save_for_backward(x > 0)
        return round_at_scale(x, scale, fmt, rounding, key, blocks=blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if ctx.ste == "none":
            gradient = torch.zeros_like(gradient)
        elif ctx.ste != "identity":
            (passes,) = ctx.saved_tensors
            gradient = gradient.masked_fill(~passes, 0.0)
        # of x, scale, fmt, ste, rounding, key and blocks
        return gradient, None, None, None, None, None, None


def as_scale(
    x: Tensor, scale: Tensor | float, blocks: bool = False, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a scale that the caller chose, checked, as a tensor of ``dtype``.

    It broadcasts against ``x``. With ``blocks`` it is expanded to one for every block.
    """
    scaling.check_is_scale(scale)
    tensor = torch.as_tensor(scale, dtype=dtype, device=x.device).detach()
    shape = scaling.block_shape(x.shape) if blocks else x.shape
    if not scaling.broadcasts_to(tensor.shape, shape):
        target = f"{tuple(shape)}, the blocks of x" if blocks else f"x of shape {tuple(shape)}"
        raise ValueError(f"scale of shape {tuple(tensor.shape)} does not fit {target}")
    scaling.check_positive(tensor)
    return tensor.expand(shape) if blocks else tensor
