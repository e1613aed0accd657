/* Counter-based random words, as in fp8manifold/random_bits.py.
 *
 *     word(position) = hash(position; three round keys) + phase
 *
 * A word depends on nothing but its position and the keys, so that threads, tiles and
 * processes can draw theirs in any order. */
#ifndef FP8MANIFOLD_DRAWS_H
#define FP8MANIFOLD_DRAWS_H

#include "portable.h"

typedef struct {
    uint32_t first, second, third; /* added in the rounds of the hash */
    uint32_t phase;                /* added at the end */
} Keys;

INLINE uint32_t random_word(const Keys keys, uint32_t position)
{
    uint32_t x = position + keys.first;
    x = (x ^ (x >> 17)) * 0xED5AD4BBu + keys.second;
    x = (x ^ (x >> 11)) * 0xAC4C1B51u + keys.third;
    return (x ^ (x >> 15)) * 0x31848BABu + keys.phase;
}

/* The 24 bits of a word that decide a rounding. */
INLINE int32_t draw_of(uint32_t word) { return (int32_t)(word >> 8); }

#endif
