"""Whole arrays to the grid, to codes and back, and whether gradients are finite: ``grid.c`` and ``squares.c``."""

import triton
import triton.language as tl

from fp8manifold._triton.format import (
    any_value,
    bits_of,
    draw_of,
    encode_finite,
    magnitude_ulp,
    nearest_bfloat16,
    of_bfloat16,
    random_word,
    round_value,
)
from fp8manifold._triton.kinds import SAID as _SAID
from fp8manifold._triton.stages import ROWS, WORDS, load_float

__all__ = ["decode_kernel", "encode_kernel", "finite_kernel", "round_kernel"]

SAID: tl.constexpr = tl.constexpr(_SAID)


@triton.jit
def _scaled_places(scale, rows, length, in_row, R: tl.constexpr, W: tl.constexpr):
    """Positions in a matrix whose rows share a scale each, which of them there are, and the scales."""
    program = tl.program_id(0).to(tl.int64)
    row = (program // in_row) * R + tl.arange(0, R)
    column = (program % in_row) * W + tl.arange(0, W)[None, :]
    inside = (row < rows)[:, None] & (column < length)
    return (row * length)[:, None] + column, inside, tl.load(scale + row, mask=row < rows, other=1.0)[:, None]


@triton.jit(do_not_specialize=["rows", "in_row"])
def decode_kernel(
    codes, scale, out, rows, length, in_row, F: tl.constexpr, SPACING: tl.constexpr, R: tl.constexpr, W: tl.constexpr
):
    """``scale * decode(codes)``, to float32 or bfloat16 (uint16 bits), or ``scale * ulp``."""
    at, inside, s = _scaled_places(scale, rows, length, in_row, R, W)
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32) & (2 * F.SIGN - 1)
    if SPACING:
        value = magnitude_ulp(code & (F.SIGN - 1), F, 0) * s
    else:
        value = any_value(code, F) * s
    if out.dtype.element_ty == tl.uint16:
        tl.store(out + at, nearest_bfloat16(value), mask=inside)
    else:
        tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "in_row"])
def round_kernel(
    x,
    scale,
    out,
    keys,
    rows,
    length,
    in_row,
    F: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """``scale * round(x / scale)``; ``keys`` begin at the first element's position."""
    at, inside, s = _scaled_places(scale, rows, length, in_row, R, W)
    value = tl.load(x + at, mask=inside, other=0.0)
    if SCALED:
        value = tl.math.div_rn(value, s)
    draw = 0
    if STOCHASTIC:
        draw = draw_of(random_word(keys, at.to(tl.uint32)))
    value = round_value(value, draw, F, STOCHASTIC)
    if SCALED and RESCALE:
        value = value * s
    tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=["rows", "in_row"])
def encode_kernel(
    x,
    scale,
    out,
    keys,
    rows,
    length,
    in_row,
    F: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FIXED: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Codes of ``x / scale``, of float32 or bfloat16 (uint16 bits); NaN has the format's code for it.

    ``keys`` begin at the first element's position.
    """
    at, inside, s = _scaled_places(scale, rows, length, in_row, R, W)
    value = tl.load(x + at, mask=inside, other=0)
    if x.dtype.element_ty == tl.uint16:
        value = of_bfloat16(value)
    if SCALED:
        value = tl.math.div_rn(value, s)
    draw = 0
    if STOCHASTIC:
        draw = draw_of(random_word(keys, at.to(tl.uint32)))
    code = encode_finite(value, draw, F, STOCHASTIC, FIXED)
    tl.store(out + at, tl.where(value != value, F.NAN_CODE, code).to(tl.uint8), mask=inside)


@triton.jit
def finite_kernel(table, chunks, refused, KIND: tl.constexpr, W: tl.constexpr):
    """Put 1 into ``refused``, and into the parameter's own word, where a gradient's square is not finite in float32."""
    chunk = chunks + 2 * tl.program_id(0)
    index = tl.load(chunk)
    words = table + index.to(tl.int64) * WORDS
    places = words.to(tl.pointer_type(tl.int64))
    numel = tl.load(places + ROWS // 2) * tl.load(places + ROWS // 2 + 1)
    at = tl.load(chunk + 1).to(tl.int64) * W + tl.arange(0, W)
    g = load_float(words, 2, KIND, at, at < numel, False)
    largest = tl.max(bits_of(g) & 0x7FFFFFFF, axis=0)
    if largest > 0x5F7FFFFF:  # the square of the next one is Inf
        tl.store(refused, 1)
        tl.store(refused + (index + 1) * SAID + 2, 1)
