"""Zero-gradient zones: weights whose layer answers the same whichever way they move by half an ULP."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8manifold._numerics.blocks import BLOCK
from fp8manifold._numerics.float_bits import working_dtype
from fp8manifold.formats import FloatFormat, FormatLike, as_format
from fp8manifold.grid import from_chart, round_to_grid, to_chart, ulp
from fp8manifold.monitor._passes import ScaleLike, fitting, plain

__all__ = ["zero_gradient_zone"]

_LARGE = 2.0**100  # stands for no slack at all: times 0 it is 0
_HALVES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def zero_gradient_zone(
    weight: Tensor,
    inputs: Tensor,
    fmt: FormatLike,
    scale: ScaleLike = 1.0,
    *,
    output: FormatLike | torch.dtype = torch.bfloat16,
    output_scale: ScaleLike = 1.0,
    bias: Tensor | None = None,
) -> float:
    """Share of a linear layer's weights for which half an ULP, up or down, leaves every output unchanged.

    .. math:: \\frac{1}{n} \\#\\{(i, j) : \\forall t : Q(y_{ti} \\pm x_{tj} S(w_{ij}) / 2) = Q(y_{ti})\\}, \\qquad
              y = x W^T + b

    A finite difference of the loss with respect to such a weight is zero.

    Args:
        weight: (O, I), as it is multiplied: quantised.
        inputs: (..., I) what it is multiplied by; time grows with the number of rows, a few dozen tell.  Fewer rows
            give a larger share, or the same.
        fmt: the weight's format, or its name.
        scale: of the weight; positive, broadcasting against it.
        output: format that the layer's output is rounded to, or the float dtype that it has.
        output_scale: of that format: a number or a tensor of one element.
        bias: (O,), or None.

    Returns:
        A number in [0, 1]; 0 for an empty weight, 1 without rows.  An output beyond the range of its format stays
        there for every step that does not bring it back, an output that is NaN or Inf in a float dtype for every step;
        a weight that is NaN, or meets an input that is NaN or Inf, is in no zone; +0 and -0 are one weight.

    Raises:
        TypeError: not float tensors, or an output dtype other than bfloat16, float16 and float32.
        ValueError: shapes that don't belong together, or a scale that does not fit or is not positive.

    Example:
        >>> weight, inputs = torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[1.0, 0.1, 0.0]])
        >>> zero_gradient_zone(weight, inputs, "E4M3", output="E4M3")  # outputs near 1 are 0.125 apart
        0.6666666666666666
    """
    w, x = plain(weight, "weight"), plain(inputs, "inputs")
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"weight must be (O, I) and inputs (..., I): got {tuple(w.shape)} and {tuple(x.shape)}")
    if not w.numel():
        return 0.0
    fitted = fitting(scale, w)
    half = ulp(w.to(fitted.dtype) / fitted, as_format(fmt)) * (fitted / 2)
    rows = x.reshape(-1, w.shape[1]).float()
    outputs = torch.nn.functional.linear(rows, w.float(), None if bias is None else bias.detach().float())
    slack = _slack(outputs, output, output_scale)
    ratios = _largest_ratios(rows, slack, half.expand(w.shape))
    return sum(int((ratio * part < 1).sum()) for ratio, part in ratios) / max(w.numel(), 1)


def _largest_ratios(rows: Tensor, slack: Tensor, half: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """``max_t |x_tj| / slack_ti`` for blocks of outputs i, with their part of ``half``."""
    size = max(BLOCK // max(rows.shape[1], 1), 1)
    inverse = (1 / slack).nan_to_num_(nan=0.0, posinf=_LARGE).clamp_(max=_LARGE)
    rows = rows.abs()
    for inverses, part in zip(inverse.split(size, dim=1), half.split(size), strict=True):
        worst = rows.new_zeros(part.shape)
        scratch = torch.empty_like(worst)
        for margin, x in zip(inverses, rows, strict=True):
            torch.maximum(worst, torch.mul(margin[:, None], x, out=scratch), out=worst)
        yield worst, part


def _slack(outputs: Tensor, output: FormatLike | torch.dtype, scale: ScaleLike) -> Tensor:
    """How far each output is from the nearest value that rounds to something else."""
    if not isinstance(output, torch.dtype):
        return _slack_of_format(outputs, as_format(output), scale)
    if output not in _HALVES:
        raise TypeError(f"output={output} must be torch.bfloat16, torch.float16, torch.float32 or a format")
    rounded = outputs.to(output)
    infinity = torch.full_like(rounded, float("inf"))
    ends = [torch.nextafter(rounded, end).double() for end in (-infinity, infinity)]
    low, high = ((rounded.double() + end) / 2 for end in ends)
    exact = outputs.double()
    return torch.minimum(exact - low, high - exact).float()


def _slack_of_format(outputs: Tensor, fmt: FloatFormat, scale: ScaleLike) -> Tensor:
    fitted = fitting(scale, outputs.reshape(-1)[:1].reshape(())) if outputs.numel() else torch.ones(())
    units = (outputs / fitted).to(working_dtype(outputs))
    code = to_chart(round_to_grid(units, fmt), fmt)
    high = torch.where(code >= fmt.max_code, float("inf"), from_chart(code + 0.5, fmt))
    low = torch.where(code <= -fmt.max_code, -float("inf"), from_chart(code - 0.5, fmt))
    return torch.minimum(units - low, high - units) * fitted
