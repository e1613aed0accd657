"""Whole arrays to the grid, to codes and back, the verdict on gradients, and operands
of products in 8 bits.
"""

import triton
import triton.language as tl

from fp8manifold._triton import format as floats
from fp8manifold._triton.kinds import SAID as _SAID
from fp8manifold._triton.stages import ROWS, WORDS, load_float

SAID: tl.constexpr = tl.constexpr(_SAID)
LARGEST_INT8: tl.constexpr = tl.constexpr(0x42FE0000)  # float32 bits of 127


@triton.jit
def _scaled_places(scale, rows, length, in_row, R: tl.constexpr, W: tl.constexpr):
    """Positions in a matrix with a scale for each row, a mask of those that exist, and
    the scales.
    """
    program = tl.program_id(0).to(tl.int64)
    row = (program // in_row) * R + tl.arange(0, R)
    column = (program % in_row) * W + tl.arange(0, W)[None, :]
    inside = (row < rows)[:, None] & (column < length)
    return (
        (row * length)[:, None] + column,
        inside,
        tl.load(scale + row, mask=row < rows, other=1.0)[:, None],
    )


@triton.jit
def _units(
    x,
    scale,
    keys,
    rows,
    length,
    in_row,
    STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Positions, mask, scales, the values (float32 or bfloat16 as uint16 bits) over
    their scales, and the draws.
    """
    at, inside, s = _scaled_places(scale, rows, length, in_row, R, W)
    value = tl.load(x + at, mask=inside, other=0)
    if x.dtype.element_ty == tl.uint16:
        value = floats.of_bfloat16(value)
    if SCALED:
        value = tl.math.div_rn(value, s)
    draw = 0
    if STOCHASTIC:
        draw = floats.draw_of(floats.random_word(keys, at.to(tl.uint32)))
    return at, inside, s, value, draw


@triton.jit(do_not_specialize=["rows", "in_row"])
def decode_kernel(
    codes,
    scale,
    out,
    rows,
    length,
    in_row,
    F: tl.constexpr,
    SPACING: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """``scale * decode(codes)``, to float32 or bfloat16 (uint16 bits), or
    ``scale * ulp``.
    """
    at, inside, s = _scaled_places(scale, rows, length, in_row, R, W)
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32) & (2 * F.SIGN - 1)
    if SPACING:
        value = floats.magnitude_ulp(code & (F.SIGN - 1), F, 0) * s
    else:
        value = floats.any_value(code, F) * s
    if out.dtype.element_ty == tl.uint16:
        tl.store(out + at, floats.nearest_bfloat16(value), mask=inside)
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
    at, inside, s, value, draw = _units(
        x, scale, keys, rows, length, in_row, STOCHASTIC, SCALED, R, W
    )
    value = floats.round_value(value, draw, F, STOCHASTIC)
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
    """Codes of ``x / scale``, of float32 or bfloat16 (uint16 bits); NaN has the
    format's code for it.
    """
    at, inside, _, value, draw = _units(
        x, scale, keys, rows, length, in_row, STOCHASTIC, SCALED, R, W
    )
    code = floats.encode_finite(value, draw, F, STOCHASTIC, FIXED)
    tl.store(out + at, tl.where(value != value, F.NAN_CODE, code).to(tl.uint8), mask=inside)


@triton.jit
def finite_kernel(table, chunks, refused, KIND: tl.constexpr, W: tl.constexpr):
    """Set the first word of ``refused``, and the parameter's, if a gradient's square is
    not finite in float32.
    """
    chunk = chunks + 2 * tl.program_id(0)
    index = tl.load(chunk)
    words = table + index.to(tl.int64) * WORDS
    places = words.to(tl.pointer_type(tl.int64))
    numel = tl.load(places + ROWS // 2) * tl.load(places + ROWS // 2 + 1)
    at = tl.load(chunk + 1).to(tl.int64) * W + tl.arange(0, W)
    g = load_float(words, 2, KIND, at, at < numel, False)
    largest = tl.max(floats.bits_of(g) & 0x7FFFFFFF, axis=0)
    if largest > 0x5F7FFFFF:  # the square of the next one is Inf
        tl.store(refused, 1)
        tl.store(refused + (index + 1) * SAID + 2, 1)


@triton.jit
def _scales_of(amax, LARGEST: tl.constexpr):
    """The least power of two that takes a magnitude (float32 bits) to at most LARGEST,
    and its reciprocal.

    At least 2^-126; 1 for zero; NaN for what is not finite, whose reciprocal is 0.
    """
    field = (
        (amax >> 23)
        - ((LARGEST >> 23) - 127)
        + ((amax & 0x7FFFFF) > (LARGEST & 0x7FFFFF)).to(tl.int32)
    )
    field = tl.where(amax == 0, 127, tl.maximum(field, 1))
    finite = amax < 0x7F800000
    scale = floats.float_of(tl.where(finite, field << 23, 0x7FC00000))
    return scale, floats.float_of(tl.where(finite, (254 - field) << 23, 0))


@triton.jit
def _code(x, reciprocal, LARGEST: tl.constexpr, F: tl.constexpr):
    """The int8 or the E4M3 code of ``x`` over its scale, rounded once; 0 where the
    reciprocal is 0.

    Without F by the instruction of compute capability 8.9 and later: Triton's own
    conversion passes through a float16 that is cut off on 8.9, and its interpreter
    rounds wrongly.
    """
    x = tl.where(reciprocal == 0.0, 0.0, x) * reciprocal
    if LARGEST == LARGEST_INT8:
        code = floats.round_even(x).to(tl.uint8)
    elif F is None:
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        code = floats.encode_finite(x, 0, F, False, False).to(tl.uint8)
    return code


@triton.jit
def _values(x, row, column, stride, inside):
    """In float32, of float32, float16 or bfloat16 (uint16 bits)."""
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    if x.dtype.element_ty == tl.uint16:
        value = floats.of_bfloat16(value)
    return value.to(tl.float32)


@triton.jit
def _row_values(x, fold, row, column, height, width, stride, FOLDS: tl.constexpr):
    inside = (row < height)[:, None] & (column < width)[None, :]
    value = _values(x, row, column, stride, inside)
    if FOLDS == 1:
        value = value * tl.load(fold)
    elif FOLDS == 2:
        value = value * tl.load(fold + column, mask=column < width, other=0.0)[None, :]
    return value, inside


@triton.jit
def _largest(value, axis: tl.constexpr):
    """Float32 bits of the largest magnitude: those of Inf are larger than a number's,
    and NaN's larger still.
    """
    return tl.max(floats.bits_of(value) & 0x7FFFFFFF, axis=axis)


@triton.jit(do_not_specialize=["height"])
def rows_kernel(
    x,
    fold,
    codes,
    scales,
    height,
    width,
    stride,
    LARGEST: tl.constexpr,
    F: tl.constexpr,
    FOLDS: tl.constexpr,
    LONG: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Codes of ``x * fold`` at a scale for each row, read twice if LONG; ``fold``: 2
    one per column, 1 one, 0 none.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    if LONG:
        amax = tl.zeros((R,), tl.int32)
        for start in range(0, width, W):
            value, _ = _row_values(x, fold, row, start + column, height, width, stride, FOLDS)
            amax = tl.maximum(amax, _largest(value, 1))
        scale, reciprocal = _scales_of(amax, LARGEST)
        for start in range(0, width, W):
            value, inside = _row_values(x, fold, row, start + column, height, width, stride, FOLDS)
            at = row[:, None] * width + (start + column)[None, :]
            tl.store(codes + at, _code(value, reciprocal[:, None], LARGEST, F), mask=inside)
    else:
        value, inside = _row_values(x, fold, row, column, height, width, stride, FOLDS)
        scale, reciprocal = _scales_of(_largest(value, 1), LARGEST)
        at = row[:, None] * width + column[None, :]
        tl.store(codes + at, _code(value, reciprocal[:, None], LARGEST, F), mask=inside)
    tl.store(scales + row, scale, mask=row < height)


@triton.jit
def _tile(x, fold, height, width, stride, FOLDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Values of ``fold * x`` (FOLDS: 2 a factor for each row, 1 one in all, 0 none),
    and their rows and columns.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    value = _values(x, row, column, stride, (row < height)[:, None] & (column < width)[None, :])
    if FOLDS == 1:
        value = value * tl.load(fold)
    elif FOLDS == 2:
        value = value * tl.load(fold + row, mask=row < height, other=0.0)[:, None]
    return value, row, column


@triton.jit
def _store_transposed(out, code, row, column, height, width):
    inside = (column < width)[:, None] & (row < height)[None, :]
    tl.store(out + column[:, None] * height + row[None, :], tl.trans(code), mask=inside)


@triton.jit
def amax_kernel(
    x, fold, amax, height, width, stride, FOLDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """The largest magnitude of each column of ``fold * x`` (float32 bits), into zeros;
    the same in any order.
    """
    value, _, column = _tile(x, fold, height, width, stride, FOLDS, R, C)
    tl.atomic_max(amax + column, _largest(value, 0), mask=column < width, sem="relaxed")


@triton.jit
def columns_kernel(
    x,
    fold,
    amax,
    codes,
    scales,
    height,
    width,
    stride,
    LARGEST: tl.constexpr,
    F: tl.constexpr,
    FOLDS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Codes of ``fold * x`` at a scale for each column, transposed."""
    value, row, column = _tile(x, fold, height, width, stride, FOLDS, R, C)
    scale, reciprocal = _scales_of(tl.load(amax + column, mask=column < width, other=0), LARGEST)
    _store_transposed(
        codes, _code(value, reciprocal[None, :], LARGEST, F), row, column, height, width
    )
    if tl.program_id(0) == 0:
        tl.store(scales + column, scale, mask=column < width)


@triton.jit
def copy_kernel(
    codes,
    out,
    height,
    width,
    INTEGERS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Codes by columns or by rows; of E1M6 as INTEGERS, whose sign and magnitude become
    two's complement.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    at = row[:, None] * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    code = tl.load(codes + at, mask=inside, other=0)
    if INTEGERS:
        negative = (code.to(tl.int8, bitcast=True) >> 7).to(tl.uint8, bitcast=True)
        code = ((code & 127) ^ negative) - negative
    if TRANSPOSED:
        _store_transposed(out, code, row, column, height, width)
    else:
        tl.store(out + at, code, mask=inside)
