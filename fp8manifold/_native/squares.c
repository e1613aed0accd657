/* Whether gradients and their squares are finite. */
#include "portable.h"

/* The sum of the squares of some arrays, as float32: Inf or NaN if a square is, and otherwise finite unless the sum
 * itself is beyond float32. */
CLONED static float sum_of_squares(const float *x, int64_t n)
{
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int k = 0; k < 32; k++)
            sums[k] += x[i + k] * x[i + k];
    for (; i < n; i++)
        sum += x[i] * x[i];
    for (int k = 0; k < 32; k++)
        sum += sums[k];
    return sum;
}

EXPORT float fp8manifold_squares(const float *const *arrays, const int64_t *sizes, int64_t count)
{
    float sum = 0;
    for (int64_t k = 0; k < count; k++)
        sum += sum_of_squares(arrays[k], sizes[k]);
    return sum;
}
