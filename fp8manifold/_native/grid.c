/* Whole arrays to the grid, to codes and back: matrices with a scale for each row, or one in all. */
#include <math.h>
#include <stddef.h>

#include "draws.h"
#include "format.h"
#include "threads.h"

#define CHUNK 16384

typedef struct {
    Format format;
    const void *from;
    void *to;
    const float *scale; /* NULL for 1 */
    int64_t rows, length;
    int32_t shared;     /* whether all rows share one scale */
    int32_t stochastic, rescale, bfloat16;
    int32_t nan_code;   /* what a NaN is encoded as */
    int32_t spacing;    /* decode: the spacings at the values in place of the values */
    Keys keys;
    uint32_t position;  /* of the first element */
} Array;

_Static_assert(sizeof(Array) == 144, "the size of ARRAY in records.py");

/* Some elements that share a scale. */
typedef void (*Piece)(const Array *a, int64_t at, int n, float scale);

typedef struct {
    const Array *array;
    Piece piece;
} Work;

static void take_share(const void *context, int part, int parts)
{
    const Work *work = context;
    const Array *a = work->array;
    const int64_t rows = a->shared ? 1 : a->rows, length = a->shared ? a->rows * a->length : a->length;
    const int64_t in_row = (length + CHUNK - 1) / CHUNK, pieces = rows * in_row;
    for (int64_t k = pieces * part / parts; k < pieces * (part + 1) / parts; k++) {
        const int64_t row = k / in_row, start = k % in_row * CHUNK, left = length - start;
        const float scale = !a->scale ? 1.0f : a->scale[a->shared ? 0 : row];
        work->piece(a, row * length + start, (int)(left < CHUNK ? left : CHUNK), scale);
    }
}

/* ------------------------------------------------------------------------------------------------------- decode */
INLINE float any_value(const Format *f, int32_t code)
{
    const int32_t magnitude = code & (f->sign_bit - 1);
    float value = decode_code(f, code).value;
    value = magnitude == f->inf_code ? (code & f->sign_bit ? -INFINITY : INFINITY) : value;
    const int is_nan = (code == f->one_nan) | (f->many_nans & (magnitude > f->max_code) & (magnitude != f->inf_code));
    return is_nan ? NAN : value;
}

INLINE uint16_t nearest_bfloat16(float x)
{
    const uint32_t bits = (uint32_t)bits_of(x), rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7FC0 : rounded);
}

/* From this many elements on a table of all codes is faster than arithmetic: a load each, and not two dozen operations. */
#define WORTH_A_TABLE 1024

CLONED static void fill_table(const Array *a, float scale, float *restrict table)
{
    const Format format = a->format;
    const int32_t all = 2 * format.sign_bit - 1;
    if (a->spacing)
        for (int32_t code = 0; code < 256; code++)
            table[code] = decode_code(&format, code & all).ulp * scale;
    else
        for (int32_t code = 0; code < 256; code++)
            table[code] = any_value(&format, code & all) * scale;
}

static void look_up(const uint8_t *restrict codes, const float *restrict table, float *restrict out, int n)
{
    for (int i = 0; i < n; i++)
        out[i] = table[codes[i]];
}

CLONED static void decode_piece(const Array *a, int64_t at, int n, float scale)
{
    if (n >= WORTH_A_TABLE || a->spacing) {
        float table[256];
        fill_table(a, scale, table);
        look_up((const uint8_t *)a->from + at, table, (float *)a->to + at, n);
        return;
    }
    const Format format = a->format;
    const uint8_t *codes = (const uint8_t *)a->from + at;
    float *restrict out = (float *)a->to + at;
    for (int i = 0; i < n; i++)
        out[i] = any_value(&format, codes[i]) * scale;
}

CLONED static void decode_piece_bfloat16(const Array *a, int64_t at, int n, float scale)
{
    const Format format = a->format;
    const uint8_t *codes = (const uint8_t *)a->from + at;
    uint16_t *restrict out = (uint16_t *)a->to + at;
    for (int i = 0; i < n; i++)
        out[i] = nearest_bfloat16(any_value(&format, codes[i]) * scale);
}

/* -------------------------------------------------------------------------------------------------------- round */
INLINE void round_piece(const Array *a, int64_t at, int n, float scale, int stochastic, int scaled)
{
    const Format format = a->format;
    const Keys keys = a->keys;
    const uint32_t position = a->position + (uint32_t)at;
    const float *x = (const float *)a->from + at;
    float *restrict out = (float *)a->to + at;
    const float back = a->rescale ? scale : 1.0f;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(random_word(keys, position + (uint32_t)i)) : 0;
        const float y = round_value(&format, scaled ? x[i] / scale : x[i], stochastic, draw);
        out[i] = scaled ? y * back : y;
    }
}

CLONED static void round_nearest(const Array *a, int64_t at, int n, float scale) { round_piece(a, at, n, scale, 0, 0); }
CLONED static void round_stochastic(const Array *a, int64_t at, int n, float scale)
{
    round_piece(a, at, n, scale, 1, 0);
}
CLONED static void round_nearest_scaled(const Array *a, int64_t at, int n, float scale)
{
    round_piece(a, at, n, scale, 0, 1);
}
CLONED static void round_stochastic_scaled(const Array *a, int64_t at, int n, float scale)
{
    round_piece(a, at, n, scale, 1, 1);
}

/* ------------------------------------------------------------------------------------------------------- encode */
INLINE void encode_piece(const Array *a, int64_t at, int n, int stochastic, int fixed)
{
    const Format format = a->format;
    const Keys keys = a->keys;
    const uint32_t position = a->position + (uint32_t)at;
    const float *x = (const float *)a->from + at;
    uint8_t *restrict out = (uint8_t *)a->to + at;
    const int32_t nan_code = a->nan_code;
    for (int i = 0; i < n; i++) {
        const int32_t draw = stochastic ? draw_of(random_word(keys, position + (uint32_t)i)) : 0;
        const int32_t code = encode_finite(&format, x[i], stochastic, draw, fixed);
        out[i] = (uint8_t)(x[i] != x[i] ? nan_code : code);
    }
}

CLONED static void encode_nearest(const Array *a, int64_t at, int n, float scale)
{
    (void)scale;
    encode_piece(a, at, n, 0, 0);
}
CLONED static void encode_stochastic(const Array *a, int64_t at, int n, float scale)
{
    (void)scale;
    encode_piece(a, at, n, 1, 0);
}
CLONED static void encode_stochastic_fixed(const Array *a, int64_t at, int n, float scale)
{
    (void)scale;
    encode_piece(a, at, n, 1, 1);
}

/* -------------------------------------------------------------------------------------------------------- calls */
static void run(const Array *a, Piece piece, int threads)
{
    const Work work = {a, piece};
    run_in_threads(take_share, &work, threads);
}

EXPORT void fp8manifold_decode(const Array *a, int threads)
{
    run(a, a->bfloat16 ? decode_piece_bfloat16 : decode_piece, threads);
}

EXPORT void fp8manifold_round(const Array *a, int threads)
{
    if (a->scale)
        run(a, a->stochastic ? round_stochastic_scaled : round_nearest_scaled, threads);
    else
        run(a, a->stochastic ? round_stochastic : round_nearest, threads);
}

EXPORT void fp8manifold_encode(const Array *a, int threads)
{
    const int fixed = in_fixed_point(&a->format, a->format.mantissa_bits);
    run(a, !a->stochastic ? encode_nearest : fixed ? encode_stochastic_fixed : encode_stochastic, threads);
}

/* sum(bits_i r_i) mod 2^64 of float32 bits and the words drawn at their positions, both as signed numbers.
   Every NaN counts as the quiet one: a GPU's arithmetic gives other bits than a CPU's. */
CLONED static uint64_t content_of(const int32_t *bits, int64_t n, Keys keys)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t value = (bits[i] & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC00000 : bits[i];
        sum += (uint64_t)(int64_t)value * (uint64_t)(int64_t)(int32_t)random_word(keys, (uint32_t)i);
    }
    return sum;
}

EXPORT uint64_t fp8manifold_content(const int32_t *bits, int64_t n, const Keys *keys) { return content_of(bits, n, *keys); }
