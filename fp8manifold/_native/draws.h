/* Counter-based random words, as in fp8manifold/random_bits.py.
 *
 *     word(position) = hash(position; three round keys) + phase
 *
 * A word depends on nothing but its position and the keys, so that threads, tiles and
 * processes can draw theirs in any order. */
#ifndef FP8MANIFOLD_DRAWS_H
#define FP8MANIFOLD_DRAWS_H

#include "generated.h"
#include "portable.h"

INLINE uint32_t random_word(const Keys keys, uint32_t position)
{
    uint32_t x = position + keys.first;
    x = (x ^ (x >> HASH_SHIFT_1)) * HASH_MULTIPLIER_1 + keys.second;
    x = (x ^ (x >> HASH_SHIFT_2)) * HASH_MULTIPLIER_2 + keys.third;
    return (x ^ (x >> HASH_SHIFT_3)) * HASH_MULTIPLIER_3 + keys.phase;
}

/* The 24 bits of a word that decide a rounding. */
INLINE int32_t draw_of(uint32_t word) { return (int32_t)(word >> 8); }

#endif
