/* The stages, a tile at a time, for every variant.  Values that a loop reads are copied first: as far as a compiler
 * knows, the loop could overwrite them. */
#include <stddef.h>

#include "tile.h"

CLONED void load_weights(const Job *j, const Local *l, Tile *t)
{
    const Spec spec = *j->spec, *s = &spec;
    const Format *f = &spec.format;
    const int n = t->n;
    const uint8_t *codes = (const uint8_t *)j->weight + t->at;
    const float *floats = (const float *)j->weight + t->at;
    const int8_t *residual = j->residual ? j->residual + t->at : NULL;
    Decoded w;
    if (s->storage == CODES && s->writeback == WRITE_RESIDUAL8)
        LOOP(w = load_codes(f, codes[i], residual[i], 8); t->x[i] = w.value; t->ulp[i] = w.ulp;)
    else if (s->storage == CODES)
        LOOP(w = load_codes(f, codes[i], 0, 0); t->x[i] = w.value; t->ulp[i] = w.ulp;)
    else if (s->storage == PLAIN)
        LOOP(t->x[i] = floats[i];)
    else
        LOOP(w = load_floats(s, l, floats[i], residual ? residual[i] : 0); t->x[i] = w.value; t->ulp[i] = w.ulp;)
}

CLONED static void store_with_residual(const Job *j, const Local *l, Tile *t, int extra)
{
    const Format format = j->spec->format, *f = &format;
    const float scale = l->scale;
    const int n = t->n, fixed = in_fixed_point(f, f->mantissa_bits + extra);
    uint8_t *codes = (uint8_t *)j->weight + t->at;
    float *floats = (float *)j->weight + t->at;
    int8_t *residual = j->residual + t->at;
    int32_t count, left, code;
    if (j->spec->storage == CODES) {
        LOOP_FOR(fixed, count = encode_signed(f, t->target[i], 1, draw_of(t->words[i]), extra, FLAG);
                 code = signed_zero(f, split_code(f, count, extra, &left), codes[i]); residual[i] = (int8_t)left;
                 codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else {
        LOOP_FOR(fixed, count = encode_signed(f, t->target[i], 1, draw_of(t->words[i]), extra, FLAG);
                 code = split_code(f, count, extra, &left);
                 code = signed_zero(f, code, bits_of(floats[i]) == INT32_MIN ? f->sign_bit : 0); residual[i] = (int8_t)left;
                 floats[i] = isnan(floats[i]) ? floats[i] : decode_code(f, code).value * scale;)
    }
}

CLONED void store_weights(const Job *j, const Local *l, Tile *t)
{
    const Spec spec = *j->spec, *s = &spec;
    const Format *f = &spec.format;
    const int n = t->n, stochastic = s->writeback != WRITE_NEAREST, fixed = in_fixed_point(f, f->mantissa_bits);
    uint8_t *codes = (uint8_t *)j->weight + t->at;
    float *floats = (float *)j->weight + t->at;
    int32_t code;
    float y;
    if (s->storage == PLAIN) {
        LOOP(floats[i] = t->target[i];)
    } else if (s->storage == FREE) {
        LOOP(y = bounded(t->target[i], -f->largest, f->largest);
             floats[i] = y == t->x[i] ? floats[i] : y * l->scale;)
    } else if (s->writeback == WRITE_RESIDUAL8) {
        store_with_residual(j, l, t, 8);
    } else if (s->storage == GRID) {
        LOOP_FOR(stochastic, y = round_value(f, t->target[i], FLAG, FLAG ? draw_of(t->words[i]) : 0);
                 t->after[i] = y; floats[i] = y * l->scale;)
    } else if (s->writeback == WRITE_MOMENTUM) {
        LOOP_FOR(fixed, code = encode_finite(f, t->target[i], 1, draw_of(t->words[i]), FLAG);
             t->after[i] = decode_code(f, code).value;
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else if (stochastic) {
        LOOP_FOR(fixed, code = encode_finite(f, t->target[i], 1, draw_of(t->words[i]), FLAG);
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else {
        LOOP(code = encode_finite(f, t->target[i], 0, 0, 0);
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    }
}

/* ----------------------------------------------------------------------------------------------------- gradient */
/* The gradient with respect to the coordinates that the direction is taken in. */
CLONED void load_gradient(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
    const int n = t->n;
    const float *g = j->gradient + t->at, sign = s->maximize ? -1.0f : 1.0f, scale = l->scale * j->hyper.per_unit;
    if (s->storage == PLAIN || s->geometry == LINEAR)
        LOOP(t->gradient[i] = sign * g[i];)
    else if (s->metric == METRIC_ULP)
        LOOP(t->gradient[i] = sign * g[i] * (stiffness_at(l, t->x[i], METRIC_ULP) * scale);)
    else
        LOOP(t->gradient[i] = sign * g[i] * scale;)
}

/* ----------------------------------------------------------------------------------------------------- averages */
CLONED void load_averages(const Job *j, const Block *b, Tile *t)
{
    const int n = t->n, moments = j->spec->moments;
    float root;
    if (j->first && moments == FLOAT32) {
        const float *a = (const float *)j->first + t->at;
        LOOP(t->first[i] = a[i];)
    } else if (j->first && moments == BFLOAT16) {
        const uint16_t *a = (const uint16_t *)j->first + t->at;
        LOOP(t->first[i] = of_bfloat16(a[i]);)
    } else if (j->first && is_fitted(j->spec)) {
        const uint8_t *a = (const uint8_t *)j->first + t->at;
        LOOP(t->first[i] = decode_code(&MOMENTUM, a[i]).value * b->first;)
    } else if (j->first) {
        const uint8_t *a = (const uint8_t *)j->first + t->at;
        LOOP(t->first[i] = decode_code(&MOMENT, a[i]).value * b->first;)
    }
    if (j->second && moments == FLOAT32) {
        const float *a = (const float *)j->second + t->at;
        LOOP(t->second[i] = a[i];)
    } else if (j->second && moments == BFLOAT16) {
        const uint16_t *a = (const uint16_t *)j->second + t->at;
        LOOP(t->second[i] = of_bfloat16(a[i]);)
    } else if (j->second) {
        const uint8_t *a = (const uint8_t *)j->second + t->at;
        LOOP(root = decode_magnitude(&MOMENT, a[i], 0).value * b->second; t->second[i] = root * root;)
    }
}

CLONED void store_averages(const Job *j, const Block *b, Tile *t)
{
    const int n = t->n, moments = j->spec->moments, shift = j->first ? 16 : 0;
    if (j->first && moments == FLOAT32) {
        float *a = (float *)j->first + t->at;
        LOOP(a[i] = t->first[i];)
    } else if (j->first && moments == BFLOAT16) {
        uint16_t *a = (uint16_t *)j->first + t->at;
        LOOP(a[i] = to_bfloat16(t->first[i], t->words[i] & 0xFFFF);)
    } else if (j->first && is_fitted(j->spec)) {
        uint8_t *a = (uint8_t *)j->first + t->at;
        LOOP(a[i] = (uint8_t)to_fitted_codes(t->first[i], b->first_inverse, t->words[i]);)
    } else if (j->first) {
        uint8_t *a = (uint8_t *)j->first + t->at;
        LOOP(a[i] = to_codes(t->first[i], b->first_inverse, t->words[i] & 0xFFFF);)
    }
    if (j->second && moments == FLOAT32) {
        float *a = (float *)j->second + t->at;
        LOOP(a[i] = t->second[i];)
    } else if (j->second && moments == BFLOAT16) {
        uint16_t *a = (uint16_t *)j->second + t->at;
        LOOP(a[i] = to_bfloat16(t->second[i], (t->words[i] >> shift) & 0xFFFF);)
    } else if (j->second) {
        uint8_t *a = (uint8_t *)j->second + t->at;
        LOOP(a[i] = root_to_codes(t->root[i], b->second_inverse, t->words[i]);)
    }
}

/* ---------------------------------------------------------------------------------------------------- directions */
CLONED void adam(const Job *j, Tile *t)
{
    const Hyper hyper = j->hyper, *h = &hyper;
    const int n = t->n;
    float *largest = j->largest ? j->largest + t->at : NULL;
    LOOP(t->first[i] = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;)
    LOOP(t->second[i] = t->second[i] * h->beta2 + t->gradient[i] * h->gain2 * t->gradient[i];
         t->root[i] = sqrtf(t->second[i]);)
    if (largest)
        LOOP(largest[i] = largest[i] > t->second[i] ? largest[i] : t->second[i];
             t->denominator[i] = sqrtf(largest[i]) + h->eps;)
    else
        LOOP(t->denominator[i] = t->root[i] + h->eps;)
    LOOP(t->direction[i] = t->first[i] / t->denominator[i];)
}

/* The gradient or its momentum; Muon's adds the gradient in the share that the momentum takes of it. */
CLONED void sgd(const Job *j, Tile *t)
{
    const Hyper hyper = j->hyper, *h = &hyper;
    const int n = t->n;
    if (!j->first) {
        LOOP(t->direction[i] = t->gradient[i];)
        return;
    }
    LOOP(t->first[i] = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;)
    if (!j->spec->nesterov)
        LOOP(t->direction[i] = t->first[i];)
    else if (j->spec->direction == MUON)
        LOOP(t->direction[i] = t->gradient[i] * h->gain1 + t->first[i] * h->beta1;)
    else
        LOOP(t->direction[i] = t->gradient[i] + t->first[i] * h->beta1;)
}

CLONED void lion(const Job *j, Tile *t)
{
    const Hyper hyper = j->hyper, *h = &hyper;
    const int n = t->n;
    float mixed;
    LOOP(mixed = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;
         t->direction[i] = (float)((0.0f < mixed) - (mixed < 0.0f));
         t->first[i] = t->first[i] * h->beta2 + t->gradient[i] * h->gain2;)
}

/* ------------------------------------------------------------------------------------------------------ geometry */
#define MOVED(mode) \
    LOOP(t->target[i] = move_linear(t->x[i] * keep, t->direction[i] * factor_at(j, l, t->ulp[i], mode), l->rate);)

CLONED void move(const Job *job, const Local *local, Tile *t)
{
    const Spec spec = *job->spec, *s = &spec;
    const Local its_local = *local, *l = &its_local;
    Job its_job = *job;
    its_job.spec = &spec;
    const Job *j = &its_job;
    const int n = t->n, mode = s->stiffness, metric = s->metric;
    const float keep = s->decays ? j->hyper.keep : 1.0f;
    if (s->storage == PLAIN)
        LOOP(t->target[i] = move_linear(t->x[i] * keep, t->direction[i], j->hyper.rate);)
    else if (s->geometry == LINEAR && mode == FIELD_NONE)
        LOOP(t->target[i] = move_linear(t->x[i] * keep, t->direction[i], l->rate);)
    else if (s->geometry == LINEAR && mode == FIELD_LINEAR)
        MOVED(FIELD_LINEAR)
    else if (s->geometry == LINEAR && mode == FIELD_SQRT)
        MOVED(FIELD_SQRT)
    else if (s->geometry == LINEAR && mode == FIELD_SQUARE)
        MOVED(FIELD_SQUARE)
    else if (s->geometry == LINEAR)
        MOVED(FIELD_POWER)
    else if (s->geometry == TANGENT)
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], TANGENT, metric);)
    else if (metric == METRIC_ULP)
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], EXPONENTIAL, METRIC_ULP);)
    else
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], EXPONENTIAL, METRIC_EUCLIDEAN);)
}

/* The rounding error of the weights goes into the first average. */
CLONED void inject(const Job *job, const Local *local, Tile *t)
{
    const Spec spec = *job->spec, *s = &spec;
    const Local its_local = *local, *l = &its_local;
    Job its_job = *job;
    its_job.spec = &spec;
    const Job *j = &its_job;
    const int n = t->n;
    const float share = j->hyper.inject;
    float *error = t->after;
    if (s->geometry == LINEAR)
        LOOP(error[i] = (t->target[i] - t->after[i]) / l->inverse;)
    else if (s->metric == METRIC_ULP)
        LOOP(error[i] = chart_forward(l->chart, t->target[i]) - chart_forward(l->chart, t->after[i]);)
    else
        LOOP(error[i] = t->target[i] - t->after[i];)
    if (s->geometry == LINEAR && s->stiffness == FIELD_LINEAR)
        LOOP(error[i] = error[i] / factor_at(j, l, t->ulp[i], FIELD_LINEAR);)
    else if (s->geometry == LINEAR && s->stiffness)
        LOOP(error[i] = error[i] / factor_at(j, l, t->ulp[i], s->stiffness);)
    if (s->direction == ADAM)
        LOOP(error[i] = error[i] * t->denominator[i];)
    LOOP(t->first[i] = t->first[i] - error[i] * share;)
}
