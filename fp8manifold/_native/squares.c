/* The sum of squares of gradients: the verdict on whether all of them are finite. */
#include "portable.h"

/* Sums that are added up side by side, in vectors. */
#define SUMS 32

CLONED static float sum_of_squares(const float *x, int64_t n)
{
    float sums[SUMS] = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int k = 0; k < SUMS; k++)
            sums[k] += x[i + k] * x[i + k];
    for (; i < n; i++)
        sum += x[i] * x[i];
    for (int k = 0; k < SUMS; k++)
        sum += sums[k];
    return sum;
}

/* In float32:  Inf or NaN if a square is, and otherwise finite unless the sum itself is
 * beyond float32. */
EXPORT float fp8manifold_squares(const float *const *arrays, const int64_t *sizes, int64_t count)
{
    float sum = 0;
    for (int64_t k = 0; k < count; k++)
        sum += sum_of_squares(arrays[k], sizes[k]);
    return sum;
}
