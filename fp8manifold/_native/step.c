/* One step of many parameters, a tile of elements at a time: load, direction, move, store. */
#include <stddef.h>

#include "stages.h"
#include "threads.h"

#define LOOP(...) \
    for (int i = 0; i < n; i++) { \
        __VA_ARGS__ \
    }

/* A loop for each value of what is the same for all elements, so that no vector carries the choice. */
#define LOOP_FOR(flag, ...) \
    if (flag) { \
        enum { FLAG = 1 }; \
        LOOP(__VA_ARGS__) \
    } else { \
        enum { FLAG = 0 }; \
        LOOP(__VA_ARGS__) \
    }

/* Some elements of a row, as they pass from stage to stage. */
typedef struct {
    int n;
    int64_t at; /* position of the first in the parameter */
    float x[TILE], ulp[TILE], gradient[TILE], direction[TILE], target[TILE], after[TILE];
    float first[TILE], second[TILE], root[TILE], denominator[TILE];
    uint32_t words[TILE];
    int32_t codes[TILE], rest[TILE], first_codes[TILE], second_codes[TILE];
} Tile;

/* The scales of a block's averages, before and after the step. */
typedef struct {
    float first, first_inverse, second, second_inverse;
} Block;

/* ------------------------------------------------------------------------------------------------------ weights */
CLONED static void load_weights(const Job *j, const Local *l, Tile *t)
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
    else if (s->storage == CODES && s->writeback == WRITE_RESIDUAL4)
        LOOP(w = load_codes(f, codes[i], residual[i], 4); t->x[i] = w.value; t->ulp[i] = w.ulp;)
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
                 code = split_code(f, count, extra, &left); residual[i] = (int8_t)left;
                 codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else {
        LOOP_FOR(fixed, count = encode_signed(f, t->target[i], 1, draw_of(t->words[i]), extra, FLAG);
                 code = split_code(f, count, extra, &left); residual[i] = (int8_t)left;
                 floats[i] = isnan(floats[i]) ? floats[i] : decode_code(f, code).value * scale;)
    }
}

CLONED static void store_weights(const Job *j, const Local *l, Tile *t)
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
    } else if (s->writeback == WRITE_RESIDUAL4) {
        store_with_residual(j, l, t, 4);
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
/* With respect to the coordinates that the direction is taken in. */
CLONED static void load_gradient(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
    const int n = t->n;
    const float *g = j->gradient + t->at, sign = s->maximize ? -1.0f : 1.0f;
    if (s->storage == PLAIN || s->geometry == LINEAR || s->geometry == MULTIPLICATIVE)
        LOOP(t->gradient[i] = sign * g[i];)
    else if (s->metric == METRIC_ULP)
        LOOP(t->gradient[i] = sign * g[i] * (stiffness_at(l, t->x[i], METRIC_ULP) * l->scale);)
    else
        LOOP(t->gradient[i] = sign * g[i] * l->scale;)
}

/* ----------------------------------------------------------------------------------------------------- averages */
CLONED static void load_averages(const Job *j, const Block *b, Tile *t)
{
    const int n = t->n, moments = j->spec->moments;
    float root;
    if (j->first && moments == FLOAT32) {
        const float *a = (const float *)j->first + t->at;
        LOOP(t->first[i] = a[i];)
    } else if (j->first && moments == BFLOAT16) {
        const uint16_t *a = (const uint16_t *)j->first + t->at;
        LOOP(t->first[i] = of_bfloat16(a[i]);)
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

CLONED static void store_averages(const Job *j, const Block *b, Tile *t)
{
    const int n = t->n, moments = j->spec->moments, shift = j->first ? 16 : 0;
    if (j->first && moments == FLOAT32) {
        float *a = (float *)j->first + t->at;
        LOOP(a[i] = t->first[i];)
    } else if (j->first && moments == BFLOAT16) {
        uint16_t *a = (uint16_t *)j->first + t->at;
        LOOP(a[i] = to_bfloat16(t->first[i], t->words[i] & 0xFFFF);)
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
        LOOP(a[i] = root_to_codes(t->root[i], b->second_inverse, (t->words[i] >> shift) & 0xFFFF);)
    }
}

/* ---------------------------------------------------------------------------------------------------- directions */
CLONED static void adam(const Job *j, Tile *t)
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
CLONED static void sgd(const Job *j, Tile *t)
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

CLONED static void lion(const Job *j, Tile *t)
{
    const Hyper hyper = j->hyper, *h = &hyper;
    const int n = t->n;
    float mixed;
    LOOP(mixed = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;
         t->direction[i] = (float)((0.0f < mixed) - (mixed < 0.0f));
         t->first[i] = t->first[i] * h->beta2 + t->gradient[i] * h->gain2;)
}

CLONED static void madam(const Job *j, Tile *t)
{
    const Hyper hyper = j->hyper, *h = &hyper;
    const int n = t->n;
    LOOP(t->second[i] = t->second[i] * h->beta2 + t->gradient[i] * h->gain2 * t->gradient[i];
         t->root[i] = sqrtf(t->second[i]);
         t->direction[i] = bounded(t->gradient[i] * h->correction / (t->root[i] + h->eps), -h->largest, h->largest);)
}

/* ------------------------------------------------------------------------------------------------------ geometry */
#define MOVED(mode) \
    LOOP(t->target[i] = move_linear(t->x[i] * keep, t->direction[i] * factor_at(j, l, t->ulp[i], mode), l->rate);)

CLONED static void move(const Job *job, const Local *local, Tile *t)
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
    else if (s->geometry == MULTIPLICATIVE)
        LOOP(t->target[i] = move_by_factor(t->x[i] * keep, t->direction[i] * j->hyper.rate, l->floor);)
    else if (s->geometry == TANGENT)
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], TANGENT, metric);)
    else if (metric == METRIC_ULP)
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], EXPONENTIAL, METRIC_ULP);)
    else
        LOOP(t->target[i] = move_on_chart(j, l, t->x[i] * keep, t->direction[i], EXPONENTIAL, METRIC_EUCLIDEAN);)
}

/* What the rounding took from the weights goes into the first average. */
CLONED static void inject(const Job *job, const Local *local, Tile *t)
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

/* -------------------------------------------------------------------------------------------------- in one loop */
/* Adam over codes, the stages of an element one after another: what most people run, in a third of the time. */
INLINE void adam_over_codes(const Job *j, const Local *l, const Block *b, Tile *t, int writeback, int moments,
                            int stiffness)
{
    const Format format = usual_format(&j->spec->format), *f = &format;
    const Hyper hyper = j->hyper, *h = &hyper;
    const Keys weight_keys = j->weight_keys, average_keys = j->average_keys;
    const int extra = writeback == WRITE_RESIDUAL8 ? 8 : 0, n = t->n;
    const uint32_t at = (uint32_t)t->at;
    const float gain1 = j->spec->maximize ? -h->gain1 : h->gain1, keep = j->spec->decays ? h->keep : 1.0f;
    const float scale = l->scale, rate = l->rate;
    const float first_scale = b->first, second_scale = b->second;
    const float first_inverse = b->first_inverse, second_inverse = b->second_inverse;
    uint8_t *codes = (uint8_t *)j->weight + t->at;
    int8_t *residual = j->residual + t->at;
    uint8_t *first_codes = (uint8_t *)j->first + t->at, *second_codes = (uint8_t *)j->second + t->at;
    const float *restrict gradient = j->gradient + t->at;
    float *restrict first = (float *)j->first + t->at, *restrict second = (float *)j->second + t->at;
    /* bytes are widened and narrowed in loops of their own: in one with floats, vectors of four sizes crowd each other */
    int32_t *restrict code = t->codes, *restrict rest = t->rest;
    int32_t *restrict first_code = t->first_codes, *restrict second_code = t->second_codes;
    LOOP(code[i] = codes[i];)
    if (extra)
        LOOP(rest[i] = residual[i];)
    if (moments == EIGHT_BITS)
        LOOP(first_code[i] = first_codes[i]; second_code[i] = second_codes[i];)
    for (int i = 0; i < n; i++) {
        const int32_t old = code[i];
        const Decoded w = load_codes(f, old, extra ? rest[i] : 0, extra);
        const float g = gradient[i];
        float m, v, root;
        if (moments == EIGHT_BITS) {
            m = decode_code(&MOMENT, first_code[i]).value * first_scale;
            root = decode_magnitude(&MOMENT, second_code[i], 0).value * second_scale;
            v = root * root;
        } else {
            m = first[i];
            v = second[i];
        }
        m = m * h->beta1 + g * gain1;
        v = v * h->beta2 + g * h->gain2 * g;
        root = sqrtf(v);
        float direction = m / (root + h->eps);
        if (stiffness)
            direction = direction * field_factor(h, FIELD_LINEAR, w.ulp * scale);
        const float target = move_linear(w.value * keep, direction, rate);
        const int32_t draw = writeback ? draw_of(random_word(weight_keys, at + (uint32_t)i)) : 0;
        int32_t new;
        if (extra)
            new = split_code(f, encode_signed(f, target, 1, draw, extra, 0), extra, &rest[i]);
        else
            new = encode_finite(f, target, writeback, draw, 1);
        code[i] = new;
        if (moments == EIGHT_BITS) {
            const uint32_t word = random_word(average_keys, at + (uint32_t)i);
            first_code[i] = to_codes(m, first_inverse, word & 0xFFFF);
            second_code[i] = root_to_codes(root, second_inverse, word >> 16);
        } else {
            first[i] = m;
            second[i] = v;
        }
    }
    const uint8_t without_sign = (uint8_t)(f->sign_bit - 1), top = (uint8_t)(f->many_nans ? f->max_code : 255);
    LOOP(codes[i] = (uint8_t)(codes[i] & without_sign) > top ? codes[i] : (uint8_t)code[i];)
    if (extra)
        LOOP(residual[i] = (int8_t)rest[i];)
    if (moments == EIGHT_BITS)
        LOOP(first_codes[i] = (uint8_t)first_code[i]; second_codes[i] = (uint8_t)second_code[i];)
}

typedef void (*InOneLoop)(const Job *, const Local *, const Block *, Tile *);

#define IN_ONE_LOOP(name, writeback, moments, stiffness) \
    CLONED static void name(const Job *j, const Local *l, const Block *b, Tile *t) \
    { \
        adam_over_codes(j, l, b, t, writeback, moments, stiffness); \
    }

IN_ONE_LOOP(adam_nearest, WRITE_NEAREST, FLOAT32, FIELD_NONE)
IN_ONE_LOOP(adam_stochastic, WRITE_STOCHASTIC, FLOAT32, FIELD_NONE)
IN_ONE_LOOP(adam_residual, WRITE_RESIDUAL8, FLOAT32, FIELD_NONE)
IN_ONE_LOOP(adam_nearest_field, WRITE_NEAREST, FLOAT32, FIELD_LINEAR)
IN_ONE_LOOP(adam_stochastic_field, WRITE_STOCHASTIC, FLOAT32, FIELD_LINEAR)
IN_ONE_LOOP(adam_residual_field, WRITE_RESIDUAL8, FLOAT32, FIELD_LINEAR)
IN_ONE_LOOP(adam8_nearest, WRITE_NEAREST, EIGHT_BITS, FIELD_NONE)
IN_ONE_LOOP(adam8_stochastic, WRITE_STOCHASTIC, EIGHT_BITS, FIELD_NONE)
IN_ONE_LOOP(adam8_residual, WRITE_RESIDUAL8, EIGHT_BITS, FIELD_NONE)
IN_ONE_LOOP(adam8_nearest_field, WRITE_NEAREST, EIGHT_BITS, FIELD_LINEAR)
IN_ONE_LOOP(adam8_stochastic_field, WRITE_STOCHASTIC, EIGHT_BITS, FIELD_LINEAR)
IN_ONE_LOOP(adam8_residual_field, WRITE_RESIDUAL8, EIGHT_BITS, FIELD_LINEAR)

/* By moments, stiffness and write-back. */
static const InOneLoop ADAMS[2][2][3] = {
    {{adam_nearest, adam_stochastic, adam_residual}, {adam_nearest_field, adam_stochastic_field, adam_residual_field}},
    {{adam8_nearest, adam8_stochastic, adam8_residual},
     {adam8_nearest_field, adam8_stochastic_field, adam8_residual_field}},
};

/* The loop that takes all of a step, where there is one. */
static InOneLoop in_one_loop(const Job *j)
{
    const Spec *s = j->spec;
    if (s->direction != ADAM || s->storage != CODES || s->geometry != LINEAR || s->metric != METRIC_ULP ||
        s->moments == BFLOAT16 || s->stiffness > FIELD_LINEAR || s->writeback > WRITE_RESIDUAL8 || j->largest ||
        !is_usual(&s->format))
        return NULL;
    return ADAMS[s->moments == EIGHT_BITS][s->stiffness][s->writeback];
}

/* --------------------------------------------------------------------------------------------------------- tiles */
CLONED static void draw_words(const Keys *given, Tile *t)
{
    const Keys keys = *given;
    const int n = t->n;
    LOOP(t->words[i] = random_word(keys, (uint32_t)(t->at + i));)
}

static void take_tile(const Job *j, const Local *l, const Block *b, Tile *t)
{
    const Spec *s = j->spec;
    load_weights(j, l, t);
    load_gradient(j, l, t);
    load_averages(j, b, t);
    if (s->direction == ADAM)
        adam(j, t);
    else if (s->direction == LION)
        lion(j, t);
    else if (s->direction == MADAM)
        madam(j, t);
    else
        sgd(j, t);
    move(j, l, t);
    if (rounds(s) && s->writeback != WRITE_NEAREST)
        draw_words(&j->weight_keys, t);
    store_weights(j, l, t);
    if (rounds(s) && s->writeback == WRITE_MOMENTUM)
        inject(j, l, t);
    if (s->moments != FLOAT32)
        draw_words(&j->average_keys, t);
    store_averages(j, b, t);
}

/* The bits of the largest magnitude. */
CLONED static int32_t largest_bits(const float *x, int n)
{
    int32_t largest = 0;
    LOOP(largest = most(largest, bits_of(x[i]) & 0x7FFFFFFF);)
    return largest;
}

/* The largest gradient of a tile, with respect to the coordinates that the direction is taken in. */
static float largest_of(const Job *j, const Local *l, Tile *t)
{
    if (j->spec->geometry == LINEAR || j->spec->geometry == MULTIPLICATIVE)
        return float_of(largest_bits(j->gradient + t->at, t->n));
    load_weights(j, l, t);
    load_gradient(j, l, t);
    return float_of(largest_bits(t->gradient, t->n));
}

/* Advance the bounds of a row's averages. */
static Block next_block(const Job *j, float largest, int64_t row)
{
    const Hyper *h = &j->hyper;
    const int lion = j->spec->direction == LION;
    Block b = {1, 1, 1, 1};
    if (j->first_bound) {
        const float decay = lion ? h->beta2 : h->beta1, gain = fabsf(lion ? h->gain2 : h->gain1);
        const float before = j->first_bound[row], after = before * decay + gain * largest;
        b.first = scale_of_bound(before, 0);
        b.first_inverse = reciprocal(scale_of_bound(after, 0));
        j->first_bound[row] = after;
    }
    if (j->second_bound) {
        const float before = j->second_bound[row], after = before * h->beta2 + fabsf(h->gain2) * (largest * largest);
        b.second = scale_of_bound(before, 1);
        b.second_inverse = reciprocal(scale_of_bound(after, 1));
        j->second_bound[row] = after;
    }
    return b;
}

static int all_powers_of_two(const Job *j)
{
    const int64_t count = !j->scale                       ? 0
                          : j->scales == ONE_SCALE        ? 1
                          : j->scales == SCALE_AN_ELEMENT ? j->rows * j->length
                                                          : j->rows / j->repeats;
    for (int64_t i = 0; i < count; i++)
        if (bits_of(j->scale[i]) & 0x7FFFFF)
            return 0;
    return 1;
}

static Local local_at(const Job *j, int64_t row, int64_t at, int exact)
{
    if (!j->scale)
        return local_to(j, 1.0f, exact);
    return local_to(j, j->scale[j->scales == ONE_SCALE ? 0 : j->scales == SCALE_A_ROW ? row / j->repeats : at], exact);
}

/* Elements start to stop of a row; all of it where its averages share a block. */
static void take_row(const Job *j, int64_t row, int64_t start, int64_t stop, int exact, Tile *t)
{
    const int each = j->scales == SCALE_AN_ELEMENT, in_blocks = j->first_bound || j->second_bound;
    const int64_t first = row * j->length;
    const InOneLoop loop = in_one_loop(j);
    Block block = {1, 1, 1, 1};
    Local l = local_at(j, row, first, exact);
    float largest = 0;
    for (int pass = in_blocks ? 0 : 1; pass < 2; pass++) {
        for (int64_t at = first + start; at < first + stop; at += t->n) {
            const int64_t left = first + stop - at;
            t->n = each ? 1 : (int)(left < TILE ? left : TILE);
            t->at = at;
            if (each)
                l = local_at(j, row, at, exact);
            if (pass == 1) {
                (loop ? loop : take_tile)(j, &l, &block, t);
                continue;
            }
            const float here = largest_of(j, &l, t);
            largest = here > largest ? here : largest;
        }
        if (pass == 0)
            block = next_block(j, largest, row);
    }
}

/* Parts that a job can be cut into: rows, or pieces of them. */
static int64_t pieces_of(const Job *j, int64_t *length)
{
    const int64_t piece = 16 * TILE;
    *length = j->first_bound || j->second_bound || j->length < piece ? j->length : piece;
    return j->rows * ((j->length + *length - 1) / *length);
}

typedef struct {
    const Job *jobs;
    int64_t count;
} Work;

/* One thread's share: every thread takes its run of the pieces of each job. */
static void take_share(const void *context, int part, int parts)
{
    const Work *work = context;
    Tile tile;
    int64_t before = 0; /* so that many small jobs do not all fall to the first */
    for (int64_t k = 0; k < work->count; k++) {
        const Job *j = &work->jobs[k];
        int64_t length;
        const int64_t pieces = pieces_of(j, &length), in_row = pieces / j->rows;
        const int exact = all_powers_of_two(j);
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int owner = pieces < parts ? (int)((before + piece) % parts) : (int)(piece * parts / pieces);
            if (owner != part)
                continue;
            const int64_t start = piece % in_row * length;
            const int64_t stop = start + length < j->length ? start + length : j->length;
            take_row(j, piece / in_row, start, stop, exact, &tile);
        }
        before += pieces;
    }
}

EXPORT void fp8manifold_step(const Job *jobs, int64_t count, int threads)
{
    const Work work = {jobs, count};
    run_in_threads(take_share, &work, threads);
}

EXPORT int64_t fp8manifold_sizes(int which) { return which ? (int64_t)sizeof(Spec) : (int64_t)sizeof(Job); }

/* ---------------------------------------------------------------------------------------------------- gradients */
/* The sum of the squares of some arrays, as float32: Inf or NaN where any of them is, and else finite unless the sum
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
