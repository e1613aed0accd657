/* The stages of a step, element by element, as fp8manifold/optim/_step.py, _directions.py and
 * fp8manifold/_numerics/stiffness.py have them for whole tensors. */
#ifndef FP8MANIFOLD_ELEMENTS_H
#define FP8MANIFOLD_ELEMENTS_H

#include "step.h"

/* The formats of averages in eight bits: E4M3, and E2M5 for one that is fitted. */
static const Format MOMENT = {3, 7, -6, 8, 8, 128, 126, 0x43E00000, 1, 0, -1, 1, -1, 448.0f};
static const Format MOMENTUM = {5, 1, 0, 2, 8, 128, 127, 0x40FC0000, 1, 0, -1, 0, -1, 7.875f};

/* What holds for all elements that share a scale. */
typedef struct {
    float scale, inverse, rate;
    float log_reference; /* log2 S_ref minus log2 of the scale's mantissa */
    Chart chart, own;
    int exact; /* whether division by the scale is exact */
} Local;

/* The reciprocal of a power of two. */
INLINE float reciprocal(float power) { return float_of(254 * (1 << 23) - bits_of(power)); }

INLINE int extra_bits(const Spec *s) { return s->writeback == WRITE_RESIDUAL8 ? 8 : 0; }

INLINE int rounds(const Spec *s) { return s->storage == CODES || s->storage == GRID; }

/* log2 f of 2^e f, as log2_of_mantissa of fp8manifold/_numerics/stiffness.py. */
INLINE float log2_of_mantissa(float x)
{
    static const float coefficients[8] = {
        (float)2.8853900817779268,  (float)0.9617966939259756, (float)0.5770780163555853,  (float)0.4121985831111324,
        (float)0.3205988979753252, (float)0.2623081892525388, (float)0.22195308321368667, (float)0.19235933878519512,
    };
    const float f = float_of((bits_of(x) & 0x7FFFFF) | 0x3F800000), t = (f - 1.0f) / (f + 1.0f), square = t * t;
    float value = coefficients[7];
    for (int i = 6; i >= 0; i--)
        value = value * square + coefficients[i];
    return value * t;
}

INLINE Local local_to(const Job *j, float scale, int exact)
{
    const Spec *s = j->spec;
    const Format *f = &s->format;
    Local l = {scale, 1.0f, 0, 0, {0, 0, 0}, {f->mantissa_bits, f->emin, f->emax}, exact};
    if (s->storage == PLAIN)
        return l;
    const int mantissa = bits_of(scale) & 0x7FFFFF; /* a power of two's reciprocal costs a tenth of a division */
    l.inverse = mantissa || scale > 0x1p126f ? 1.0f / scale : reciprocal(scale);
    l.rate = j->hyper.rate * l.inverse;
    if (s->stiffness == FIELD_POWER)
        l.log_reference = j->hyper.log_reference - (mantissa ? log2_of_mantissa(scale) : 0.0f);
    if (s->geometry == EXPONENTIAL || s->geometry == TANGENT) {
        int exponent;
        frexpf(scale, &exponent);
        const int32_t lowest = most(f->emin, j->low_exponent - (exponent - 1));
        const int32_t highest = least(f->emax, j->high_exponent - (exponent - 1));
        l.chart = (Chart){f->mantissa_bits, lowest, most(highest, lowest)};
    }
    return l;
}

/* ---------------------------------------------------------------------------------------------------- weights */
INLINE Decoded load_codes(const Format *f, int32_t code, int32_t residual, int32_t extra)
{
    if (!extra)
        return decode_code(f, code);
    const int32_t negative = -((code & f->sign_bit) >> (f->bits - 1));
    const int32_t count = ((code & (f->sign_bit - 1)) ^ negative) - negative;
    Decoded d = decode_signed(f, count * (1 << extra) + residual, extra);
    d.ulp = d.ulp * (float)(1 << extra);
    return d;
}

INLINE Decoded load_floats(const Spec *s, const Local *l, float weight, int32_t residual)
{
    const Format *f = &s->format;
    if (s->storage == PLAIN)
        return (Decoded){weight, 0};
    float x = weight / l->scale;
    if (s->storage == GRID && !l->exact)
        x = round_value(f, x, 0, 0);
    if (s->storage == GRID && extra_bits(s))
        return load_codes(f, encode_finite(f, x, 0, 0, 0), residual, extra_bits(s));
    return (Decoded){x, chart_stiffness(l->own, x)};
}

/* The nearest code of a finer one and what is left. */
INLINE int32_t split_code(const Format *f, int32_t count, int32_t extra, int32_t *residual)
{
    const int32_t nearest = (count + (1 << (extra - 1))) >> extra;
    *residual = count - nearest * (1 << extra);
    return (nearest < 0 ? -nearest : nearest) | (nearest & f->sign_bit);
}

/* Of the two zeros -0 where the old code was. */
INLINE int32_t signed_zero(const Format *f, int32_t code, int32_t old)
{
    return code | (code == 0 && old == f->sign_bit ? f->sign_bit : 0);
}

/* --------------------------------------------------------------------------------------------------- averages */
INLINE float scale_of_bound(float bound, int root)
{
    const int32_t field = bits_of(bound) >> 23;
    return float_of((root ? ((field - 125) >> 1) + 120 : most(field - 6, 1)) * (1 << 23));
}

/* Whether the grid of the average is fitted to each block's largest value. */
INLINE int is_fitted(const Spec *s) { return s->moments == EIGHT_BITS && s->direction == MUON; }

/* The smallest power of two that takes the largest magnitude within MOMENTUM. */
INLINE float fitted_scale(float largest)
{
    return float_of(most(((bits_of(largest) + 0x3FFFF) >> 23) - 2, 1) * (1 << 23));
}

INLINE uint16_t to_bfloat16(float x, uint32_t draw) { return (uint16_t)(((uint32_t)bits_of(x) + draw) >> 16); }
INLINE float of_bfloat16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

/* A draw of 16 bits stands for the middle of what 24 bits would make of it, so that mirroring keeps the odds. */
INLINE int32_t to_codes(float x, float inverse, uint32_t draw)
{
    return encode_finite(&MOMENT, x * inverse, 1, (int32_t)(draw << 8 | 0x80), 1);
}

INLINE int32_t to_fitted_codes(float x, float inverse, uint32_t word)
{
    return encode_finite(&MOMENTUM, x * inverse, 1, draw_of(word), 1);
}

/* The code of a root, for which the mean of 1 over it is right; a root that is not 0 does not become 0. */
INLINE int32_t root_to_codes(float root, float inverse, uint32_t word)
{
    const int32_t m = 3, lowest = 127 - 6; /* of MOMENT */
    const int32_t magnitude = least(bits_of(root * inverse), 0x43E00000);
    const int32_t power = most(magnitude & 0x7F800000, lowest * (1 << 23));
    const float steps = float_of(magnitude) * float_of((254 + m - (power >> 23)) * (1 << 23));
    const int32_t whole = (int32_t)steps;
    const float unit = (float)(4 * whole + 2), part = steps - (float)whole;
    const int32_t away = (float)draw_of(word) * 0x1p-24f * unit < part * (unit + (1.0f - part));
    return most(whole + away + (power >> (23 - m)) - lowest * (1 << m), least(bits_of(root), 1));
}

/* --------------------------------------------------------------------------------------------------- geometry */
/* (S / S_ref)^k of a spacing in value. */
INLINE float field_factor(const Hyper *h, int mode, float stiffness, float log_reference)
{
    if (mode == FIELD_POWER) {
        float at = (float)((bits_of(stiffness) >> 23) - 127) - log_reference;
        at = at > h->log_low ? at : h->log_low;
        at = at < h->log_high ? at : h->log_high;
        return exp2_exact(at * h->power);
    }
    const int32_t bits = bits_of(stiffness * h->inverse_reference);
    const float ratio = float_of(least(most(bits, bits_of(h->low)), bits_of(h->high)));
    return mode == FIELD_SQRT ? sqrtf(ratio) : mode == FIELD_SQUARE ? ratio * ratio : ratio;
}

INLINE float factor_at(const Job *j, const Local *l, float ulp, int mode)
{
    return field_factor(&j->hyper, mode, (j->spec->metric == METRIC_ULP ? ulp : 1.0f) * l->scale, l->log_reference);
}

INLINE float stiffness_at(const Local *l, float x, int metric)
{
    return metric == METRIC_ULP ? chart_stiffness(l->chart, x) : 1.0f;
}

INLINE float move_linear(float start, float direction, float rate) { return start - direction * rate; }

INLINE float move_on_chart(const Job *j, const Local *l, float start, float direction, int geometry, int metric)
{
    const float steps = bounded(direction * -j->hyper.rate, -0x1p24f, 0x1p24f);
    float moved;
    if (geometry == TANGENT) {
        moved = start + steps * stiffness_at(l, start, metric);
    } else {
        moved = metric == METRIC_ULP ? chart_shift(l->chart, start, steps) : start + steps;
        moved = steps == 0 ? start : moved;
    }
    return bounded(moved, -j->spec->format.largest, j->spec->format.largest);
}

#endif
