/* The usual steps over codes, Adam and along a gradient: an element passes through all
 * stages without memory between them, or through three loops if its moments are codes.
 *
 *     Adam: for each kind of moments (float32, bfloat16, eight bits)
 *       and of field (none, linear, power)
 *       and of write-back (nearest, stochastic, residual)
 *         one function: adam_over_codes with these three as constants
 *     along a gradient (SGD without a moment, Adafactor, the second half of Muon's):
 *       gradient_over_codes, for two write-backs
 *
 * Its bits are those of the stages in stages.c. */
#include <stddef.h>

#include "tile.h"

/* What the steps of codes have in common, next to their directions. */
typedef struct {
    Format format;
    Hyper hyper;
    Keys keys;
    float keep, scale, rate, log_reference;
    uint32_t start;
} Moves;

/* `m3`, whether the format is one of is_m3(), is a constant here and below. */
INLINE Moves moves_of(const Job *job, const PerScale *per_scale, const Tile *tile, int m3)
{
    return (Moves){
        .format = usual_format(&job->spec->format, m3),
        .hyper = job->hyper,
        .keys = job->weight_keys,
        .keep = job->spec->decays ? job->hyper.keep : 1.0f,
        .scale = per_scale->scale,
        .rate = per_scale->rate,
        .log_reference = per_scale->log_reference,
        .start = (uint32_t)tile->start,
    };
}

/* The code of element i after a step along its direction. */
INLINE int32_t moved_code(const Moves *moves, int i, int32_t code, int32_t *residual,
                          float direction, int writeback, int stiffness, int m3)
{
    const Format *format = &moves->format;
    const int extra_bits = writeback == WRITE_RESIDUAL8 ? 8 : 0;
    const Decoded weight =
        m3 ? decode_signed_byte(format, code)
           : load_code(format, code, extra_bits ? *residual : 0, extra_bits);
    if (stiffness != FIELD_NONE) {
        const float ulp = weight.ulp * moves->scale;
        direction *= field_factor(&moves->hyper, stiffness, ulp, moves->log_reference);
    }
    const float target = move_linear(weight.value * moves->keep, direction, moves->rate);
    const int stochastic = writeback != WRITE_NEAREST;
    const uint32_t position = moves->start + (uint32_t)i;
    const int32_t draw = stochastic ? draw_of(random_word(moves->keys, position)) : 0;
    if (m3)
        return encode_byte(format, target, draw);
    if (!extra_bits)
        return encode_finite(format, target, stochastic, draw, 1);
    const int32_t signed_code = encode_signed(format, target, 1, draw, extra_bits, 0);
    return split_code(format, signed_code, extra_bits, residual);
}

/* Codes read as signed bytes: the sign of one of 8 bits is then where a float has its own. */
INLINE void widen(const uint8_t *codes, int32_t *restrict wide_code, int n)
{
    for (int i = 0; i < n; i++)
        wide_code[i] = (int8_t)codes[i];
}

/* Whether a code is above the top one: it is special, and stays. */
INLINE int stays_special(const Format *format, uint8_t code)
{
    const uint8_t magnitude_mask = (uint8_t)(format->sign_bit - 1);
    const uint8_t top_code = (uint8_t)(format->many_nans ? format->max_code : 255);
    return (uint8_t)(code & magnitude_mask) > top_code;
}

/* Stores new codes in the place of old ones. */
INLINE void put_codes(const Format *shared_format, const int32_t *restrict wide_code,
                      uint8_t *codes, int n)
{
    const Format format = *shared_format;
    for (int i = 0; i < n; i++)
        codes[i] = stays_special(&format, codes[i]) ? codes[i] : (uint8_t)wide_code[i];
}

/* Of the two zeros -0 stays -0; split_code never gives a new one. */
INLINE void put_codes_and_residuals(const Format *shared_format, const Tile *tile, uint8_t *codes,
                                    int8_t *residuals)
{
    const Format format = *shared_format;
    const uint8_t negative_zero = (uint8_t)format.sign_bit;
    const int n = tile->n;
    for (int i = 0; i < n; i++) {
        const uint8_t old_code = codes[i];
        const uint8_t new_code = (uint8_t)tile->codes[i];
        const int stays =
            stays_special(&format, old_code) || (!new_code && old_code == negative_zero);
        codes[i] = stays ? old_code : new_code;
    }
    for (int i = 0; i < n; i++)
        residuals[i] = (int8_t)tile->residuals[i];
}

/* Moments in floats of 32 or 16 bits: all of an element in one loop. */
INLINE void step_with_floats(const Job *job, const PerScale *per_scale, Tile *tile, int writeback,
                             int moments, int stiffness, int m3)
{
    const Moves moves = moves_of(job, per_scale, tile, m3);
    const Hyper hyper = job->hyper;
    const Keys moment_keys = job->moment_keys;
    const int n = tile->n;
    const uint32_t start = (uint32_t)tile->start;
    const float gain1 = job->spec->maximize ? -hyper.gain1 : hyper.gain1;
    const float *restrict gradients = job->gradient + tile->start;
    /* of the moments those of one kind are used */
    float *restrict first_floats = (float *)job->first + tile->start;
    float *restrict second_floats = (float *)job->second + tile->start;
    uint16_t *first_halves = (uint16_t *)job->first + tile->start;
    uint16_t *second_halves = (uint16_t *)job->second + tile->start;
    int32_t *restrict wide_code = tile->codes, *restrict wide_residual = tile->residuals;
    int32_t *restrict wide_first = tile->first_codes, *restrict wide_second = tile->second_codes;
    if (moments == BFLOAT16) {
        for (int i = 0; i < n; i++) {
            wide_first[i] = first_halves[i];
            wide_second[i] = second_halves[i];
        }
    }
    for (int i = 0; i < n; i++) {
        const float gradient = gradients[i];
        const int is_half = moments == BFLOAT16;
        float first = is_half ? of_bfloat16((uint16_t)wide_first[i]) : first_floats[i];
        float second = is_half ? of_bfloat16((uint16_t)wide_second[i]) : second_floats[i];
        first = average(first, hyper.beta1, gradient, gain1);
        second = average_of_squares(second, hyper.beta2, gradient, hyper.gain2);
        const float direction = first / (sqrtf(second) + hyper.eps);
        wide_code[i] = moved_code(&moves, i, wide_code[i], &wide_residual[i], direction, writeback,
                                  stiffness, m3);
        if (is_half) {
            const uint32_t word = random_word(moment_keys, start + (uint32_t)i);
            wide_first[i] = to_bfloat16(first, word & 0xFFFF);
            wide_second[i] = to_bfloat16(second, word >> 16);
        } else {
            first_floats[i] = first;
            second_floats[i] = second;
        }
    }
    if (moments == BFLOAT16) {
        for (int i = 0; i < n; i++) {
            first_halves[i] = (uint16_t)wide_first[i];
            second_halves[i] = (uint16_t)wide_second[i];
        }
    }
}

/* Moments in 8 bits: three loops.  One is longer than what a processor has under way at
 * a time, so that it would wait for each element's square root and division.  The root is
 * in the first and the division in the last: two in one loop would wait for each other. */
INLINE void step_with_codes(const Job *job, const PerScale *per_scale, const BlockScales *block,
                            Tile *tile, int writeback, int stiffness, int m3)
{
    const Moves moves = moves_of(job, per_scale, tile, m3);
    const Hyper hyper = job->hyper;
    const Keys moment_keys = job->moment_keys;
    const BlockScales scales = *block;
    const Format moments = usual_format(moment_format(), 1);
    const int n = tile->n;
    const uint32_t start = (uint32_t)tile->start;
    const float gain1 = job->spec->maximize ? -hyper.gain1 : hyper.gain1;
    const float *restrict gradients = job->gradient + tile->start;
    int8_t *first_codes = (int8_t *)job->first + tile->start;
    uint8_t *second_codes = (uint8_t *)job->second + tile->start;
    float *restrict firsts = tile->first, *restrict roots = tile->root;
    int32_t *restrict wide_code = tile->codes, *restrict wide_residual = tile->residuals;
    int32_t *restrict wide_first = tile->first_codes, *restrict wide_second = tile->second_codes;
    for (int i = 0; i < n; i++) {
        wide_first[i] = first_codes[i];
        wide_second[i] = second_codes[i];
    }
    for (int i = 0; i < n; i++) {
        const float old_first = decode_signed_byte(&moments, wide_first[i]).value * scales.first;
        const float old_root =
            decode_magnitude(&moments, wide_second[i], 0).value * scales.second;
        const float gradient = gradients[i];
        const float first = average(old_first, hyper.beta1, gradient, gain1);
        const float second =
            average_of_squares(old_root * old_root, hyper.beta2, gradient, hyper.gain2);
        firsts[i] = first;
        roots[i] = sqrtf(second);
    }
    for (int i = 0; i < n; i++) {
        const uint32_t word = random_word(moment_keys, start + (uint32_t)i);
        wide_first[i] = encode_moment(&moments, firsts[i], scales.new_first_inverse, word & 0xFFFF);
        wide_second[i] = encode_root(&moments, roots[i], scales.new_second_inverse, word);
    }
    for (int i = 0; i < n; i++) {
        const float direction = firsts[i] / (roots[i] + hyper.eps);
        wide_code[i] = moved_code(&moves, i, wide_code[i], &wide_residual[i], direction, writeback,
                                  stiffness, m3);
    }
    for (int i = 0; i < n; i++) {
        first_codes[i] = (int8_t)wide_first[i];
        second_codes[i] = (uint8_t)wide_second[i];
    }
}

INLINE void adam_over_codes(const Job *job, const PerScale *per_scale, const BlockScales *block,
                            Tile *tile, int writeback, int moments, int stiffness)
{
    const Format *format = &job->spec->format;
    const int has_residuals = writeback == WRITE_RESIDUAL8;
    const int n = tile->n;
    uint8_t *codes = (uint8_t *)job->weight + tile->start;
    int8_t *residuals = job->residual + tile->start;
    /* Bytes are widened and narrowed in loops of their own: in one with floats, vectors
     * of four sizes crowd each other. */
    int32_t *restrict wide_code = tile->codes, *restrict wide_residual = tile->residuals;
    widen(codes, wide_code, n);
    if (has_residuals) {
        for (int i = 0; i < n; i++)
            wide_residual[i] = residuals[i];
    }
    const int m3 = writeback == WRITE_STOCHASTIC && is_m3(format);
    if (moments == EIGHT_BIT && m3)
        step_with_codes(job, per_scale, block, tile, writeback, stiffness, 1);
    else if (moments == EIGHT_BIT)
        step_with_codes(job, per_scale, block, tile, writeback, stiffness, 0);
    else if (m3)
        step_with_floats(job, per_scale, tile, writeback, moments, stiffness, 1);
    else
        step_with_floats(job, per_scale, tile, writeback, moments, stiffness, 0);
    if (has_residuals)
        put_codes_and_residuals(format, tile, codes, residuals);
    else
        put_codes(format, wide_code, codes, n);
}

/* Move the codes of a tile along n gradients, from its element `first` on.  With `column`
 * gradients are multiplied by Adafactor's factors. */
INLINE void move_along(const Moves *shared_moves, Tile *tile, int first, int n,
                       const float *restrict gradient, const float *restrict column, float row,
                       float cap, int writeback, int m3)
{
    Moves moves = *shared_moves;
    moves.start += (uint32_t)first;
    int32_t *restrict wide_code = tile->codes + first;
    for (int i = 0; i < n; i++) {
        float direction = gradient[i];
        if (column) {
            const float factor = row * column[i];
            direction *= factor < cap ? factor : cap;
        }
        wide_code[i] = moved_code(&moves, i, wide_code[i], NULL, direction, writeback, FIELD_NONE,
                                  m3);
    }
}

/* From so many columns on, each row of a matrix has a loop of its own in a tile. */
#define LONG_ROW 128

/* A step along the gradient over codes, without a moment: SGD's, the second half of
 * Muon's, and Adafactor's. */
INLINE void gradient_over_codes(const Job *job, const PerScale *per_scale, Tile *tile,
                                int writeback, int m3)
{
    Moves moves = moves_of(job, per_scale, tile, m3);
    const Factors *factors = job->factors;
    const float *gradient = job->gradient + tile->start;
    const int n = tile->n;
    uint8_t *codes = (uint8_t *)job->weight + tile->start;
    widen(codes, tile->codes, n);
    if (factors && factors->columns < LONG_ROW) {
        load_gradient(job, per_scale, tile);
        move_along(&moves, tile, 0, n, tile->gradient, NULL, 1, 1, writeback, m3);
        put_codes(&moves.format, tile->codes, codes, n);
        return;
    }
    /* in place of the sign of each gradient */
    moves.rate = job->spec->maximize ? -moves.rate : moves.rate;
    if (!factors) {
        move_along(&moves, tile, 0, n, gradient, NULL, 1, 1, writeback, m3);
        put_codes(&moves.format, tile->codes, codes, n);
        return;
    }
    int64_t row = tile->start / factors->columns;
    int64_t column = tile->start % factors->columns;
    for (int first = 0; first < n;) {
        const int64_t left = factors->columns - column;
        const int count = left < n - first ? (int)left : n - first;
        const int64_t matrix = row / factors->rows;
        move_along(&moves, tile, first, count, gradient + first,
                   factors->column + matrix * factors->columns + column, factors->row[row],
                   factors->cap, writeback, m3);
        first += count;
        row++;
        column = 0;
    }
    put_codes(&moves.format, tile->codes, codes, n);
}

CLONED static void gradient_nearest(const Job *job, const PerScale *per_scale,
                                    const BlockScales *block, Tile *tile)
{
    (void)block;
    gradient_over_codes(job, per_scale, tile, WRITE_NEAREST, 0);
}

CLONED static void gradient_stochastic(const Job *job, const PerScale *per_scale,
                                       const BlockScales *block, Tile *tile)
{
    (void)block;
    if (is_m3(&job->spec->format))
        gradient_over_codes(job, per_scale, tile, WRITE_STOCHASTIC, 1);
    else
        gradient_over_codes(job, per_scale, tile, WRITE_STOCHASTIC, 0);
}

/* A function of the type TakeTile for constant choices. */
#define ADAM_FOR(name, moments, stiffness, writeback) \
    CLONED static void name(const Job *job, const PerScale *per_scale, const BlockScales *block, \
                            Tile *tile) \
    { \
        adam_over_codes(job, per_scale, block, tile, writeback, moments, stiffness); \
    }

/* Functions for each write-back, and for each power of the field with each write-back.
 */
#define ADAMS_FOR_WRITEBACKS(name, moments, stiffness) \
    ADAM_FOR(name##_nearest, moments, stiffness, WRITE_NEAREST) \
    ADAM_FOR(name##_stochastic, moments, stiffness, WRITE_STOCHASTIC) \
    ADAM_FOR(name##_residual, moments, stiffness, WRITE_RESIDUAL8)
#define ADAMS_FOR_FIELDS(name, moments) \
    ADAMS_FOR_WRITEBACKS(name, moments, FIELD_NONE) \
    ADAMS_FOR_WRITEBACKS(name##_linear, moments, FIELD_LINEAR) \
    ADAMS_FOR_WRITEBACKS(name##_power, moments, FIELD_ANY)

ADAMS_FOR_FIELDS(adam, FLOAT32)
ADAMS_FOR_FIELDS(adam16, BFLOAT16)
ADAMS_FOR_FIELDS(adam8, EIGHT_BIT)

/* Their names by write-back, and by field and write-back. */
#define BY_WRITEBACK(name) \
    { \
        [WRITE_NEAREST] = name##_nearest, [WRITE_STOCHASTIC] = name##_stochastic, \
        [WRITE_RESIDUAL8] = name##_residual \
    }
#define BY_FIELD(name) \
    { \
        [FIELD_NONE] = BY_WRITEBACK(name), [FIELD_LINEAR] = BY_WRITEBACK(name##_linear), \
        [FIELD_ANY] = BY_WRITEBACK(name##_power) \
    }

/* By moments, field and write-back; NULL for the fields 1/2 and 2 and for the write-back
 * that adds to the first moment, which the stages take. */
static const TakeTile
    ADAMS[MOMENT_STORAGE_COUNT][STIFFNESS_POWER_COUNT][KERNEL_WRITE_BACK_COUNT] = {
    [FLOAT32] = BY_FIELD(adam),
    [BFLOAT16] = BY_FIELD(adam16),
    [EIGHT_BIT] = BY_FIELD(adam8),
};

TakeTile in_one_loop(const Job *job)
{
    const Spec *spec = job->spec;
    const int is_over_codes = spec->storage == CODES && spec->geometry == LINEAR;
    if (!is_over_codes || spec->metric != METRIC_ULP)
        return NULL;
    if (spec->direction == SGD && !job->first && spec->stiffness == FIELD_NONE &&
        is_usual(&spec->format)) {
        if (spec->writeback == WRITE_NEAREST)
            return gradient_nearest;
        return spec->writeback == WRITE_STOCHASTIC ? gradient_stochastic : NULL;
    }
    if (spec->direction != ADAM || job->second_max || !is_usual(&spec->format))
        return NULL;
    return ADAMS[spec->moments][spec->stiffness][spec->writeback];
}
