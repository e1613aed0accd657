/* Adafactor's second moment: its statistics, and the factors of a gradient that follow.
 * fp8manifold/optim/_factors.py and _factored.py define them; this is their twin.
 *
 *     first pass    squares of gradients and weights   sums of tiles of rows, and of columns
 *     then          averages in the state              factors of rows and columns
 *     second pass   squares of directions              sums of tiles of rows
 *     then          root mean squares                  factors clipped, rate by the size
 *
 * A sum has one order, whatever a thread takes: a tile of a row by halves, everything
 * else in runs of 32, and runs of runs. */
#include <float.h>
#include <stddef.h>

#include "factors.h"
#include "threads.h"

#define RUN 32

/* ----------------------------------------------------------------------------- sums */
/* What is summed: squares; squares, of which each is added to the sum of its column as well;
 * or squares of gradients times their factors. */
typedef enum { SQUARES, SQUARES_AND_COLUMNS, DIRECTIONS } Summand;

/* Numbers, and what a summand needs beside them. */
typedef struct {
    const float *restrict x;
    float *restrict column_sums;  /* SQUARES_AND_COLUMNS */
    const float *restrict column; /* DIRECTIONS, and so the next two */
    float row, cap;
} Terms;

INLINE float square_at(const Terms *terms, int i, int width, Summand summand)
{
    (void)width;
    if (summand != DIRECTIONS) {
        const float square = terms->x[i] * terms->x[i];
        if (summand == SQUARES_AND_COLUMNS)
            terms->column_sums[i] += square;
        return square;
    }
    const float factor = terms->row * terms->column[i];
    const float product = terms->x[i] * (factor < terms->cap ? factor : terms->cap);
    return product * product;
}

/* One function for each level at which the upper half of a tile is added to the lower
 * one.  They are called from the last level to the first, so that a few registers hold
 * what is under way, and no half is written to memory.  `width` is a constant. */
#define ADD_HALF(name, level_before, half) \
    INLINE float name(const Terms *terms, int i, int width, Summand summand) \
    { \
        const float lower = level_before(terms, i, width, summand); \
        if (width <= half) \
            return lower; \
        return lower + level_before(terms, i + half, width, summand); \
    }

ADD_HALF(sum_at_256, square_at, 256)
ADD_HALF(sum_at_128, sum_at_256, 128)
ADD_HALF(sum_at_64, sum_at_128, 64)
ADD_HALF(sum_at_32, sum_at_64, 32)
ADD_HALF(sum_at_16, sum_at_32, 16)

INLINE void add_upper_half(float *x, const int half)
{
    for (int i = 0; i < half; i++)
        x[i] += x[half + i];
}

/* The sum by halves of `width` squares, a power of two from 16 to 512. */
INLINE float sum_of_terms(const Terms *terms, int width, Summand summand)
{
    float sums[16];
    for (int i = 0; i < 16; i++)
        sums[i] = sum_at_16(terms, i, width, summand);
    add_upper_half(sums, 8);
    add_upper_half(sums, 4);
    add_upper_half(sums, 2);
    return sums[0] + sums[1];
}

/* The sum by halves of the squares of a tile.  Fewer numbers than a power of two are
 * copied, with zeros after them. */
CLONED static float sum_of_squares(const float *x, int n)
{
    float copy[TILE];
    int width = 16;
    while (width < n)
        width *= 2;
    if (n < width) {
        for (int i = 0; i < n; i++)
            copy[i] = x[i];
        for (int i = n; i < width; i++)
            copy[i] = 0.0f;
        x = copy;
    }
    const Terms terms = {.x = x};
    switch (width) {
    case 16:
        return sum_of_terms(&terms, 16, SQUARES);
    case 32:
        return sum_of_terms(&terms, 32, SQUARES);
    case 64:
        return sum_of_terms(&terms, 64, SQUARES);
    case 128:
        return sum_of_terms(&terms, 128, SQUARES);
    case 256:
        return sum_of_terms(&terms, 256, SQUARES);
    default:
        return sum_of_terms(&terms, 512, SQUARES);
    }
}

/* The same, and each square is added to the sum of its column. */
CLONED static float sum_and_add_squares(const float *restrict x, float *restrict column_sums, int n)
{
    if (n == TILE) {
        const Terms terms = {.x = x, .column_sums = column_sums};
        return sum_of_terms(&terms, TILE, SQUARES_AND_COLUMNS);
    }
    for (int i = 0; i < n; i++)
        column_sums[i] += x[i] * x[i];
    return sum_of_squares(x, n);
}

/* The sum in runs, and runs of runs, which overwrites the numbers. */
static float sum_in_runs(float *x, int64_t n)
{
    while (n > 1) {
        int64_t runs = 0;
        for (int64_t start = 0; start < n; start += RUN) {
            const int64_t stop = start + RUN < n ? start + RUN : n;
            float total = x[start];
            for (int64_t i = start + 1; i < stop; i++)
                total += x[i];
            x[runs++] = total;
        }
        n = runs;
    }
    return x[0];
}

/* The same for each column of rows. */
CLONED static void sum_rows_in_runs(float *x, int64_t n, int64_t columns)
{
    while (n > 1) {
        int64_t runs = 0;
        for (int64_t start = 0; start < n; start += RUN) {
            const int64_t stop = start + RUN < n ? start + RUN : n;
            float *total = x + runs++ * columns;
            if (start)
                memmove(total, x + start * columns, (size_t)columns * sizeof *x);
            for (int64_t row = start + 1; row < stop; row++) {
                const float *other = x + row * columns;
                for (int64_t i = 0; i < columns; i++)
                    total[i] += other[i];
            }
        }
        n = runs;
    }
}

INLINE float mean_of(float total, int64_t count)
{
    return (total < FLT_MAX ? total : FLT_MAX) / (float)count;
}

INLINE float inverse_root(float x) { return 1.0f / sqrtf(x); }

/* ------------------------------------------------------------------------ positions */
static int64_t tiles_in_row(const Factors *factors) { return (factors->columns + TILE - 1) / TILE; }

static int64_t runs_of_matrix(const Factors *factors) { return (factors->rows + RUN - 1) / RUN; }

/* A run of rows of a matrix: what a thread takes at a time. */
typedef struct {
    int64_t matrix;
    int64_t row, stop; /* rows, of all matrices */
    float *column_sums;
} RowRun;

static int64_t run_count(const Factors *factors)
{
    return factors->matrices * runs_of_matrix(factors);
}

static RowRun run_at(const Factors *factors, int64_t i)
{
    RowRun run;
    run.matrix = i / runs_of_matrix(factors);
    const int64_t first = i % runs_of_matrix(factors) * RUN;
    const int64_t left = factors->rows - first;
    run.row = run.matrix * factors->rows + first;
    run.stop = run.row + (left < RUN ? left : RUN);
    run.column_sums = factors->column_sums + i * factors->columns;
    return run;
}

/* --------------------------------------------------------------------------- passes */
/* Magnitudes of codes times a scale; those that are NaN or Inf count as 0. */
CLONED static void load_codes(const Format *shared_format, const uint8_t *restrict codes,
                              float *restrict value, int n, float scale)
{
    const Format format = *shared_format;
    const uint8_t sign_bit = (uint8_t)format.sign_bit;
    for (int i = 0; i < n; i++) {
        const int32_t magnitude = codes[i] & (sign_bit - 1);
        const float x = decode_magnitude(&format, magnitude, 0).value * scale;
        value[i] = is_special(&format, codes[i]) ? 0.0f : x;
    }
}

CLONED static void load_floats(const float *floats, float *value, int n)
{
    for (int i = 0; i < n; i++)
        value[i] = fabsf(floats[i]) <= FLT_MAX ? floats[i] : 0.0f;
}

/* Magnitudes of weights as they are stored, in value and without a residual, in
 * tile->value. */
static void load_values(const Job *job, Tile *tile)
{
    const int n = tile->n;
    const int64_t start = tile->start;
    if (job->spec->storage != CODES) {
        load_floats((const float *)job->weight + start, tile->value, n);
        return;
    }
    const uint8_t *codes = (const uint8_t *)job->weight + start;
    if (job->scales == ONE_SCALE) {
        load_codes(&job->spec->format, codes, tile->value, n, job->scale[0]);
        return;
    }
    for (int i = 0; i < n;) {
        const int64_t position = start + i;
        int64_t run = 1;
        int64_t place = position;
        if (job->scales == SCALE_A_ROW) {
            run = job->length - position % job->length;
            place = position / job->length / job->repeats;
        }
        if (run > n - i)
            run = n - i;
        load_codes(&job->spec->format, codes + i, tile->value + i, (int)run, job->scale[place]);
        i += (int)run;
    }
}

/* Place the tile at some columns of a row. */
static void place_tile(const Factors *factors, int64_t row, int64_t column, Tile *tile)
{
    const int64_t left = factors->columns - column;
    tile->n = (int)(left < TILE ? left : TILE);
    tile->start = row * factors->columns + column;
}

/* How far ahead of a tile gradients are asked for.  A tile is read by halves, an order in which
 * a processor does not see what comes next. */
#define AHEAD (2 * TILE)
/* Floats of a cache line. */
#define LINE 16

INLINE void prefetch_gradient(const Job *job, const Tile *tile, int64_t end)
{
    const int64_t first = tile->start + AHEAD;
    const int64_t last = first + tile->n < end ? first + tile->n : end;
    for (int64_t i = first; i < last; i += LINE)
        PREFETCH(job->gradient + i);
}

/* Columns whose sums stay in the first-level cache from one row to the next. */
#define PANEL (4 * TILE)

/* The first pass over a run, a panel of columns after the other. */
static void sum_statistics(const Job *job, const RowRun *run, Tile *tile)
{
    const Factors *factors = job->factors;
    const int64_t tiles = tiles_in_row(factors);
    const int64_t end = run->stop * factors->columns;
    memset(run->column_sums, 0, (size_t)factors->columns * sizeof *run->column_sums);
    for (int64_t panel = 0; panel < factors->columns; panel += PANEL) {
        const int64_t left = factors->columns - panel;
        const int64_t stop = panel + (left < PANEL ? left : PANEL);
        for (int64_t row = run->row; row < run->stop; row++) {
            for (int64_t column = panel; column < stop; column += TILE) {
                const int64_t place = row * tiles + column / TILE;
                place_tile(factors, row, column, tile);
                prefetch_gradient(job, tile, end);
                factors->sums[place] = sum_and_add_squares(job->gradient + tile->start,
                                                           run->column_sums + column, tile->n);
                load_values(job, tile);
                factors->weight_sums[place] = sum_of_squares(tile->value, tile->n);
            }
        }
    }
}

/* The sum by halves of the squares of a tile's gradient times its factors. */
CLONED static float sum_of_directions(const Terms *shared_terms, int n)
{
    const Terms terms = *shared_terms;
    if (n == TILE)
        return sum_of_terms(&terms, TILE, DIRECTIONS);
    float products[TILE];
    multiply_by_factors(terms.x, products, n, terms.row, terms.column, terms.cap, 1.0f);
    return sum_of_squares(products, n);
}

/* The second pass over a run. */
static void sum_directions(const Job *job, const RowRun *run, Tile *tile)
{
    const Factors *factors = job->factors;
    const float *columns = factors->column + run->matrix * factors->columns;
    const int64_t end = run->stop * factors->columns;
    int64_t place = run->row * tiles_in_row(factors);
    for (int64_t row = run->row; row < run->stop; row++) {
        for (int64_t column = 0; column < factors->columns; column += TILE) {
            place_tile(factors, row, column, tile);
            prefetch_gradient(job, tile, end);
            const Terms terms = {.x = job->gradient + tile->start,
                                 .column = columns + column,
                                 .row = factors->row[row],
                                 .cap = factors->cap};
            factors->sums[place++] = sum_of_directions(&terms, tile->n);
        }
    }
}

/* ------------------------------------------------------------------- between passes */
/* Sums of rows, in place of those of their tiles. */
static void sum_tiles(const Factors *factors, float *sums)
{
    const int64_t tiles = tiles_in_row(factors);
    const int64_t rows = factors->matrices * factors->rows;
    for (int64_t row = 0; row < rows; row++)
        sums[row] = sum_in_runs(sums + row * tiles, tiles);
}

/* Advance the averages of a matrix's columns. */
CLONED static void advance_columns(const Job *job, int64_t matrix)
{
    const Factors *factors = job->factors;
    const float beta2 = job->hyper.beta2, gain2 = job->hyper.gain2;
    const int64_t columns = factors->columns;
    const int64_t runs = runs_of_matrix(factors);
    float *sums = factors->column_sums + matrix * runs * columns;
    float *restrict means = factors->column_means + matrix * columns;
    float *restrict column = factors->column + matrix * columns;
    sum_rows_in_runs(sums, runs, columns);
    for (int64_t i = 0; i < columns; i++) {
        means[i] = means[i] * beta2 + mean_of(sums[i], factors->rows) * gain2;
        column[i] = inverse_root(means[i]);
    }
}

/* Advance the averages of a matrix's rows; a vector has none. */
CLONED static void advance_rows(const Job *job, int64_t matrix)
{
    const Factors *factors = job->factors;
    const float beta2 = job->hyper.beta2, gain2 = job->hyper.gain2, eps = job->hyper.eps;
    const int64_t rows = factors->rows;
    const float *sums = factors->sums + matrix * rows;
    float *row = factors->row + matrix * rows;
    if (!factors->row_means) {
        row[0] = 1.0f;
        return;
    }
    float *means = factors->row_means + matrix * rows;
    for (int64_t i = 0; i < rows; i++) {
        means[i] = means[i] * beta2 + mean_of(sums[i], factors->columns) * gain2;
        row[i] = means[i];
    }
    const float mean = mean_of(sum_in_runs(row, rows), rows);
    const float least = mean > eps ? mean : eps;
    for (int64_t i = 0; i < rows; i++)
        row[i] = inverse_root(means[i] / least);
}

static float root_of_mean(const Factors *factors, float *sums)
{
    const int64_t rows = factors->matrices * factors->rows;
    sum_tiles(factors, sums);
    return sqrtf(mean_of(sum_in_runs(sums, rows), rows * factors->columns));
}

static void advance_averages(Job *job)
{
    Factors *factors = job->factors;
    const float size = root_of_mean(factors, factors->weight_sums);
    factors->size = size > job->hyper.least_size ? size : job->hyper.least_size;
    factors->cap = 1.0f / job->hyper.eps;
    sum_tiles(factors, factors->sums);
    for (int64_t matrix = 0; matrix < factors->matrices; matrix++) {
        advance_columns(job, matrix);
        advance_rows(job, matrix);
    }
}

/* Let directions have at most the root mean square `most`. */
static void clip_factors(Job *job)
{
    Factors *factors = job->factors;
    const float rms = root_of_mean(factors, factors->sums);
    if (!(rms > job->hyper.most))
        return;
    const float shrink = job->hyper.most / rms;
    const int64_t rows = factors->matrices * factors->rows;
    for (int64_t i = 0; i < rows; i++)
        factors->row[i] *= shrink;
    factors->cap *= shrink;
}

/* -------------------------------------------------------------------------- threads */
typedef void (*TakeRun)(const Job *, const RowRun *, Tile *);

typedef struct {
    Job *jobs;
    int64_t count;
    TakeRun take; /* of a pass, or NULL for what follows it */
    void (*finish)(Job *);
} Pass;

static int is_computed(const Job *job) { return job->factors && job->factors->sums; }

/* Take one thread's runs of each job in turn, or its jobs. */
static void take_share(const void *context, int part, int parts)
{
    const Pass *pass = context;
    Tile tile;
    int64_t before = 0;
    for (int64_t k = 0; k < pass->count; k++) {
        Job *job = &pass->jobs[k];
        if (!is_computed(job))
            continue;
        const int64_t turns = pass->take ? run_count(job->factors) : 1;
        for (int64_t i = 0; i < turns; i++) {
            if ((before + i) % parts != part)
                continue;
            if (pass->take) {
                const RowRun run = run_at(job->factors, i);
                pass->take(job, &run, &tile);
            } else {
                pass->finish(job);
            }
        }
        before += turns;
    }
}

void take_factors(Job *jobs, int64_t count, int threads)
{
    const Pass passes[] = {
        {jobs, count, sum_statistics, NULL},
        {jobs, count, NULL, advance_averages},
        {jobs, count, sum_directions, NULL},
        {jobs, count, NULL, clip_factors},
    };
    for (size_t i = 0; i < sizeof passes / sizeof *passes; i++)
        run_in_threads(take_share, &passes[i], threads);
    for (int64_t k = 0; k < count; k++) {
        if (jobs[k].factors) {
            jobs[k].hyper.rate *= jobs[k].factors->size;
            jobs[k].hyper.inject /= jobs[k].factors->size;
        }
    }
}
