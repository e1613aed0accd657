"""What the figures share: checked arguments, tensors walked in cached blocks, counts without masks."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8manifold._base.blocks import BLOCK, runs_in_blocks
from fp8manifold._base.float_bits import binade, float_bits, working_dtype
from fp8manifold.formats import FloatFormat
from fp8manifold.tensor import FP8Tensor

ScaleLike = Tensor | float
"""Positive; a tensor broadcasts against what it scales."""
_EXACT = 2**24  # a float32 counts so far


def plain(x: Tensor, name: str = "x") -> Tensor:
    """The values of a float tensor, one-byte weights included, apart from any graph.

    Raises:
        TypeError: no float tensor.
    """
    if isinstance(x, FP8Tensor):
        return x.detach().dequantize()
    working_dtype(x, name)
    return x.detach()


def check_shapes(**tensors: Tensor) -> None:
    """Raise TypeError unless all are tensors, ValueError unless they have one shape."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        got = ", ".join(f"{name} has {shape}" for name, shape in shapes.items())
        raise ValueError(f"all tensors must have one shape: {got}")


def fitting(scale: ScaleLike, x: Tensor) -> Tensor:
    """The scale as a tensor on the device of ``x`` that does not widen it.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: another shape, or an entry that is not finite and positive.
    """
    if not isinstance(scale, Tensor | int | float) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number or a tensor, not {type(scale).__name__}")
    work = working_dtype(x)
    tensor = torch.as_tensor(scale, device=x.device).detach().to(work)
    if not _fits(tensor.shape, x.shape):
        raise ValueError(f"scale of shape {tuple(tensor.shape)} does not fit x of shape {tuple(x.shape)}")
    low, high = (float(end) for end in tensor.aminmax()) if tensor.numel() else (1.0, 1.0)
    if not (low > 0 and high < math.inf):  # NaN is neither
        wrong = tensor[~((tensor > 0) & tensor.isfinite())]
        raise ValueError(f"scale holds {wrong.flatten()[0].item():g}: every entry must be finite and positive")
    return tensor


def _fits(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a shape broadcasts to another without widening it; torch.broadcast_shapes takes longer than a pass."""
    if len(shape) > len(whole):
        return False
    return all(size in (1, end) for size, end in zip(reversed(shape), reversed(whole), strict=False))


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of tensors of one shape, in their working dtype; one empty piece of empty tensors."""
    flat = [t.reshape(-1).resolve_neg() for t in tensors]  # of some the bits are looked at
    numel = flat[0].numel()
    size = BLOCK if runs_in_blocks(flat[0].device, numel) else max(numel, 1)
    for start in range(0, max(numel, 1), size):
        yield tuple(t[start : start + size].to(working_dtype(t)) for t in flat)


def scaled_blocks(scale: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The scale's piece (flat, or one number), and the pieces of the tensors."""
    if scale.numel() == 1:
        one = scale.reshape(())
        for parts in blocks(*tensors):
            yield one, *parts
        return
    yield from blocks(scale.expand(tensors[0].shape), *tensors)


def unit_blocks(scale: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The scale's piece, and the pieces of the tensors in units of it."""
    for scales, *parts in scaled_blocks(scale, *tensors):
        yield scales, *(part / scales for part in parts)


def one_scale(scale: Tensor) -> float:
    """The geometric mean of all entries."""
    return float(scale.double().log2().mean().exp2()) if scale.numel() else 1.0


def count_above(x: Tensor, threshold: float, scratch: Tensor) -> Tensor:
    """How many elements exceed a threshold, as a float; a comparison into floats costs a quarter of one into a mask."""
    above = torch.gt(x, threshold, out=scratch)
    return above.sum(dtype=torch.float64 if x.numel() > _EXACT else None).double()


def share(mask: Tensor) -> float:
    """The share of a mask that is set; 0 where there is nothing."""
    return int(mask.sum()) / max(mask.numel(), 1)


def inside(units: Tensor, fmt: FloatFormat) -> Tensor:
    """The nearest value within the range; NaN stays NaN."""
    return units.clamp(-fmt.max, fmt.max)


def spacing(units: Tensor, fmt: FloatFormat) -> Tensor:
    """:func:`fp8manifold.ulp` of values within the range, in their own dtype; Inf for NaN."""
    return binade(units, fmt.emin).mul_(2.0**-fmt.mantissa_bits)


def steps_from_zero(units: Tensor, ulps: Tensor, fmt: FloatFormat) -> tuple[Tensor, Tensor]:
    """The chart's coordinate as a whole number, of the binade, and what the mantissa adds to it.

    .. math:: \\mathrm{sign}(x) (e - e_{min}) 2^M, \\qquad x / S(x)
    """
    fields = float_bits(units.dtype)
    lowest = fields.bias + fmt.emin - fmt.mantissa_bits
    binades = ((ulps.view(fields.integer) >> fields.mantissa_bits) - lowest) << fmt.mantissa_bits
    return torch.sign(units).mul_(binades), units / ulps


def chart_steps(a: Tensor, b: Tensor, fmt: FloatFormat) -> Tensor:
    """``|phi(a) - phi(b)|`` of values in units of their scale, exact to the last digits of ``a - b``.

    The coordinates themselves are two orders of magnitude larger than many a difference between them.
    """
    a, b = inside(a, fmt), inside(b, fmt)
    whole_a, part_a = steps_from_zero(a, spacing(a, fmt), fmt)
    whole_b, part_b = steps_from_zero(b, spacing(b, fmt), fmt)
    return whole_a.sub_(whole_b).add_(part_a.sub_(part_b)).abs_()
