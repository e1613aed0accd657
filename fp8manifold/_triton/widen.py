"""Scales that double on the card, in the step that has left a weight at the end of its range."""

import triton
import triton.language as tl

from fp8manifold._triton.format import draw_of, encode_finite, encode_signed, is_special, random_word
from fp8manifold._triton.kinds import WIDENED
from fp8manifold._triton.stages import decoded, load, load_scales, place_of, pointer, store

__all__ = ["widen_kernel"]

_WORD = 4
assert WIDENED.fields is not None
WORDS: tl.constexpr = tl.constexpr(WIDENED.itemsize // _WORD)
KEYS: tl.constexpr = tl.constexpr(WIDENED.fields["keys"][1] // _WORD)


@triton.jit
def _double(words, row, doubles, scale, S: tl.constexpr):
    if S.exponents:
        places = pointer(words, 2, tl.uint8, False) + row
        exponents = tl.load(places, mask=doubles, other=0)
        tl.store(places, (exponents.to(tl.int32) + 1).to(tl.uint8), mask=doubles)
    else:
        tl.store(pointer(words, 2, tl.float32, False) + row, scale * 2.0, mask=doubles)


@triton.jit
def _rewrite(words, at, inside, S: tl.constexpr):
    """Half of each value, rounded stochastically once."""
    old = load(words, 0, tl.uint8, at, inside, False).to(tl.int32)
    rest = 0
    if S.extra:
        rest = load(words, 1, tl.int8, at, inside, False).to(tl.int32)
    x, _ = decoded(old, rest, S)
    draw = draw_of(random_word((words + KEYS).to(tl.pointer_type(tl.uint32)), at.to(tl.uint32)))
    if S.extra:
        signed = encode_signed(x * 0.5, draw, S.format, S.extra, S.fixed)
        nearest = (signed + (1 << (S.extra - 1))) >> S.extra
        store(words, 1, tl.int8, at, (signed - (nearest << S.extra)).to(tl.int8), inside, False)
        code = tl.abs(nearest) | (nearest & S.format.SIGN)
    else:
        code = encode_finite(x * 0.5, draw, S.format, True, S.fixed)
    if S.format.MANY_NANS or S.format.ONE_NAN >= 0:
        code = tl.where(is_special(old, S.format), old, code)
    store(words, 0, tl.uint8, at, code.to(tl.uint8), inside, False)


@triton.jit
def widen_kernel(table, chunks, refused, S: tl.constexpr, T: tl.constexpr):
    """Double the scale of every row that has the format's largest magnitude, where a step was taken that left one.

    A program has some rows, and looks no further where the step's flag is 0, as it nearly always is.
    """
    chunk = chunks + 2 * tl.program_id(0)
    words = table + tl.load(chunk).to(tl.int64) * WORDS
    flags = pointer(words, 3, tl.int32, False)
    if (tl.load(refused) == 0) & (tl.load(flags) != 0):
        places = words.to(tl.pointer_type(tl.int64))
        length = tl.load(places + 5)
        row = tl.load(chunk + 1) + tl.arange(0, T.rows)
        in_rows = row < tl.load(places + 4)
        tiles = ((length + (T.width - 1)) // T.width).to(tl.int32)
        ends = tl.zeros((T.rows,), tl.int32)
        for tile in range(tiles):
            at, inside = place_of(row, in_rows, tile * T.width, length, T)
            code = load(words, 0, tl.uint8, at, inside, False).to(tl.int32)
            last = ((code & (S.format.SIGN - 1)) == S.format.MAX_CODE) & inside
            ends = tl.maximum(ends, tl.max(last.to(tl.int32), axis=1))
        scale = load_scales(words, 2, row, in_rows, S)
        doubles = in_rows & (ends > 0) & (scale * 2.0 <= S.widest)
        for tile in range(tiles):
            at, inside = place_of(row, doubles, tile * T.width, length, T)
            _rewrite(words, at, inside, S)
        _double(words, row, doubles, scale, S)
        tl.atomic_add(flags + 1, tl.sum(doubles.to(tl.int32), axis=0))
