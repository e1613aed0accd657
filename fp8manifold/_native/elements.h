/* The stages of a step for one element.  fp8manifold/optim/_eager_step.py, _directions.py and
 * fp8manifold/_numerics/stiffness.py define them for whole tensors; this is their twin.
 *
 * Weights are stepped in units of their scale:
 *
 *     memory: code, scale s  ->  value x = decode(code), ulp S(x)
 *     linear                     target = keep x - direction (rate / s) (s S(x) / S_ref)^k
 *     on the chart               target = the value -direction * rate ulps from x
 *     memory: code'         <-   target, rounded once
 *
 * 8-bit moments are codes of MOMENT_FORMAT at a power of two for each row.  It follows
 * from a bound of the row's magnitudes, which is advanced as the moment is, so that no
 * value leaves the format.  The second moment is stored as its root.  Muon's momentum
 * is in MOMENTUM_FORMAT, whose scale is fitted to the row's largest magnitude. */
#ifndef FP8MANIFOLD_ELEMENTS_H
#define FP8MANIFOLD_ELEMENTS_H

#include "chart.h"
#include "draws.h"

/* What holds for all elements that share a scale. */
typedef struct {
    float scale, inverse;
    float rate;          /* of a linear step, over the scale */
    float log_reference; /* log2 S_ref minus log2 of the scale's mantissa */
    Chart chart;         /* of the metric, between the bounds of the stiffness */
    Chart format_chart;  /* between the ends of the format */
    int is_exact;        /* whether division by the scale is exact */
} PerScale;

/* The scales of a block of moments: of what is stored, and 1 over those of what will
 * be. */
typedef struct {
    float first, new_first_inverse, second, new_second_inverse;
} BlockScales;

/* The reciprocal of a power of two. */
INLINE float reciprocal(float power) { return float_of(254 * (1 << 23) - bits_of(power)); }

INLINE int residual_bits(const Spec *spec) { return spec->writeback == WRITE_RESIDUAL8 ? 8 : 0; }

/* Whether weights are rounded to a grid. */
INLINE int is_rounded(const Spec *spec) { return spec->storage == CODES || spec->storage == GRID; }

/* log2 f of x = 2^e f, as log2_of_mantissa of fp8manifold/_numerics/stiffness.py. */
INLINE float log2_of_mantissa(float x)
{
    const float f = float_of((bits_of(x) & 0x7FFFFF) | 0x3F800000);
    const float t = (f - 1.0f) / (f + 1.0f);
    const float square = t * t;
    float value = LOG2_SERIES[FLOAT32_TERMS - 1];
    for (int i = FLOAT32_TERMS - 2; i >= 0; i--)
        value = value * square + LOG2_SERIES[i];
    return value * t;
}

INLINE PerScale per_scale_of(const Job *job, float scale, int is_exact)
{
    const Spec *spec = job->spec;
    const Format *format = &spec->format;
    PerScale per_scale = {
        .scale = scale,
        .inverse = 1.0f,
        .format_chart = {format->mantissa_bits, format->emin, format->emax},
        .is_exact = is_exact,
    };
    if (spec->storage == PLAIN)
        return per_scale;
    const int mantissa = bits_of(scale) & 0x7FFFFF;
    /* a power of two's reciprocal costs a tenth of a division */
    const int must_divide = mantissa || scale > 0x1p126f;
    per_scale.inverse = must_divide ? 1.0f / scale : reciprocal(scale);
    per_scale.rate = job->hyper.rate * per_scale.inverse;
    if (spec->stiffness == FIELD_ANY) {
        const float log_mantissa = mantissa ? log2_of_mantissa(scale) : 0.0f;
        per_scale.log_reference = job->hyper.log_reference - log_mantissa;
    }
    if (spec->geometry == EXPONENTIAL || spec->geometry == TANGENT) {
        int exponent;
        frexpf(scale, &exponent);
        const int32_t scale_exponent = exponent - 1;
        const int32_t lowest = max_int(format->emin, job->low_exponent - scale_exponent);
        const int32_t highest = min_int(format->emax, job->high_exponent - scale_exponent);
        per_scale.chart = (Chart){format->mantissa_bits, lowest, max_int(highest, lowest)};
    }
    return per_scale;
}

/* -------------------------------------------------------------------------- weights */
/* The value of a code, with its residual if there are extra bits, and the ulp of the
 * format. */
INLINE Decoded load_code(const Format *format, int32_t code, int32_t residual, int32_t extra_bits)
{
    if (!extra_bits)
        return decode_code(format, code);
    const int32_t negative = -((code & format->sign_bit) >> (format->bits - 1)); /* -1 or 0 */
    const int32_t signed_code = ((code & (format->sign_bit - 1)) ^ negative) - negative;
    const int32_t joined = signed_code * (1 << extra_bits) + residual;
    Decoded decoded = decode_signed(format, joined, extra_bits);
    decoded.ulp = decoded.ulp * (float)(1 << extra_bits);
    return decoded;
}

INLINE Decoded load_float(const Spec *spec, const PerScale *per_scale, float weight,
                          int32_t residual)
{
    const Format *format = &spec->format;
    if (spec->storage == PLAIN)
        return (Decoded){weight, 0};
    float x = weight / per_scale->scale;
    if (spec->storage == GRID && !per_scale->is_exact)
        x = round_value(format, x, 0, 0);
    if (spec->storage == GRID && residual_bits(spec)) {
        const int32_t code = encode_finite(format, x, 0, 0, 0);
        return load_code(format, code, residual, residual_bits(spec));
    }
    return (Decoded){x, chart_stiffness(per_scale->format_chart, x)};
}

/* The nearest code of a signed code with extra bits, and what is left: load_code
 * undone. */
INLINE int32_t split_code(const Format *format, int32_t signed_code, int32_t extra_bits,
                          int32_t *residual)
{
    const int32_t nearest = (signed_code + (1 << (extra_bits - 1))) >> extra_bits;
    *residual = signed_code - nearest * (1 << extra_bits);
    return (nearest < 0 ? -nearest : nearest) | (nearest & format->sign_bit);
}

/* A code; if it is 0 and the old code was -0, that of -0. */
INLINE int32_t keep_negative_zero(const Format *format, int32_t code, int32_t old_code)
{
    return code | (code == 0 && old_code == format->sign_bit ? format->sign_bit : 0);
}

/* A code as a byte, or the old one if that was NaN or Inf, which a step leaves as they
 * are. */
INLINE uint8_t keep_special(const Format *format, int32_t code, uint8_t old_code)
{
    return (uint8_t)(is_special(format, old_code) ? old_code : code);
}

/* -------------------------------------------------------------------------- moments */
/* The power of two that takes a bound, or its root, to 2^6 .. 2^7: below the 448 of
 * MOMENT_FORMAT there is room for rounding noise. */
INLINE float scale_of_bound(float bound, int is_of_root)
{
    const int32_t field = bits_of(bound) >> 23;
    const int32_t scale_field = is_of_root ? ((field - 125) >> 1) + 120 : max_int(field - 6, 1);
    return float_of(scale_field * (1 << 23));
}

/* Whether the first moment's grid is fitted to each block's largest value. */
INLINE int is_fitted(const Spec *spec)
{
    return spec->moments == EIGHT_BIT && spec->direction == MUON;
}

/* The smallest power of two that takes the largest magnitude within MOMENTUM_FORMAT. */
INLINE float fitted_scale(float largest)
{
    /* carries into the exponent field if the mantissa exceeds that of the format's
     * largest value */
    const int32_t carry = 0x7FFFFF - (MOMENTUM_FORMAT.top & 0x7FFFFF);
    const int32_t field = (bits_of(largest) + carry) >> 23;
    return float_of(max_int(field - MOMENTUM_FORMAT.emax, 1) * (1 << 23));
}

INLINE uint16_t to_bfloat16(float x, uint32_t draw)
{
    return (uint16_t)(((uint32_t)bits_of(x) + draw) >> 16);
}

INLINE float of_bfloat16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

/* The code of a first moment, rounded by a draw of 16 bits.  The draw stands for the
 * middle of what 24 bits would make of it, so that mirroring keeps the odds. */
INLINE int32_t encode_moment(const Format *format, float x, float inverse_scale, uint32_t draw)
{
    return encode_byte(format, x * inverse_scale, (int32_t)(draw << 8 | 0x80));
}

INLINE int32_t encode_fitted_moment(float x, float inverse_scale, uint32_t word)
{
    return encode_finite(&MOMENTUM_FORMAT, x * inverse_scale, 1, draw_of(word), 1);
}

/* The code of a second moment's root.  For `whole + part` steps it goes on with the
 * probability part (unit + 1 - part) / unit,  unit = 4 whole + 2.  That preserves the
 * mean of v^(1/4), and so that of 1 / root, as optim/_eager_step.py derives.  A root that is
 * not 0 does not become 0. */
INLINE int32_t encode_root(const Format *format, float root, float inverse_scale, uint32_t word)
{
    const int32_t mantissa_bits = format->mantissa_bits;
    const int32_t lowest_field = 127 + format->emin;
    const int32_t magnitude = min_int(bits_of(root * inverse_scale), format->top);
    const int32_t power = max_int(magnitude & 0x7F800000, lowest_field * (1 << 23));
    const uint32_t field = (uint32_t)(254 + mantissa_bits);
    const float steps = float_of(magnitude) * float_of((int32_t)((field << 23) - (uint32_t)power));
    const int32_t whole = (int32_t)steps;
    const float lower = (float)whole;
    const float unit = 4.0f * lower + 2.0f;
    const float part = steps - lower;
    const int goes_on = (float)draw_of(word) * 0x1p-24f * unit < part * (unit + (1.0f - part));
    const int32_t power_code = power >> (23 - mantissa_bits);
    const int32_t lower_code = whole + power_code - lowest_field * (1 << mantissa_bits);
    const int32_t code = goes_on ? lower_code + 1 : lower_code;
    const int32_t smallest = min_int(bits_of(root), 1);
    return max_int(code, smallest);
}

/* ----------------------------------------------------------------------- directions */
/* A moment after a step, of gradients and of their squares, as in
 * fp8manifold/optim/_directions.py. */
INLINE float average(float moment, float decay, float gradient, float gain)
{
    return moment * decay + gradient * gain;
}

INLINE float average_of_squares(float moment, float decay, float gradient, float gain)
{
    return moment * decay + gradient * gain * gradient;
}

/* ------------------------------------------------------------------------- geometry */
/* clamp(S / S_ref)^k of a stiffness S in value. */
INLINE float field_factor(const Hyper *hyper, int mode, float stiffness, float log_reference)
{
    if (mode == FIELD_ANY) {
        float logarithm = (float)((bits_of(stiffness) >> 23) - 127) - log_reference;
        logarithm = logarithm > hyper->log_low ? logarithm : hyper->log_low;
        logarithm = logarithm < hyper->log_high ? logarithm : hyper->log_high;
        return exp2_exact(logarithm * hyper->power);
    }
    /* positive floats are ordered like their bits */
    const int32_t bits = bits_of(stiffness * hyper->inverse_reference);
    const float ratio = float_of(min_int(max_int(bits, bits_of(hyper->low)), bits_of(hyper->high)));
    if (mode == FIELD_SQRT)
        return sqrtf(ratio);
    return mode == FIELD_SQUARE ? ratio * ratio : ratio;
}

/* field_factor at a weight, whose ulp is in units of the scale. */
INLINE float factor_at(const Job *job, const PerScale *per_scale, float ulp, int mode)
{
    const float step = job->spec->metric == METRIC_ULP ? ulp : 1.0f;
    return field_factor(&job->hyper, mode, step * per_scale->scale, per_scale->log_reference);
}

/* The length of a step on the chart at x, in units of the scale. */
INLINE float stiffness_at(const PerScale *per_scale, float x, int metric)
{
    return metric == METRIC_ULP ? chart_stiffness(per_scale->chart, x) : 1.0f;
}

INLINE float move_linear(float start, float direction, float rate)
{
    return start - direction * rate;
}

INLINE float move_on_chart(const Job *job, const PerScale *per_scale, float start, float direction,
                           int geometry, int metric)
{
    const float steps = clamp(direction * -job->hyper.rate, -0x1p24f, 0x1p24f);
    float target;
    if (geometry == TANGENT) {
        target = start + steps * stiffness_at(per_scale, start, metric);
    } else {
        const float shifted = metric == METRIC_ULP ? chart_shift(per_scale->chart, start, steps)
                                                   : start + steps;
        target = steps == 0 ? start : shifted;
    }
    return clamp(target, -job->spec->format.largest, job->spec->format.largest);
}

#endif
