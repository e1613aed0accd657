"""Codes and power-of-two scales as a store of weights: from floats, to floats, and what the rounding left."""

from typing import Final

import torch
from torch import Tensor

from fp8manifold._blocks import BLOCK
from fp8manifold._codec import decode_bits
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import decode, to_chart
from fp8manifold.scaling import BLOCK_SIZE, StorageGranularity, storage_scale

__all__ = [
    "REMAINDER_STEPS",
    "checked_codes",
    "dequantize_codes",
    "expand_scale",
    "fresh_scale",
    "given_scale",
    "is_traced",
    "power_of_two",
    "remainder_of",
]

REMAINDER_STEPS: Final = 256
"""Parts of a chart step in which a remainder is counted."""


def is_traced(x: Tensor) -> bool:
    """Whether ``x`` stands for a tensor while a compiler looks on, so that nothing may depend on its values."""
    return type(x) is not Tensor or x.is_meta


def expand_scale(scale: Tensor, block_size: int | None, shape: torch.Size) -> Tensor:
    """The scale in a shape that broadcasts against the values: blocks are spread out, the rest stays as it is."""
    return scale if block_size is None else scale.repeat_interleave(block_size, dim=-1).view(shape)


def dequantize_codes(
    codes: Tensor, scale: Tensor, fmt: FloatFormat, dtype: torch.dtype, block_size: int | None
) -> Tensor:
    """``scale * decode(codes)`` in one pass: the only place where stored weights become floats.

    Args:
        codes: uint8.
        scale: float32: ``()``, one entry an index of the first axis ``(R, 1, .., 1)``, or one a block of the last.
        fmt: the format of the codes.
        dtype: float32 or bfloat16, in which every product is exact.
        block_size: length of the blocks, or None.
    """
    if is_traced(codes) or torch.compiler.is_compiling():
        return (decode_bits(codes, fmt) * expand_scale(scale, block_size, codes.shape)).to(dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    groups = max(scale.numel(), 1)
    pieces = (codes.reshape(groups, -1), scale.reshape(groups, 1), out.view(groups, -1))
    if groups == 1 or codes.device.type != "cpu":
        _decode_pieces(*pieces, fmt, axis=1)
    else:
        _decode_pieces(*pieces, fmt, axis=0)
    return out


def _decode_pieces(codes: Tensor, scale: Tensor, out: Tensor, fmt: FloatFormat, axis: int) -> None:
    """Decode a matrix with one scale a row, in pieces of whole rows (axis 0) or of columns (axis 1)."""
    length = codes.shape[axis] if codes.device.type != "cpu" else max(BLOCK // max(codes.shape[1 - axis], 1), 1)
    for start in range(0, codes.shape[axis], max(length, 1)):
        size = min(length, codes.shape[axis] - start)
        rows = scale.narrow(0, start, size) if axis == 0 else scale
        torch.mul(decode(codes.narrow(axis, start, size), fmt), rows, out=out.narrow(axis, start, size))


def remainder_of(w: Tensor, codes: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """What rounding ``w`` left, in 1/256 of a chart step: int8 of ``w``'s shape, 0 for NaN.

    .. math:: \\operatorname{round}(256 (\\varphi(w / s) - \\varphi(q))) \\in [-128, 127]

    Args:
        w: float values.
        codes: their codes.
        scale: broadcasts against ``w``.
        fmt: the format.
    """
    left = to_chart(w.double() / scale, fmt) - to_chart(decode(codes, fmt, torch.float64), fmt)
    return (left * REMAINDER_STEPS).round_().clamp_(-128, 127).nan_to_num_(0.0).to(torch.int8)


def fresh_scale(w: Tensor, fmt: FloatFormat, granularity: StorageGranularity, headroom: float | None) -> Tensor:
    """:func:`fp8manifold.storage_scale`; of a meta tensor, which has no magnitude, one without values."""
    if w.is_meta:
        return torch.empty(_scale_shape(w.shape, granularity), device="meta")
    return storage_scale(w, fmt, granularity, headroom=headroom)


def given_scale(scale: float | Tensor, w: Tensor, granularity: str) -> Tensor:
    """A scale that the caller chose, as float32 in the granularity's shape.

    Raises:
        TypeError: neither a number nor a tensor.
        ValueError: no power of two, or another shape.
    """
    if not isinstance(scale, Tensor | int | float) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number or a tensor, not {type(scale).__name__}")
    tensor = power_of_two(torch.as_tensor(scale, dtype=torch.float32, device=w.device))
    shape = _scale_shape(w.shape, granularity)
    if tensor.shape == shape:
        return tensor
    if tensor.dim() == 0:
        return tensor.expand(shape).clone()
    raise ValueError(
        f"scale has shape {tuple(tensor.shape)}: with granularity={granularity!r} a tensor of shape {tuple(w.shape)} "
        f"needs {tuple(shape)}"
    )


def power_of_two(scale: Tensor) -> Tensor:
    """The scale itself.

    Raises:
        ValueError: an entry that is no positive power of two.
    """
    if not is_traced(scale):
        wrong = ~((torch.frexp(scale).mantissa == 0.5) & scale.isfinite())
        if bool(wrong.any()):
            raise ValueError(f"scale holds {scale[wrong][0].item():g}: every entry must be a power of two")
    return scale


def checked_codes(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes, contiguous.

    Raises:
        TypeError: no uint8 tensor.
        ValueError: the code of an infinity, or one beyond the format's width.
    """
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes must be a uint8 tensor, not {got}")
    if not is_traced(codes) and codes.numel():
        if int(codes.max()) >= 2 * fmt.sign_bit:
            raise ValueError(f"code {int(codes.max())} is out of range for {fmt.name}: 0 to {2 * fmt.sign_bit - 1}")
        if fmt.inf_code is not None and bool(((codes & (fmt.sign_bit - 1)) == fmt.inf_code).any()):
            raise ValueError(f"codes hold {fmt.inf_code}, which is Inf in {fmt.name}: stored weights are finite")
    return codes.contiguous()


def _scale_shape(shape: torch.Size, granularity: str) -> torch.Size:
    if granularity == "tensor":
        return torch.Size()
    if granularity == "channel":
        return torch.Size((*shape[:1], *(1 for _ in shape[1:])))
    if not shape or shape[-1] % BLOCK_SIZE:
        raise ValueError(f"granularity='block' needs a last dimension that {BLOCK_SIZE} divides, not {tuple(shape)}")
    return torch.Size((*shape[:-1], shape[-1] // BLOCK_SIZE))
