/* The stages of a step, a tile at a time, for every kind of step.
 *
 * Choices are made before a loop, so that a loop over elements has none and becomes
 * vector code: one loop for each choice, or one inline function that is called with
 * constants.  Values that a loop reads are copied to local variables first: as far as a
 * compiler knows, the loop could overwrite them. */
#include <stddef.h>

#include "factors.h"

/* -------------------------------------------------------------------------- weights */
CLONED void load_weights(const Job *job, const PerScale *per_scale, Tile *tile)
{
    const Spec spec = *job->spec;
    const Format *format = &spec.format;
    const int n = tile->n;
    const uint8_t *codes = (const uint8_t *)job->weight + tile->start;
    const float *floats = (const float *)job->weight + tile->start;
    const int8_t *residuals = job->residual ? job->residual + tile->start : NULL;
    if (spec.storage == CODES && spec.writeback == WRITE_RESIDUAL8) {
        for (int i = 0; i < n; i++) {
            const Decoded weight = load_code(format, codes[i], residuals[i], 8);
            tile->value[i] = weight.value;
            tile->ulp[i] = weight.ulp;
        }
    } else if (spec.storage == CODES) {
        for (int i = 0; i < n; i++) {
            const Decoded weight = load_code(format, codes[i], 0, 0);
            tile->value[i] = weight.value;
            tile->ulp[i] = weight.ulp;
        }
    } else if (spec.storage == PLAIN) {
        for (int i = 0; i < n; i++)
            tile->value[i] = floats[i];
    } else {
        for (int i = 0; i < n; i++) {
            const int32_t residual = residuals ? residuals[i] : 0;
            const Decoded weight = load_float(&spec, per_scale, floats[i], residual);
            tile->value[i] = weight.value;
            tile->ulp[i] = weight.ulp;
        }
    }
}

/* Codes of the targets, and what is left of them in eight bits each. */
INLINE void store_codes_and_residuals(const Format *format, const Tile *tile, uint8_t *codes,
                                      int8_t *residuals, int fixed_point)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const int32_t draw = draw_of(tile->words[i]);
        const int32_t signed_code = encode_signed(format, tile->target[i], 1, draw, 8, fixed_point);
        int32_t residual;
        const int32_t nearest = split_code(format, signed_code, 8, &residual);
        const int32_t code = keep_negative_zero(format, nearest, codes[i]);
        residuals[i] = (int8_t)residual;
        codes[i] = keep_special(format, code, codes[i]);
    }
}

/* The same for weights that are floats on the grid. */
INLINE void store_grid_and_residuals(const Format *format, const Tile *tile, float scale,
                                     float *floats, int8_t *residuals, int fixed_point)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const int32_t draw = draw_of(tile->words[i]);
        const int32_t signed_code = encode_signed(format, tile->target[i], 1, draw, 8, fixed_point);
        int32_t residual;
        const int32_t nearest = split_code(format, signed_code, 8, &residual);
        const int32_t old_code = bits_of(floats[i]) == INT32_MIN ? format->sign_bit : 0;
        const int32_t code = keep_negative_zero(format, nearest, old_code);
        residuals[i] = (int8_t)residual;
        floats[i] = isnan(floats[i]) ? floats[i] : decode_code(format, code).value * scale;
    }
}

CLONED static void store_with_residual(const Job *job, const PerScale *per_scale, Tile *tile)
{
    const Format format = job->spec->format;
    const float scale = per_scale->scale;
    const int fixed_point = in_fixed_point(&format, format.mantissa_bits + 8);
    uint8_t *codes = (uint8_t *)job->weight + tile->start;
    float *floats = (float *)job->weight + tile->start;
    int8_t *residuals = job->residual + tile->start;
    const int are_codes = job->spec->storage == CODES;
    if (are_codes && fixed_point)
        store_codes_and_residuals(&format, tile, codes, residuals, 1);
    else if (are_codes)
        store_codes_and_residuals(&format, tile, codes, residuals, 0);
    else if (fixed_point)
        store_grid_and_residuals(&format, tile, scale, floats, residuals, 1);
    else
        store_grid_and_residuals(&format, tile, scale, floats, residuals, 0);
}

/* Codes of the targets; with `keep_rounded` their values as well, for `inject`. */
INLINE void store_codes(const Format *format, Tile *tile, uint8_t *codes, int stochastic,
                        int fixed_point, int keep_rounded)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(tile->words[i]) : 0;
        const int32_t code = encode_finite(format, tile->target[i], stochastic, draw, fixed_point);
        if (keep_rounded)
            tile->rounded[i] = decode_code(format, code).value;
        codes[i] = keep_special(format, code, codes[i]);
    }
}

INLINE void store_grid(const Format *format, Tile *tile, float scale, float *floats, int stochastic)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(tile->words[i]) : 0;
        const float rounded = round_value(format, tile->target[i], stochastic, draw);
        tile->rounded[i] = rounded;
        floats[i] = rounded * scale;
    }
}

CLONED void store_weights(const Job *job, const PerScale *per_scale, Tile *tile)
{
    const Spec spec = *job->spec;
    const Format *format = &spec.format;
    const float scale = per_scale->scale;
    const int n = tile->n;
    const int stochastic = spec.writeback != WRITE_NEAREST;
    const int fixed_point = in_fixed_point(format, format->mantissa_bits);
    uint8_t *codes = (uint8_t *)job->weight + tile->start;
    float *floats = (float *)job->weight + tile->start;
    if (spec.storage == PLAIN) {
        for (int i = 0; i < n; i++)
            floats[i] = tile->target[i];
    } else if (spec.storage == FREE) {
        for (int i = 0; i < n; i++) {
            const float target = clamp(tile->target[i], -format->largest, format->largest);
            /* a weight that does not move is not rounded by the scale */
            floats[i] = target == tile->value[i] ? floats[i] : target * scale;
        }
    } else if (spec.writeback == WRITE_RESIDUAL8) {
        store_with_residual(job, per_scale, tile);
    } else if (spec.storage == GRID && stochastic) {
        store_grid(format, tile, scale, floats, 1);
    } else if (spec.storage == GRID) {
        store_grid(format, tile, scale, floats, 0);
    } else if (spec.writeback == WRITE_MOMENTUM && fixed_point) {
        store_codes(format, tile, codes, 1, 1, 1);
    } else if (spec.writeback == WRITE_MOMENTUM) {
        store_codes(format, tile, codes, 1, 0, 1);
    } else if (stochastic && fixed_point) {
        store_codes(format, tile, codes, 1, 1, 0);
    } else if (stochastic) {
        store_codes(format, tile, codes, 1, 0, 0);
    } else {
        store_codes(format, tile, codes, 0, 0, 0);
    }
}

/* ------------------------------------------------------------------------- gradient */
/* The gradient times Adafactor's factors, a row of its matrix after the other. */
CLONED static void load_factored_gradient(const Job *job, Tile *tile)
{
    const Factors *factors = job->factors;
    const float sign = job->spec->maximize ? -1.0f : 1.0f;
    int64_t row = tile->start / factors->columns;
    int64_t column = tile->start % factors->columns;
    for (int i = 0; i < tile->n;) {
        const int64_t left = factors->columns - column;
        const int n = left < tile->n - i ? (int)left : tile->n - i;
        const float *columns = factors->column + row / factors->rows * factors->columns + column;
        multiply_by_factors(job->gradient + tile->start + i, tile->gradient + i, n,
                            factors->row[row], columns, factors->cap, sign);
        i += n;
        row++;
        column = 0;
    }
}

/* The gradient with respect to the coordinates that the direction is taken in: values,
 * or steps of the chart. */
CLONED void load_gradient(const Job *job, const PerScale *per_scale, Tile *tile)
{
    const Spec *spec = job->spec;
    if (job->factors) {
        load_factored_gradient(job, tile);
        return;
    }
    const int n = tile->n;
    const float *gradient = job->gradient + tile->start;
    const float sign = spec->maximize ? -1.0f : 1.0f;
    const float scale = per_scale->scale * job->hyper.per_unit;
    if (spec->storage == PLAIN || spec->geometry == LINEAR) {
        for (int i = 0; i < n; i++)
            tile->gradient[i] = sign * gradient[i];
    } else if (spec->metric == METRIC_ULP) {
        for (int i = 0; i < n; i++) {
            const float stiffness = stiffness_at(per_scale, tile->value[i], METRIC_ULP);
            tile->gradient[i] = sign * gradient[i] * (stiffness * scale);
        }
    } else {
        for (int i = 0; i < n; i++)
            tile->gradient[i] = sign * gradient[i] * scale;
    }
}

/* -------------------------------------------------------------------------- moments */
CLONED static void load_first_moment(const Job *job, const BlockScales *block, Tile *tile)
{
    const int n = tile->n;
    const int moments = job->spec->moments;
    if (moments == FLOAT32) {
        const float *stored = (const float *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            tile->first[i] = stored[i];
    } else if (moments == BFLOAT16) {
        const uint16_t *stored = (const uint16_t *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            tile->first[i] = of_bfloat16(stored[i]);
    } else if (is_fitted(job->spec)) {
        const uint8_t *stored = (const uint8_t *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            tile->first[i] = decode_code(&MOMENTUM_FORMAT, stored[i]).value * block->first;
    } else {
        const uint8_t *stored = (const uint8_t *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            tile->first[i] = decode_code(&MOMENT_FORMAT, stored[i]).value * block->first;
    }
}

CLONED static void load_second_moment(const Job *job, const BlockScales *block, Tile *tile)
{
    const int n = tile->n;
    const int moments = job->spec->moments;
    if (moments == FLOAT32) {
        const float *stored = (const float *)job->second + tile->start;
        for (int i = 0; i < n; i++)
            tile->second[i] = stored[i];
    } else if (moments == BFLOAT16) {
        const uint16_t *stored = (const uint16_t *)job->second + tile->start;
        for (int i = 0; i < n; i++)
            tile->second[i] = of_bfloat16(stored[i]);
    } else {
        const uint8_t *stored = (const uint8_t *)job->second + tile->start;
        for (int i = 0; i < n; i++) {
            const float root = decode_magnitude(&MOMENT_FORMAT, stored[i], 0).value * block->second;
            tile->second[i] = root * root;
        }
    }
}

void load_moments(const Job *job, const BlockScales *block, Tile *tile)
{
    if (job->first)
        load_first_moment(job, block, tile);
    if (job->second)
        load_second_moment(job, block, tile);
}

CLONED static void store_first_moment(const Job *job, const BlockScales *block, Tile *tile)
{
    const int n = tile->n;
    const int moments = job->spec->moments;
    if (moments == FLOAT32) {
        float *stored = (float *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            stored[i] = tile->first[i];
    } else if (moments == BFLOAT16) {
        uint16_t *stored = (uint16_t *)job->first + tile->start;
        for (int i = 0; i < n; i++)
            stored[i] = to_bfloat16(tile->first[i], tile->words[i] & 0xFFFF);
    } else if (is_fitted(job->spec)) {
        uint8_t *stored = (uint8_t *)job->first + tile->start;
        for (int i = 0; i < n; i++) {
            const float inverse = block->new_first_inverse;
            stored[i] = (uint8_t)encode_fitted_moment(tile->first[i], inverse, tile->words[i]);
        }
    } else {
        uint8_t *stored = (uint8_t *)job->first + tile->start;
        for (int i = 0; i < n; i++) {
            const float inverse = block->new_first_inverse;
            const uint32_t draw = tile->words[i] & 0xFFFF;
            stored[i] = (uint8_t)encode_moment(&MOMENT_FORMAT, tile->first[i], inverse, draw);
        }
    }
}

CLONED static void store_second_moment(const Job *job, const BlockScales *block, Tile *tile)
{
    const int n = tile->n;
    const int moments = job->spec->moments;
    /* the lower half of a word has rounded the first moment */
    const int shift = job->first ? 16 : 0;
    if (moments == FLOAT32) {
        float *stored = (float *)job->second + tile->start;
        for (int i = 0; i < n; i++)
            stored[i] = tile->second[i];
    } else if (moments == BFLOAT16) {
        uint16_t *stored = (uint16_t *)job->second + tile->start;
        for (int i = 0; i < n; i++)
            stored[i] = to_bfloat16(tile->second[i], (tile->words[i] >> shift) & 0xFFFF);
    } else {
        uint8_t *stored = (uint8_t *)job->second + tile->start;
        for (int i = 0; i < n; i++) {
            const float inverse = block->new_second_inverse;
            const uint32_t word = tile->words[i];
            stored[i] = (uint8_t)encode_root(&MOMENT_FORMAT, tile->root[i], inverse, word);
        }
    }
}

void store_moments(const Job *job, const BlockScales *block, Tile *tile)
{
    if (job->first)
        store_first_moment(job, block, tile);
    if (job->second)
        store_second_moment(job, block, tile);
}

const Format *moment_format(void) { return &MOMENT_FORMAT; }

/* ----------------------------------------------------------------------- directions */
CLONED void adam(const Job *job, Tile *tile)
{
    const Hyper hyper = job->hyper;
    const int n = tile->n;
    float *second_max = job->second_max ? job->second_max + tile->start : NULL;
    for (int i = 0; i < n; i++)
        tile->first[i] = average(tile->first[i], hyper.beta1, tile->gradient[i], hyper.gain1);
    for (int i = 0; i < n; i++) {
        const float gradient = tile->gradient[i];
        tile->second[i] = average_of_squares(tile->second[i], hyper.beta2, gradient, hyper.gain2);
        tile->root[i] = sqrtf(tile->second[i]);
    }
    if (second_max) {
        for (int i = 0; i < n; i++) {
            second_max[i] = second_max[i] > tile->second[i] ? second_max[i] : tile->second[i];
            tile->denominator[i] = sqrtf(second_max[i]) + hyper.eps;
        }
    } else {
        for (int i = 0; i < n; i++)
            tile->denominator[i] = tile->root[i] + hyper.eps;
    }
    for (int i = 0; i < n; i++)
        tile->direction[i] = tile->first[i] / tile->denominator[i];
}

/* SGD, and the first half of Muon: the gradient, or its momentum; with Nesterov the
 * momentum of the next step, as far as this gradient gives it.  Muon's momentum is an
 * average, which takes the share gain1 of a gradient. */
CLONED void sgd_or_muon(const Job *job, Tile *tile)
{
    const Hyper hyper = job->hyper;
    const int n = tile->n;
    if (!job->first) {
        for (int i = 0; i < n; i++)
            tile->direction[i] = tile->gradient[i];
        return;
    }
    for (int i = 0; i < n; i++)
        tile->first[i] = average(tile->first[i], hyper.beta1, tile->gradient[i], hyper.gain1);
    if (!job->spec->nesterov) {
        for (int i = 0; i < n; i++)
            tile->direction[i] = tile->first[i];
    } else if (job->spec->direction == MUON) {
        for (int i = 0; i < n; i++)
            tile->direction[i] = tile->gradient[i] * hyper.gain1 + tile->first[i] * hyper.beta1;
    } else {
        for (int i = 0; i < n; i++)
            tile->direction[i] = tile->gradient[i] + tile->first[i] * hyper.beta1;
    }
}

CLONED void lion(const Job *job, Tile *tile)
{
    const Hyper hyper = job->hyper;
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const float gradient = tile->gradient[i];
        const float mixed = average(tile->first[i], hyper.beta1, gradient, hyper.gain1);
        tile->direction[i] = (float)((0.0f < mixed) - (mixed < 0.0f));
        tile->first[i] = average(tile->first[i], hyper.beta2, gradient, hyper.gain2);
    }
}

/* ------------------------------------------------------------------------- geometry */
/* A job and what its scale brings, copied where a loop can't overwrite them. */
typedef struct {
    Spec spec;
    Job job; /* whose spec is the one above */
    PerScale per_scale;
} LocalCopy;

INLINE void copy_locally(LocalCopy *local, const Job *job, const PerScale *per_scale)
{
    local->spec = *job->spec;
    local->job = *job;
    local->job.spec = &local->spec;
    local->per_scale = *per_scale;
}

/* `mode` is a power of the stiffness field, a constant. */
INLINE void move_by_field(const Job *job, const PerScale *per_scale, Tile *tile, float keep,
                          int mode)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const float direction = tile->direction[i] * factor_at(job, per_scale, tile->ulp[i], mode);
        tile->target[i] = move_linear(tile->value[i] * keep, direction, per_scale->rate);
    }
}

/* `geometry` and `metric` are constants, but for TANGENT. */
INLINE void move_along_chart(const Job *job, const PerScale *per_scale, Tile *tile, float keep,
                             int geometry, int metric)
{
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const float start = tile->value[i] * keep;
        tile->target[i] =
            move_on_chart(job, per_scale, start, tile->direction[i], geometry, metric);
    }
}

CLONED void move(const Job *shared_job, const PerScale *shared_per_scale, Tile *tile)
{
    LocalCopy local;
    copy_locally(&local, shared_job, shared_per_scale);
    const Job *job = &local.job;
    const PerScale *per_scale = &local.per_scale;
    const Spec *spec = &local.spec;
    const int n = tile->n;
    const float keep = spec->decays ? job->hyper.keep : 1.0f;
    const int is_linear = spec->geometry == LINEAR;
    if (spec->storage == PLAIN) {
        const float rate = job->hyper.rate;
        for (int i = 0; i < n; i++)
            tile->target[i] = move_linear(tile->value[i] * keep, tile->direction[i], rate);
    } else if (is_linear && spec->stiffness == FIELD_NONE) {
        const float rate = per_scale->rate;
        for (int i = 0; i < n; i++)
            tile->target[i] = move_linear(tile->value[i] * keep, tile->direction[i], rate);
    } else if (is_linear && spec->stiffness == FIELD_LINEAR) {
        move_by_field(job, per_scale, tile, keep, FIELD_LINEAR);
    } else if (is_linear && spec->stiffness == FIELD_SQRT) {
        move_by_field(job, per_scale, tile, keep, FIELD_SQRT);
    } else if (is_linear && spec->stiffness == FIELD_SQUARE) {
        move_by_field(job, per_scale, tile, keep, FIELD_SQUARE);
    } else if (is_linear) {
        move_by_field(job, per_scale, tile, keep, FIELD_ANY);
    } else if (spec->geometry == TANGENT) {
        move_along_chart(job, per_scale, tile, keep, TANGENT, spec->metric);
    } else if (spec->metric == METRIC_ULP) {
        move_along_chart(job, per_scale, tile, keep, EXPONENTIAL, METRIC_ULP);
    } else {
        move_along_chart(job, per_scale, tile, keep, EXPONENTIAL, METRIC_EUCLIDEAN);
    }
}

/* Add the rounding error of the weights to the first moment: what the moment would have
 * to be for this step to end at the rounded weights. */
CLONED void inject(const Job *shared_job, const PerScale *shared_per_scale, Tile *tile)
{
    LocalCopy local;
    copy_locally(&local, shared_job, shared_per_scale);
    const Job *job = &local.job;
    const PerScale *per_scale = &local.per_scale;
    const Spec *spec = &local.spec;
    const int n = tile->n;
    const float share = job->hyper.inject;
    /* in place of the rounded weights */
    float *error = tile->rounded;
    if (spec->geometry == LINEAR) {
        for (int i = 0; i < n; i++)
            error[i] = (tile->target[i] - tile->rounded[i]) / per_scale->inverse;
    } else if (spec->metric == METRIC_ULP) {
        for (int i = 0; i < n; i++) {
            const float target = chart_forward(per_scale->chart, tile->target[i]);
            error[i] = target - chart_forward(per_scale->chart, tile->rounded[i]);
        }
    } else {
        for (int i = 0; i < n; i++)
            error[i] = tile->target[i] - tile->rounded[i];
    }
    if (spec->geometry == LINEAR && spec->stiffness == FIELD_LINEAR) {
        for (int i = 0; i < n; i++)
            error[i] = error[i] / factor_at(job, per_scale, tile->ulp[i], FIELD_LINEAR);
    } else if (spec->geometry == LINEAR && spec->stiffness != FIELD_NONE) {
        for (int i = 0; i < n; i++)
            error[i] = error[i] / factor_at(job, per_scale, tile->ulp[i], spec->stiffness);
    }
    if (spec->direction == ADAM) {
        for (int i = 0; i < n; i++)
            error[i] = error[i] * tile->denominator[i];
    }
    for (int i = 0; i < n; i++)
        tile->first[i] = tile->first[i] - error[i] * share;
}
