"""Codes and scales as a store of weights: from floats, to floats, and the remainder of
rounding.

A scale is for the weights that its shape says, for 32 of a row, or for a square of 128
x 128, partial at its ends.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import BLOCK, in_pieces, pieces
from fp8manifold._base.reading import has_values
from fp8manifold._native._arrays import decoded
from fp8manifold._numerics.codec import decode_bits, encode_bits
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import check_codes, decode, decode_checked, encode, to_chart
from fp8manifold.random_bits import named_word
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, square_amax

BlockSize = int | tuple[int, int] | None
"""The weights that share a scale: 32 of a row, 128 x 128 of the last two dimensions, or
what the scale's shape says.
"""
SQUARE: Final = (SQUARE_SIZE, SQUARE_SIZE)
_SHORTEST_RUN: Final = 32
_KNOWN: Final[dict[int, BlockSize]] = {0: None, BLOCK_SIZE: BLOCK_SIZE, SQUARE_SIZE**2: SQUARE}


def number_of(block_size: BlockSize) -> int:
    """The block size as one number, which states store: the weights that share a scale,
    or 0 without blocks.
    """
    return next(number for number, known in _KNOWN.items() if known == block_size)


def block_size_of(number: int) -> BlockSize:
    """The inverse of :func:`number_of`."""
    if number not in _KNOWN:
        raise ValueError(
            f"blocks of {number} weights are unknown: one of {', '.join(map(str, _KNOWN))}"
        )
    return _KNOWN[number]


def run_length(columns: int) -> int:
    """Weights in each of the equal runs of a row that share a scale: 32 to 128, 1, or a
    row of up to 128.
    """
    if columns <= SQUARE_SIZE:
        return max(columns, 1)
    length = math.gcd(columns, SQUARE_SIZE)
    return length if length >= _SHORTEST_RUN else 1


def runs_of(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scales of squares, one for each run of :func:`run_length` weights,
    contiguous.
    """
    return runs_of_rows(spread_rows(scale, shape[-2]), shape[-1])


def runs_of_rows(scale: Tensor, columns: int) -> Tensor:
    """The scales of runs, from those of rows: one for each square that a row runs
    through.
    """
    length = run_length(columns)
    if columns <= SQUARE_SIZE:
        return scale.contiguous()
    return scale.repeat_interleave(SQUARE_SIZE // length, -1)[..., : columns // length].contiguous()


def spread_rows(scale: Tensor, rows: int) -> Tensor:
    """The scales of squares, one per row for each square that the row runs through."""
    return _spread(scale, rows, -2)


def _spread(scale: Tensor, size: int, dim: int) -> Tensor:
    if size % SQUARE_SIZE and (is_traced(scale) or torch.compiler.is_compiling()):
        # inductor takes (i % size) // 128 for (i // 128) % (size // 128) where it joins
        # loops: avoid // altogether
        return scale.index_select(
            dim, (torch.arange(size, device=scale.device) * (1 / SQUARE_SIZE)).long()
        )
    return scale.repeat_interleave(SQUARE_SIZE, dim).narrow(dim, 0, size)


REMAINDER_STEPS: Final = 256  #: Parts of a chart step in which a remainder is counted.


def is_traced(x: Tensor) -> bool:
    """True if ``x`` is a tracer's tensor or has no memory, so that nothing may depend
    on its values.
    """
    return type(x) is not Tensor or x.is_meta


def expand_scale(scale: Tensor, block_size: BlockSize, shape: torch.Size) -> Tensor:
    """The scale in a shape that broadcasts against the values: blocks are spread out,
    the rest stays as it is.
    """
    if isinstance(block_size, tuple):
        return _spread(spread_rows(scale, shape[-2]), shape[-1], -1).contiguous()
    return scale if block_size is None else scale.repeat_interleave(block_size, dim=-1).view(shape)


def dequantize_codes(
    codes: Tensor, scale: Tensor, fmt: FloatFormat, dtype: torch.dtype, block_size: BlockSize
) -> Tensor:
    """``scale * decode(codes)``, the floats of stored weights: rounded to float32, and
    from there to ``dtype``.

    A scale is ``()``, or one per row ``(R, 1, .., 1)``, per block of the last axis, or
    per square of the last two.
    """
    if is_traced(codes) or torch.compiler.is_compiling():
        return (decode_bits(codes, fmt) * expand_scale(scale, block_size, codes.shape)).to(dtype)
    if isinstance(block_size, tuple):
        scale = runs_of(scale, codes.shape)
    return decode_runs(codes, scale, fmt, dtype)


def decode_runs(codes: Tensor, scale: Tensor, fmt: FloatFormat, dtype: torch.dtype) -> Tensor:
    """``scale * decode(codes)`` of codes in memory, with a scale for each of equal runs
    of them.
    """
    if (native := decoded(codes, fmt, dtype, scale)) is not None:
        return native
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel():
        groups = scale.numel()
        matrix, factors, target = (
            codes.reshape(groups, -1),
            scale.reshape(groups, 1),
            out.view(groups, -1),
        )
        axis = 1 if groups == 1 else 0
        length = max(BLOCK // matrix.shape[1 - axis], 1) if codes.is_cpu else matrix.shape[axis]
        parts = (x.split(length, axis) for x in (matrix, factors.expand_as(matrix), target))
        for some, factor, into in zip(*parts, strict=True):
            torch.mul(decode_checked(some, fmt), factor, out=into)
    return out


def encode_in_graph(units: Tensor, fmt: FloatFormat, rounding: str) -> Tensor:
    """Codes of values in units of their scale, in a graph: rounded to nearest, as no
    draw can be counted there.
    """
    if rounding == "stochastic" and not units.is_meta:
        raise RuntimeError(
            "compiled code can't write to an FP8Tensor in place with rounding='stochastic', whose "
            "draws are counted outside the graph: write in eager mode, take rounding='nearest', or "
            "step it with fp8manifold.optim"
        )
    return encode_bits(units.float(), fmt)


def divided(w: Tensor, scale: Tensor) -> Tensor:
    """``w / scale`` in the wider dtype of the two; torch would divide halves by a
    scalar scale in their own.
    """
    return w.to(torch.promote_types(w.dtype, scale.dtype)) / scale


def codes_of(
    w: Tensor, scale: Tensor, fmt: FloatFormat, *, keep_remainder: bool
) -> tuple[Tensor, Tensor | None]:
    """Codes of the values of ``w`` rounded to nearest, and the remainder if it is kept;
    some rows at a time.
    """
    if not has_values(w):
        codes = torch.empty_like(w, dtype=torch.uint8)
    elif not is_traced(w) and in_pieces(w):
        codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
        left = torch.empty(w.shape, dtype=torch.int8, device=w.device) if keep_remainder else None
        for rows in pieces(w):
            own = scale[rows] if scale.dim() == w.dim() and scale.shape[0] > 1 else scale
            codes[rows], part = codes_of(w[rows], own, fmt, keep_remainder=keep_remainder)
            if left is not None and part is not None:
                left[rows] = part
        return codes, left
    elif w.dim() > 2 and w.shape[0] == 1 and not is_traced(w) and w.numel():
        codes, inner = codes_of(
            w[0], scale[0] if scale.dim() else scale, fmt, keep_remainder=keep_remainder
        )
        return codes[None], None if inner is None else inner[None]
    else:
        codes = encode(divided(w, scale), fmt)
    return codes, remainder_of(w, codes, scale, fmt) if keep_remainder else None


def remainder_of(w: Tensor, codes: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """The remainder ``round(256 (phi(w / s) - phi(q)))`` in [-128, 127]: int8 of
    ``w``'s shape, 0 for NaN.
    """
    if not has_values(w):
        return torch.empty_like(w, dtype=torch.int8)
    left = to_chart(w.double() / scale, fmt) - to_chart(decode(codes, fmt, torch.float64), fmt)
    return (left * REMAINDER_STEPS).round_().clamp_(-128, 127).nan_to_num_(0.0).to(torch.int8)


def void_remainder(own: Any) -> None:
    """Drop the remainder of a tensor whose codes have changed, also for state dicts,
    which share its memory.
    """
    if own.remainder is not None:
        own.remainder.zero_()
        own.remainder = None


def checked_codes(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes, contiguous; the code of Inf, or one beyond the format's width, is
    refused.
    """
    check_codes(codes)
    if not is_traced(codes) and codes.numel():
        if int(codes.max()) >= 2 * fmt.sign_bit:
            raise ValueError(
                f"code {int(codes.max())} is out of range for {fmt.name}: 0 to "
                f"{2 * fmt.sign_bit - 1}"
            )
        if fmt.inf_code is not None and bool(((codes & (fmt.sign_bit - 1)) == fmt.inf_code).any()):
            raise ValueError(
                f"codes hold {fmt.inf_code}, which is Inf in {fmt.name}: stored weights are finite"
            )
    return codes.contiguous()


def largest_magnitude(
    codes: Tensor, scale: Tensor, fmt: FloatFormat, block_size: BlockSize
) -> Tensor:
    """The largest finite magnitude stored under each scale, in value; of the shape of
    ``scale``.
    """
    if not codes.numel():
        return torch.zeros_like(scale)
    groups = codes & (fmt.sign_bit - 1)
    if isinstance(block_size, tuple):
        return (
            decode_checked(square_amax(torch.where(groups > fmt.max_code, 0, groups)), fmt) * scale
        )
    groups = groups.view(-1, block_size or codes.numel() // scale.numel())
    top = groups.amax(1)
    if bool((top > fmt.max_code).any()):  # NaN: rare, and not worth a pass of its own
        top = torch.where(groups > fmt.max_code, 0, groups).amax(1)
    return decode_checked(top.view(scale.shape), fmt) * scale


def next_codes(own: Any, units: Tensor, rounding: str, operator: str) -> Tensor:
    """Codes of values in units of the scale that ``operator`` writes; draws are
    counted, and always independent.
    """
    if is_traced(own.codes):
        return encode_in_graph(units, own.format, rounding)
    if rounding == "nearest":
        return encode(units, own.format)
    stream = named_word(operator) if own.by_operator else 0
    key = {"seed": own.seed, "step": int(own.counter), "stream": stream}
    codes = encode(units, own.format, "stochastic", **key)
    own.counter.add_(1)
    return codes
