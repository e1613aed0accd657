/* One step of many parameters: tiles of rows, each stage after the other. */
#include <stddef.h>

#include "threads.h"
#include "tile.h"

/* --------------------------------------------------------------------------------------------------------- tiles */
CLONED static void draw_words(const Keys *given, Tile *t)
{
    const Keys keys = *given;
    const int n = t->n;
    LOOP(t->words[i] = random_word(keys, (uint32_t)(t->at + i));)
}

/* Whether one of the codes is that of the largest magnitude, and, as 2, whether all are 0. */
CLONED static int ends_of(const Format *f, const uint8_t *codes, int n)
{
    const uint8_t magnitude = (uint8_t)(f->sign_bit - 1), last = (uint8_t)f->max_code;
    uint8_t found = 0, any = 0;
    LOOP(const uint8_t code = codes[i] & magnitude; found |= (uint8_t)(code == last); any |= code;)
    return found | (any ? 0 : 2);
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
    if (j->spec->geometry == LINEAR)
        return float_of(largest_bits(j->gradient + t->at, t->n));
    load_weights(j, l, t);
    load_gradient(j, l, t);
    return float_of(largest_bits(t->gradient, t->n));
}

/* The largest magnitude of a tile's average after the step, which does not depend on the weights. */
static float largest_average(const Job *j, const Local *l, const Block *b, Tile *t)
{
    load_gradient(j, l, t);
    load_averages(j, b, t);
    sgd(j, t);
    return float_of(largest_bits(t->first, t->n));
}

/* Fit a row's average: its scale is known before the step, and 1 over the next one once the largest magnitude is. */
static Block fitted_block(const Job *j, int64_t row)
{
    return (Block){fitted_scale(j->first_bound[row]), 1, 1, 1};
}

static void refit_block(const Job *j, Block *b, float largest, int64_t row)
{
    b->first_inverse = reciprocal(fitted_scale(largest));
    j->first_bound[row] = largest;
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
    const int fitted = is_fitted(j->spec) && in_blocks;
    Block block = fitted ? fitted_block(j, row) : (Block){1, 1, 1, 1};
    Local l = local_at(j, row, first, exact);
    const uint8_t *codes = j->spec->storage == CODES ? j->weight : NULL;
    float largest = 0;
    int reached = 0;
    for (int pass = in_blocks ? 0 : 1; pass < 2; pass++) {
        for (int64_t at = first + start; at < first + stop; at += t->n) {
            const int64_t left = first + stop - at;
            t->n = each ? 1 : (int)(left < TILE ? left : TILE);
            t->at = at;
            if (each)
                l = local_at(j, row, at, exact);
            if (pass == 1) {
                (loop ? loop : take_tile)(j, &l, &block, t);
                reached |= codes ? ends_of(&j->spec->format, codes + at, t->n) : 0;
                continue;
            }
            const float here = fitted ? largest_average(j, &l, &block, t) : largest_of(j, &l, t);
            largest = here > largest ? here : largest;
        }
        if (pass == 0 && fitted)
            refit_block(j, &block, largest, row);
        else if (pass == 0)
            block = next_block(j, largest, row);
    }
    if (reached & 1)
        SET(j->reached);
    if (reached & 2)
        SET(j->reached + 1);
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
