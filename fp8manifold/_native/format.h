/* Codes to values and back, and rounding to the grid, as in
 * fp8manifold/_numerics/codec.py.
 *
 * A code without its sign counts the representable values from zero up.  Every binade
 * [2^e, 2^(e+1)) has 2^M of them, spaced by ulp = 2^(e - M); subnormals share the
 * spacing of the first binade.
 *
 *     E4M3 (M = 3, bias = 7), code 62      0 0111 110
 *     first code of its binade             0 0111 000        56
 *     ulp, a float32 by its field          E + 127 - bias - M -> 2^(7 - 7 - 3) = 1/8
 *     value                                (62 - 56 + 2^M) * 1/8 = 1.75
 *
 * Encoding runs the same backwards.  The float32 whose exponent field is 2 * 127 + M
 * minus that of 2^e is the exact 1 / ulp, and steps = |x| / ulp are rounded to a whole
 * number:
 *
 *     x = 1.8                              e = 0, steps = 1.8 * 8 = 14.4 -> 14
 *     codes below the binade               (e - emin) * 2^M = 6 * 8 = 48
 *     code                                 48 + 14 = 62
 *
 * With `extra_bits` all of this runs on the grid of a format with that many more
 * mantissa bits: a stored residual is the part of such a code that the format's own
 * code has no bits for.  A signed code has its sign as a number has, and counts from
 * the lowest value up.
 *
 * A Format has the facts of one, which fp8manifold/_interface.py explains. */
#ifndef FP8MANIFOLD_FORMAT_H
#define FP8MANIFOLD_FORMAT_H

#include <math.h>

#include "generated.h"
#include "portable.h"

/* -------------------------------------------------------------------- code to value */
typedef struct {
    float value, ulp;
} Decoded;

/* Read as a mantissa and an exponent one binade too high, a code is `twice` the value,
 * but for subnormals: they lack the leading one that is read, which is subtracted.  Of
 * the two the right one is the smaller one.  No operation rounds. */
INLINE Decoded decode_magnitude(const Format *format, int32_t magnitude, int32_t extra_bits)
{
    const int32_t mantissa_bits = format->mantissa_bits + extra_bits;
    const int32_t first_binade = (128 - format->bias) * (1 << 23);
    const int32_t twice = magnitude * (1 << (23 - mantissa_bits)) + first_binade;
    const float subnormal = float_of(twice) - float_of(first_binade);
    /* floats that are not negative are ordered like their bits */
    const float value = float_of(min_int(bits_of(subnormal), twice - (1 << 23)));
    /* subnormals are spaced like the first binade */
    const int32_t power = max_int(twice - (1 << 23), first_binade) & 0x7F800000;
    return (Decoded){value, float_of(power - mantissa_bits * (1 << 23))};
}

/* The value of a code as if it were a number: those of NaN and Inf are read beyond the
 * largest. */
INLINE Decoded decode_code(const Format *format, int32_t code)
{
    Decoded decoded = decode_magnitude(format, code & (format->sign_bit - 1), 0);
    const uint32_t sign = ((uint32_t)code << (32 - format->bits)) & 0x80000000u;
    decoded.value = float_of((int32_t)((uint32_t)bits_of(decoded.value) | sign));
    return decoded;
}

/* The same for a code of 8 bits that was read as a signed byte. */
INLINE Decoded decode_signed_byte(const Format *format, int32_t code)
{
    Decoded decoded = decode_magnitude(format, code & 0x7F, 0);
    decoded.value = float_of(bits_of(decoded.value) | (code & INT32_MIN));
    return decoded;
}

INLINE Decoded decode_signed(const Format *format, int32_t signed_code, int32_t extra_bits)
{
    const int32_t magnitude = signed_code < 0 ? -signed_code : signed_code;
    Decoded decoded = decode_magnitude(format, magnitude, extra_bits);
    const uint32_t sign = (uint32_t)signed_code & 0x80000000u;
    decoded.value = float_of((int32_t)((uint32_t)bits_of(decoded.value) | sign));
    return decoded;
}

/* Whether a code stands for NaN or Inf. */
INLINE int is_special(const Format *format, int32_t code)
{
    const int is_above = (code & (format->sign_bit - 1)) > format->max_code;
    return (code == format->one_nan) | (format->many_nans & is_above);
}

/* -------------------------------------------------------------------- value to code */
/* Whether steps in parts of 2^-24 can be counted in 31 bits.  The factor from values to
 * parts must be a normal float32, too. */
INLINE int in_fixed_point(const Format *format, int32_t mantissa_bits)
{
    const int32_t low = mantissa_bits + 24 - format->emin;
    const int32_t high = mantissa_bits + 24 - format->emax;
    return mantissa_bits <= 5 && low > -127 && low <= 127 && high > -127 && high <= 127;
}

/* The code of x, which is not negative, rounded to nearest or by a draw of 24 bits.
 *
 * `fixed_point` is in_fixed_point() of the mantissa bits.  Callers pass it and
 * `stochastic` as constants, so that a loop over elements has one of the three
 * roundings alone. */
INLINE int32_t encode_magnitude(const Format *format, float x, int stochastic, int32_t draw,
                                int32_t extra_bits, int fixed_point)
{
    const int32_t mantissa_bits = format->mantissa_bits + extra_bits;
    const int32_t lowest_field = 127 + format->emin;
    const int32_t magnitude = min_int(bits_of(x), format->top);
    const int32_t power = max_int(magnitude & 0x7F800000, lowest_field * (1 << 23));
    const int32_t part_bits = stochastic && fixed_point ? 24 : 0;
    const uint32_t field = (uint32_t)(254 + mantissa_bits + part_bits);
    const float inverse_ulp = float_of((int32_t)((field << 23) - (uint32_t)power));
    float steps = float_of(magnitude) * inverse_ulp;
    if (format->coarse) {
        /* the quotient of the smallest floats underflows, but is not 0 to a draw of 0
         */
        const float not_zero = float_of(min_int(magnitude, bits_of(0x1p-100f)));
        steps = steps > not_zero ? steps : not_zero;
    }
    const int32_t power_code = power >> (23 - mantissa_bits);
    int32_t whole;
    if (!stochastic) {
        whole = (int32_t)rintf(steps);
        /* One value per binade: 1.5 steps were rounded to the even number of steps, 2.
         * The even code may be the lower one, after an odd number of codes below. */
        const int codes_below_are_odd = (power_code + lowest_field) & 1;
        whole -= (mantissa_bits == 0) & (steps == 1.5f) & codes_below_are_odd;
    } else if (fixed_point) {
        /* A fraction f exceeds the draw r exactly where f + (2^24 - 1 - r) carries into
         * the whole steps.  What is less than a part counts as one: a draw of 0 moves
         * every fraction. */
        whole = ((int32_t)ceilf(steps) + (draw ^ 0xFFFFFF)) >> 24;
    } else {
        whole = (int32_t)steps;
        const float fraction = steps - (float)whole;
        /* the sign bit of r - f, spread over the word: -1 where the fraction goes on */
        whole -= bits_of((float)draw * 0x1p-24f - fraction) >> 31;
    }
    return whole + power_code - lowest_field * (1 << mantissa_bits);
}

/* The draw for a number with these bits, whose magnitude is rounded: r, or 2^24 - 1 - r
 * if it is negative.  One draw then moves both signs in one direction on the line. */
INLINE int32_t mirror_draw(int32_t draw, int32_t bits) { return draw ^ ((bits >> 31) & 0xFFFFFF); }

/* The code of a number; Inf saturates. */
INLINE int32_t encode_finite(const Format *format, float x, int stochastic, int32_t draw,
                             int fixed_point)
{
    const int32_t bits = bits_of(x);
    const int32_t code = encode_magnitude(format, float_of(bits & 0x7FFFFFFF), stochastic,
                                          mirror_draw(draw, bits), 0, fixed_point);
    const int32_t sign = (bits >> (32 - format->bits)) & format->sign_bit;
    if (format->signed_zero)
        return code | sign;
    /* code + (sign_bit - 1) has the sign bit set unless the code is 0, which stays +0
     */
    return code + ((code + (format->sign_bit - 1)) & sign);
}

/* encode_finite, stochastic and in fixed point, for a usual format of 8 bits, in fewer
 * operations: one word has the sign, the code below it and the fraction that the draw is
 * added to. */
INLINE int32_t encode_byte(const Format *format, float x, int32_t draw)
{
    const int32_t bits = bits_of(x);
    const int32_t mantissa_bits = format->mantissa_bits;
    const uint32_t lowest_field = (uint32_t)(127 + format->emin);
    const int32_t magnitude = min_int(bits & 0x7FFFFFFF, format->top);
    const int32_t power = max_int(magnitude & 0x7F800000, (int32_t)(lowest_field << 23));
    const uint32_t field = (uint32_t)(254 + mantissa_bits + 24);
    const float parts_per_unit = float_of((int32_t)((field << 23) - (uint32_t)power));
    const int32_t parts = (int32_t)ceilf(float_of(magnitude) * parts_per_unit);
    const uint32_t rounded = (uint32_t)(parts + (mirror_draw(draw, bits) ^ 0xFFFFFF));
    const uint32_t codes_below =
        ((uint32_t)power << (mantissa_bits + 1)) - (lowest_field << (mantissa_bits + 24));
    return (int32_t)(((rounded | ((uint32_t)bits & 0x80000000u)) + codes_below) >> 24);
}

INLINE int32_t encode_signed(const Format *format, float x, int stochastic, int32_t draw,
                             int32_t extra_bits, int fixed_point)
{
    const int32_t bits = bits_of(x);
    const int32_t negative = bits >> 31; /* -1 or 0 */
    const int32_t code = encode_magnitude(format, float_of(bits & 0x7FFFFFFF), stochastic,
                                          mirror_draw(draw, bits), extra_bits, fixed_point);
    /* negates in two's complement where negative is -1 */
    return (code ^ negative) - negative;
}

/* Whether a format needs no special cases in a loop: it has mantissa bits and a -0, and
 * NaN, if there is any, above the largest code. */
INLINE int is_usual(const Format *format)
{
    return format->signed_zero && !format->coarse && format->mantissa_bits > 0 &&
           format->one_nan < 0 && in_fixed_point(format, format->mantissa_bits);
}

/* Whether codes have 8 bits, 3 of them of the mantissa, as those of E4M3. */
INLINE int is_m3(const Format *format) { return format->bits == 8 && format->mantissa_bits == 3; }

/* The same format, with constants by which a compiler sees that it is a usual one, and
 * with `is_m3` by how much codes are shifted. */
INLINE Format usual_format(const Format *format, int is_m3)
{
    Format usual = *format;
    usual.signed_zero = 1;
    usual.coarse = 0;
    usual.one_nan = -1;
    if (is_m3) {
        usual.bits = 8;
        usual.sign_bit = 128;
        usual.mantissa_bits = 3;
    }
    return usual;
}

/* ------------------------------------------------------------------- value to value */
/* 2^max(floor(log2|x|), lowest). */
INLINE float binade_of(float x, int32_t lowest)
{
    return float_of(max_int(bits_of(x) & 0x7F800000, (lowest + 127) * (1 << 23)));
}

/* A number of the format's range, to nearest, ties to the even code.  Adding 1.5 *
 * 2^(23 - M) times its power of two pushes out the bits below the last one; subtracting
 * it leaves the rounded value, without the sign of a zero. */
INLINE float round_to_nearest(const Format *format, float x)
{
    const float power = binade_of(x, format->emin);
    const float constant = 0x1.8p23f * power_of_two(-format->mantissa_bits);
    float magic;
    if (format->mantissa_bits == 0) {
        /* One value per binade: the even code is that of an even exponent field.  An
         * odd multiple of the power of two in the constant turns the tie the other way.
         */
        const int32_t odd_field = (bits_of(power) >> 23) & 1;
        const float odd_multiple = constant + (float)(1 ^ ((127 - format->bias) & 1));
        magic = float_of(bits_of(power * odd_multiple) ^ odd_field);
    } else {
        magic = power * constant;
    }
    return (x + magic) - magic;
}

/* A number of the format's range that is not negative, to one of its neighbours. */
INLINE float round_by_draw(const Format *format, float x, int32_t draw)
{
    /* if the smallest ulp exceeds 1, the quotient of the smallest float by it would
     * underflow: count finer units */
    const float units_per_ulp = format->coarse ? 0x1p24f : 1.0f;
    const float unit =
        binade_of(x, format->emin) * (power_of_two(-format->mantissa_bits) / units_per_ulp);
    const float units = x / unit;
    const float steps = format->coarse ? floorf(units * 0x1p-24f) : floorf(units);
    const float fraction = units - steps * units_per_ulp;
    const float excess = fraction - (float)draw * (units_per_ulp * 0x1p-24f);
    const float goes_on = ceilf(clamp(excess, 0.0f, 1.0f));
    const float rounded = (goes_on + steps) * unit;
    return format->coarse ? rounded * units_per_ulp : rounded;
}

/* x to the grid, saturating; NaN stays. */
INLINE float round_value(const Format *format, float x, int stochastic, int32_t draw)
{
    const float in_range = clamp(x, -format->largest, format->largest);
    float rounded;
    if (!stochastic) {
        rounded = round_to_nearest(format, in_range);
        /* the difference of two equal numbers is +0 already */
        if (!format->signed_zero)
            return rounded;
    } else {
        rounded = round_by_draw(format, fabsf(in_range), mirror_draw(draw, bits_of(x)));
    }
    const uint32_t sign = (uint32_t)bits_of(x) & 0x80000000u;
    rounded = float_of((int32_t)((uint32_t)bits_of(rounded) | sign));
    return format->signed_zero ? rounded : rounded + 0.0f;
}

#endif
