"""Codes and scales as a store of weights: from floats, to floats, and remainders.

A weight is ``scale * decode(code)``. Some weights share a scale:

- without a block size those that the scale's shape says: all for ``()``, one index of
  the first dimension for ``(R, 1, .., 1)``, one row for ``(.., 1)``;
- a block: 32 of a row;
- a square: 128 x 128 of the last two dimensions, partial at their ends. Loops over rows
  take its scale once for each run of a row (``runs_of``), as runs have one length.

``codes_of`` rounds floats to codes, and ``dequantize_codes`` decodes them. What
rounding took away, the remainder, can be stored in 1/256 of a step (``remainder_of``).
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._base.blocks import BLOCK, in_pieces, pieces
from fp8manifold._base.reading import has_values
from fp8manifold._native._arrays import decode_by_kernel
from fp8manifold._numerics.codec import decode_with_specials, encode_with_nan
from fp8manifold.formats import FloatFormat
from fp8manifold.grid import check_codes, decode, decode_checked, encode, to_chart
from fp8manifold.random_bits import named_word
from fp8manifold.scaling import BLOCK_SIZE, SQUARE_SIZE, square_amax

BlockSize = int | tuple[int, int] | None
"""The weights that share a scale: 32, ``(128, 128)``, or None if its shape says so."""
SQUARE: Final = (SQUARE_SIZE, SQUARE_SIZE)
_SHORTEST_RUN: Final = 32
_BLOCK_SIZES_BY_NUMBER: Final[dict[int, BlockSize]] = {
    0: None,
    BLOCK_SIZE: BLOCK_SIZE,
    SQUARE_SIZE**2: SQUARE,
}
_NUMBERS: Final = {block_size: number for number, block_size in _BLOCK_SIZES_BY_NUMBER.items()}
REMAINDER_STEPS: Final = 256
"""Parts of a chart step in which a remainder is counted."""


def number_of(block_size: BlockSize) -> int:
    """Return the block size as one number, which states store.

    It is the number of weights that share a scale, or 0 without blocks.
    """
    return _NUMBERS[block_size]


def block_size_of(number: int) -> BlockSize:
    """Return the block size of a number: the inverse of :func:`number_of`."""
    if number not in _BLOCK_SIZES_BY_NUMBER:
        known_numbers = ", ".join(map(str, _BLOCK_SIZES_BY_NUMBER))
        raise ValueError(
            f"blocks of {number} weights are not supported: use one of {known_numbers}"
        )
    return _BLOCK_SIZES_BY_NUMBER[number]


def run_length(columns: int) -> int:
    """Return the length of equal runs of a row, each in one square.

    It is 32 to 128, or 1 if no such length divides 128 and ``columns``, or the whole
    row if that has up to 128.
    """
    if columns <= SQUARE_SIZE:
        return max(columns, 1)
    length = math.gcd(columns, SQUARE_SIZE)
    return length if length >= _SHORTEST_RUN else 1


def runs_of(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the scales of squares, one for each run of :func:`run_length` weights.

    They are contiguous. For 256 x 320 weights, scales of squares are (2, 3). Spread to
    rows they are (256, 3), and then for runs of 64 weights (256, 5).
    """
    return runs_of_rows(spread_rows(scale, shape[-2]), shape[-1])


def runs_of_rows(scale: Tensor, columns: int) -> Tensor:
    """Return the scales of runs.

    Args:
        scale: of rows: one for each square that a row runs through.
        columns: length of a row.
    """
    if columns <= SQUARE_SIZE:
        return scale.contiguous()
    length = run_length(columns)
    runs = scale.repeat_interleave(SQUARE_SIZE // length, -1)
    # the last square may be cut off
    return runs[..., : columns // length].contiguous()


def spread_rows(scale: Tensor, rows: int) -> Tensor:
    """Return the scales of squares, one per row for each square that it crosses."""
    return _spread(scale, rows, -2)


def _spread(scale: Tensor, size: int, dim: int) -> Tensor:
    """Repeat the scales of squares along a dimension of ``size`` weights."""
    if size % SQUARE_SIZE and (is_traced(scale) or torch.compiler.is_compiling()):
        # inductor wrongly takes (i % size) // 128 for (i // 128) % (size // 128) where
        # it joins loops: avoid // altogether
        squares = (torch.arange(size, device=scale.device) * (1 / SQUARE_SIZE)).long()
        return scale.index_select(dim, squares)
    return scale.repeat_interleave(SQUARE_SIZE, dim).narrow(dim, 0, size)


def is_traced(x: Tensor) -> bool:
    """Return True if nothing may depend on the values of ``x``.

    It is a tracer's tensor then, or has no memory.
    """
    return type(x) is not Tensor or x.is_meta


def expand_scale(scale: Tensor, block_size: BlockSize, shape: torch.Size) -> Tensor:
    """Return the scale in a shape that broadcasts against the values.

    Those of blocks and squares are repeated for every weight; others stay as they are.
    """
    if isinstance(block_size, tuple):
        return _spread(spread_rows(scale, shape[-2]), shape[-1], -1).contiguous()
    if block_size is None:
        return scale
    return scale.repeat_interleave(block_size, dim=-1).view(shape)


def dequantize_codes(
    codes: Tensor, scale: Tensor, fmt: FloatFormat, dtype: torch.dtype, block_size: BlockSize
) -> Tensor:
    """Return ``scale * decode(codes)``, rounded to float32, and from that to ``dtype``.

    A scale is ``()``, or one per row ``(R, 1, .., 1)``, per block of the last axis, or
    per square of the last two.
    """
    if is_traced(codes) or torch.compiler.is_compiling():
        return (decode_with_specials(codes, fmt) * expand_scale(scale, block_size, codes.shape)).to(
            dtype
        )
    if isinstance(block_size, tuple):
        scale = runs_of(scale, codes.shape)
    return decode_runs(codes, scale, fmt, dtype)


def decode_runs(codes: Tensor, scale: Tensor, fmt: FloatFormat, dtype: torch.dtype) -> Tensor:
    """Return ``scale * decode(codes)``, with a scale for each of equal runs."""
    native = decode_by_kernel(codes, fmt, dtype, scale)
    if native is not None:
        return native
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if not values.numel():
        return values
    runs = scale.numel()
    codes_by_run = codes.reshape(runs, -1)
    scales_by_run = scale.reshape(runs, 1).expand_as(codes_by_run)
    values_by_run = values.view(runs, -1)
    # a CPU takes pieces that stay in its cache: some runs, or columns of a single one
    axis = 1 if runs == 1 else 0
    length = codes_by_run.shape[axis]
    if codes.is_cpu:
        length = max(BLOCK // codes_by_run.shape[1 - axis], 1)
    pieces_of_all = zip(
        codes_by_run.split(length, axis),
        scales_by_run.split(length, axis),
        values_by_run.split(length, axis),
        strict=True,
    )
    for piece, factors, target in pieces_of_all:
        torch.mul(decode_checked(piece, fmt), factors, out=target)
    return values


def encode_in_graph(units: Tensor, fmt: FloatFormat, rounding: str) -> Tensor:
    """Return codes of values in units of their scale, in a graph, rounded to nearest.

    Stochastic rounding is refused: no draw can be counted in a graph.
    """
    if rounding == "stochastic" and not units.is_meta:
        raise RuntimeError(
            "compiled code can't write to an FP8Tensor in place with rounding='stochastic', whose "
            "draws are counted outside the graph: write in eager mode, take rounding='nearest', or "
            "step it with fp8manifold.optim"
        )
    return encode_with_nan(units.float(), fmt)


def divided(w: Tensor, scale: Tensor) -> Tensor:
    """Return ``w / scale`` in the wider dtype of the two.

    Torch would divide halves by a scalar scale in their own dtype.
    """
    return w.to(torch.promote_types(w.dtype, scale.dtype)) / scale


def codes_of(
    w: Tensor, scale: Tensor, fmt: FloatFormat, *, keep_remainder: bool
) -> tuple[Tensor, Tensor | None]:
    """Round ``w`` to nearest, some rows at a time.

    Returns:
        The codes, and the remainder, or None unless ``keep_remainder``.
    """
    if not has_values(w):
        codes = torch.empty_like(w, dtype=torch.uint8)
    elif not is_traced(w) and in_pieces(w):
        return _codes_by_pieces(w, scale, fmt, keep_remainder=keep_remainder)
    elif not is_traced(w) and w.numel() and w.dim() > 2 and w.shape[0] == 1:
        # a stack of one: what is in it may be taken in pieces
        inner_scale = scale[0] if scale.dim() else scale
        codes, remainder = codes_of(w[0], inner_scale, fmt, keep_remainder=keep_remainder)
        return codes[None], None if remainder is None else remainder[None]
    else:
        codes = encode(divided(w, scale), fmt)
    return codes, remainder_of(w, codes, scale, fmt) if keep_remainder else None


def _codes_by_pieces(
    w: Tensor, scale: Tensor, fmt: FloatFormat, *, keep_remainder: bool
) -> tuple[Tensor, Tensor | None]:
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    remainder = torch.empty(w.shape, dtype=torch.int8, device=w.device) if keep_remainder else None
    has_scale_per_row = scale.dim() == w.dim() and scale.shape[0] > 1
    for rows in pieces(w):
        row_scale = scale[rows] if has_scale_per_row else scale
        codes[rows], row_remainder = codes_of(
            w[rows], row_scale, fmt, keep_remainder=keep_remainder
        )
        if remainder is not None and row_remainder is not None:
            remainder[rows] = row_remainder
    return codes, remainder


def remainder_of(w: Tensor, codes: Tensor, scale: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the remainder ``round(256 (phi(w / s) - phi(q)))`` in [-128, 127].

    It is int8 of ``w``'s shape, and 0 for NaN.
    """
    if not has_values(w):
        return torch.empty_like(w, dtype=torch.int8)
    steps = to_chart(w.double() / scale, fmt) - to_chart(decode(codes, fmt, torch.float64), fmt)
    return (steps * REMAINDER_STEPS).round_().clamp_(-128, 127).nan_to_num_(0.0).to(torch.int8)


def void_remainder(tensor: Any) -> None:
    """Drop the remainder of a tensor whose codes have changed.

    It becomes 0 also in state dicts, which share its memory.
    """
    if tensor.remainder is not None:
        tensor.remainder.zero_()
        tensor.remainder = None


def checked_codes(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Return the codes, contiguous.

    Raises:
        TypeError: other than uint8.
        ValueError: the code of Inf, or one beyond the format's width.
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
    """Return the largest finite magnitude under each scale, in value.

    It has the shape of ``scale``.
    """
    if not codes.numel():
        return torch.zeros_like(scale)
    magnitudes = codes & (fmt.sign_bit - 1)
    if isinstance(block_size, tuple):
        finite = torch.where(magnitudes > fmt.max_code, 0, magnitudes)
        return decode_checked(square_amax(finite), fmt) * scale
    groups = magnitudes.view(-1, block_size or codes.numel() // scale.numel())
    top = groups.amax(1)
    # NaN is rare, and not worth a pass of its own
    if bool((top > fmt.max_code).any()):
        top = torch.where(groups > fmt.max_code, 0, groups).amax(1)
    # as large as all codes
    del magnitudes, groups
    return decode_checked(top.view(scale.shape), fmt) * scale


def next_codes(tensor: Any, units: Tensor, rounding: str, operator: str) -> Tensor:
    """Return codes of values that an operator writes into a tensor of codes.

    The draws of stochastic rounding are counted in the tensor, and independent of each
    other.

    Args:
        tensor: its format, seed and counter are used.
        units: the values in units of the scale.
        rounding: ``nearest`` or ``stochastic``.
        operator: the name of what writes.
    """
    if is_traced(tensor.codes):
        return encode_in_graph(units, tensor.format, rounding)
    if rounding == "nearest":
        return encode(units, tensor.format)
    stream = named_word(operator) if tensor.by_operator else 0
    codes = encode(
        units,
        tensor.format,
        "stochastic",
        seed=tensor.seed,
        step=int(tensor.counter),
        stream=stream,
    )
    tensor.counter.add_(1)
    return codes
