/* The sum of squares of gradients: the verdict on whether all of them are finite. */
#include "portable.h"

/* Parts of an array that are read side by side, and sums in a vector of each. */
#define PARTS 4
#define SUMS 16

CLONED static float sum_of_squares(const float *x, int64_t n)
{
    float sums[PARTS * SUMS] = {0};
    float sum = 0;
    const int64_t length = n / (PARTS * SUMS) * SUMS;
    for (int64_t i = 0; i < length; i += SUMS)
        for (int part = 0; part < PARTS; part++)
            for (int k = 0; k < SUMS; k++) {
                const float y = x[part * length + i + k];
                sums[part * SUMS + k] += y * y;
            }
    for (int64_t i = PARTS * length; i < n; i++)
        sum += x[i] * x[i];
    for (int k = 0; k < PARTS * SUMS; k++)
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
