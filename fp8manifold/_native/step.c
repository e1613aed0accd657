/* One step of many parameters, a tile of elements at a time: load, direction, move, store. */
#include <stddef.h>

#include "stages.h"
#include "threads.h"

#define LOOP(...) \
    for (int i = 0; i < n; i++) { \
        __VA_ARGS__ \
    }

/* Some elements of a row, as they pass from stage to stage. */
typedef struct {
    int n;
    int64_t at; /* position of the first in the parameter */
    float x[TILE], ulp[TILE], gradient[TILE], direction[TILE], target[TILE], after[TILE];
    float first[TILE], second[TILE], root[TILE], denominator[TILE];
    uint32_t words[TILE];
} Tile;

/* The scales of a block's averages, before and after the step. */
typedef struct {
    float first, first_inverse, second, second_inverse;
} Block;

/* ------------------------------------------------------------------------------------------------------ weights */
INLINE void load_weights(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
    const Format *f = &s->format;
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

INLINE void store_with_residual(const Job *j, const Local *l, Tile *t, int extra)
{
    const Format *f = &j->spec->format;
    const int n = t->n, fixed = in_fixed_point(f, f->mantissa_bits + extra);
    uint8_t *codes = (uint8_t *)j->weight + t->at;
    float *floats = (float *)j->weight + t->at;
    int8_t *residual = j->residual + t->at;
    int32_t count, left, code;
    if (j->spec->storage == CODES)
        LOOP(count = encode_signed(f, t->target[i], 1, draw_of(t->words[i]), extra, fixed);
             code = split_code(f, count, extra, &left); residual[i] = (int8_t)left;
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    else
        LOOP(count = encode_signed(f, t->target[i], 1, draw_of(t->words[i]), extra, fixed);
             code = split_code(f, count, extra, &left); residual[i] = (int8_t)left;
             floats[i] = isnan(floats[i]) ? floats[i] : decode_code(f, code).value * l->scale;)
}

INLINE void store_weights(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
    const Format *f = &s->format;
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
        LOOP(y = round_value(f, t->target[i], stochastic, stochastic ? draw_of(t->words[i]) : 0); t->after[i] = y;
             floats[i] = y * l->scale;)
    } else if (s->writeback == WRITE_MOMENTUM) {
        LOOP(code = encode_finite(f, t->target[i], 1, draw_of(t->words[i]), fixed);
             t->after[i] = decode_code(f, code).value;
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else if (stochastic) {
        LOOP(code = encode_finite(f, t->target[i], 1, draw_of(t->words[i]), fixed);
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    } else {
        LOOP(code = encode_finite(f, t->target[i], 0, 0, 0);
             codes[i] = (uint8_t)(is_special(f, codes[i]) ? codes[i] : code);)
    }
}

/* ----------------------------------------------------------------------------------------------------- gradient */
/* With respect to the coordinates that the direction is taken in. */
INLINE void load_gradient(const Job *j, const Local *l, Tile *t)
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
INLINE void load_averages(const Job *j, const Block *b, Tile *t)
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

INLINE void store_averages(const Job *j, const Block *b, Tile *t)
{
    const int n = t->n, moments = j->spec->moments, shift = j->first ? 16 : 0;
    if (moments != FLOAT32)
        LOOP(t->words[i] = random_word(j->average_keys, (uint32_t)(t->at + i));)
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
INLINE void adam(const Job *j, Tile *t)
{
    const Hyper *h = &j->hyper;
    const int n = t->n;
    float *largest = j->largest ? j->largest + t->at : NULL;
    LOOP(t->first[i] = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;
         t->second[i] = t->second[i] * h->beta2 + t->gradient[i] * h->gain2 * t->gradient[i];
         t->root[i] = sqrtf(t->second[i]);)
    if (largest)
        LOOP(largest[i] = largest[i] > t->second[i] ? largest[i] : t->second[i];
             t->denominator[i] = sqrtf(largest[i]) + h->eps;)
    else
        LOOP(t->denominator[i] = t->root[i] + h->eps;)
    LOOP(t->direction[i] = t->first[i] / t->denominator[i];)
}

/* The gradient or its momentum; Muon's adds the gradient in the share that the momentum takes of it. */
INLINE void sgd(const Job *j, Tile *t)
{
    const Hyper *h = &j->hyper;
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

INLINE void lion(const Job *j, Tile *t)
{
    const Hyper *h = &j->hyper;
    const int n = t->n;
    float mixed;
    LOOP(mixed = t->first[i] * h->beta1 + t->gradient[i] * h->gain1;
         t->direction[i] = (float)((0.0f < mixed) - (mixed < 0.0f));
         t->first[i] = t->first[i] * h->beta2 + t->gradient[i] * h->gain2;)
}

INLINE void madam(const Job *j, Tile *t)
{
    const Hyper *h = &j->hyper;
    const int n = t->n;
    LOOP(t->second[i] = t->second[i] * h->beta2 + t->gradient[i] * h->gain2 * t->gradient[i];
         t->root[i] = sqrtf(t->second[i]);
         t->direction[i] = bounded(t->gradient[i] * h->correction / (t->root[i] + h->eps), -h->largest, h->largest);)
}

/* ------------------------------------------------------------------------------------------------------ geometry */
#define MOVED(mode) \
    LOOP(t->target[i] = move_linear(t->x[i] * keep, t->direction[i] * factor_at(j, l, t->ulp[i], mode), l->rate);)

INLINE void move(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
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
INLINE void inject(const Job *j, const Local *l, Tile *t)
{
    const Spec *s = j->spec;
    const int n = t->n;
    float error;
    for (int i = 0; i < n; i++) {
        if (s->geometry == LINEAR) {
            error = (t->target[i] - t->after[i]) / l->inverse;
            if (s->stiffness)
                error = error / factor_at(j, l, t->ulp[i], s->stiffness);
        } else if (s->metric == METRIC_ULP) {
            error = chart_forward(l->chart, t->target[i]) - chart_forward(l->chart, t->after[i]);
        } else {
            error = t->target[i] - t->after[i];
        }
        if (s->direction == ADAM)
            error = error * t->denominator[i];
        t->first[i] = t->first[i] - error * j->hyper.inject;
    }
}

/* --------------------------------------------------------------------------------------------------------- tiles */
CLONED static void take_tile(const Job *j, const Local *l, const Block *b, Tile *t)
{
    const Spec *s = j->spec;
    const int n = t->n;
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
        LOOP(t->words[i] = random_word(j->weight_keys, (uint32_t)(t->at + i));)
    store_weights(j, l, t);
    if (rounds(s) && s->writeback == WRITE_MOMENTUM)
        inject(j, l, t);
    store_averages(j, b, t);
}

/* The largest gradient of a tile. */
CLONED static float largest_of(const Job *j, const Local *l, Tile *t)
{
    const int n = t->n;
    float largest = 0;
    if (j->spec->geometry == EXPONENTIAL || j->spec->geometry == TANGENT)
        load_weights(j, l, t);
    load_gradient(j, l, t);
    int32_t most_bits = 0;
    LOOP(most_bits = most(most_bits, bits_of(t->gradient[i]) & 0x7FFFFFFF);)
    largest = float_of(most_bits);
    return largest;
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
                take_tile(j, &l, &block, t);
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
