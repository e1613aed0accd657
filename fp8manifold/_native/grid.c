/* Whole arrays to the grid, to codes and back.
 *
 *     array (rows x length)  ->  rows, or one row if all share a scale
 *       -> pieces of up to 16384 elements under one scale  ->  threads
 *         -> one loop: decode, round or encode
 *       -> rows  ->  threads  ->  exponent fields of codes, counted */
#include <math.h>
#include <stddef.h>

#include "draws.h"
#include "format.h"
#include "threads.h"

#define PIECE 16384

/* Takes n elements from `start` on, which share a scale. */
typedef void (*TakePiece)(const Array *array, int64_t start, int n, float scale);

typedef struct {
    const Array *array;
    TakePiece take_piece;
} Work;

static void take_share(const void *context, int part, int parts)
{
    const Work *work = context;
    const Array *array = work->array;
    const int64_t rows = array->shared ? 1 : array->rows;
    const int64_t length = array->shared ? array->rows * array->length : array->length;
    const int64_t pieces_in_row = (length + PIECE - 1) / PIECE;
    const int64_t pieces = rows * pieces_in_row;
    const int64_t first_piece = pieces * part / parts;
    const int64_t stop_piece = pieces * (part + 1) / parts;
    for (int64_t piece = first_piece; piece < stop_piece; piece++) {
        const int64_t row = piece / pieces_in_row;
        const int64_t column = piece % pieces_in_row * PIECE;
        const int64_t left = length - column;
        const float scale = array->scale ? array->scale[row] : 1.0f;
        work->take_piece(array, row * length + column, (int)(left < PIECE ? left : PIECE), scale);
    }
}

/* Facts of arrays, with the memory of one. */
static Array array_at(const Array *facts, const void *input, void *output, const float *scale)
{
    Array array = *facts;
    array.input = input;
    array.output = output;
    array.scale = scale;
    return array;
}

static void run(const Array *array, TakePiece take_piece, int threads)
{
    const Work work = {array, take_piece};
    run_in_threads(take_share, &work, threads);
}

/* --------------------------------------------------------------------------- decode */
/* The value of any code, NaN and Inf included. */
INLINE float any_value(const Format *format, int32_t code)
{
    const int32_t magnitude = code & (format->sign_bit - 1);
    const int is_inf = magnitude == format->inf_code;
    const int is_above = (magnitude > format->max_code) & !is_inf;
    const int is_nan = (code == format->one_nan) | (format->many_nans & is_above);
    const float inf = code & format->sign_bit ? -INFINITY : INFINITY;
    float value = decode_code(format, code).value;
    value = is_inf ? inf : value;
    return is_nan ? NAN : value;
}

INLINE uint16_t nearest_bfloat16(float x)
{
    const uint32_t bits = (uint32_t)bits_of(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7FC0 : rounded);
}

/* From this many elements on a table of all codes is faster than arithmetic: one load
 * for each element in place of two dozen operations. */
#define WORTH_A_TABLE 1024

CLONED static void fill_table(const Array *array, float scale, float *restrict table)
{
    const Format format = array->format;
    const int32_t code_mask = 2 * format.sign_bit - 1;
    for (int32_t code = 0; code < 256; code++)
        table[code] = any_value(&format, code & code_mask) * scale;
}

static void look_up(const uint8_t *restrict codes, const float *restrict table,
                    float *restrict out, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = table[codes[i]];
}

CLONED static void decode_piece(const Array *array, int64_t start, int n, float scale)
{
    const uint8_t *codes = (const uint8_t *)array->input + start;
    float *restrict out = (float *)array->output + start;
    if (n >= WORTH_A_TABLE) {
        float table[256];
        fill_table(array, scale, table);
        look_up(codes, table, out, n);
        return;
    }
    const Format format = array->format;
    for (int i = 0; i < n; i++)
        out[i] = any_value(&format, codes[i]) * scale;
}

CLONED static void decode_piece_bfloat16(const Array *array, int64_t start, int n, float scale)
{
    const Format format = array->format;
    const uint8_t *codes = (const uint8_t *)array->input + start;
    uint16_t *restrict out = (uint16_t *)array->output + start;
    for (int i = 0; i < n; i++)
        out[i] = nearest_bfloat16(any_value(&format, codes[i]) * scale);
}

EXPORT void fp8manifold_decode(const Array *facts, const void *input, void *output,
                               const float *scale, int threads)
{
    const Array array = array_at(facts, input, output, scale);
    run(&array, array.bfloat16 ? decode_piece_bfloat16 : decode_piece, threads);
}

/* ---------------------------------------------------------------------------- round */
/* `stochastic`, and `scaled` where there is a scale, are constants. */
INLINE void round_piece(const Array *array, int64_t start, int n, float scale, int stochastic,
                        int scaled)
{
    const Format format = array->format;
    const Keys keys = array->keys;
    const uint32_t position = array->position + (uint32_t)start;
    const float *x = (const float *)array->input + start;
    float *restrict out = (float *)array->output + start;
    const float new_scale = array->rescale ? scale : 1.0f;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(random_word(keys, position + (uint32_t)i)) : 0;
        const float units = scaled ? x[i] / scale : x[i];
        const float rounded = round_value(&format, units, stochastic, draw);
        out[i] = scaled ? rounded * new_scale : rounded;
    }
}

CLONED static void round_nearest(const Array *array, int64_t start, int n, float scale)
{
    round_piece(array, start, n, scale, 0, 0);
}

CLONED static void round_stochastic(const Array *array, int64_t start, int n, float scale)
{
    round_piece(array, start, n, scale, 1, 0);
}

CLONED static void round_nearest_scaled(const Array *array, int64_t start, int n, float scale)
{
    round_piece(array, start, n, scale, 0, 1);
}

CLONED static void round_stochastic_scaled(const Array *array, int64_t start, int n, float scale)
{
    round_piece(array, start, n, scale, 1, 1);
}

EXPORT void fp8manifold_round(const Array *facts, const void *input, void *output,
                              const float *scale, int threads)
{
    const Array array = array_at(facts, input, output, scale);
    if (scale)
        run(&array, array.stochastic ? round_stochastic_scaled : round_nearest_scaled, threads);
    else
        run(&array, array.stochastic ? round_stochastic : round_nearest, threads);
}

/* --------------------------------------------------------------------------- encode */
/* `stochastic` and `fixed_point` are constants. */
INLINE void encode_piece(const Array *array, int64_t start, int n, int stochastic, int fixed_point)
{
    const Format format = array->format;
    const Keys keys = array->keys;
    const uint32_t position = array->position + (uint32_t)start;
    const float *x = (const float *)array->input + start;
    uint8_t *restrict out = (uint8_t *)array->output + start;
    const int32_t nan_code = format.nan_code;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(random_word(keys, position + (uint32_t)i)) : 0;
        const int32_t code = encode_finite(&format, x[i], stochastic, draw, fixed_point);
        out[i] = (uint8_t)(x[i] != x[i] ? nan_code : code);
    }
}

CLONED static void encode_nearest(const Array *array, int64_t start, int n, float scale)
{
    (void)scale;
    encode_piece(array, start, n, 0, 0);
}

CLONED static void encode_stochastic(const Array *array, int64_t start, int n, float scale)
{
    (void)scale;
    encode_piece(array, start, n, 1, 0);
}

CLONED static void encode_stochastic_fixed(const Array *array, int64_t start, int n, float scale)
{
    (void)scale;
    encode_piece(array, start, n, 1, 1);
}

EXPORT void fp8manifold_encode(const Array *facts, const void *input, void *output,
                               const float *scale, int threads)
{
    const Array array = array_at(facts, input, output, scale);
    const int fixed_point = in_fixed_point(&array.format, array.format.mantissa_bits);
    if (!array.stochastic)
        run(&array, encode_nearest, threads);
    else
        run(&array, fixed_point ? encode_stochastic_fixed : encode_stochastic, threads);
}

/* ----------------------------------------------------------------- exponents of codes */
typedef struct {
    const uint8_t *codes;
    int64_t rows, length;
    int32_t mantissa_bits, fields;
    int64_t *counts; /* of each field, row by row */
} Exponents;

/* Neighbours are counted in tables of their own: a count in memory that has just been
 * written is slow to read. */
#define COUNTERS 4

static void count_row(const Exponents *exponents, int64_t row)
{
    const uint8_t *codes = exponents->codes + row * exponents->length;
    const int32_t mantissa_bits = exponents->mantissa_bits;
    const int32_t fields = exponents->fields;
    const int32_t mask = fields - 1; /* there are a power of two */
    int64_t *counts = exponents->counts + row * fields;
    int64_t tables[COUNTERS][128];
    for (int table = 0; table < COUNTERS; table++)
        memset(tables[table], 0, (size_t)fields * sizeof **tables);
    for (int64_t i = 0; i < exponents->length; i++)
        tables[i % COUNTERS][(codes[i] >> mantissa_bits) & mask]++;
    for (int32_t field = 0; field < fields; field++) {
        counts[field] = 0;
        for (int table = 0; table < COUNTERS; table++)
            counts[field] += tables[table][field];
    }
}

static void count_rows(const void *context, int part, int parts)
{
    const Exponents *exponents = context;
    const int64_t stop = exponents->rows * (part + 1) / parts;
    for (int64_t row = exponents->rows * part / parts; row < stop; row++)
        count_row(exponents, row);
}

/* How many codes of each row have each exponent field. */
EXPORT void fp8manifold_exponents(const Array *facts, const uint8_t *codes, int64_t *counts,
                                  int threads)
{
    const Exponents exponents = {
        .codes = codes,
        .rows = facts->rows,
        .length = facts->length,
        .mantissa_bits = facts->format.mantissa_bits,
        .fields = facts->format.sign_bit >> facts->format.mantissa_bits,
        .counts = counts,
    };
    run_in_threads(count_rows, &exponents, threads);
}

/* -------------------------------------------------------------------------- content */
/* sum(bits_i r_i) mod 2^64 of float32 bits and the words drawn at their positions, both
 * as signed numbers.  Every NaN counts as the quiet one: a GPU's arithmetic gives other
 * bits than a CPU's. */
CLONED static uint64_t content_of(const int32_t *bits, int64_t n, Keys keys)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const int is_nan = (bits[i] & 0x7FFFFFFF) > 0x7F800000;
        const int32_t value = is_nan ? 0x7FC00000 : bits[i];
        const int32_t word = (int32_t)random_word(keys, (uint32_t)i);
        sum += (uint64_t)(int64_t)value * (uint64_t)(int64_t)word;
    }
    return sum;
}

EXPORT uint64_t fp8manifold_content(const int32_t *bits, int64_t n, const Keys *keys)
{
    return content_of(bits, n, *keys);
}
