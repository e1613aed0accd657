"""Codes to values and back, rounding and random words, for the elements of a tile.

The arithmetic is that of ``format.h``, ``chart.h`` and ``draws.h`` of native code,
which explain it, to the same bits. A code counts the values from zero up; a float32
whose exponent field is ``2 * 127 + M`` minus that of ``2^e`` is the exact reciprocal of
an ulp. Where a GPU is faster another way, it is taken here:

- Decoding moves the fields of a code to those of a float32. One product then corrects
  the bias.
- Rounding to a whole number adds ``1.5 * 2^23`` and subtracts it again. A GPU converts
  at an eighth of the rate at which it adds.

``FORMAT`` is a ``Format`` of ``kinds.py``. Arguments in capitals are constants that a
kernel is compiled for.
"""

import triton
import triton.language as tl

from fp8manifold._interface import (
    EXP2_SERIES,
    HASH_MULTIPLIERS,
    HASH_SHIFTS,
    LOG2_SERIES,
    POSITIONS,
)

#: 1.5 * 2^23: a float32 below 2^22 that is added to it is rounded to a whole number.
TO_WHOLE: tl.constexpr = tl.constexpr(12582912.0)
#: 2^-24: draws are whole numbers of it.
DRAW_UNIT: tl.constexpr = tl.constexpr(5.9604644775390625e-08)

# The rounds that make a random word of a position.
SHIFT_1: tl.constexpr = tl.constexpr(HASH_SHIFTS[0])
SHIFT_2: tl.constexpr = tl.constexpr(HASH_SHIFTS[1])
SHIFT_3: tl.constexpr = tl.constexpr(HASH_SHIFTS[2])
MULTIPLIER_1: tl.constexpr = tl.constexpr(HASH_MULTIPLIERS[0])
MULTIPLIER_2: tl.constexpr = tl.constexpr(HASH_MULTIPLIERS[1])
MULTIPLIER_3: tl.constexpr = tl.constexpr(HASH_MULTIPLIERS[2])

# The terms of 2^x and of log2((1 + t) / (1 - t)) / t that float32 takes.
EXP2_0: tl.constexpr = tl.constexpr(EXP2_SERIES[0])
EXP2_1: tl.constexpr = tl.constexpr(EXP2_SERIES[1])
EXP2_2: tl.constexpr = tl.constexpr(EXP2_SERIES[2])
EXP2_3: tl.constexpr = tl.constexpr(EXP2_SERIES[3])
EXP2_4: tl.constexpr = tl.constexpr(EXP2_SERIES[4])
EXP2_5: tl.constexpr = tl.constexpr(EXP2_SERIES[5])
EXP2_6: tl.constexpr = tl.constexpr(EXP2_SERIES[6])
EXP2_7: tl.constexpr = tl.constexpr(EXP2_SERIES[7])
LOG2_0: tl.constexpr = tl.constexpr(LOG2_SERIES[0])
LOG2_1: tl.constexpr = tl.constexpr(LOG2_SERIES[1])
LOG2_2: tl.constexpr = tl.constexpr(LOG2_SERIES[2])
LOG2_3: tl.constexpr = tl.constexpr(LOG2_SERIES[3])
LOG2_4: tl.constexpr = tl.constexpr(LOG2_SERIES[4])
LOG2_5: tl.constexpr = tl.constexpr(LOG2_SERIES[5])
LOG2_6: tl.constexpr = tl.constexpr(LOG2_SERIES[6])
LOG2_7: tl.constexpr = tl.constexpr(LOG2_SERIES[7])

# The numbers of a step that a power of the stiffness field needs, by their index.
INVERSE_REFERENCE: tl.constexpr = tl.constexpr(POSITIONS["inverse_reference"])
LOG_REFERENCE: tl.constexpr = tl.constexpr(POSITIONS["log_reference"])
LOW: tl.constexpr = tl.constexpr(POSITIONS["low"])
HIGH: tl.constexpr = tl.constexpr(POSITIONS["high"])
LOG_LOW: tl.constexpr = tl.constexpr(POSITIONS["log_low"])
LOG_HIGH: tl.constexpr = tl.constexpr(POSITIONS["log_high"])
POWER: tl.constexpr = tl.constexpr(POSITIONS["power"])


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    return float_of((exponent + 127) << 23)


@triton.jit
def reciprocal(power):
    """Return the reciprocal of a power of two."""
    return float_of((254 << 23) - bits_of(power))


@triton.jit
def clamp(x, low, high):
    """Return ``x`` between two bounds; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


# --------------------------------------------------------------------------------------
# Random words


@triton.jit
def random_word(keys, position):
    """Return the random words of positions (uint32).

    ``keys`` points to three round keys and a phase.
    """
    x = position + tl.load(keys)
    x = (x ^ (x >> SHIFT_1)) * MULTIPLIER_1 + tl.load(keys + 1)
    x = (x ^ (x >> SHIFT_2)) * MULTIPLIER_2 + tl.load(keys + 2)
    return (x ^ (x >> SHIFT_3)) * MULTIPLIER_3 + tl.load(keys + 3)


@triton.jit
def draw_of(word):
    """Return the 24 bits of a word that decide a rounding."""
    return (word >> 8).to(tl.int32)


@triton.jit
def mirror_draw(draw, bits):
    """Return the draw for a number with these bits, whose magnitude is rounded.

    That is ``2^24 - 1 - r`` for a negative number: one draw moves both signs in one
    direction.
    """
    return draw ^ ((bits >> 31) & 0xFFFFFF)


# --------------------------------------------------------------------------------------
# Codes to values


@triton.jit
def _unbiased(x, BIAS: tl.constexpr):
    """Return ``x 2^(127 - bias)``, in two steps where that is no float32."""
    FIRST_FIELD: tl.constexpr = 254 - (BIAS if BIAS > 0 else 0)
    x = x * float_of(tl.full((), FIRST_FIELD << 23, tl.int32))
    if BIAS < 0:
        x = x * float_of(tl.full((), (127 - BIAS) << 23, tl.int32))
    return x


@triton.jit
def magnitude_value(magnitude, FORMAT: tl.constexpr, EXTRA_BITS: tl.constexpr):
    """Return the value of a code without its sign."""
    fields = magnitude << (23 - FORMAT.mantissa_bits - EXTRA_BITS)
    return _unbiased(float_of(fields), FORMAT.bias)


@triton.jit
def code_value(code, FORMAT: tl.constexpr):
    """Return the value of a finite code; a shift carries its sign along."""
    EXPONENT_BITS: tl.constexpr = FORMAT.bits - 1 - FORMAT.mantissa_bits
    # The sign, and as many bits below it as code and mantissa have: the copies of the
    # sign between them go. -2147483648 is the sign bit of an int32.
    MASK: tl.constexpr = ((1 << (23 + EXPONENT_BITS)) - 1) - 2147483648
    fields = ((code << (32 - FORMAT.bits)) >> (8 - EXPONENT_BITS)) & MASK
    return _unbiased(float_of(fields), FORMAT.bias)


@triton.jit
def magnitude_ulp(magnitude, FORMAT: tl.constexpr, EXTRA_BITS: tl.constexpr):
    """Return the format's ulp at a code without its sign, which may have extra bits."""
    field = tl.maximum(magnitude >> (FORMAT.mantissa_bits + EXTRA_BITS), 1)
    return power_of_two(field - (FORMAT.bias + FORMAT.mantissa_bits))


@triton.jit
def any_value(code, FORMAT: tl.constexpr):
    """Return the value of any code, NaN and Inf included."""
    magnitude = code & (FORMAT.sign_bit - 1)
    sign = (code << (32 - FORMAT.bits)) & -2147483648
    value = bits_of(magnitude_value(magnitude, FORMAT, 0)) | sign
    if FORMAT.many_nans:
        value = tl.where(magnitude > FORMAT.max_code, 0x7FC00000, value)
    if FORMAT.inf_code >= 0:
        value = tl.where(magnitude == FORMAT.inf_code, 0x7F800000 | sign, value)
    if FORMAT.one_nan >= 0:
        value = tl.where(code == FORMAT.one_nan, 0x7FC00000, value)
    return float_of(value)


@triton.jit
def is_special(code, FORMAT: tl.constexpr):
    """Return whether a code is NaN or Inf: steps leave such codes as they are."""
    if FORMAT.many_nans:
        special = (code & (FORMAT.sign_bit - 1)) > FORMAT.max_code
    else:
        special = code == FORMAT.one_nan
    return special


# --------------------------------------------------------------------------------------
# Values to codes


@triton.jit
def round_even(steps):
    """Return a float32 below 2^22 as a whole number, ties to even, int32."""
    return bits_of(steps + TO_WHOLE) - 0x4B400000


@triton.jit
def encoding_steps(bits, FORMAT: tl.constexpr, EXTRA_BITS: tl.constexpr, PART_BITS: tl.constexpr):
    """Return the steps in float32 bits without a sign, and the number of codes below.

    Steps are whole numbers of an ulp, in parts of ``2^-PART_BITS``.
    """
    MANTISSA_BITS: tl.constexpr = FORMAT.mantissa_bits + EXTRA_BITS
    FIELD: tl.constexpr = 254 + MANTISSA_BITS + PART_BITS
    # As an int32, of which the exponent field may have overflowed into the sign.
    FIELD_BITS: tl.constexpr = FIELD * (1 << 23) - ((1 << 32) if FIELD >= 256 else 0)
    magnitude = tl.minimum(bits, FORMAT.top)
    power = tl.maximum(magnitude & 0x7F800000, (127 + FORMAT.emin) << 23)
    steps = float_of(magnitude) * float_of(FIELD_BITS - power)
    if FORMAT.coarse:
        # The quotient of the smallest floats underflows, but is not 0 to a draw of 0.
        # The bound is 2^-100.
        steps = tl.maximum(steps, float_of(tl.minimum(magnitude, 27 << 23)))
    below = (power >> (23 - MANTISSA_BITS)) - ((127 + FORMAT.emin) << MANTISSA_BITS)
    return steps, below


@triton.jit
def encode_magnitude(
    bits,
    draw,
    FORMAT: tl.constexpr,
    EXTRA_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FIXED_POINT: tl.constexpr,
):
    """Return the code of float32 bits without a sign, rounded."""
    PART_BITS: tl.constexpr = 24 if STOCHASTIC and FIXED_POINT else 0
    steps, below = encoding_steps(bits, FORMAT, EXTRA_BITS, PART_BITS)
    if not STOCHASTIC:
        whole = round_even(steps)
        if FORMAT.mantissa_bits + EXTRA_BITS == 0:
            # One value per binade: 1.5 steps were rounded to the even number of steps,
            # 2. The even code may be the lower one, after an odd number of codes below.
            whole = whole - ((steps == 1.5).to(tl.int32) & below & 1)
    elif FIXED_POINT:
        # A fraction exceeds the draw r exactly where its sum with 2^24 - 1 - r carries.
        whole = (tl.ceil(steps).to(tl.int32) + (0xFFFFFF - draw)) >> 24
    else:
        whole = steps.to(tl.int32)
        fraction = steps - whole.to(tl.float32)
        # -1, the sign spread over a word, where the fraction exceeds the draw
        whole = whole - (bits_of(draw.to(tl.float32) * DRAW_UNIT - fraction) >> 31)
    return whole + below


@triton.jit
def encode_finite(
    x, draw, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr, FIXED_POINT: tl.constexpr
):
    """Return the code of a number; Inf saturates."""
    bits = bits_of(x)
    if STOCHASTIC:
        draw = mirror_draw(draw, bits)
    code = encode_magnitude(bits & 0x7FFFFFFF, draw, FORMAT, 0, STOCHASTIC, FIXED_POINT)
    sign = (bits >> (32 - FORMAT.bits)) & FORMAT.sign_bit
    if FORMAT.signed_zero:
        code = code | sign
    else:
        # The sum has the sign bit set unless the code is 0, which stays +0.
        code = code + ((code + (FORMAT.sign_bit - 1)) & sign)
    return code


@triton.jit
def encode_signed(
    x, draw, FORMAT: tl.constexpr, EXTRA_BITS: tl.constexpr, FIXED_POINT: tl.constexpr
):
    """Return the signed code of a stochastic rounding, with extra bits."""
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    draw = mirror_draw(draw, bits)
    code = encode_magnitude(magnitude, draw, FORMAT, EXTRA_BITS, True, FIXED_POINT)
    # -1 for a negative number: the code is negated in two's complement
    negative = bits >> 31
    return (code ^ negative) - negative


@triton.jit
def split_code(signed_code, old_code, FORMAT: tl.constexpr, EXTRA_BITS: tl.constexpr):
    """Return the nearest code of one with extra bits, and the residual.

    A zero is -0 where the old code was -0.
    """
    # In another order of these statements ptxas spills registers of widen_kernel.
    nearest = (signed_code + (1 << (EXTRA_BITS - 1))) >> EXTRA_BITS
    is_zero = nearest == 0
    zero = tl.where(old_code == FORMAT.sign_bit, FORMAT.sign_bit, 0)
    code = tl.where(is_zero, zero, tl.abs(nearest) | (nearest & FORMAT.sign_bit))
    return code, (signed_code - (nearest << EXTRA_BITS)).to(tl.int8)


# --------------------------------------------------------------------------------------
# Values to values


@triton.jit
def binade_of(x, lowest):
    """Return ``2^max(floor(log2|x|), lowest)``."""
    return float_of(tl.maximum(bits_of(x) & 0x7F800000, (lowest + 127) << 23))


@triton.jit
def _nearest_value(x, FORMAT: tl.constexpr):
    """Return a number of the format's range rounded, ties to the even code."""
    CONSTANT: tl.constexpr = TO_WHOLE * 2.0**-FORMAT.mantissa_bits
    power = binade_of(x, FORMAT.emin)
    if FORMAT.mantissa_bits == 0:
        # One value per binade: the even code is that of an even exponent field. An odd
        # multiple of the power of two in the constant turns the tie the other way.
        ODD_MULTIPLE: tl.constexpr = CONSTANT + (1 ^ ((127 - FORMAT.bias) & 1))
        odd_field = (bits_of(power) >> 23) & 1
        magic = float_of(bits_of(power * ODD_MULTIPLE) ^ odd_field)
    else:
        magic = power * CONSTANT
    return (x + magic) - magic


@triton.jit
def _drawn_value(x, draw, FORMAT: tl.constexpr):
    """Return the magnitude of a number of the format's range, rounded by a draw."""
    # If the smallest ulp exceeds 1, the quotient of the smallest float by it would
    # underflow: finer units are counted.
    UNITS_PER_ULP: tl.constexpr = 16777216.0 if FORMAT.coarse else 1.0
    x = tl.abs(x)
    unit = binade_of(x, FORMAT.emin) * (2.0**-FORMAT.mantissa_bits / UNITS_PER_ULP)
    units = tl.math.div_rn(x, unit)
    steps = tl.floor(units * DRAW_UNIT) if FORMAT.coarse else tl.floor(units)
    fraction = units - steps * UNITS_PER_ULP
    excess = fraction - draw.to(tl.float32) * (UNITS_PER_ULP * DRAW_UNIT)
    goes_on = tl.ceil(clamp(excess, 0.0, 1.0))
    rounded = (goes_on + steps) * unit
    if FORMAT.coarse:
        rounded = rounded * UNITS_PER_ULP
    return rounded


@triton.jit
def round_value(x, draw, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return the nearest or a drawn value of the grid, saturating; NaN stays."""
    in_range = clamp(x, -FORMAT.largest, FORMAT.largest)
    if STOCHASTIC:
        rounded = _drawn_value(in_range, mirror_draw(draw, bits_of(x)), FORMAT)
    else:
        rounded = _nearest_value(in_range, FORMAT)
    if FORMAT.signed_zero or STOCHASTIC:
        rounded = float_of((bits_of(rounded) & 0x7FFFFFFF) | (bits_of(x) & -2147483648))
    if not FORMAT.signed_zero:
        # -0 becomes +0.
        rounded = rounded + 0.0
    return rounded


# --------------------------------------------------------------------------------------
# 16-bit floats


@triton.jit
def nearest_bfloat16(x):
    """Return the nearest bfloat16, as uint16 bits."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def of_bfloat16(bits):
    return float_of(bits.to(tl.int32) << 16)


@triton.jit
def _drawn_float16(magnitude, draw):
    """Return the float32 bits of a float16 neighbour of float32 bits without a sign."""
    power = tl.maximum(magnitude & 0x7F800000, (127 - 14) << 23)
    steps = float_of(magnitude) * float_of(((2 * 127 + 10) << 23) - 4294967296 - power)
    whole = steps.to(tl.int32)
    goes_on = draw.to(tl.float32) * DRAW_UNIT < steps - whole.to(tl.float32)
    value = (whole + goes_on.to(tl.int32)).to(tl.float32) * float_of(power - (10 << 23))
    return bits_of(tl.minimum(value, 65504.0))


@triton.jit
def random_half(x, draw, FLOAT16: tl.constexpr):
    """Return a 16-bit neighbour as a float32.

    It is the one away from zero with the odds of what is cut off.
    """
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    if FLOAT16:
        rounded = _drawn_float16(magnitude, draw)
    else:
        # The sum carries into the upper half where the lower one exceeds the 16 upper
        # bits of the draw.
        rounded = tl.minimum((magnitude + ((draw >> 8) ^ 0xFFFF)) & -65536, 0x7F7F0000)
    # NaN and Inf stay.
    return float_of(tl.where(magnitude < 0x7F800000, rounded, magnitude) | (bits & -2147483648))


# --------------------------------------------------------------------------------------
# The chart of the ulp metric


@triton.jit
def sign_of(x):
    return float_of((bits_of(x) & -2147483648) | 0x3F800000)


@triton.jit
def chart_stiffness(x, lowest, highest, FORMAT: tl.constexpr):
    """Return one step at ``x``, whose exponent is clamped to ``[lowest, highest]``."""
    power = tl.minimum(binade_of(x, lowest), power_of_two(highest))
    return power * (2.0**-FORMAT.mantissa_bits)


@triton.jit
def _codes_below(stiffness, lowest, FORMAT: tl.constexpr):
    """Return ``(e - lowest) 2^M``, which ``|x| / S`` lacks of the steps from 0."""
    exponent_field = (bits_of(stiffness) >> 23) + FORMAT.mantissa_bits
    return ((exponent_field - (127 + lowest)) << FORMAT.mantissa_bits).to(tl.float32)


@triton.jit
def chart_forward(x, lowest, highest, FORMAT: tl.constexpr):
    """Return the steps from zero to ``x``."""
    stiffness = chart_stiffness(x, lowest, highest, FORMAT)
    sign = sign_of(x)
    return (_codes_below(stiffness, lowest, FORMAT) + tl.math.div_rn(x * sign, stiffness)) * sign


@triton.jit
def _chart_inverse(coordinate, lowest, highest, FORMAT: tl.constexpr):
    """Return the value so many steps from zero."""
    STEPS_PER_BINADE: tl.constexpr = float(1 << FORMAT.mantissa_bits)
    sign = sign_of(coordinate)
    magnitude = coordinate * sign
    index = tl.floor(magnitude * (1.0 / STEPS_PER_BINADE)) - 1.0
    index = tl.minimum(tl.maximum(index, 0.0), (highest - lowest).to(tl.float32))
    spacing = power_of_two(index.to(tl.int32) + lowest - FORMAT.mantissa_bits)
    return (magnitude - index * STEPS_PER_BINADE) * spacing * sign


@triton.jit
def chart_shift(x, steps, lowest, highest, FORMAT: tl.constexpr):
    """Return the value so many steps from ``x``.

    Whole steps are counted apart from the fraction of one, which alone is rounded.
    """
    stiffness = chart_stiffness(x, lowest, highest, FORMAT)
    sign = sign_of(x)
    position = tl.math.div_rn(x * sign, stiffness)
    whole = tl.floor(position)
    fraction = (position - whole) + steps * sign
    whole_of_fraction = tl.floor(fraction)
    code = _codes_below(stiffness, lowest, FORMAT) + whole + whole_of_fraction
    value = _chart_inverse(code, lowest, highest, FORMAT)
    next_value = _chart_inverse(code + 1.0, lowest, highest, FORMAT)
    return (value + (fraction - whole_of_fraction) * (next_value - value)) * sign


# --------------------------------------------------------------------------------------
# Powers of the stiffness field


@triton.jit
def exp2_exact(x):
    """Return ``2^x`` within 4 ulp, and exactly for a whole ``x`` from -126 to 127."""
    small = tl.abs(x) < 4194304.0
    whole = tl.where(small, (x + TO_WHOLE) - TO_WHOLE, x)
    fraction = x - whole
    # A tensor of the first coefficient, in the shape of x.
    value = x * 0.0 + EXP2_7
    value = value * fraction + EXP2_6
    value = value * fraction + EXP2_5
    value = value * fraction + EXP2_4
    value = value * fraction + EXP2_3
    value = value * fraction + EXP2_2
    value = value * fraction + EXP2_1
    value = value * fraction + EXP2_0
    return value * power_of_two(tl.minimum(tl.maximum(whole, -126.0), 127.0).to(tl.int32))


@triton.jit
def log2_of_mantissa(x):
    """Return ``log2 f`` of ``x = 2^e f``."""
    f = float_of((bits_of(x) & 0x7FFFFF) | 0x3F800000)
    t = tl.math.div_rn(f - 1.0, f + 1.0)
    square = t * t
    # A tensor of the first coefficient, in the shape of x.
    value = square * 0.0 + LOG2_7
    value = value * square + LOG2_6
    value = value * square + LOG2_5
    value = value * square + LOG2_4
    value = value * square + LOG2_3
    value = value * square + LOG2_2
    value = value * square + LOG2_1
    value = value * square + LOG2_0
    return value * t


@triton.jit
def field_factor(stiffness, scale, numbers, MODE: tl.constexpr, EXPONENTS: tl.constexpr):
    """Return ``clamp(S / S_ref)^k`` of a stiffness in value.

    Args:
        stiffness: its mantissa is that of the scale.
        scale: the logarithm of its mantissa is taken in place of the stiffness's, which
            may be a larger tensor.
        numbers: points to the numbers of the step.
        MODE: ``linear``, ``sqrt``, ``square``, or ``power`` for any other ``k``.
        EXPONENTS: whether scales are stored as exponents.
    """
    if MODE == "power":
        log_reference = tl.load(numbers + LOG_REFERENCE)
        if not EXPONENTS:
            log_reference = log_reference - log2_of_mantissa(scale)
        logarithm = ((bits_of(stiffness) >> 23) - 127).to(tl.float32) - log_reference
        logarithm = tl.maximum(logarithm, tl.load(numbers + LOG_LOW))
        logarithm = tl.minimum(logarithm, tl.load(numbers + LOG_HIGH))
        factor = exp2_exact(logarithm * tl.load(numbers + POWER))
    else:
        # Positive floats are ordered like their bits.
        low = bits_of(tl.load(numbers + LOW))
        high = bits_of(tl.load(numbers + HIGH))
        ratio = bits_of(stiffness * tl.load(numbers + INVERSE_REFERENCE))
        factor = float_of(tl.minimum(tl.maximum(ratio, low), high))
        if MODE == "sqrt":
            factor = tl.math.sqrt_rn(factor)
        elif MODE == "square":
            factor = factor * factor
    return factor
