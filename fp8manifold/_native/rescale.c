/* Codes under other scales: the values of a row are multiplied by its factor, the old
 * scale over the new one, and rounded stochastically once.  Rows whose factor is 1 stay. */
#include "draws.h"
#include "elements.h"
#include "threads.h"

typedef struct {
    const Array *array;
    uint8_t *codes;
    int8_t *residuals; /* or NULL */
    const float *factors;
} Rescaling;

/* `extra_bits`, of the residuals, and `fixed_point` are constants. */
INLINE void rescale_row(const Rescaling *rescaling, int64_t row, int extra_bits, int fixed_point)
{
    const Array *array = rescaling->array;
    const Format format = array->format;
    const Keys keys = array->keys;
    const float factor = rescaling->factors[row];
    const int64_t start = row * array->length;
    const uint32_t position = array->position + (uint32_t)start;
    uint8_t *codes = rescaling->codes + start;
    int8_t *residuals = extra_bits ? rescaling->residuals + start : NULL;
    for (int64_t i = 0; i < array->length; i++) {
        const int32_t draw = draw_of(random_word(keys, position + (uint32_t)i));
        const int32_t old_residual = extra_bits ? residuals[i] : 0;
        const float value = load_code(&format, codes[i], old_residual, extra_bits).value * factor;
        int32_t code;
        if (extra_bits) {
            int32_t residual;
            const int32_t signed_code =
                encode_signed(&format, value, 1, draw, extra_bits, fixed_point);
            const int32_t nearest = split_code(&format, signed_code, extra_bits, &residual);
            code = keep_negative_zero(&format, nearest, codes[i]);
            residuals[i] = (int8_t)residual;
        } else {
            code = encode_finite(&format, value, 1, draw, fixed_point);
        }
        codes[i] = keep_special(&format, code, codes[i]);
    }
}

CLONED static void rescale_codes(const Rescaling *rescaling, int64_t row)
{
    rescale_row(rescaling, row, 0, 0);
}

CLONED static void rescale_codes_fixed(const Rescaling *rescaling, int64_t row)
{
    rescale_row(rescaling, row, 0, 1);
}

CLONED static void rescale_residuals(const Rescaling *rescaling, int64_t row)
{
    rescale_row(rescaling, row, 8, 0);
}

CLONED static void rescale_residuals_fixed(const Rescaling *rescaling, int64_t row)
{
    rescale_row(rescaling, row, 8, 1);
}

static void take_share(const void *context, int part, int parts)
{
    const Rescaling *rescaling = context;
    const Array *array = rescaling->array;
    const int32_t extra_bits = rescaling->residuals ? 8 : 0;
    const int fixed_point =
        in_fixed_point(&array->format, array->format.mantissa_bits + extra_bits);
    const int64_t stop = array->rows * (part + 1) / parts;
    for (int64_t row = array->rows * part / parts; row < stop; row++) {
        if (rescaling->factors[row] == 1.0f)
            continue;
        if (extra_bits && fixed_point)
            rescale_residuals_fixed(rescaling, row);
        else if (extra_bits)
            rescale_residuals(rescaling, row);
        else if (fixed_point)
            rescale_codes_fixed(rescaling, row);
        else
            rescale_codes(rescaling, row);
    }
}

EXPORT void fp8manifold_rescale(const Array *array, uint8_t *codes, int8_t *residuals,
                                const float *factors, int threads)
{
    const Rescaling rescaling = {array, codes, residuals, factors};
    run_in_threads(take_share, &rescaling, threads);
}
