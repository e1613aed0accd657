/* What most people run in one loop: the same stages of an element one after another, with nothing put down between. */
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
InOneLoop in_one_loop(const Job *j)
{
    const Spec *s = j->spec;
    if (s->direction != ADAM || s->storage != CODES || s->geometry != LINEAR || s->metric != METRIC_ULP ||
        s->moments == BFLOAT16 || s->stiffness > FIELD_LINEAR || s->writeback > WRITE_RESIDUAL8 || j->largest ||
        !is_usual(&s->format))
        return NULL;
    return ADAMS[s->moments == EIGHT_BITS][s->stiffness][s->writeback];
}
