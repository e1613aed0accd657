/* The usual step, Adam over codes, in one loop: an element passes through all stages
 * without memory between them.
 *
 *     for each kind of moments (float32, bfloat16, eight bits)
 *       and of field (none, linear, power)
 *       and of write-back (nearest, stochastic, residual)
 *         one function: adam_over_codes with these three as constants
 *
 * Its bits are those of the stages in stages.c. */
#include <stddef.h>

#include "tile.h"

INLINE void adam_over_codes(const Job *job, const PerScale *per_scale, const BlockScales *block,
                            Tile *tile, int writeback, int moments, int stiffness)
{
    const Format format = usual_format(&job->spec->format);
    const Hyper hyper = job->hyper;
    const Keys weight_keys = job->weight_keys, moment_keys = job->moment_keys;
    const int extra_bits = writeback == WRITE_RESIDUAL8 ? 8 : 0;
    const int n = tile->n;
    const uint32_t start = (uint32_t)tile->start;
    const float gain1 = job->spec->maximize ? -hyper.gain1 : hyper.gain1;
    const float keep = job->spec->decays ? hyper.keep : 1.0f;
    const float scale = per_scale->scale;
    const float rate = per_scale->rate;
    const float log_reference = per_scale->log_reference;
    const float first_scale = block->first, second_scale = block->second;
    const float new_first_inverse = block->new_first_inverse;
    const float new_second_inverse = block->new_second_inverse;
    /* the arrays in memory; of the moments those of one kind are used */
    const float *restrict gradients = job->gradient + tile->start;
    uint8_t *codes = (uint8_t *)job->weight + tile->start;
    int8_t *residuals = job->residual + tile->start;
    uint8_t *first_codes = (uint8_t *)job->first + tile->start;
    uint8_t *second_codes = (uint8_t *)job->second + tile->start;
    uint16_t *first_halves = (uint16_t *)job->first + tile->start;
    uint16_t *second_halves = (uint16_t *)job->second + tile->start;
    float *restrict first_floats = (float *)job->first + tile->start;
    float *restrict second_floats = (float *)job->second + tile->start;
    /* Bytes are widened and narrowed in loops of their own: in one with floats, vectors
     * of four sizes crowd each other. */
    int32_t *restrict wide_code = tile->codes, *restrict wide_residual = tile->residuals;
    int32_t *restrict wide_first = tile->first_codes, *restrict wide_second = tile->second_codes;
    for (int i = 0; i < n; i++)
        wide_code[i] = codes[i];
    if (extra_bits) {
        for (int i = 0; i < n; i++)
            wide_residual[i] = residuals[i];
    }
    if (moments == EIGHT_BIT) {
        for (int i = 0; i < n; i++) {
            wide_first[i] = first_codes[i];
            wide_second[i] = second_codes[i];
        }
    }
    if (moments == BFLOAT16) {
        for (int i = 0; i < n; i++) {
            wide_first[i] = first_halves[i];
            wide_second[i] = second_halves[i];
        }
    }
    for (int i = 0; i < n; i++) {
        const int32_t residual = extra_bits ? wide_residual[i] : 0;
        const Decoded weight = load_code(&format, wide_code[i], residual, extra_bits);
        const float gradient = gradients[i];
        float first, second, root;
        if (moments == EIGHT_BIT) {
            first = decode_code(&MOMENT_FORMAT, wide_first[i]).value * first_scale;
            root = decode_magnitude(&MOMENT_FORMAT, wide_second[i], 0).value * second_scale;
            second = root * root;
        } else if (moments == BFLOAT16) {
            first = of_bfloat16((uint16_t)wide_first[i]);
            second = of_bfloat16((uint16_t)wide_second[i]);
        } else {
            first = first_floats[i];
            second = second_floats[i];
        }
        first = average(first, hyper.beta1, gradient, gain1);
        second = average_of_squares(second, hyper.beta2, gradient, hyper.gain2);
        root = sqrtf(second);
        float direction = first / (root + hyper.eps);
        if (stiffness != FIELD_NONE)
            direction *= field_factor(&hyper, stiffness, weight.ulp * scale, log_reference);
        const float target = move_linear(weight.value * keep, direction, rate);
        const uint32_t position = start + (uint32_t)i;
        const int stochastic = writeback != WRITE_NEAREST;
        const int32_t draw = stochastic ? draw_of(random_word(weight_keys, position)) : 0;
        if (extra_bits) {
            const int32_t signed_code = encode_signed(&format, target, 1, draw, extra_bits, 0);
            wide_code[i] = split_code(&format, signed_code, extra_bits, &wide_residual[i]);
        } else {
            wide_code[i] = encode_finite(&format, target, stochastic, draw, 1);
        }
        const uint32_t word = moments == FLOAT32 ? 0 : random_word(moment_keys, position);
        if (moments == EIGHT_BIT) {
            wide_first[i] = encode_moment(first, new_first_inverse, word & 0xFFFF);
            wide_second[i] = encode_root(root, new_second_inverse, word);
        } else if (moments == BFLOAT16) {
            wide_first[i] = to_bfloat16(first, word & 0xFFFF);
            wide_second[i] = to_bfloat16(second, word >> 16);
        } else {
            first_floats[i] = first;
            second_floats[i] = second;
        }
    }
    /* a code above the top one is special, and stays */
    const uint8_t magnitude_mask = (uint8_t)(format.sign_bit - 1);
    const uint8_t top_code = (uint8_t)(format.many_nans ? format.max_code : 255);
    if (extra_bits) {
        /* of the two zeros -0 stays -0; split_code never gives a new one */
        const uint8_t negative_zero = (uint8_t)format.sign_bit;
        for (int i = 0; i < n; i++) {
            const uint8_t old_code = codes[i];
            const uint8_t new_code = (uint8_t)wide_code[i];
            const int stays = (uint8_t)(old_code & magnitude_mask) > top_code ||
                              (!new_code && old_code == negative_zero);
            codes[i] = stays ? old_code : new_code;
        }
        for (int i = 0; i < n; i++)
            residuals[i] = (int8_t)wide_residual[i];
    } else {
        for (int i = 0; i < n; i++) {
            const int stays = (uint8_t)(codes[i] & magnitude_mask) > top_code;
            codes[i] = stays ? codes[i] : (uint8_t)wide_code[i];
        }
    }
    if (moments == EIGHT_BIT) {
        for (int i = 0; i < n; i++) {
            first_codes[i] = (uint8_t)wide_first[i];
            second_codes[i] = (uint8_t)wide_second[i];
        }
    }
    if (moments == BFLOAT16) {
        for (int i = 0; i < n; i++) {
            first_halves[i] = (uint16_t)wide_first[i];
            second_halves[i] = (uint16_t)wide_second[i];
        }
    }
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
    const int is_adam_over_codes =
        spec->direction == ADAM && spec->storage == CODES && spec->geometry == LINEAR;
    if (!is_adam_over_codes || spec->metric != METRIC_ULP)
        return NULL;
    if (job->largest || !is_usual(&spec->format))
        return NULL;
    return ADAMS[spec->moments][spec->stiffness][spec->writeback];
}
