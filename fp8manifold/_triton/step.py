"""One step of many parameters in one launch, and the doubling of scales after it.

::

    program i  ->  chunks[i] = (parameter, start)      which record, and where in it
               ->  table[parameter]                    addresses, sizes, keys, numbers
               ->  tiles of TILE.rows x TILE.width     each through all stages

A program takes one tile. Only if 8-bit moments share blocks longer than a tile it takes
whole rows, tile after tile, twice: the scales of the moments follow from the row's
largest gradient (or, fitted, from its largest moment), which must be known first.

:func:`widen_kernel` runs after the step. Where a code of a row has reached the format's
last, and still moves, it doubles the row's scale and rounds half of each value once.

Nothing runs if the first word of the report is set: some gradient was not
finite. ``SPEC`` and ``TILE`` are constants of ``kinds.py``; names are those of
``stages.py``.
"""

import triton
import triton.language as tl

from fp8manifold._interface import WIDENING, GpuReport
from fp8manifold._triton import format as floats
from fp8manifold._triton import stages

# Entries of the report of one parameter.
SATURATED: tl.constexpr = tl.constexpr(GpuReport._fields.index("is_saturated"))
DOUBLED: tl.constexpr = tl.constexpr(GpuReport._fields.index("doubled"))
ZERO_ROW: tl.constexpr = tl.constexpr(GpuReport._fields.index("has_zero_row"))

# A record of a parameter whose scales may double: its offsets in words, and the indices
# of its pointers.
WIDENED_WORDS: tl.constexpr = tl.constexpr(WIDENING.size // 4)
WIDENED_ROWS: tl.constexpr = tl.constexpr(WIDENING.word("rows"))
WIDENED_LENGTH: tl.constexpr = tl.constexpr(WIDENING.word("length"))
WIDENED_KEYS: tl.constexpr = tl.constexpr(WIDENING.word("keys"))
WIDENED_CODES: tl.constexpr = tl.constexpr(WIDENING.column("codes"))
WIDENED_RESIDUAL: tl.constexpr = tl.constexpr(WIDENING.column("residual"))
WIDENED_SCALES: tl.constexpr = tl.constexpr(WIDENING.column("scales"))
WIDENED_GRADIENT: tl.constexpr = tl.constexpr(WIDENING.column("gradient"))
WIDENED_MOMENT: tl.constexpr = tl.constexpr(WIDENING.column("moment"))
WIDENED_REPORT: tl.constexpr = tl.constexpr(WIDENING.column("report"))


# --------------------------------------------------------------------------------------
# Write-back


@triton.jit
def _store_float(record, offsets, mask, value, word, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Store weights that are floats; those of 16 bits are rounded."""
    if SPEC.weight == "float32":
        stages.store(record, stages.WEIGHT, tl.float32, offsets, value, mask, TILE.aligned)
    else:
        if SPEC.draws:
            value = floats.random_half(value, floats.draw_of(word), SPEC.weight == "float16")
        if SPEC.weight == "bfloat16":
            half = floats.nearest_bfloat16(value)
            stages.store(record, stages.WEIGHT, tl.uint16, offsets, half, mask, TILE.aligned)
        else:
            half = value.to(tl.float16)
            stages.store(record, stages.WEIGHT, tl.float16, offsets, half, mask, TILE.aligned)


@triton.jit
def _store_residual(
    record, offsets, mask, target, draw, old_code, SPEC: tl.constexpr, TILE: tl.constexpr
):
    """Store the residual of a target; return its code."""
    signed_code = floats.encode_signed(
        target, draw, SPEC.format, SPEC.residual_bits, SPEC.fixed_point
    )
    code, residual = floats.split_code(signed_code, old_code, SPEC.format, SPEC.residual_bits)
    stages.store(record, stages.RESIDUAL, tl.int8, offsets, residual, mask, TILE.aligned)
    return code


@triton.jit
def _report_codes(record, code, mask, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Set the report's words for rows with the last code, and for rows of zeros."""
    magnitude = code & (SPEC.format.sign_bit - 1)
    is_last = ((magnitude == SPEC.format.max_code) & mask).to(tl.int32)
    places = stages.pointer(record, stages.REPORT, tl.int32, False)
    # The same address for each row: the masks of the stores have that shape.
    places = places + tl.zeros((TILE.rows,), tl.int32)
    tl.store(places + SATURATED, 1, mask=tl.max(is_last, axis=1) > 0)
    largest = tl.max(tl.where(mask, magnitude, 0), axis=1)
    # ``code >= 0`` is always true, and gives the mask the shape of the codes.
    row_exists = tl.max((mask & (code >= 0)).to(tl.int32), axis=1)
    tl.store(places + ZERO_ROW, 1, mask=(row_exists > 0) & (largest == 0))


@triton.jit
def _store_weights(
    record,
    offsets,
    mask,
    stored,
    value,
    target,
    scale,
    word,
    SPEC: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round the targets once and store them.

    Return the new weights in units of the scale, which only ``momentum`` needs.
    """
    STOCHASTIC: tl.constexpr = SPEC.writeback != "nearest"
    rounded, draw = target, 0
    if STOCHASTIC and (SPEC.storage == "codes" or SPEC.storage == "grid"):
        draw = floats.draw_of(word)
    if SPEC.storage == "plain":
        _store_float(record, offsets, mask, target, word, SPEC, TILE)
    elif SPEC.storage == "free":
        rounded = floats.clamp(target, -SPEC.format.largest, SPEC.format.largest)
        # A weight that does not move is not rounded by the scale.
        new = tl.where(rounded == value, stored, rounded * scale)
        _store_float(record, offsets, mask, new, word, SPEC, TILE)
    elif SPEC.storage == "grid":
        if SPEC.residual_bits:
            is_negative_zero = floats.bits_of(stored) == -2147483648
            old_code = tl.where(is_negative_zero, SPEC.format.sign_bit, 0)
            code = _store_residual(record, offsets, mask, target, draw, old_code, SPEC, TILE)
            new = floats.code_value(code, SPEC.format) * scale
            # NaN stays.
            new = tl.where(stored != stored, stored, new)
        else:
            rounded = floats.round_value(target, draw, SPEC.format, STOCHASTIC)
            new = rounded * scale
        stages.store(record, stages.WEIGHT, tl.float32, offsets, new, mask, TILE.aligned)
    else:
        if SPEC.residual_bits:
            code = _store_residual(record, offsets, mask, target, draw, stored, SPEC, TILE)
        else:
            code = floats.encode_finite(target, draw, SPEC.format, STOCHASTIC, SPEC.fixed_point)
            if SPEC.writeback == "momentum":
                rounded = floats.code_value(code, SPEC.format)
        if SPEC.format.many_nans or SPEC.format.one_nan >= 0:
            code = tl.where(floats.is_special(stored, SPEC.format), stored, code)
        _report_codes(record, code, mask, SPEC, TILE)
        new = code.to(tl.uint8)
        stages.store(record, stages.WEIGHT, tl.uint8, offsets, new, mask, TILE.aligned)
    return rounded


# --------------------------------------------------------------------------------------
# Tiles


@triton.jit
def _offsets_in_rows(record, row, start, TILE: tl.constexpr):
    """Return the offsets of a tile's elements, their mask, and the mask of its rows.

    The offsets at which its rows begin come first.
    """
    row_mask = row < stages.load_size(record, stages.ROWS)
    length = TILE.length
    if TILE.length == 0:
        # Not by load_size: what multiple_of says of a function's result is lost when the
        # function is inlined, and with it wide loads.
        length = tl.load((record + stages.LENGTH).to(tl.pointer_type(tl.int64)))
        if TILE.aligned:
            length = tl.multiple_of(length, 16)
    offsets, mask = stages.offsets_of(row, row_mask, start, length, TILE)
    begin = (row.to(tl.int64) * length)[:, None] + start
    return begin, offsets, mask, row_mask


@triton.jit
def _largest_bits_of_rows(x):
    """Return the float32 bits of each row's largest magnitude."""
    return tl.max(floats.bits_of(x) & 0x7FFFFFFF, axis=1)


@triton.jit
def _largest_gradient(record, row, start, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return the float32 bits of each row's largest gradient."""
    begin, offsets, mask, row_mask = _offsets_in_rows(record, row, start, TILE)
    value, scale, lowest, highest = 0, 0, 0, 0
    if SPEC.covector:
        scale = stages.scale_at(record, row, offsets, mask, row_mask, SPEC, TILE)
        lowest, highest = stages.chart_ends(record, scale, SPEC)
        _, value, _ = stages.load_weights(record, offsets, mask, scale, SPEC, TILE)
    gradient = stages.load_gradient(
        record, begin, offsets, mask, value, scale, lowest, highest, SPEC, TILE
    )
    return _largest_bits_of_rows(gradient)


@triton.jit
def _largest_momentum(record, row, start, scales, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return the float32 bits of each row's largest moment after the step.

    It does not depend on the weights.
    """
    begin, offsets, mask, _ = _offsets_in_rows(record, row, start, TILE)
    gradient = stages.load_gradient(record, begin, offsets, mask, 0, 0, 0, 0, SPEC, TILE)
    first = stages.load_moment(record, stages.FIRST, offsets, mask, scales, SPEC, TILE)
    _, first, _, _, _ = stages.descend(record, offsets, mask, gradient, first, gradient, SPEC, TILE)
    return _largest_bits_of_rows(first)


@triton.jit
def _load_moments(record, offsets, mask, gradient, blocks, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return both moments; one that the step does not have is any value.

    ``blocks`` are (scale, 1 / new scale) of the first moment, and the same of the second.
    """
    first_scale, _, second_scale, _ = blocks
    first, second = gradient, gradient
    if SPEC.first:
        first = stages.load_moment(record, stages.FIRST, offsets, mask, first_scale, SPEC, TILE)
    if SPEC.second:
        second = stages.load_moment(record, stages.SECOND, offsets, mask, second_scale, SPEC, TILE)
    return first, second


@triton.jit
def _store_moments(
    record,
    offsets,
    mask,
    first,
    second,
    root,
    new_first_inverse,
    new_second_inverse,
    SPEC: tl.constexpr,
    TILE: tl.constexpr,
):
    position = offsets.to(tl.uint32)
    word = position
    if SPEC.moments != "float32":
        keys = (record + stages.MOMENT_KEYS).to(tl.pointer_type(tl.uint32))
        word = floats.random_word(keys, position)
    if SPEC.first:
        stages.store_moment(
            record, stages.FIRST, offsets, mask, first, new_first_inverse, root, word, SPEC, TILE
        )
    if SPEC.second:
        stages.store_moment(
            record, stages.SECOND, offsets, mask, second, new_second_inverse, root, word, SPEC, TILE
        )


@triton.jit
def _step_tile(record, row, start, blocks, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Step a tile.

    ``blocks`` are the scales of its rows' moments, as of ``advance_bounds``. They are
    unused unless ``TILE.long``: a tile of whole rows finds them itself.
    """
    begin, offsets, mask, row_mask = _offsets_in_rows(record, row, start, TILE)
    scale = stages.scale_at(record, row, offsets, mask, row_mask, SPEC, TILE)
    lowest, highest = stages.chart_ends(record, scale, SPEC)
    stored, value, ulp = stages.load_weights(record, offsets, mask, scale, SPEC, TILE)
    gradient = stages.load_gradient(
        record, begin, offsets, mask, value, scale, lowest, highest, SPEC, TILE
    )
    if SPEC.fitted and not TILE.long:
        blocks = (stages.fitted_scales(record, row, row_mask, SPEC), 0, 0, 0)
    elif SPEC.blocks and not TILE.long:
        blocks = stages.advance_bounds(record, _largest_bits_of_rows(gradient), row, row_mask, SPEC)
    first, second = _load_moments(record, offsets, mask, gradient, blocks, SPEC, TILE)
    direction, first, second, root, denominator = stages.descend(
        record, offsets, mask, gradient, first, second, SPEC, TILE
    )
    inverse = stages.inverse_scale(scale, SPEC)
    target = stages.move(record, value, ulp, direction, scale, inverse, lowest, highest, SPEC)
    _, new_first_inverse, _, new_second_inverse = blocks
    if SPEC.fitted and not TILE.long:
        new_first_inverse = stages.refit(record, _largest_bits_of_rows(first), row, row_mask, SPEC)
    word = offsets.to(tl.uint32)
    if SPEC.draws:
        keys = (record + stages.KEYS).to(tl.pointer_type(tl.uint32))
        word = floats.random_word(keys, word)
    rounded = _store_weights(record, offsets, mask, stored, value, target, scale, word, SPEC, TILE)
    if SPEC.writeback == "momentum" and (SPEC.storage == "codes" or SPEC.storage == "grid"):
        first = stages.with_error(
            record,
            first,
            target,
            rounded,
            ulp,
            denominator,
            scale,
            inverse,
            lowest,
            highest,
            SPEC,
        )
    _store_moments(
        record,
        offsets,
        mask,
        first,
        second,
        root,
        new_first_inverse,
        new_second_inverse,
        SPEC,
        TILE,
    )


@triton.jit
def step_kernel(table, chunks, report, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Take the steps of a table's records, unless the report's first word is set."""
    if tl.load(report) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        record = table + tl.load(chunk).to(tl.int64) * stages.RECORD_WORDS
        start = tl.load(chunk + 1)
        row = tl.arange(0, TILE.rows)
        no_blocks = (0, 0, 0, 0)
        if TILE.long:
            row = row + start
            length = stages.load_size(record, stages.LENGTH)
            tiles = ((length + (TILE.width - 1)) // TILE.width).to(tl.int32)
            largest = tl.zeros((TILE.rows,), tl.int32)
            # ``row >= 0`` is always true: a program takes one long row, which exists.
            if SPEC.fitted:
                scales = stages.fitted_scales(record, row, row >= 0, SPEC)
                for tile in range(tiles):
                    in_tile = _largest_momentum(record, row, tile * TILE.width, scales, SPEC, TILE)
                    largest = tl.maximum(largest, in_tile)
                new_inverse = stages.refit(record, largest, row, row >= 0, SPEC)
                blocks = (scales, new_inverse, 0, 0)
            else:
                for tile in range(tiles):
                    in_tile = _largest_gradient(record, row, tile * TILE.width, SPEC, TILE)
                    largest = tl.maximum(largest, in_tile)
                blocks = stages.advance_bounds(record, largest, row, row >= 0, SPEC)
            for tile in range(tiles):
                _step_tile(record, row, tile * TILE.width, blocks, SPEC, TILE)
        elif TILE.length:
            # whole rows, from row ``start`` on
            _step_tile(record, row + start, 0, no_blocks, SPEC, TILE)
        else:
            # one row, cut into tiles
            _step_tile(record, row, start.to(tl.int64) * TILE.width, no_blocks, SPEC, TILE)


# --------------------------------------------------------------------------------------
# Scales that double


@triton.jit
def _double_scales(record, row, doubles, scale, SPEC: tl.constexpr):
    if SPEC.exponents:
        places = stages.pointer(record, WIDENED_SCALES, tl.uint8, False) + row
        exponents = tl.load(places, mask=doubles, other=0)
        tl.store(places, (exponents.to(tl.int32) + 1).to(tl.uint8), mask=doubles)
    else:
        places = stages.pointer(record, WIDENED_SCALES, tl.float32, False) + row
        tl.store(places, scale * 2.0, mask=doubles)


@triton.jit
def _halve_values(record, offsets, mask, SPEC: tl.constexpr):
    """Replace codes by those of half of each value, rounded stochastically once."""
    old_code = stages.load(record, WIDENED_CODES, tl.uint8, offsets, mask, False).to(tl.int32)
    residual = 0
    if SPEC.residual_bits:
        residual = stages.load(record, WIDENED_RESIDUAL, tl.int8, offsets, mask, False)
        residual = residual.to(tl.int32)
    value, _ = stages.decode_with_ulp(old_code, residual, SPEC)
    keys = (record + WIDENED_KEYS).to(tl.pointer_type(tl.uint32))
    draw = floats.draw_of(floats.random_word(keys, offsets.to(tl.uint32)))
    half = value * 0.5
    if SPEC.residual_bits:
        signed_code = floats.encode_signed(
            half, draw, SPEC.format, SPEC.residual_bits, SPEC.fixed_point
        )
        code, residual = floats.split_code(signed_code, old_code, SPEC.format, SPEC.residual_bits)
        stages.store(record, WIDENED_RESIDUAL, tl.int8, offsets, residual, mask, False)
    else:
        code = floats.encode_finite(half, draw, SPEC.format, True, SPEC.fixed_point)
    if SPEC.format.many_nans or SPEC.format.one_nan >= 0:
        code = tl.where(floats.is_special(old_code, SPEC.format), old_code, code)
    stages.store(record, WIDENED_CODES, tl.uint8, offsets, code.to(tl.uint8), mask, False)


@triton.jit
def _is_moving(record, offsets, mask, SPEC: tl.constexpr):
    """Return a mask of weights with a gradient or a first moment that is not 0."""
    gradient = stages.load_float(record, WIDENED_GRADIENT, SPEC.gradient, offsets, mask, False)
    is_moving = gradient != 0
    if SPEC.moments == "8bit":
        code = stages.load(record, WIDENED_MOMENT, tl.uint8, offsets, mask, False)
        is_moving = is_moving | ((code & 0x7F) != 0)
    elif SPEC.moments != "":
        moment = stages.load_float(record, WIDENED_MOMENT, SPEC.moments, offsets, mask, False)
        is_moving = is_moving | (moment != 0)
    return is_moving


@triton.jit
def widen_kernel(table, chunks, report, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Double the scales of rows whose largest magnitude is the format's last and moves.

    It does nothing for a parameter whose step has not flagged that. ``SPEC`` is a
    ``Widening``.
    """
    chunk = chunks + 2 * tl.program_id(0)
    record = table + tl.load(chunk).to(tl.int64) * WIDENED_WORDS
    words = stages.pointer(record, WIDENED_REPORT, tl.int32, False)
    if (tl.load(report) == 0) & (tl.load(words + SATURATED) != 0):
        sizes = record.to(tl.pointer_type(tl.int64))
        length = tl.load(sizes + WIDENED_LENGTH // 2)
        row = tl.load(chunk + 1) + tl.arange(0, TILE.rows)
        row_mask = row < tl.load(sizes + WIDENED_ROWS // 2)
        tiles = ((length + (TILE.width - 1)) // TILE.width).to(tl.int32)
        is_saturated = tl.zeros((TILE.rows,), tl.int32)
        for tile in range(tiles):
            offsets, mask = stages.offsets_of(row, row_mask, tile * TILE.width, length, TILE)
            code = stages.load(record, WIDENED_CODES, tl.uint8, offsets, mask, False).to(tl.int32)
            is_last = ((code & (SPEC.format.sign_bit - 1)) == SPEC.format.max_code) & mask
            is_last = is_last & _is_moving(record, offsets, mask, SPEC)
            is_saturated = tl.maximum(is_saturated, tl.max(is_last.to(tl.int32), axis=1))
        scale = stages.load_scales(record, WIDENED_SCALES, row, row_mask, SPEC)
        doubles = row_mask & (is_saturated > 0) & (scale * 2.0 <= SPEC.widest)
        for tile in range(tiles):
            offsets, mask = stages.offsets_of(row, doubles, tile * TILE.width, length, TILE)
            _halve_values(record, offsets, mask, SPEC)
        _double_scales(record, row, doubles, scale, SPEC)
        tl.atomic_add(words + DOUBLED, tl.sum(doubles.to(tl.int32), axis=0))
