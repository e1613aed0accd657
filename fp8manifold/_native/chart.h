/* The chart of the spacing, and powers of two by a polynomial, as in charts.py and stiffness.py of
 * fp8manifold/_numerics. */
#ifndef FP8MANIFOLD_CHART_H
#define FP8MANIFOLD_CHART_H

#include "format.h"

/* One step is one ulp, 2^(e - mantissa_bits), with the exponent held between lowest and highest. */
typedef struct {
    int32_t mantissa_bits, lowest, highest;
} Chart;

INLINE float sign_of(float x) { return float_of((bits_of(x) & INT32_MIN) | 0x3F800000); }

INLINE float chart_power(const Chart c, float x)
{
    const float power = binade_of(x, c.lowest), top = power_of_two(c.highest);
    return power < top ? power : top;
}

INLINE float chart_stiffness(const Chart c, float x) { return chart_power(c, x) * power_of_two(-c.mantissa_bits); }

INLINE float chart_below(const Chart c, float power)
{
    return (float)(((bits_of(power) >> 23) - (127 + c.lowest)) * (1 << c.mantissa_bits));
}

INLINE float chart_forward(const Chart c, float x)
{
    const float power = chart_power(c, x), sign = sign_of(x);
    const float steps = x * sign / (power * power_of_two(-c.mantissa_bits));
    return (chart_below(c, power) + steps) * sign;
}

INLINE float chart_inverse(const Chart c, float at)
{
    const float per_binade = (float)(1 << c.mantissa_bits), sign = sign_of(at), magnitude = at * sign;
    float index = floorf(magnitude / per_binade) - 1;
    const float last = (float)(c.highest - c.lowest);
    index = index < 0 ? 0 : index;
    index = index > last ? last : index;
    const float spacing = power_of_two((int32_t)index + c.lowest - c.mantissa_bits);
    return (magnitude - index * per_binade) * spacing * sign;
}

INLINE float chart_shift(const Chart c, float x, float steps)
{
    const float power = chart_power(c, x), sign = sign_of(x);
    const float position = x * sign / (power * power_of_two(-c.mantissa_bits)), whole = floorf(position);
    const float fraction = (position - whole) + steps * sign, moved = floorf(fraction);
    const float start = chart_below(c, power) + whole + moved;
    const float value = chart_inverse(c, start), neighbour = chart_inverse(c, start + 1);
    return (value + (fraction - moved) * (neighbour - value)) * sign;
}

/* 2^x within 4 ulp. */
INLINE float exp2_exact(float x)
{
    static const float coefficients[8] = {
        1.0f,
        (float)0.6931471805599453,
        (float)0.2402265069591007,
        (float)0.05550410866482158,
        (float)0.009618129107628477,
        (float)0.0013333558146428441,
        (float)0.00015403530393381606,
        (float)1.5252733804059838e-05,
    };
    const float whole = rintf(x), fraction = x - whole;
    float value = coefficients[7];
    for (int i = 6; i >= 0; i--)
        value = value * fraction + coefficients[i];
    return value * power_of_two(most(-126, least(127, (int32_t)whole)));
}

#endif
