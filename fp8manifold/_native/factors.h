/* The factors of a gradient, by Adafactor's statistics. */
#ifndef FP8MANIFOLD_FACTORS_H
#define FP8MANIFOLD_FACTORS_H

#include "tile.h"

/* Some neighbours in a row of a gradient, times their factors and a sign. */
INLINE void multiply_by_factors(const float *gradient, float *product, int n, float row,
                                const float *column, float cap, float sign)
{
    for (int i = 0; i < n; i++) {
        const float factor = row * column[i];
        product[i] = sign * gradient[i] * (factor < cap ? factor : cap);
    }
}

/* Advance the statistics of all jobs that have some, and compute their factors.  Their
 * rates are multiplied by the sizes of the weights. */
void take_factors(Job *jobs, int64_t count, int threads);

#endif
