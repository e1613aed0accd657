/* The chart of the ulp metric, and powers of two by a polynomial, as in charts.py and
 * stiffness.py of fp8manifold/_numerics.
 *
 * The chart counts ulps from zero, so that the coordinate of a code is the code itself:
 *
 *     E4M3             binade       binade           binade
 *     value     0 ..  [1, 2)        [2, 4)           [4, 8)        448
 *     ulp           1/8             1/4              1/2
 *     chart     0 ..  56 57 .. 63   64 65 .. 71      72 73 .. 79   126 */
#ifndef FP8MANIFOLD_CHART_H
#define FP8MANIFOLD_CHART_H

#include "format.h"

/* One step is one ulp, 2^(e - mantissa_bits), with e between lowest and highest. */
typedef struct {
    int32_t mantissa_bits, lowest, highest;
} Chart;

/* 1 or -1; -1 for -0. */
INLINE float sign_of(float x) { return float_of((bits_of(x) & INT32_MIN) | 0x3F800000); }

/* 2^e. */
INLINE float chart_power(const Chart chart, float x)
{
    const float power = binade_of(x, chart.lowest);
    const float highest_power = power_of_two(chart.highest);
    return power < highest_power ? power : highest_power;
}

INLINE float chart_stiffness(const Chart chart, float x)
{
    return chart_power(chart, x) * power_of_two(-chart.mantissa_bits);
}

/* (e - lowest) 2^M.  Up to the binade there are 2^M steps more, which |x| / ulp counts
 * too. */
INLINE float chart_codes_below(const Chart chart, float power)
{
    const int32_t index = (bits_of(power) >> 23) - (127 + chart.lowest);
    return (float)(index * (1 << chart.mantissa_bits));
}

/* The steps from zero to x. */
INLINE float chart_forward(const Chart chart, float x)
{
    const float power = chart_power(chart, x);
    const float sign = sign_of(x);
    const float steps = x * sign / (power * power_of_two(-chart.mantissa_bits));
    return (chart_codes_below(chart, power) + steps) * sign;
}

/* The value so many steps from zero. */
INLINE float chart_inverse(const Chart chart, float coordinate)
{
    const float steps_per_binade = (float)(1 << chart.mantissa_bits);
    const float sign = sign_of(coordinate);
    const float magnitude = coordinate * sign;
    const float last_index = (float)(chart.highest - chart.lowest);
    /* binade 0 has twice as many steps as the others: the subnormal ones are spaced
     * alike */
    float index = floorf(magnitude / steps_per_binade) - 1;
    index = index < 0 ? 0 : index;
    index = index > last_index ? last_index : index;
    const float spacing = power_of_two((int32_t)index + chart.lowest - chart.mantissa_bits);
    return (magnitude - index * steps_per_binade) * spacing * sign;
}

/* The value so many steps from x.  Whole steps are counted apart from the fraction of
 * one: their floats are exact, so that only the fraction is rounded. */
INLINE float chart_shift(const Chart chart, float x, float steps)
{
    const float power = chart_power(chart, x);
    const float sign = sign_of(x);
    const float position = x * sign / (power * power_of_two(-chart.mantissa_bits));
    const float whole = floorf(position);
    const float fraction = (position - whole) + steps * sign;
    const float whole_of_fraction = floorf(fraction);
    const float code = chart_codes_below(chart, power) + whole + whole_of_fraction;
    const float value = chart_inverse(chart, code);
    const float next_value = chart_inverse(chart, code + 1);
    return (value + (fraction - whole_of_fraction) * (next_value - value)) * sign;
}

/* 2^x within 4 ulp. */
INLINE float exp2_exact(float x)
{
    const float whole = rintf(x);
    const float fraction = x - whole;
    float power_of_fraction = EXP2_SERIES[FLOAT32_TERMS - 1];
    for (int i = FLOAT32_TERMS - 2; i >= 0; i--)
        power_of_fraction = power_of_fraction * fraction + EXP2_SERIES[i];
    return power_of_fraction * power_of_two(max_int(-126, min_int(127, (int32_t)whole)));
}

#endif
