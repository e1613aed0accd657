"""Codes to values and back, rounding and random words, as in ``format.h`` and
``draws.h`` of native code.
"""

import triton
import triton.language as tl


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
    """The reciprocal of a power of two."""
    return float_of((254 << 23) - bits_of(power))


@triton.jit
def bounded(x, low, high):
    """``x`` within two bounds; NaN stays."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def random_word(keys, position):
    """Random words from a row of three round keys and a phase, and positions (uint32)."""
    x = position + tl.load(keys)
    x = (x ^ (x >> 17)) * 0xED5AD4BB + tl.load(keys + 1)
    x = (x ^ (x >> 11)) * 0xAC4C1B51 + tl.load(keys + 2)
    return (x ^ (x >> 15)) * 0x31848BAB + tl.load(keys + 3)


@triton.jit
def draw_of(word):
    """The 24 bits of a word that decide a rounding."""
    return (word >> 8).to(tl.int32)


@triton.jit
def _unbiased(x, BIAS: tl.constexpr):
    """x 2^(127 - bias), in two steps where that is no float32."""
    FIRST: tl.constexpr = 254 - (BIAS if BIAS > 0 else 0)
    x = x * float_of(tl.full((), FIRST << 23, tl.int32))
    if BIAS < 0:
        x = x * float_of(tl.full((), (127 - BIAS) << 23, tl.int32))
    return x


@triton.jit
def magnitude_value(magnitude, F: tl.constexpr, EXTRA: tl.constexpr):
    """The value of a code without sign: its fields are moved to those of float32, and a
    power corrects the bias.
    """
    return _unbiased(float_of(magnitude << (23 - F.M - EXTRA)), F.BIAS)


@triton.jit
def code_value(code, F: tl.constexpr):
    """The value of a finite code with its sign, which an arithmetic shift carries
    along.
    """
    E: tl.constexpr = F.BITS - 1 - F.M
    MASK: tl.constexpr = ((1 << (23 + E)) - 1) - 2147483648
    return _unbiased(float_of(((code << (32 - F.BITS)) >> (8 - E)) & MASK), F.BIAS)


@triton.jit
def magnitude_ulp(magnitude, F: tl.constexpr, EXTRA: tl.constexpr):
    """The spacing at a code without sign, in units of the scale: that of the format,
    EXTRA bits finer or not.
    """
    field = tl.maximum(magnitude >> (F.M + EXTRA), 1)
    return power_of_two(field - (F.BIAS + F.M))


@triton.jit
def any_value(code, F: tl.constexpr):
    """The value of any code, NaN and Inf included."""
    magnitude = code & (F.SIGN - 1)
    sign = (code << (32 - F.BITS)) & -2147483648
    value = bits_of(magnitude_value(magnitude, F, 0)) | sign
    if F.MANY_NANS:
        value = tl.where(magnitude > F.MAX_CODE, 0x7FC00000, value)
    if F.INF_CODE >= 0:
        value = tl.where(magnitude == F.INF_CODE, 0x7F800000 | sign, value)
    if F.ONE_NAN >= 0:
        value = tl.where(code == F.ONE_NAN, 0x7FC00000, value)
    return float_of(value)


@triton.jit
def is_special(code, F: tl.constexpr):
    """True if a code is not a finite number's: steps leave such codes as they are."""
    if F.MANY_NANS:
        special = (code & (F.SIGN - 1)) > F.MAX_CODE
    else:
        special = code == F.ONE_NAN
    return special


@triton.jit
def round_even(steps):
    """int32 of a float32 below 2^22, without a conversion, which a GPU does at an
    eighth of the rate of sums.
    """
    return bits_of(steps + 12582912.0) - 0x4B400000


@triton.jit
def encoding_steps(bits, F: tl.constexpr, EXTRA: tl.constexpr, PARTS: tl.constexpr):
    """The spacings in float32 bits without sign, in parts of 2^-PARTS, and what is
    added to them for a code.
    """
    M: tl.constexpr = F.M + EXTRA
    E: tl.constexpr = 254 + M + PARTS
    FACTOR: tl.constexpr = E * (1 << 23) - ((1 << 32) if E >= 256 else 0)
    magnitude = tl.minimum(bits, F.TOP)
    power = tl.maximum(magnitude & 0x7F800000, (127 + F.EMIN) << 23)
    steps = float_of(magnitude) * float_of(FACTOR - power)
    if (
        F.COARSE
    ):  # the quotient of the smallest floats underflows, where a draw of 0 must still see it
        steps = tl.maximum(steps, float_of(tl.minimum(magnitude, 27 << 23)))  # 2^-100
    return steps, (power >> (23 - M)) - ((127 + F.EMIN) << M)


@triton.jit
def encode_magnitude(
    bits, draw, F: tl.constexpr, EXTRA: tl.constexpr, STOCHASTIC: tl.constexpr, FIXED: tl.constexpr
):
    """The code of float32 bits without sign, rounded."""
    steps, below = encoding_steps(bits, F, EXTRA, 24 if STOCHASTIC and FIXED else 0)
    if not STOCHASTIC:
        whole = round_even(steps)
        if (
            F.M + EXTRA == 0
        ):  # one value per binade: even is the code of an even field, and below counts from EMIN
            whole = whole - ((steps == 1.5).to(tl.int32) & below & 1)
    elif FIXED:
        whole = (tl.ceil(steps).to(tl.int32) + (0xFFFFFF - draw)) >> 24
    else:
        whole = steps.to(tl.int32)
        fraction = steps - whole.to(tl.float32)
        whole = whole - (bits_of(draw.to(tl.float32) * 5.9604644775390625e-08 - fraction) >> 31)
    return whole + below


@triton.jit
def mirrored(draw, bits):
    """A draw by which a negative number, whose magnitude is rounded, moves in a
    positive one's direction.
    """
    return draw ^ ((bits >> 31) & 0xFFFFFF)


@triton.jit
def encode_finite(x, draw, F: tl.constexpr, STOCHASTIC: tl.constexpr, FIXED: tl.constexpr):
    bits = bits_of(x)
    if STOCHASTIC:
        draw = mirrored(draw, bits)
    code = encode_magnitude(bits & 0x7FFFFFFF, draw, F, 0, STOCHASTIC, FIXED)
    sign = (bits >> (32 - F.BITS)) & F.SIGN
    if F.SIGNED_ZERO:
        code = code | sign
    else:
        code = code + ((code + (F.SIGN - 1)) & sign)
    return code


@triton.jit
def encode_signed(x, draw, F: tl.constexpr, EXTRA: tl.constexpr, FIXED: tl.constexpr):
    """A stochastic code of the format with EXTRA more bits, which counts up from the
    lowest value.
    """
    bits = bits_of(x)
    code = encode_magnitude(bits & 0x7FFFFFFF, mirrored(draw, bits), F, EXTRA, True, FIXED)
    negative = bits >> 31
    return (code ^ negative) - negative


@triton.jit
def split_code(signed, old, F: tl.constexpr, EXTRA: tl.constexpr):
    """The nearest code of a finer one and what is left; of the two zeros -0 where the
    old code was.
    """
    nearest = (signed + (1 << (EXTRA - 1))) >> EXTRA
    code = tl.where(
        nearest == 0, tl.where(old == F.SIGN, F.SIGN, 0), tl.abs(nearest) | (nearest & F.SIGN)
    )
    return code, (signed - (nearest << EXTRA)).to(tl.int8)


@triton.jit
def binade_of(x, lowest):
    """2^max(floor(log2|x|), lowest)."""
    return float_of(tl.maximum(bits_of(x) & 0x7F800000, (lowest + 127) << 23))


@triton.jit
def _nearest_value(y, F: tl.constexpr):
    CONSTANT: tl.constexpr = 12582912.0 * 2.0**-F.M
    power = binade_of(y, F.EMIN)
    if F.M == 0:
        odd = (bits_of(power) >> 23) & 1
        magic = float_of(bits_of(power * (CONSTANT + (1 ^ ((127 - F.BIAS) & 1)))) ^ odd)
    else:
        magic = power * CONSTANT
    return (y + magic) - magic


@triton.jit
def _stochastic_value(y, draw, F: tl.constexpr):
    FINER: tl.constexpr = 16777216.0 if F.COARSE else 1.0
    y = tl.abs(y)
    unit = binade_of(y, F.EMIN) * (2.0**-F.M / FINER)
    y = tl.math.div_rn(y, unit)
    steps = tl.floor(y * 5.9604644775390625e-08) if F.COARSE else tl.floor(y)
    y = y - steps * FINER
    y = tl.ceil(bounded(y - draw.to(tl.float32) * (FINER * 5.9604644775390625e-08), 0.0, 1.0))
    y = (y + steps) * unit
    if F.COARSE:
        y = y * FINER
    return y


@triton.jit
def round_value(x, draw, F: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The nearest or a drawn value of the grid, saturating; NaN stays."""
    y = bounded(x, -F.LARGEST, F.LARGEST)
    if STOCHASTIC:
        y = _stochastic_value(y, mirrored(draw, bits_of(x)), F)
    else:
        y = _nearest_value(y, F)
    if F.SIGNED_ZERO or STOCHASTIC:
        y = float_of((bits_of(y) & 0x7FFFFFFF) | (bits_of(x) & -2147483648))
    if not F.SIGNED_ZERO:
        y = y + 0.0
    return y


@triton.jit
def nearest_bfloat16(x):
    """uint16 bits."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def of_bfloat16(bits):
    return float_of(bits.to(tl.int32) << 16)


@triton.jit
def _float16_magnitude(magnitude, draw):
    power = tl.maximum(magnitude & 0x7F800000, (127 - 14) << 23)
    steps = float_of(magnitude) * float_of(((2 * 127 + 10) << 23) - 4294967296 - power)
    whole = steps.to(tl.int32)
    away = draw.to(tl.float32) * 5.9604644775390625e-08 < steps - whole.to(tl.float32)
    value = (whole + away.to(tl.int32)).to(tl.float32) * float_of(power - (10 << 23))
    return bits_of(tl.minimum(value, 65504.0))


@triton.jit
def random_half(x, draw, FLOAT16: tl.constexpr):
    """The float32 of a 16-bit neighbour: the one away from zero with the odds of what
    is cut off.
    """
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    if FLOAT16:
        rounded = _float16_magnitude(magnitude, draw)
    else:
        rounded = tl.minimum((magnitude + ((draw >> 8) ^ 0xFFFF)) & -65536, 0x7F7F0000)
    return float_of(tl.where(magnitude < 0x7F800000, rounded, magnitude) | (bits & -2147483648))


@triton.jit
def sign_of(x):
    return float_of((bits_of(x) & -2147483648) | 0x3F800000)


@triton.jit
def chart_stiffness(x, lowest, highest, F: tl.constexpr):
    """One step at x: the exponent is held between lowest and highest."""
    return tl.minimum(binade_of(x, lowest), power_of_two(highest)) * (2.0**-F.M)


@triton.jit
def _below(stiffness, lowest, F: tl.constexpr):
    """The steps from 0 to the binade, short of those within it."""
    return ((((bits_of(stiffness) >> 23) + F.M) - (127 + lowest)) << F.M).to(tl.float32)


@triton.jit
def chart_forward(x, lowest, highest, F: tl.constexpr):
    step, sign = chart_stiffness(x, lowest, highest, F), sign_of(x)
    return (_below(step, lowest, F) + tl.math.div_rn(x * sign, step)) * sign


@triton.jit
def _inverse(at, lowest, highest, F: tl.constexpr):
    BINADE: tl.constexpr = float(1 << F.M)
    sign = sign_of(at)
    magnitude = at * sign
    index = tl.floor(magnitude * (1.0 / BINADE)) - 1.0
    index = tl.minimum(tl.maximum(index, 0.0), (highest - lowest).to(tl.float32))
    spacing = power_of_two(index.to(tl.int32) + lowest - F.M)
    return (magnitude - index * BINADE) * spacing * sign


@triton.jit
def chart_shift(x, steps, lowest, highest, F: tl.constexpr):
    """x moved by so many steps, along a straight line between whole ones."""
    step, sign = chart_stiffness(x, lowest, highest, F), sign_of(x)
    position = tl.math.div_rn(x * sign, step)
    whole = tl.floor(position)
    fraction = (position - whole) + steps * sign
    moved = tl.floor(fraction)
    start = _below(step, lowest, F) + whole + moved
    value, neighbour = (
        _inverse(start, lowest, highest, F),
        _inverse(start + 1.0, lowest, highest, F),
    )
    return (value + (fraction - moved) * (neighbour - value)) * sign


@triton.jit
def exp2_exact(x):
    """2^x within 4 ulp."""
    small = tl.abs(x) < 4194304.0
    whole = tl.where(small, (x + 12582912.0) - 12582912.0, x)
    fraction = x - whole
    value = x * 0.0 + 1.5252733804059838e-05
    value = value * fraction + 0.00015403530393381606
    value = value * fraction + 0.0013333558146428441
    value = value * fraction + 0.009618129107628477
    value = value * fraction + 0.05550410866482158
    value = value * fraction + 0.2402265069591007
    value = value * fraction + 0.6931471805599453
    value = value * fraction + 1.0
    return value * power_of_two(tl.minimum(tl.maximum(whole, -126.0), 127.0).to(tl.int32))


@triton.jit
def log2_of_mantissa(x):
    """log2 f of 2^e f."""
    f = float_of((bits_of(x) & 0x7FFFFF) | 0x3F800000)
    t = tl.math.div_rn(f - 1.0, f + 1.0)
    square = t * t
    value = square * 0.0 + 0.19235933878519512
    value = value * square + 0.22195308321368667
    value = value * square + 0.2623081892525388
    value = value * square + 0.3205988979753252
    value = value * square + 0.4121985831111324
    value = value * square + 0.5770780163555853
    value = value * square + 0.9617966939259756
    value = value * square + 2.8853900817779268
    return value * t


@triton.jit
def field_factor(stiffness, scale, reference, MODE: tl.constexpr, EXPONENTS: tl.constexpr):
    """(S / S_ref)^k of a spacing in value, whose mantissa is the scale's: with
    EXPONENTS 1.

    ``reference`` points to 1 / S_ref, log2 S_ref, the bounds of the ratio, those of its
    logarithm, and k.
    """
    if MODE == "power":
        log_reference = tl.load(reference + 1)
        if not EXPONENTS:
            log_reference = log_reference - log2_of_mantissa(scale)
        log = ((bits_of(stiffness) >> 23) - 127).to(tl.float32) - log_reference
        log = tl.minimum(tl.maximum(log, tl.load(reference + 4)), tl.load(reference + 5))
        factor = exp2_exact(log * tl.load(reference + 6))
    else:
        low, high = bits_of(tl.load(reference + 2)), bits_of(tl.load(reference + 3))
        factor = float_of(
            tl.minimum(tl.maximum(bits_of(stiffness * tl.load(reference)), low), high)
        )
        if MODE == "sqrt":
            factor = tl.math.sqrt_rn(factor)
        elif MODE == "square":
            factor = factor * factor
    return factor
