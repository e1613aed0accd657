"""One step of many parameters, and the doubling of scales after it, where a weight is
at the end of its range.

A program finds its parameter and rows in ``chunks``, and all else in a table of
records, for steps native code's.
"""

import triton
import triton.language as tl

from fp8manifold._triton import format as floats
from fp8manifold._triton import stages
from fp8manifold._triton.kinds import WIDENED

WIDENED_WORDS: tl.constexpr = tl.constexpr(WIDENED.itemsize // stages.WORD)
WIDENED_KEYS: tl.constexpr = tl.constexpr(WIDENED.fields["keys"][1] // stages.WORD)


@triton.jit
def _store_float(words, at, inside, value, word, S: tl.constexpr, T: tl.constexpr):
    if S.weight == "float32":
        stages.store(words, 1, tl.float32, at, value, inside, T.aligned)
    else:
        if S.draws:
            value = floats.random_half(value, floats.draw_of(word), S.weight == "float16")
        if S.weight == "bfloat16":
            stages.store(words, 1, tl.uint16, at, floats.nearest_bfloat16(value), inside, T.aligned)
        else:
            stages.store(words, 1, tl.float16, at, value.to(tl.float16), inside, T.aligned)


@triton.jit
def _split(words, at, inside, target, draw, old, S: tl.constexpr, T: tl.constexpr):
    """The nearest code of a finer one; the rest is stored as its residual."""
    code, rest = floats.split_code(
        floats.encode_signed(target, draw, S.format, S.extra, S.fixed), old, S.format, S.extra
    )
    stages.store(words, 4, tl.int8, at, rest, inside, T.aligned)
    return code


@triton.jit
def _store_weights(
    words, at, inside, old, x, target, scale, word, S: tl.constexpr, T: tl.constexpr
):
    """Round once and store; return the stored value in units of the scale, which only
    ``momentum`` needs.
    """
    after, draw = target, 0
    STOCHASTIC: tl.constexpr = S.writeback != "nearest"
    if STOCHASTIC and (S.storage == "codes" or S.storage == "grid"):
        draw = floats.draw_of(word)
    if S.storage == "plain":
        _store_float(words, at, inside, target, word, S, T)
    elif S.storage == "free":
        after = floats.bounded(target, -S.format.LARGEST, S.format.LARGEST)
        _store_float(words, at, inside, tl.where(after == x, old, after * scale), word, S, T)
    elif S.storage == "grid":
        if S.extra:
            negative = tl.where(floats.bits_of(old) == -2147483648, S.format.SIGN, 0)
            value = (
                floats.code_value(_split(words, at, inside, target, draw, negative, S, T), S.format)
                * scale
            )
            value = tl.where(old != old, old, value)
        else:
            after = floats.round_value(target, draw, S.format, STOCHASTIC)
            value = after * scale
        stages.store(words, 1, tl.float32, at, value, inside, T.aligned)
    else:
        if S.extra:
            code = _split(words, at, inside, target, draw, old, S, T)
        else:
            code = floats.encode_finite(target, draw, S.format, STOCHASTIC, S.fixed)
            if S.writeback == "momentum":
                after = floats.code_value(code, S.format)
        if S.format.MANY_NANS or S.format.ONE_NAN >= 0:
            code = tl.where(floats.is_special(old, S.format), old, code)
        last = (((code & (S.format.SIGN - 1)) == S.format.MAX_CODE) & inside).to(tl.int32)
        flags = stages.pointer(words, 10, tl.int32, False) + tl.zeros((T.rows,), tl.int32)
        tl.store(flags, 1, mask=tl.max(last, axis=1) > 0)
        used = tl.where(inside, code & (S.format.SIGN - 1), 0)
        there = tl.max((inside & (code >= 0)).to(tl.int32), axis=1)
        tl.store(flags + 3, 1, mask=(there > 0) & (tl.max(used, axis=1) == 0))
        stages.store(words, 1, tl.uint8, at, code.to(tl.uint8), inside, T.aligned)
    return after


@triton.jit
def _place(words, row, start, T: tl.constexpr):
    """Positions of a tile's elements, a mask of those that exist, and one of its rows
    that exist.
    """
    in_rows = row < tl.load((words + stages.ROWS).to(tl.pointer_type(tl.int64)))
    length = T.length
    if T.length == 0:
        length = tl.load((words + stages.LENGTH).to(tl.pointer_type(tl.int64)))
        if T.aligned:
            length = tl.multiple_of(length, 16)
    at, inside = stages.place_of(row, in_rows, start, length, T)
    return at, inside, in_rows


@triton.jit
def _largest(words, row, start, S: tl.constexpr, T: tl.constexpr):
    """float32 bits of the largest gradient of each row."""
    at, inside, in_rows = _place(words, row, start, T)
    x, scale, lowest, highest = 0, 0, 0, 0
    if S.covector:
        scale = stages.scale_at(words, row, at, inside, in_rows, S, T)
        lowest, highest = stages.ends_at(words, scale, S)
        _, x, _ = stages.load_weights(words, at, inside, scale, S, T)
    g = stages.load_gradient(words, at, inside, x, scale, lowest, highest, S, T)
    return tl.max(floats.bits_of(g) & 0x7FFFFFFF, axis=1)


@triton.jit
def _largest_average(words, row, start, scales, S: tl.constexpr, T: tl.constexpr):
    """float32 bits of the largest magnitude of each row's average after the step, which
    does not depend on weights.
    """
    at, inside, _ = _place(words, row, start, T)
    g = stages.load_gradient(words, at, inside, 0, 0, 0, 0, S, T)
    m = stages.load_average(words, 5, at, inside, scales, S, T)
    _, m, _, _, _ = stages.descend(words, at, inside, g, m, g, S, T)
    return tl.max(floats.bits_of(m) & 0x7FFFFFFF, axis=1)


@triton.jit
def _take(words, row, start, blocks, S: tl.constexpr, T: tl.constexpr):
    """Step a tile; ``blocks`` are the scales of its rows' averages, unused if the tile
    has whole rows.
    """
    at, inside, in_rows = _place(words, row, start, T)
    scale = stages.scale_at(words, row, at, inside, in_rows, S, T)
    lowest, highest = stages.ends_at(words, scale, S)
    old, x, ulp = stages.load_weights(words, at, inside, scale, S, T)
    g = stages.load_gradient(words, at, inside, x, scale, lowest, highest, S, T)
    if S.fitted and not T.long:
        blocks = (stages.fitted_scales(words, row, in_rows, S), 0, 0, 0)
    elif S.blocks and not T.long:
        blocks = stages.next_bounds(
            words, tl.max(floats.bits_of(g) & 0x7FFFFFFF, axis=1), row, in_rows, S
        )
    m, v = g, g
    if S.first:
        m = stages.load_average(words, 5, at, inside, blocks[0], S, T)
    if S.second:
        v = stages.load_average(words, 6, at, inside, blocks[2], S, T)
    direction, m, v, root, denominator = stages.descend(words, at, inside, g, m, v, S, T)
    inverse = stages.inverse_of(scale, S)
    target = stages.move(words, x, ulp, direction, scale, inverse, lowest, highest, S)
    first_inverse = blocks[1]
    if S.fitted and not T.long:
        first_inverse = stages.refit(
            words, tl.max(floats.bits_of(m) & 0x7FFFFFFF, axis=1), row, in_rows, S
        )
    position = at.to(tl.uint32)
    word, noise = position, position
    if S.draws:
        word = floats.random_word((words + stages.KEYS).to(tl.pointer_type(tl.uint32)), position)
    after = _store_weights(words, at, inside, old, x, target, scale, word, S, T)
    if S.writeback == "momentum" and (S.storage == "codes" or S.storage == "grid"):
        m = stages.with_error(
            words, m, target, after, ulp, denominator, scale, inverse, lowest, highest, S
        )
    if S.moments != "float32":
        noise = floats.random_word(
            (words + stages.KEYS + 4).to(tl.pointer_type(tl.uint32)), position
        )
    if S.first:
        stages.store_average(words, 5, at, inside, m, first_inverse, root, noise, S, T)
    if S.second:
        stages.store_average(words, 6, at, inside, v, blocks[3], root, noise, S, T)


@triton.jit
def step_kernel(table, chunks, refused, S: tl.constexpr, T: tl.constexpr):
    """Take the steps of a table's records, unless the first word of ``refused`` is set."""
    if tl.load(refused) == 0:
        chunk = chunks + 2 * tl.program_id(0)
        words = table + tl.load(chunk).to(tl.int64) * stages.WORDS
        start = tl.load(chunk + 1)
        row = tl.arange(0, T.rows)
        nothing = (0, 0, 0, 0)
        if T.long:
            row = row + start
            length = tl.load((words + stages.LENGTH).to(tl.pointer_type(tl.int64)))
            tiles = ((length + (T.width - 1)) // T.width).to(tl.int32)
            largest = tl.zeros((T.rows,), tl.int32)
            if S.fitted:
                scales = stages.fitted_scales(words, row, row >= 0, S)
                for tile in range(tiles):
                    here = _largest_average(words, row, tile * T.width, scales, S, T)
                    largest = tl.maximum(largest, here)
                blocks = (scales, stages.refit(words, largest, row, row >= 0, S), 0, 0)
            else:
                for tile in range(tiles):
                    largest = tl.maximum(largest, _largest(words, row, tile * T.width, S, T))
                blocks = stages.next_bounds(words, largest, row, row >= 0, S)
            for tile in range(tiles):
                _take(words, row, tile * T.width, blocks, S, T)
        elif T.length:
            _take(words, row + start, 0, nothing, S, T)
        else:
            _take(words, row, start.to(tl.int64) * T.width, nothing, S, T)


@triton.jit
def _double(words, row, doubles, scale, S: tl.constexpr):
    if S.exponents:
        places = stages.pointer(words, 2, tl.uint8, False) + row
        exponents = tl.load(places, mask=doubles, other=0)
        tl.store(places, (exponents.to(tl.int32) + 1).to(tl.uint8), mask=doubles)
    else:
        tl.store(stages.pointer(words, 2, tl.float32, False) + row, scale * 2.0, mask=doubles)


@triton.jit
def _rewrite(words, at, inside, S: tl.constexpr):
    """Half of each value, rounded stochastically once."""
    old = stages.load(words, 0, tl.uint8, at, inside, False).to(tl.int32)
    rest = 0
    if S.extra:
        rest = stages.load(words, 1, tl.int8, at, inside, False).to(tl.int32)
    x, _ = stages.decoded(old, rest, S)
    draw = floats.draw_of(
        floats.random_word((words + WIDENED_KEYS).to(tl.pointer_type(tl.uint32)), at.to(tl.uint32))
    )
    if S.extra:
        signed = floats.encode_signed(x * 0.5, draw, S.format, S.extra, S.fixed)
        code, rest = floats.split_code(signed, old, S.format, S.extra)
        stages.store(words, 1, tl.int8, at, rest, inside, False)
    else:
        code = floats.encode_finite(x * 0.5, draw, S.format, True, S.fixed)
    if S.format.MANY_NANS or S.format.ONE_NAN >= 0:
        code = tl.where(floats.is_special(old, S.format), old, code)
    stages.store(words, 0, tl.uint8, at, code.to(tl.uint8), inside, False)


@triton.jit
def _moves(words, at, inside, S: tl.constexpr):
    """A mask of weights with a gradient or a first average that is not 0."""
    moves = stages.load_float(words, 3, S.gradient, at, inside, False) != 0
    if S.moments == "8bit":
        moves = moves | ((stages.load(words, 4, tl.uint8, at, inside, False) & 0x7F) != 0)
    elif S.moments != "":
        moves = moves | (stages.load_float(words, 4, S.moments, at, inside, False) != 0)
    return moves


@triton.jit
def widen_kernel(table, chunks, refused, S: tl.constexpr, T: tl.constexpr):
    """Double the scales of rows whose largest magnitude is at the end and moves, after
    a step that has flagged it.
    """
    chunk = chunks + 2 * tl.program_id(0)
    words = table + tl.load(chunk).to(tl.int64) * WIDENED_WORDS
    flags = stages.pointer(words, 5, tl.int32, False)
    if (tl.load(refused) == 0) & (tl.load(flags) != 0):
        places = words.to(tl.pointer_type(tl.int64))
        length = tl.load(places + 7)
        row = tl.load(chunk + 1) + tl.arange(0, T.rows)
        in_rows = row < tl.load(places + 6)
        tiles = ((length + (T.width - 1)) // T.width).to(tl.int32)
        ends = tl.zeros((T.rows,), tl.int32)
        for tile in range(tiles):
            at, inside = stages.place_of(row, in_rows, tile * T.width, length, T)
            code = stages.load(words, 0, tl.uint8, at, inside, False).to(tl.int32)
            last = ((code & (S.format.SIGN - 1)) == S.format.MAX_CODE) & inside
            last = last & _moves(words, at, inside, S)
            ends = tl.maximum(ends, tl.max(last.to(tl.int32), axis=1))
        scale = stages.load_scales(words, 2, row, in_rows, S)
        doubles = in_rows & (ends > 0) & (scale * 2.0 <= S.widest)
        for tile in range(tiles):
            at, inside = stages.place_of(row, doubles, tile * T.width, length, T)
            _rewrite(words, at, inside, S)
        _double(words, row, doubles, scale, S)
        tl.atomic_add(flags + 1, tl.sum(doubles.to(tl.int32), axis=0))
