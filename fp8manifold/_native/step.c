/* One step of many parameters: rows cut into tiles, tiles taken by threads.
 *
 *     for each job (parameter)
 *         for each piece of this thread (a row, or 8192 elements of a long one)
 *             8-bit moments: all tiles once, for the largest gradient and the scales
 *             all tiles: take_tile, or the single loop of in_one_loop.c
 *
 * Which thread takes what changes nothing: draws go by an element's position, and
 * scales of moments belong to whole rows. */
#include <stddef.h>

#include "factors.h"
#include "threads.h"
#include "tile.h"

/* ---------------------------------------------------------------------------- tiles */
CLONED static void draw_words(const Keys *shared_keys, Tile *tile)
{
    const Keys keys = *shared_keys;
    const int n = tile->n;
    for (int i = 0; i < n; i++)
        tile->words[i] = random_word(keys, (uint32_t)(tile->start + i));
}

/* Take all stages of a step, one after the other. */
static void take_tile(const Job *job, const PerScale *per_scale, const BlockScales *block,
                      Tile *tile)
{
    const Spec *spec = job->spec;
    load_weights(job, per_scale, tile);
    load_gradient(job, per_scale, tile);
    load_moments(job, block, tile);
    if (spec->direction == ADAM)
        adam(job, tile);
    else if (spec->direction == LION)
        lion(job, tile);
    else
        sgd_or_muon(job, tile);
    move(job, per_scale, tile);
    if (is_rounded(spec) && spec->writeback != WRITE_NEAREST)
        draw_words(&job->weight_keys, tile);
    store_weights(job, per_scale, tile);
    if (is_rounded(spec) && spec->writeback == WRITE_MOMENTUM)
        inject(job, per_scale, tile);
    if (spec->moments != FLOAT32)
        draw_words(&job->moment_keys, tile);
    store_moments(job, block, tile);
}

/* What is true of some codes after a step: flags that are or-ed. */
enum { HAS_LAST_CODE = 1, IS_ALL_ZERO = 2 };

CLONED static int flags_of(const Format *format, const uint8_t *codes, int n)
{
    const uint8_t magnitude_mask = (uint8_t)(format->sign_bit - 1);
    const uint8_t last_code = (uint8_t)format->max_code;
    uint8_t has_last_code = 0;
    uint8_t all_bits = 0;
    for (int i = 0; i < n; i++) {
        const uint8_t code = codes[i] & magnitude_mask;
        has_last_code |= (uint8_t)(code == last_code);
        all_bits |= code;
    }
    return (has_last_code ? HAS_LAST_CODE : 0) | (all_bits ? 0 : IS_ALL_ZERO);
}

/* ---------------------------------------------------------- scales of 8-bit moments */
/* The largest magnitude. */
CLONED static float largest_magnitude(const float *x, int n)
{
    int32_t largest_bits = 0;
    for (int i = 0; i < n; i++)
        largest_bits = max_int(largest_bits, bits_of(x[i]) & 0x7FFFFFFF);
    return float_of(largest_bits);
}

/* The largest gradient of a tile, in the coordinates that the direction is taken in. */
static float largest_gradient(const Job *job, const PerScale *per_scale, Tile *tile)
{
    if (job->spec->geometry == LINEAR && !job->factors)
        return largest_magnitude(job->gradient + tile->start, tile->n);
    load_weights(job, per_scale, tile);
    load_gradient(job, per_scale, tile);
    return largest_magnitude(tile->gradient, tile->n);
}

/* The largest first moment of a tile after Muon's step, which does not depend on the
 * weights. */
static float largest_momentum(const Job *job, const PerScale *per_scale, const BlockScales *block,
                              Tile *tile)
{
    load_gradient(job, per_scale, tile);
    load_moments(job, block, tile);
    sgd_or_muon(job, tile);
    return largest_magnitude(tile->first, tile->n);
}

/* Scales from the bounds of a row's moments, which are advanced by its largest
 * gradient. */
static BlockScales advance_bounds(const Job *job, float largest, int64_t row)
{
    const Hyper *hyper = &job->hyper;
    const int is_lion = job->spec->direction == LION;
    BlockScales block = {1, 1, 1, 1};
    if (job->first_bound) {
        const float decay = is_lion ? hyper->beta2 : hyper->beta1;
        const float gain = fabsf(is_lion ? hyper->gain2 : hyper->gain1);
        const float bound = job->first_bound[row];
        const float new_bound = bound * decay + gain * largest;
        block.first = scale_of_bound(bound, 0);
        block.new_first_inverse = reciprocal(scale_of_bound(new_bound, 0));
        job->first_bound[row] = new_bound;
    }
    if (job->second_bound) {
        const float bound = job->second_bound[row];
        const float new_bound = bound * hyper->beta2 + fabsf(hyper->gain2) * (largest * largest);
        block.second = scale_of_bound(bound, 1);
        block.new_second_inverse = reciprocal(scale_of_bound(new_bound, 1));
        job->second_bound[row] = new_bound;
    }
    return block;
}

/* ---------------------------------------------------------------- scales of weights */
static int64_t scale_count(const Job *job)
{
    if (!job->scale)
        return 0;
    if (job->scales == ONE_SCALE)
        return 1;
    if (job->scales == SCALE_AN_ELEMENT)
        return job->rows * job->length;
    return job->rows / job->repeats;
}

static int all_powers_of_two(const Job *job)
{
    const int64_t count = scale_count(job);
    for (int64_t i = 0; i < count; i++)
        if (bits_of(job->scale[i]) & 0x7FFFFF)
            return 0;
    return 1;
}

static PerScale per_scale_at(const Job *job, int64_t row, int64_t position, int is_exact)
{
    float scale = 1.0f;
    if (job->scale && job->scales == ONE_SCALE)
        scale = job->scale[0];
    else if (job->scale && job->scales == SCALE_A_ROW)
        scale = job->scale[row / job->repeats];
    else if (job->scale)
        scale = job->scale[position];
    return per_scale_of(job, scale, is_exact);
}

/* ----------------------------------------------------------------------------- rows */
/* A run of a row's elements, from position `start` in the parameter up to `stop`. */
typedef struct {
    const Job *job;
    int64_t row, start, stop;
    int is_exact;       /* whether division by the scales is exact */
    PerScale per_scale; /* of the tile's elements */
} Run;

/* Put the tile at a position of a run; only one element where each has a scale. */
static void place_tile(Run *run, int64_t position, Tile *tile)
{
    const int64_t left = run->stop - position;
    tile->n = (int)(left < TILE ? left : TILE);
    tile->start = position;
    if (run->job->scales == SCALE_AN_ELEMENT) {
        tile->n = 1;
        run->per_scale = per_scale_at(run->job, run->row, position, run->is_exact);
    }
}

/* Scales of a whole row's 8-bit moments.  A fitted one has its scale from the row's
 * largest moment, before the step and after it; others from bounds. */
static BlockScales scales_of_moments(Run *run, Tile *tile)
{
    const Job *job = run->job;
    float largest = 0;
    if (!is_fitted(job->spec)) {
        for (int64_t at = run->start; at < run->stop; at += tile->n) {
            place_tile(run, at, tile);
            const float in_tile = largest_gradient(job, &run->per_scale, tile);
            largest = in_tile > largest ? in_tile : largest;
        }
        return advance_bounds(job, largest, run->row);
    }
    BlockScales block = {fitted_scale(job->first_bound[run->row]), 1, 1, 1};
    for (int64_t at = run->start; at < run->stop; at += tile->n) {
        place_tile(run, at, tile);
        const float in_tile = largest_momentum(job, &run->per_scale, &block, tile);
        largest = in_tile > largest ? in_tile : largest;
    }
    block.new_first_inverse = reciprocal(fitted_scale(largest));
    job->first_bound[run->row] = largest;
    return block;
}

static int has_blocks(const Job *job) { return job->first_bound || job->second_bound; }

/* Step the elements of a run: a whole row if its moments share a block. */
static void take_run(Run *run, Tile *tile)
{
    const Job *job = run->job;
    const Format *format = &job->spec->format;
    const TakeTile single_loop = in_one_loop(job);
    const TakeTile take = single_loop ? single_loop : take_tile;
    const uint8_t *codes = job->spec->storage == CODES ? job->weight : NULL;
    int flags = 0;
    BlockScales block = {1, 1, 1, 1};
    if (has_blocks(job))
        block = scales_of_moments(run, tile);
    for (int64_t at = run->start; at < run->stop; at += tile->n) {
        place_tile(run, at, tile);
        take(job, &run->per_scale, &block, tile);
        if (codes)
            flags |= flags_of(format, codes + at, tile->n);
    }
    if (flags & HAS_LAST_CODE)
        SET_FLAG(job->report + IS_SATURATED);
    if (flags & IS_ALL_ZERO)
        SET_FLAG(job->report + HAS_ZERO_TILE);
}

/* -------------------------------------------------------------------------- threads */
/* Elements that a thread takes at a time: a whole row where its moments share a block.
 */
static int64_t piece_length(const Job *job)
{
    const int64_t longest = 16 * TILE;
    return has_blocks(job) || job->length < longest ? job->length : longest;
}

typedef struct {
    const Job *jobs;
    int64_t count;
} Work;

/* Take one thread's pieces of each job: a run of them, or, of a job with fewer pieces
 * than threads, single ones in turn, so that many small jobs do not all fall to the
 * first thread. */
static void take_share(const void *context, int part, int parts)
{
    const Work *work = context;
    Tile tile;
    int64_t pieces_before = 0;
    for (int64_t k = 0; k < work->count; k++) {
        const Job *job = &work->jobs[k];
        const int64_t length = piece_length(job);
        const int64_t pieces_in_row = (job->length + length - 1) / length;
        const int64_t pieces = job->rows * pieces_in_row;
        const int is_exact = all_powers_of_two(job);
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int owner = pieces < parts ? (int)((pieces_before + piece) % parts)
                                             : (int)(piece * parts / pieces);
            if (owner != part)
                continue;
            const int64_t row = piece / pieces_in_row;
            const int64_t row_start = row * job->length;
            const int64_t start = piece % pieces_in_row * length;
            const int64_t stop = start + length < job->length ? start + length : job->length;
            Run run = {
                .job = job,
                .row = row,
                .start = row_start + start,
                .stop = row_start + stop,
                .is_exact = is_exact,
                .per_scale = per_scale_at(job, row, row_start, is_exact),
            };
            take_run(&run, &tile);
        }
        pieces_before += pieces;
    }
}

/* How many jobs to take together: all, or as many as a cache has the gradients of, which
 * Adafactor's steps read three times.  Where threads are started for each of the passes,
 * they are more. */
static int64_t count_together(const Job *jobs, int64_t count, int threads)
{
    const int64_t most = threads > 1 ? 1 << 20 : 1 << 18;
    int64_t elements = 0;
    int64_t together = 0;
    int has_factors = 0;
    for (int64_t k = 0; k < count; k++)
        has_factors |= jobs[k].factors != NULL;
    if (!has_factors)
        return count;
    while (together < count) {
        elements += jobs[together].rows * jobs[together].length;
        if (together && elements > most)
            break;
        together++;
    }
    return together;
}

EXPORT void fp8manifold_step(Job *jobs, int64_t count, int threads)
{
    while (count) {
        const int64_t together = count_together(jobs, count, threads);
        const Work work = {jobs, together};
        take_factors(jobs, together, threads);
        run_in_threads(take_share, &work, threads);
        jobs += together;
        count -= together;
    }
}
