/* Codes to values and back, and rounding to the grid, as in codec.py of fp8manifold/_numerics. */
#ifndef FP8MANIFOLD_FORMAT_H
#define FP8MANIFOLD_FORMAT_H

#include <math.h>

#include "portable.h"

/* A format; format_record of fp8manifold/_numerics/records.py fills it in. */
typedef struct {
    int32_t mantissa_bits, bias, emin, emax, bits, sign_bit, max_code;
    int32_t top;          /* float32 bits of the largest value */
    int32_t signed_zero;  /* whether there is a -0 */
    int32_t coarse;       /* whether the smallest ulp exceeds 1 */
    int32_t one_nan;      /* the code of NaN if there is exactly one, otherwise -1 */
    int32_t many_nans;    /* whether all codes above max_code are special */
    int32_t inf_code;     /* -1 where there is none */
    float largest;
} Format;

typedef struct {
    float value, ulp;
} Decoded;

/* Whether steps in parts of 2^-24 fit in 31 bits, and the factor from values to them is a normal float32. */
INLINE int in_fixed_point(const Format *f, int32_t mantissa_bits)
{
    const int32_t low = mantissa_bits + 24 - f->emin, high = mantissa_bits + 24 - f->emax;
    return mantissa_bits <= 5 && low > -127 && low <= 127 && high > -127 && high <= 127;
}

INLINE Decoded decode_magnitude(const Format *f, int32_t magnitude, int32_t extra_bits)
{
    const int32_t m = f->mantissa_bits + extra_bits;
    const int32_t binade = most(magnitude & -(1 << m), 1 << m);
    const float ulp = float_of(binade * (1 << (23 - m)) + (127 - f->bias - m) * (1 << 23));
    return (Decoded){(float)(magnitude - binade + (1 << m)) * ulp, ulp};
}

INLINE Decoded decode_code(const Format *f, int32_t code)
{
    Decoded d = decode_magnitude(f, code & (f->sign_bit - 1), 0);
    const uint32_t sign = ((uint32_t)code << (32 - f->bits)) & 0x80000000u;
    d.value = float_of((int32_t)((uint32_t)bits_of(d.value) | sign));
    return d;
}

/* Of a code of the chart, which counts up from the lowest value. */
INLINE Decoded decode_signed(const Format *f, int32_t count, int32_t extra_bits)
{
    Decoded d = decode_magnitude(f, count < 0 ? -count : count, extra_bits);
    d.value = float_of((int32_t)((uint32_t)bits_of(d.value) | ((uint32_t)count & 0x80000000u)));
    return d;
}

/* The code of |x| rounded; `fixed` is in_fixed_point of the bits. */
INLINE int32_t encode_magnitude(
    const Format *f, float x, int stochastic, int32_t draw, int32_t extra_bits, int fixed)
{
    const int32_t m = f->mantissa_bits + extra_bits, lowest = 127 + f->emin;
    const int32_t magnitude = least(bits_of(x), f->top);
    const int32_t power = most(magnitude & 0x7F800000, lowest * (1 << 23));
    const int32_t exponent = 254 + m + (stochastic && fixed ? 24 : 0);
    float steps = float_of(magnitude) * float_of((int32_t)(((uint32_t)exponent << 23) - (uint32_t)power));
    if (f->coarse) { /* the quotient of the smallest floats underflows, where a draw of 0 must still see it */
        const float seen = float_of(least(magnitude, bits_of(0x1p-100f)));
        steps = steps > seen ? steps : seen;
    }
    const int32_t below = power >> (23 - m);
    int32_t whole;
    if (!stochastic) {
        /* without mantissa bits there is one value per binade: the even code is that of an even exponent field */
        whole = (int32_t)rintf(steps) - ((m == 0) & (steps == 1.5f) & ((below + lowest) & 1));
    } else if (fixed) {
        whole = ((int32_t)ceilf(steps) + (draw ^ 0xFFFFFF)) >> 24;
    } else {
        whole = (int32_t)steps;
        const float fraction = steps - (float)whole;
        whole -= bits_of((float)draw * 0x1p-24f - fraction) >> 31;
    }
    return whole + below - lowest * (1 << m);
}

/* A draw by which a negative number, whose magnitude is rounded, moves in a positive one's direction. */
INLINE int32_t mirrored(int32_t draw, int32_t bits) { return draw ^ ((bits >> 31) & 0xFFFFFF); }

INLINE int32_t encode_finite(const Format *f, float x, int stochastic, int32_t draw, int fixed)
{
    const int32_t bits = bits_of(x);
    const int32_t code =
        encode_magnitude(f, float_of(bits & 0x7FFFFFFF), stochastic, mirrored(draw, bits), 0, fixed);
    const int32_t sign = (bits >> (32 - f->bits)) & f->sign_bit;
    return f->signed_zero ? code | sign : code + ((code + (f->sign_bit - 1)) & sign);
}

INLINE int32_t encode_signed(const Format *f, float x, int stochastic, int32_t draw, int32_t extra_bits, int fixed)
{
    const int32_t bits = bits_of(x), negative = bits >> 31;
    const int32_t code =
        encode_magnitude(f, float_of(bits & 0x7FFFFFFF), stochastic, mirrored(draw, bits), extra_bits, fixed);
    return (code ^ negative) - negative;
}

/* A format that needs no special cases in a loop: with mantissa bits and a -0, and NaN, if there is any, above the
 * largest code. */
INLINE int is_usual(const Format *f)
{
    return f->signed_zero && !f->coarse && f->mantissa_bits > 0 && f->one_nan < 0 &&
           in_fixed_point(f, f->mantissa_bits);
}

/* The same format, with constants by which a compiler sees that it is a usual one. */
INLINE Format usual_format(const Format *f)
{
    return (Format){f->mantissa_bits, f->bias, f->emin, f->emax, f->bits, f->sign_bit, f->max_code, f->top,
                    1, 0, -1, f->many_nans, f->inf_code, f->largest};
}

INLINE int is_special(const Format *f, int32_t code)
{
    return (code == f->one_nan) | (f->many_nans & ((code & (f->sign_bit - 1)) > f->max_code));
}

/* 2^max(floor(log2|x|), lowest). */
INLINE float binade_of(float x, int32_t lowest)
{
    return float_of(most(bits_of(x) & 0x7F800000, (lowest + 127) * (1 << 23)));
}

/* x to the nearest value of the grid, or with 24 bits of chance to one of its neighbours, saturating; NaN stays. */
INLINE float round_value(const Format *f, float x, int stochastic, int32_t draw)
{
    float y = bounded(x, -f->largest, f->largest);
    if (!stochastic) {
        const float power = binade_of(y, f->emin), constant = 0x1.8p23f * power_of_two(-f->mantissa_bits);
        float magic;
        if (f->mantissa_bits == 0) {
            const int32_t odd = (bits_of(power) >> 23) & 1;
            magic = float_of(bits_of(power * (constant + (float)(1 ^ ((127 - f->bias) & 1)))) ^ odd);
        } else {
            magic = power * constant;
        }
        y = (y + magic) - magic;
        if (!f->signed_zero)
            return y;
    } else {
        const float finer = f->coarse ? 0x1p24f : 1.0f;
        y = fabsf(y);
        const float unit = binade_of(y, f->emin) * (power_of_two(-f->mantissa_bits) / finer);
        y = y / unit;
        const float steps = f->coarse ? floorf(y * 0x1p-24f) : floorf(y);
        y = y - steps * finer;
        y = ceilf(bounded(y - (float)mirrored(draw, bits_of(x)) * (finer * 0x1p-24f), 0.0f, 1.0f));
        y = (y + steps) * unit;
        if (f->coarse)
            y = y * finer;
    }
    y = float_of((int32_t)((uint32_t)bits_of(y) | ((uint32_t)bits_of(x) & 0x80000000u)));
    return f->signed_zero ? y : y + 0.0f;
}

#endif
