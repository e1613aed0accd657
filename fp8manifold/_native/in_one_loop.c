/* The usual step, Adam over codes, in one loop: an element passes through all stages without memory between them. */
#include <stddef.h>

#include "tile.h"

/* Adam over codes. */
INLINE void adam_over_codes(const Job *j, const Local *l, const Block *b, Tile *t, int writeback, int moments,
                            int stiffness)
{
    const Format format = usual_format(&j->spec->format), *f = &format;
    const Hyper hyper = j->hyper, *h = &hyper;
    const Keys weight_keys = j->weight_keys, average_keys = j->average_keys;
    const int extra = writeback == WRITE_RESIDUAL8 ? 8 : 0, n = t->n;
    const uint32_t at = (uint32_t)t->at;
    const float gain1 = j->spec->maximize ? -h->gain1 : h->gain1, keep = j->spec->decays ? h->keep : 1.0f;
    const float scale = l->scale, rate = l->rate, log_reference = l->log_reference;
    const float first_scale = b->first, second_scale = b->second;
    const float first_inverse = b->first_inverse, second_inverse = b->second_inverse;
    uint8_t *codes = (uint8_t *)j->weight + t->at;
    int8_t *residual = j->residual + t->at;
    uint8_t *first_codes = (uint8_t *)j->first + t->at, *second_codes = (uint8_t *)j->second + t->at;
    uint16_t *first_halves = (uint16_t *)j->first + t->at, *second_halves = (uint16_t *)j->second + t->at;
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
    if (moments == BFLOAT16)
        LOOP(first_code[i] = first_halves[i]; second_code[i] = second_halves[i];)
    for (int i = 0; i < n; i++) {
        const int32_t old = code[i];
        const Decoded w = load_codes(f, old, extra ? rest[i] : 0, extra);
        const float g = gradient[i];
        float m, v, root;
        if (moments == EIGHT_BITS) {
            m = decode_code(&MOMENT, first_code[i]).value * first_scale;
            root = decode_magnitude(&MOMENT, second_code[i], 0).value * second_scale;
            v = root * root;
        } else if (moments == BFLOAT16) {
            m = of_bfloat16((uint16_t)first_code[i]);
            v = of_bfloat16((uint16_t)second_code[i]);
        } else {
            m = first[i];
            v = second[i];
        }
        m = m * h->beta1 + g * gain1;
        v = v * h->beta2 + g * h->gain2 * g;
        root = sqrtf(v);
        float direction = m / (root + h->eps);
        if (stiffness)
            direction = direction * field_factor(h, stiffness, w.ulp * scale, log_reference);
        const float target = move_linear(w.value * keep, direction, rate);
        const int32_t draw = writeback ? draw_of(random_word(weight_keys, at + (uint32_t)i)) : 0;
        int32_t new;
        if (extra)
            new = split_code(f, encode_signed(f, target, 1, draw, extra, 0), extra, &rest[i]);
        else
            new = encode_finite(f, target, writeback, draw, 1);
        code[i] = new;
        const uint32_t word = moments == FLOAT32 ? 0 : random_word(average_keys, at + (uint32_t)i);
        if (moments == EIGHT_BITS) {
            first_code[i] = to_codes(m, first_inverse, word & 0xFFFF);
            second_code[i] = root_to_codes(root, second_inverse, word);
        } else if (moments == BFLOAT16) {
            first_code[i] = to_bfloat16(m, word & 0xFFFF);
            second_code[i] = to_bfloat16(v, word >> 16);
        } else {
            first[i] = m;
            second[i] = v;
        }
    }
    const uint8_t without_sign = (uint8_t)(f->sign_bit - 1), top = (uint8_t)(f->many_nans ? f->max_code : 255);
    if (extra) { /* of the two zeros -0 stays; no new code is -0 */
        const uint8_t minus = (uint8_t)f->sign_bit;
        LOOP(const uint8_t old = codes[i], new = (uint8_t)code[i];
             codes[i] = (uint8_t)(old & without_sign) > top || (!new && old == minus) ? old : new;)
        LOOP(residual[i] = (int8_t)rest[i];)
    } else
        LOOP(codes[i] = (uint8_t)(codes[i] & without_sign) > top ? codes[i] : (uint8_t)code[i];)
    if (moments == EIGHT_BITS)
        LOOP(first_codes[i] = (uint8_t)first_code[i]; second_codes[i] = (uint8_t)second_code[i];)
    if (moments == BFLOAT16)
        LOOP(first_halves[i] = (uint16_t)first_code[i]; second_halves[i] = (uint16_t)second_code[i];)
}

#define IN_ONE_LOOP(name, moments, stiffness, writeback) \
    CLONED static void name(const Job *j, const Local *l, const Block *b, Tile *t) \
    { \
        adam_over_codes(j, l, b, t, writeback, moments, stiffness); \
    }
#define EVERY_WRITEBACK(name, moments, stiffness) \
    IN_ONE_LOOP(name##_nearest, moments, stiffness, WRITE_NEAREST) \
    IN_ONE_LOOP(name##_stochastic, moments, stiffness, WRITE_STOCHASTIC) \
    IN_ONE_LOOP(name##_residual, moments, stiffness, WRITE_RESIDUAL8)
#define EVERY_FIELD(name, moments) \
    EVERY_WRITEBACK(name, moments, FIELD_NONE) \
    EVERY_WRITEBACK(name##_linear, moments, FIELD_LINEAR) \
    EVERY_WRITEBACK(name##_power, moments, FIELD_POWER)
#define WRITEBACKS(name) {name##_nearest, name##_stochastic, name##_residual}
#define FIELDS(name) \
    [FIELD_NONE] = WRITEBACKS(name), [FIELD_LINEAR] = WRITEBACKS(name##_linear), [FIELD_POWER] = WRITEBACKS(name##_power)

EVERY_FIELD(adam, FLOAT32)
EVERY_FIELD(adam16, BFLOAT16)
EVERY_FIELD(adam8, EIGHT_BITS)

/* By moments, stiffness and write-back. */
static const InOneLoop ADAMS[3][FIELD_POWER + 1][3] = {{FIELDS(adam)}, {FIELDS(adam16)}, {FIELDS(adam8)}};

/* The loop that takes all of a step, where there is one. */
InOneLoop in_one_loop(const Job *j)
{
    const Spec *s = j->spec;
    if (s->direction != ADAM || s->storage != CODES || s->geometry != LINEAR || s->metric != METRIC_ULP ||
        s->writeback > WRITE_RESIDUAL8 || j->largest || !is_usual(&s->format))
        return NULL;
    return ADAMS[s->moments][s->stiffness][s->writeback];
}
