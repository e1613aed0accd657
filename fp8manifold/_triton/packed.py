"""Residuals of which several share a byte: read and written by whole bytes, the first in a byte's lowest bits.

A tile of bytes goes with a tile of weights where no two programs share one; otherwise each field is flipped by itself.
"""

import triton
import triton.language as tl

__all__ = ["load_packed", "place_of", "store_packed"]


@triton.jit
def _columns(row, in_rows, start, length, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    column = start + tl.arange(0, WIDTH)[None, :]
    inside = in_rows[:, None]
    if not WHOLE:
        inside = inside & (column < length)
    return (row.to(tl.int64) * length)[:, None] + column, inside


@triton.jit
def place_of(row, in_rows, start, length, BITS: tl.constexpr, T: tl.constexpr):
    """Positions of a tile's weights and which of them there are, and the same of the bytes of their residual.

    A tile begins at column ``start`` of its rows, whose ``length`` is ``T.length`` unless that is 0.
    """
    WHOLE: tl.constexpr = T.length == T.width
    at, inside = _columns(row, in_rows, start, length, T.width, WHOLE)
    byte, byte_inside = at, inside
    if T.packs == "within":
        EACH: tl.constexpr = 8 // BITS
        first, size = start // EACH, (length + (EACH - 1)) // EACH
        if T.length == 0:
            first = tl.multiple_of(first, T.width // EACH)
            if T.aligned:
                size = tl.multiple_of(size, 16 // EACH)
        byte, byte_inside = _columns(row, in_rows, first, size, T.width // EACH, WHOLE)
    return at, inside, byte, byte_inside


@triton.jit
def _address(words, SLOT: tl.constexpr):
    return tl.load(words.to(tl.pointer_type(tl.int64)) + SLOT)


@triton.jit
def _bytes(words, SLOT: tl.constexpr, ALIGNED: tl.constexpr):
    place = _address(words, SLOT).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def load_packed(words, SLOT: tl.constexpr, place, BITS: tl.constexpr, T: tl.constexpr):
    """The fields of a tile, int32; ``place`` is what :func:`place_of` gives."""
    EACH: tl.constexpr = 8 // BITS
    at, inside, byte, byte_inside = place
    if T.packs == "across":
        held = tl.load(_bytes(words, SLOT, False) + at // EACH, mask=inside, other=0).to(tl.int32)
        rest = (held << ((32 - BITS) - BITS * (at % EACH).to(tl.int32))) >> (32 - BITS)
    else:
        held = tl.load(_bytes(words, SLOT, T.aligned) + byte, mask=byte_inside, other=0).to(tl.int32)
        shifts = (32 - BITS) - BITS * tl.arange(0, EACH)[None, None, :]
        fields = (held[:, :, None] << shifts) >> (32 - BITS)
        rest = tl.reshape(fields, (held.shape[0], held.shape[1] * EACH))
    return rest


@triton.jit
def store_packed(words, SLOT: tl.constexpr, place, old, rest, BITS: tl.constexpr, T: tl.constexpr):
    """Put other fields in place of a tile's ``old`` ones."""
    EACH: tl.constexpr = 8 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    at, inside, byte, byte_inside = place
    if T.packs == "across":  # what another program does to the other fields of a byte is of no matter
        address = _address(words, SLOT) + at // EACH
        word = (address & -4).to(tl.pointer_type(tl.int32))
        shift = ((address & 3) * 8).to(tl.int32) + BITS * (at % EACH).to(tl.int32)
        flipped = ((old ^ rest) & MASK) << shift
        tl.atomic_xor(word, flipped, mask=inside & (flipped != 0), sem="relaxed")
    else:
        rest = tl.where(inside, rest, 0) & MASK  # a row's last byte may be filled up
        fields = tl.reshape(rest, (rest.shape[0], rest.shape[1] // EACH, EACH))
        held = tl.sum(fields << (BITS * tl.arange(0, EACH)[None, None, :]), axis=2)
        tl.store(_bytes(words, SLOT, T.aligned) + byte, held.to(tl.uint8), mask=byte_inside)
