"""Kernels over whole arrays.

::

    decode, round, encode    elements to elements, at one scale or one for each row
    finite                   the verdict on gradients, before a step
    rows, amax and columns   operands of products in 8 bits: codes, and a scale for each
                             row, or for each column of a matrix that is read by rows
    copy                     codes, transposed or not

A program of ``amax``, ``columns`` or ``copy`` takes R x C elements, one of ``finite``
takes W, and any other takes W elements of each of R rows at a time. A scale of an
operand is the least power of two that takes the largest magnitude of its row or column
into the range of the codes. An operand may have factors, called ``fold``: it is
multiplied by them before its scales are found.

``FORMAT`` is a ``Format`` of ``kinds.py``. bfloat16 is passed as uint16 bits. Arguments
in capitals are constants that a kernel is compiled for.
"""

import triton
import triton.language as tl

from fp8manifold._interface import GpuReport
from fp8manifold._triton import format as floats
from fp8manifold._triton.stages import (
    GRADIENT,
    LENGTH,
    RECORD_WORDS,
    ROWS,
    load_float,
    load_size,
)

REPORT_WORDS: tl.constexpr = tl.constexpr(len(GpuReport._fields))
NOT_FINITE: tl.constexpr = tl.constexpr(GpuReport._fields.index("is_nonfinite"))
LARGEST_INT8: tl.constexpr = tl.constexpr(0x42FE0000)  # float32 bits of 127


# --------------------------------------------------------------------------------------
# Decode, round, encode


@triton.jit
def _scaled_offsets(scale, rows, length, in_row, R: tl.constexpr, W: tl.constexpr):
    """Return offsets in a matrix with a scale for each row, their mask, and the scales.

    ``in_row`` programs share a row.
    """
    program = tl.program_id(0).to(tl.int64)
    row = (program // in_row) * R + tl.arange(0, R)
    column = (program % in_row) * W + tl.arange(0, W)[None, :]
    mask = (row < rows)[:, None] & (column < length)
    offsets = (row * length)[:, None] + column
    row_scale = tl.load(scale + row, mask=row < rows, other=1.0)[:, None]
    return offsets, mask, row_scale


@triton.jit
def _load_units(
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
    """Return offsets, mask, scales, the values in units of them, and the draws."""
    offsets, mask, row_scale = _scaled_offsets(scale, rows, length, in_row, R, W)
    value = tl.load(x + offsets, mask=mask, other=0)
    if x.dtype.element_ty == tl.uint16:
        value = floats.of_bfloat16(value)
    if SCALED:
        value = tl.math.div_rn(value, row_scale)
    draw = 0
    if STOCHASTIC:
        draw = floats.draw_of(floats.random_word(keys, offsets.to(tl.uint32)))
    return offsets, mask, row_scale, value, draw


@triton.jit(do_not_specialize=["rows", "in_row"])
def decode_kernel(
    codes,
    scale,
    out,
    rows,
    length,
    in_row,
    FORMAT: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Store ``scale * decode(codes)``, in float32 or bfloat16."""
    offsets, mask, row_scale = _scaled_offsets(scale, rows, length, in_row, R, W)
    code = tl.load(codes + offsets, mask=mask, other=0).to(tl.int32) & (2 * FORMAT.sign_bit - 1)
    value = floats.any_value(code, FORMAT) * row_scale
    if out.dtype.element_ty == tl.uint16:
        value = floats.nearest_bfloat16(value)
    tl.store(out + offsets, value, mask=mask)


@triton.jit(do_not_specialize=["rows", "in_row"])
def round_kernel(
    x,
    scale,
    out,
    keys,
    rows,
    length,
    in_row,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Store ``scale * round(x / scale)``; without RESCALE ``round(x / scale)``.

    ``keys`` begin at the first element's position.
    """
    offsets, mask, row_scale, value, draw = _load_units(
        x, scale, keys, rows, length, in_row, STOCHASTIC, SCALED, R, W
    )
    value = floats.round_value(value, draw, FORMAT, STOCHASTIC)
    if SCALED and RESCALE:
        value = value * row_scale
    tl.store(out + offsets, value, mask=mask)


@triton.jit(do_not_specialize=["rows", "in_row"])
def encode_kernel(
    x,
    scale,
    out,
    keys,
    rows,
    length,
    in_row,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FIXED: tl.constexpr,
    SCALED: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Store the codes of ``x / scale``, of float32 or bfloat16.

    NaN gives the format's code for it.
    """
    offsets, mask, _, value, draw = _load_units(
        x, scale, keys, rows, length, in_row, STOCHASTIC, SCALED, R, W
    )
    code = floats.encode_finite(value, draw, FORMAT, STOCHASTIC, FIXED)
    code = tl.where(value != value, FORMAT.nan_code, code).to(tl.uint8)
    tl.store(out + offsets, code, mask=mask)


# --------------------------------------------------------------------------------------
# The verdict on gradients


@triton.jit
def finite_kernel(table, chunks, report, KIND: tl.constexpr, W: tl.constexpr):
    """Set two words of the report if a gradient's square is not finite in float32.

    They are the first of all, which refuses the step, and the parameter's own. ``table`` and
    ``chunks`` are those of :mod:`fp8manifold._triton.step`; KIND is the gradient's
    dtype.
    """
    chunk = chunks + 2 * tl.program_id(0)
    parameter = tl.load(chunk)
    record = table + parameter.to(tl.int64) * RECORD_WORDS
    numel = load_size(record, ROWS) * load_size(record, LENGTH)
    offsets = tl.load(chunk + 1).to(tl.int64) * W + tl.arange(0, W)
    gradient = load_float(record, GRADIENT, KIND, offsets, offsets < numel, False)
    largest = tl.max(floats.bits_of(gradient) & 0x7FFFFFFF, axis=0)
    # The square of the next larger float is Inf.
    if largest > 0x5F7FFFFF:
        tl.store(report, 1)
        # A row of words for all parameters comes first.
        tl.store(report + (parameter + 1) * REPORT_WORDS + NOT_FINITE, 1)


# --------------------------------------------------------------------------------------
# Operands of products in 8 bits


@triton.jit
def _scales_of(amax, LARGEST: tl.constexpr):
    """Return the least powers of two that take magnitudes to at most LARGEST.

    Both are float32 bits. Return (scales, reciprocals). A scale is at least 2^-126. It
    is 1 for zero, and NaN, with the reciprocal 0, for what is not finite.
    """
    exceeds_mantissa = ((amax & 0x7FFFFF) > (LARGEST & 0x7FFFFF)).to(tl.int32)
    field = (amax >> 23) - ((LARGEST >> 23) - 127) + exceeds_mantissa
    field = tl.where(amax == 0, 127, tl.maximum(field, 1))
    is_finite = amax < 0x7F800000
    scale = floats.float_of(tl.where(is_finite, field << 23, 0x7FC00000))
    return scale, floats.float_of(tl.where(is_finite, (254 - field) << 23, 0))


@triton.jit
def _code(x, reciprocal, LARGEST: tl.constexpr, FORMAT: tl.constexpr):
    """Return the int8 or the E4M3 code of ``x`` over its scale, rounded once.

    It is 0 where the reciprocal is 0. If FORMAT is None, the instruction of compute
    capability 8.9 and later converts to E4M3. Triton's own conversion passes through a
    float16 that is cut off on 8.9, and its interpreter rounds wrongly.
    """
    units = tl.where(reciprocal == 0.0, 0.0, x) * reciprocal
    if LARGEST == LARGEST_INT8:
        code = floats.round_even(units).to(tl.uint8)
    elif FORMAT is None:
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [units],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        code = floats.encode_finite(units, 0, FORMAT, False, False).to(tl.uint8)
    return code


@triton.jit
def _load_values(x, row, column, stride, mask):
    """Load float32, float16 or bfloat16 as float32."""
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0)
    if x.dtype.element_ty == tl.uint16:
        value = floats.of_bfloat16(value)
    return value.to(tl.float32)


@triton.jit
def _largest_bits(value, axis: tl.constexpr):
    """Return the float32 bits of the largest magnitude.

    Those of Inf are larger than any number's, and those of NaN larger still.
    """
    return tl.max(floats.bits_of(value) & 0x7FFFFFFF, axis=axis)


@triton.jit
def _load_rows(x, fold, row, column, height, width, stride, FOLDS: tl.constexpr):
    """Load ``x * fold``, where each column may have its factor, and the mask of it."""
    mask = (row < height)[:, None] & (column < width)[None, :]
    value = _load_values(x, row, column, stride, mask)
    if FOLDS == 1:
        value = value * tl.load(fold)
    elif FOLDS == 2:
        value = value * tl.load(fold + column, mask=column < width, other=0.0)[None, :]
    return value, mask


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
    FORMAT: tl.constexpr,
    FOLDS: tl.constexpr,
    LONG: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """Store the codes of ``x * fold`` at a scale for each row, and the scales.

    ``fold`` has a factor for each column (FOLDS 2), one in all (1), or none (0). LONG
    rows are read twice, for their largest magnitude and for their codes.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, W)
    if LONG:
        amax = tl.zeros((R,), tl.int32)
        for start in range(0, width, W):
            value, _ = _load_rows(x, fold, row, start + column, height, width, stride, FOLDS)
            amax = tl.maximum(amax, _largest_bits(value, 1))
        scale, reciprocal = _scales_of(amax, LARGEST)
        for start in range(0, width, W):
            value, mask = _load_rows(x, fold, row, start + column, height, width, stride, FOLDS)
            offsets = row[:, None] * width + (start + column)[None, :]
            tl.store(codes + offsets, _code(value, reciprocal[:, None], LARGEST, FORMAT), mask=mask)
    else:
        value, mask = _load_rows(x, fold, row, column, height, width, stride, FOLDS)
        scale, reciprocal = _scales_of(_largest_bits(value, 1), LARGEST)
        offsets = row[:, None] * width + column[None, :]
        tl.store(codes + offsets, _code(value, reciprocal[:, None], LARGEST, FORMAT), mask=mask)
    tl.store(scales + row, scale, mask=row < height)


@triton.jit
def _load_tile(
    x, fold, height, width, stride, FOLDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Load ``fold * x``; return (values, rows, columns).

    ``fold`` has a factor for each row (FOLDS 2), one in all (1), or none (0).
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    mask = (row < height)[:, None] & (column < width)[None, :]
    value = _load_values(x, row, column, stride, mask)
    if FOLDS == 1:
        value = value * tl.load(fold)
    elif FOLDS == 2:
        value = value * tl.load(fold + row, mask=row < height, other=0.0)[:, None]
    return value, row, column


@triton.jit
def _store_transposed(out, code, row, column, height, width):
    mask = (column < width)[:, None] & (row < height)[None, :]
    tl.store(out + column[:, None] * height + row[None, :], tl.trans(code), mask=mask)


@triton.jit
def amax_kernel(
    x, fold, amax, height, width, stride, FOLDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Store the largest magnitude of each column of ``fold * x``, as float32 bits.

    ``amax`` is zeros before. The result is the same in any order of the programs.
    """
    value, _, column = _load_tile(x, fold, height, width, stride, FOLDS, R, C)
    tl.atomic_max(amax + column, _largest_bits(value, 0), mask=column < width, sem="relaxed")


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
    FORMAT: tl.constexpr,
    FOLDS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Store the codes of ``fold * x`` at a scale for each column, transposed.

    ``amax`` is what :func:`amax_kernel` has stored.
    """
    value, row, column = _load_tile(x, fold, height, width, stride, FOLDS, R, C)
    scale, reciprocal = _scales_of(tl.load(amax + column, mask=column < width, other=0), LARGEST)
    code = _code(value, reciprocal[None, :], LARGEST, FORMAT)
    _store_transposed(codes, code, row, column, height, width)
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
    """Copy codes, transposed or not.

    Codes of E1M6 become int8 with INTEGERS: sign and magnitude in two's complement.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1).to(tl.int64) * C + tl.arange(0, C)
    offsets = row[:, None] * width + column[None, :]
    mask = (row < height)[:, None] & (column < width)[None, :]
    code = tl.load(codes + offsets, mask=mask, other=0)
    if INTEGERS:
        # 255 for a negative number
        negative = (code.to(tl.int8, bitcast=True) >> 7).to(tl.uint8, bitcast=True)
        code = ((code & 127) ^ negative) - negative
    if TRANSPOSED:
        _store_transposed(out, code, row, column, height, width)
    else:
        tl.store(out + offsets, code, mask=mask)
