"""The stages of a step over a tile, as in ``stages.c`` of native code.

A parameter's step is described by a record, the ``JOB`` of ``_interface.py`` that native
code reads too: its pointers, sizes, keys and numbers. Kernels read it as int32 words and
never see a tensor::

    record + 2 * WEIGHT, GRADIENT, ...  ->  addresses, 64 bits each
    record + ROWS, LENGTH               ->  64-bit sizes
    record + REPEATS, LOW, KEYS, ...    ->  32-bit words
    record + HYPER + BETA1, GAIN1, ...  ->  float32 numbers

A tile has ``TILE.rows`` rows of ``TILE.width`` elements: ``offsets`` are the elements'
positions in the parameter, ``mask`` says which of them exist, and ``row`` and
``row_mask`` are the same for rows. Weights, ulps and targets are in units of the scale.

``SPEC`` and ``TILE`` are ``KernelSpec`` and ``Tile`` of ``kinds.py``. Arguments in
capitals are constants that a kernel is compiled for.
"""

import triton
import triton.language as tl

from fp8manifold._interface import GPU_FACTORS, JOB, POSITIONS
from fp8manifold._triton import format as floats

# Offsets in words.
RECORD_WORDS: tl.constexpr = tl.constexpr(JOB.size // 4)
ROWS: tl.constexpr = tl.constexpr(JOB.word("rows"))
LENGTH: tl.constexpr = tl.constexpr(JOB.word("length"))
REPEATS: tl.constexpr = tl.constexpr(JOB.word("repeats"))
LOW: tl.constexpr = tl.constexpr(JOB.word("low_exponent"))
HIGH: tl.constexpr = tl.constexpr(JOB.word("high_exponent"))
KEYS: tl.constexpr = tl.constexpr(JOB.word("weight_keys"))
MOMENT_KEYS: tl.constexpr = tl.constexpr(JOB.word("moment_keys"))
HYPER: tl.constexpr = tl.constexpr(JOB.word("hyper"))

# The pointers of a record, by their index.
WEIGHT: tl.constexpr = tl.constexpr(JOB.column("weight"))
GRADIENT: tl.constexpr = tl.constexpr(JOB.column("gradient"))
SCALE: tl.constexpr = tl.constexpr(JOB.column("scale"))
RESIDUAL: tl.constexpr = tl.constexpr(JOB.column("residual"))
FIRST: tl.constexpr = tl.constexpr(JOB.column("first"))
SECOND: tl.constexpr = tl.constexpr(JOB.column("second"))
SECOND_MAX: tl.constexpr = tl.constexpr(JOB.column("second_max"))
FIRST_BOUND: tl.constexpr = tl.constexpr(JOB.column("first_bound"))
SECOND_BOUND: tl.constexpr = tl.constexpr(JOB.column("second_bound"))
REPORT: tl.constexpr = tl.constexpr(JOB.column("report"))
FACTORS_OF_JOB: tl.constexpr = tl.constexpr(JOB.column("factors"))

# Of a record of Adafactor's factors: pointers by their index, and offsets in words.
ROW_FACTORS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("row"))
COLUMN_FACTORS: tl.constexpr = tl.constexpr(GPU_FACTORS.column("column"))
MATRIX_ROWS: tl.constexpr = tl.constexpr(GPU_FACTORS.word("rows"))
MATRIX_COLUMNS: tl.constexpr = tl.constexpr(GPU_FACTORS.word("columns"))
CAP: tl.constexpr = tl.constexpr(GPU_FACTORS.word("cap"))
SIZE_OF_WEIGHTS: tl.constexpr = tl.constexpr(GPU_FACTORS.word("size"))
SHRINK: tl.constexpr = tl.constexpr(GPU_FACTORS.word("shrink"))

# The numbers of a record, by their index.
BETA1: tl.constexpr = tl.constexpr(POSITIONS["beta1"])
GAIN1: tl.constexpr = tl.constexpr(POSITIONS["gain1"])
BETA2: tl.constexpr = tl.constexpr(POSITIONS["beta2"])
GAIN2: tl.constexpr = tl.constexpr(POSITIONS["gain2"])
EPS: tl.constexpr = tl.constexpr(POSITIONS["eps"])
RATE: tl.constexpr = tl.constexpr(POSITIONS["rate"])
KEEP: tl.constexpr = tl.constexpr(POSITIONS["keep"])
INJECT: tl.constexpr = tl.constexpr(POSITIONS["inject"])
PER_UNIT: tl.constexpr = tl.constexpr(POSITIONS["per_unit"])


# --------------------------------------------------------------------------------------
# Records and memory


@triton.jit
def load_size(record, WORD: tl.constexpr):
    return tl.load((record + WORD).to(tl.pointer_type(tl.int64)))


@triton.jit
def load_number(record, INDEX: tl.constexpr):
    return tl.load((record + HYPER + INDEX).to(tl.pointer_type(tl.float32)))


@triton.jit
def pointer(record, SLOT: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(record.to(tl.pointer_type(tl.int64)) + SLOT)
    address = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def load(record, SLOT: tl.constexpr, DTYPE: tl.constexpr, offsets, mask, ALIGNED: tl.constexpr):
    return tl.load(pointer(record, SLOT, DTYPE, ALIGNED) + offsets, mask=mask, other=0)


@triton.jit
def store(
    record, SLOT: tl.constexpr, DTYPE: tl.constexpr, offsets, value, mask, ALIGNED: tl.constexpr
):
    tl.store(pointer(record, SLOT, DTYPE, ALIGNED) + offsets, value, mask=mask)


@triton.jit
def load_float(
    record, SLOT: tl.constexpr, DTYPE_NAME: tl.constexpr, offsets, mask, ALIGNED: tl.constexpr
):
    """Load floats of 16 or 32 bits as float32."""
    if DTYPE_NAME == "bfloat16":
        x = floats.of_bfloat16(load(record, SLOT, tl.uint16, offsets, mask, ALIGNED))
    elif DTYPE_NAME == "float16":
        x = load(record, SLOT, tl.float16, offsets, mask, ALIGNED).to(tl.float32)
    else:
        x = load(record, SLOT, tl.float32, offsets, mask, ALIGNED)
    return x


@triton.jit
def offsets_of(row, row_mask, start, length, TILE: tl.constexpr):
    """Return the offsets of the tile at column ``start``, and their mask."""
    column = start + tl.arange(0, TILE.width)[None, :]
    mask = row_mask[:, None]
    if TILE.length != TILE.width:
        mask = mask & (column < length)
    return (row.to(tl.int64) * length)[:, None] + column, mask


# --------------------------------------------------------------------------------------
# Scales


@triton.jit
def load_scales(record, SLOT: tl.constexpr, offsets, mask, SPEC: tl.constexpr):
    """Load scales, stored as exponents or as float32; 1 where there is none."""
    if SPEC.exponents:
        places = pointer(record, SLOT, tl.uint8, False) + offsets
        exponents = tl.load(places, mask=mask, other=127)
        scale = floats.float_of(exponents.to(tl.int32) << 23)
    else:
        places = pointer(record, SLOT, tl.float32, False) + offsets
        scale = tl.load(places, mask=mask, other=1.0)
    return scale


@triton.jit
def scale_at(record, row, offsets, mask, row_mask, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return the scales of a tile, in a shape that broadcasts."""
    if SPEC.storage == "plain":
        scale = tl.full((1, 1), 1.0, tl.float32)
    elif TILE.scales == "one":
        scale = tl.full((1, 1), 1.0, tl.float32) * load_scales(record, SCALE, 0, True, SPEC)
    elif TILE.scales == "element":
        scale = load_scales(record, SCALE, offsets, mask, SPEC)
    elif TILE.scales == "row":
        scale_row = row // tl.load(record + REPEATS)
        scale = load_scales(record, SCALE, scale_row, row_mask, SPEC)[:, None]
    else:
        scale = load_scales(record, SCALE, offsets // tl.load(record + REPEATS), mask, SPEC)
    return scale


@triton.jit
def chart_ends(record, scale, SPEC: tl.constexpr):
    """Return the ends of the chart: exponents, in units of the scale."""
    lowest, highest = 0, 0
    if SPEC.covector and SPEC.metric == "ulp":
        exponent = (floats.bits_of(scale) >> 23) - 127
        # A subnormal scale has an exponent below the one that its field says.
        exponent_of_subnormal = (floats.bits_of(scale * 16777216.0) >> 23) - (127 + 24)
        exponent = tl.where(exponent == -127, exponent_of_subnormal, exponent)
        lowest = tl.maximum(tl.load(record + LOW) - exponent, SPEC.format.emin)
        highest = tl.minimum(tl.load(record + HIGH) - exponent, SPEC.format.emax)
        highest = tl.maximum(highest, lowest)
    return lowest, highest


@triton.jit
def inverse_scale(scale, SPEC: tl.constexpr):
    """Return 1 / scale; any number for weights without a scale."""
    inverse = scale
    if SPEC.storage == "codes" and SPEC.exponents:
        inverse = floats.reciprocal(scale)
    elif SPEC.storage != "plain":
        # The dividend is 1, in the shape of the scale.
        inverse = tl.math.div_rn(scale * 0.0 + 1.0, scale)
    return inverse


# --------------------------------------------------------------------------------------
# Weights and gradients


@triton.jit
def _joined_code(code, residual, SPEC: tl.constexpr):
    """Return code and residual as one signed code with that many more mantissa bits."""
    # -1 for a negative number
    negative = -((code & SPEC.format.sign_bit) >> (SPEC.format.bits - 1))
    signed_code = ((code & (SPEC.format.sign_bit - 1)) ^ negative) - negative
    return (signed_code << SPEC.residual_bits) + residual


@triton.jit
def decode_with_ulp(code, residual, SPEC: tl.constexpr):
    """Return the values of codes with their residuals, and the format's ulps."""
    if SPEC.residual_bits:
        signed_code = _joined_code(code, residual, SPEC)
        magnitude = tl.abs(signed_code)
        value = floats.magnitude_value(magnitude, SPEC.format, SPEC.residual_bits)
        value = floats.float_of(floats.bits_of(value) | (signed_code & -2147483648))
    else:
        magnitude = code & (SPEC.format.sign_bit - 1)
        value = floats.code_value(code, SPEC.format)
    return value, floats.magnitude_ulp(magnitude, SPEC.format, SPEC.residual_bits)


@triton.jit
def load_weights(record, offsets, mask, scale, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return the stored weights, and their values and ulps in units of the scale."""
    residual = 0
    if SPEC.residual_bits:
        residual = load(record, RESIDUAL, tl.int8, offsets, mask, TILE.aligned).to(tl.int32)
    if SPEC.storage == "codes":
        stored = load(record, WEIGHT, tl.uint8, offsets, mask, TILE.aligned).to(tl.int32)
        value, ulp = decode_with_ulp(stored, residual, SPEC)
    else:
        stored = load_float(record, WEIGHT, SPEC.weight, offsets, mask, TILE.aligned)
        # Plain weights have no ulp: theirs is any value.
        value, ulp = stored, stored
        if SPEC.storage != "plain":
            value = tl.math.div_rn(stored, scale)
            if SPEC.storage == "grid" and not SPEC.exact:
                value = floats.round_value(value, 0, SPEC.format, False)
            if SPEC.residual_bits:
                code = floats.encode_finite(value, 0, SPEC.format, False, False)
                value, ulp = decode_with_ulp(code, residual, SPEC)
            else:
                highest = tl.full((), SPEC.format.emax, tl.int32)
                ulp = floats.chart_stiffness(value, SPEC.format.emin, highest, SPEC.format)
    return stored, value, ulp


@triton.jit
def _float_of_factors(record, WORD: tl.constexpr):
    factors = pointer(record, FACTORS_OF_JOB, tl.int32, False)
    return tl.load((factors + WORD).to(tl.pointer_type(tl.float32)))


@triton.jit
def _factors_at(record, begin, offsets, mask, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return what Adafactor multiplies the gradient by, at the elements of a tile.

    ``begin`` are the offsets at which the tile's rows begin. Each of them is a part of a
    matrix's row if ``SPEC.in_rows``, so that no element needs a division.
    """
    factors = pointer(record, FACTORS_OF_JOB, tl.int32, False)
    columns = load_size(factors, MATRIX_COLUMNS)
    shrink = _float_of_factors(record, SHRINK)
    if SPEC.in_rows:
        row = begin // columns
        is_row = begin < load_size(record, ROWS) * load_size(record, LENGTH)
        row_factor = load(factors, ROW_FACTORS, tl.float32, row, is_row, False) * shrink
        first = row // load_size(factors, MATRIX_ROWS) * columns + begin % columns
        column = first + tl.arange(0, TILE.width)[None, :]
    else:
        places = offsets.to(tl.int64)
        row = places // columns
        row_factor = load(factors, ROW_FACTORS, tl.float32, row, mask, False) * shrink
        column = row // load_size(factors, MATRIX_ROWS) * columns + places % columns
    factor = row_factor * load(factors, COLUMN_FACTORS, tl.float32, column, mask, False)
    cap = _float_of_factors(record, CAP) * shrink
    return tl.where(factor < cap, factor, cap)


@triton.jit
def load_rate(record, SPEC: tl.constexpr):
    """Return the rate of a step, of Adafactor times the size of the weights."""
    rate = load_number(record, RATE)
    if SPEC.factored:
        rate = rate * _float_of_factors(record, SIZE_OF_WEIGHTS)
    return rate


@triton.jit
def _load_inject(record, SPEC: tl.constexpr):
    inject = load_number(record, INJECT)
    if SPEC.factored:
        inject = inject / _float_of_factors(record, SIZE_OF_WEIGHTS)
    return inject


@triton.jit
def load_gradient(
    record,
    begin,
    offsets,
    mask,
    value,
    scale,
    lowest,
    highest,
    SPEC: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the gradient in the coordinates that the direction is taken in.

    ``begin`` are the offsets of the first elements of the tile's rows. ``value``,
    ``scale`` and the ends of the chart are unused if these are values.
    """
    gradient = load_float(record, GRADIENT, SPEC.gradient, offsets, mask, TILE.aligned)
    if SPEC.factored:
        gradient = gradient * _factors_at(record, begin, offsets, mask, SPEC, TILE)
    if SPEC.maximize:
        gradient = -gradient
    if SPEC.covector:
        unit = scale * load_number(record, PER_UNIT)
        if SPEC.metric == "ulp":
            stiffness = floats.chart_stiffness(value, lowest, highest, SPEC.format)
            gradient = gradient * (stiffness * unit)
        else:
            gradient = gradient * unit
    return gradient


# --------------------------------------------------------------------------------------
# Moments, and the scales of their blocks


@triton.jit
def _scale_of_bound(bound, IS_OF_ROOT: tl.constexpr):
    """Return the power of two that takes a bound, or its root, to ``2^6 .. 2^7``."""
    field = floats.bits_of(bound) >> 23
    if IS_OF_ROOT:
        field = ((field - 125) >> 1) + 120
    else:
        field = tl.maximum(field - 6, 1)
    return floats.float_of(field << 23)


@triton.jit
def _fitted_scale(largest_bits, FORMAT: tl.constexpr):
    """Return the smallest power of two that takes a magnitude within the format."""
    # Added to the magnitude, it carries into the exponent field if the mantissa exceeds
    # that of the format's largest value.
    CARRY: tl.constexpr = 0x7FFFFF - FORMAT.top % 0x800000
    field = (largest_bits + CARRY) >> 23
    return floats.float_of(tl.maximum(field - FORMAT.emax, 1) << 23)


@triton.jit
def fitted_scales(record, row, row_mask, SPEC: tl.constexpr):
    """Return the scales of the rows' moment before the step."""
    places = pointer(record, FIRST_BOUND, tl.float32, False) + row
    largest = tl.load(places, mask=row_mask, other=0.0)
    return _fitted_scale(floats.bits_of(largest), SPEC.moment_format)[:, None]


@triton.jit
def refit(record, largest_bits, row, row_mask, SPEC: tl.constexpr):
    """Store the rows' largest moments after the step; return 1 over their scales."""
    places = pointer(record, FIRST_BOUND, tl.float32, False) + row
    tl.store(places, floats.float_of(largest_bits), mask=row_mask)
    return floats.reciprocal(_fitted_scale(largest_bits, SPEC.moment_format))[:, None]


@triton.jit
def advance_bounds(record, largest_bits, row, row_mask, SPEC: tl.constexpr):
    """Advance the bounds of the rows' moments by their largest gradients.

    Return (scale, 1 / new scale) of the first moment, and the same of the second.
    """
    largest = floats.float_of(largest_bits)
    # A scale of 1 for each row, for a moment that there is not.
    one = largest * 0.0 + 1.0
    first, new_first_inverse, second, new_second_inverse = one, one, one, one
    if SPEC.first:
        # Lion's moment decays by its second beta.
        DECAY: tl.constexpr = BETA2 if SPEC.direction == "lion" else BETA1
        GAIN: tl.constexpr = GAIN2 if SPEC.direction == "lion" else GAIN1
        places = pointer(record, FIRST_BOUND, tl.float32, False) + row
        bound = tl.load(places, mask=row_mask, other=0.0)
        grown = tl.abs(load_number(record, GAIN)) * largest
        new_bound = bound * load_number(record, DECAY) + grown
        tl.store(places, new_bound, mask=row_mask)
        first = _scale_of_bound(bound, False)
        new_first_inverse = floats.reciprocal(_scale_of_bound(new_bound, False))
    if SPEC.second:
        places = pointer(record, SECOND_BOUND, tl.float32, False) + row
        bound = tl.load(places, mask=row_mask, other=0.0)
        grown = tl.abs(load_number(record, GAIN2)) * (largest * largest)
        new_bound = bound * load_number(record, BETA2) + grown
        tl.store(places, new_bound, mask=row_mask)
        second = _scale_of_bound(bound, True)
        new_second_inverse = floats.reciprocal(_scale_of_bound(new_bound, True))
    return first[:, None], new_first_inverse[:, None], second[:, None], new_second_inverse[:, None]


@triton.jit
def load_moment(
    record, SLOT: tl.constexpr, offsets, mask, scale, SPEC: tl.constexpr, TILE: tl.constexpr
):
    """Load the moment of a slot; ``scale`` is of its block, if it has 8 bits."""
    if SPEC.moments != "8bit":
        moment = load_float(record, SLOT, SPEC.moments, offsets, mask, TILE.aligned)
    else:
        code = load(record, SLOT, tl.uint8, offsets, mask, TILE.aligned).to(tl.int32)
        if SLOT == FIRST:
            moment = floats.code_value(code, SPEC.moment_format) * scale
        else:
            # The second moment is stored as its root.
            root = floats.magnitude_value(code, SPEC.moment_format, 0) * scale
            moment = root * root
    return moment


@triton.jit
def _root_code(root, inverse, draw, SPEC: tl.constexpr):
    """Return the code of a second moment's root.

    It is rounded with the odds that preserve the mean of ``1 / root``, as
    ``optim/_eager_step.py`` derives. A root that is not 0 does not become 0.
    """
    bits = floats.bits_of(root * inverse)
    steps, below = floats.encoding_steps(bits, SPEC.moment_format, 0, 0)
    whole = steps.to(tl.int32)
    unit = (4 * whole + 2).to(tl.float32)
    part = steps - whole.to(tl.float32)
    goes_on = draw.to(tl.float32) * floats.DRAW_UNIT * unit < part * (unit + (1.0 - part))
    code = whole + below + goes_on.to(tl.int32)
    return tl.maximum(code, tl.minimum(floats.bits_of(root), 1))


@triton.jit
def store_moment(
    record,
    SLOT: tl.constexpr,
    offsets,
    mask,
    value,
    new_inverse,
    root,
    word,
    SPEC: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the moment of a slot, rounded by random words if it has fewer than 32 bits.

    The first moment takes the lower half of a word, the second one of bfloat16 the
    upper half. ``root`` is that of the second moment, which is stored in its place in 8
    bits.
    """
    TAKES_UPPER_HALF: tl.constexpr = SLOT == SECOND and SPEC.first
    if SPEC.moments == "float32":
        store(record, SLOT, tl.float32, offsets, value, mask, TILE.aligned)
    else:
        half = ((word >> 16) if TAKES_UPPER_HALF else (word & 0xFFFF)).to(tl.int32)
        if SPEC.moments == "bfloat16":
            bits = ((floats.bits_of(value) + half) >> 16).to(tl.uint16)
            store(record, SLOT, tl.uint16, offsets, bits, mask, TILE.aligned)
        elif SLOT == FIRST:
            # 16 bits stand for the middle of what 24 bits would make of them.
            draw = floats.draw_of(word) if SPEC.fitted else (half << 8) | 0x80
            scaled = value * new_inverse
            code = floats.encode_finite(scaled, draw, SPEC.moment_format, True, True)
            store(record, SLOT, tl.uint8, offsets, code.to(tl.uint8), mask, TILE.aligned)
        else:
            code = _root_code(root, new_inverse, floats.draw_of(word), SPEC)
            store(record, SLOT, tl.uint8, offsets, code.to(tl.uint8), mask, TILE.aligned)


# --------------------------------------------------------------------------------------
# Directions


@triton.jit
def descend(record, offsets, mask, gradient, first, second, SPEC: tl.constexpr, TILE: tl.constexpr):
    """Return the direction, the new moments, the second's root and the denominator.

    The denominator divides the first moment. What a direction does not have is any
    value.
    """
    root, denominator = gradient, gradient
    if SPEC.direction == "adam":
        first = first * load_number(record, BETA1) + gradient * load_number(record, GAIN1)
    if SPEC.second:
        gained = (gradient * load_number(record, GAIN2)) * gradient
        second = second * load_number(record, BETA2) + gained
        root = tl.math.sqrt_rn(second)
        denominator = root + load_number(record, EPS)
    if SPEC.amsgrad:
        second_max = load(record, SECOND_MAX, tl.float32, offsets, mask, TILE.aligned)
        second_max = tl.where(second_max > second, second_max, second)
        store(record, SECOND_MAX, tl.float32, offsets, second_max, mask, TILE.aligned)
        denominator = tl.math.sqrt_rn(second_max) + load_number(record, EPS)
    if SPEC.direction == "adam":
        direction = tl.math.div_rn(first, denominator)
    elif SPEC.direction == "lion":
        mixed = first * load_number(record, BETA1) + gradient * load_number(record, GAIN1)
        direction = (mixed > 0.0).to(tl.float32) - (mixed < 0.0).to(tl.float32)
        first = first * load_number(record, BETA2) + gradient * load_number(record, GAIN2)
    elif SPEC.first:
        first = first * load_number(record, BETA1) + gradient * load_number(record, GAIN1)
        direction = first
        if SPEC.nesterov:
            # Muon's momentum is an average, which takes the share gain1 of a gradient.
            IS_AVERAGE: tl.constexpr = SPEC.direction == "muon"
            share = gradient * load_number(record, GAIN1) if IS_AVERAGE else gradient
            direction = share + first * load_number(record, BETA1)
    else:
        direction = gradient
    return direction, first, second, root, denominator


# --------------------------------------------------------------------------------------
# Moves


@triton.jit
def _field_factor(record, ulp, scale, SPEC: tl.constexpr):
    stiffness = ulp * scale if SPEC.metric == "ulp" else scale
    numbers = (record + HYPER).to(tl.pointer_type(tl.float32))
    return floats.field_factor(stiffness, scale, numbers, SPEC.stiffness, SPEC.exponents)


@triton.jit
def move(record, value, ulp, direction, scale, inverse, lowest, highest, SPEC: tl.constexpr):
    """Return where the weights go, in units of the scale, before rounding."""
    if SPEC.decays:
        value = value * load_number(record, KEEP)
    rate = load_rate(record, SPEC)
    if SPEC.storage == "plain":
        target = value - direction * rate
    elif SPEC.geometry == "linear":
        if SPEC.stiffness != "none":
            direction = direction * _field_factor(record, ulp, scale, SPEC)
        target = value - direction * (rate * inverse)
    else:
        steps = floats.clamp(direction * -rate, -16777216.0, 16777216.0)
        target = _target_on_chart(value, steps, lowest, highest, SPEC)
    return target


@triton.jit
def _target_on_chart(value, steps, lowest, highest, SPEC: tl.constexpr):
    if SPEC.geometry == "tangent":
        if SPEC.metric == "ulp":
            steps = steps * floats.chart_stiffness(value, lowest, highest, SPEC.format)
        target = value + steps
    elif SPEC.metric == "ulp":
        shifted = floats.chart_shift(value, steps, lowest, highest, SPEC.format)
        target = tl.where(steps == 0.0, value, shifted)
    else:
        target = tl.where(steps == 0.0, value, value + steps)
    return floats.clamp(target, -SPEC.format.largest, SPEC.format.largest)


@triton.jit
def with_error(
    record,
    first,
    target,
    rounded,
    ulp,
    denominator,
    scale,
    inverse,
    lowest,
    highest,
    SPEC: tl.constexpr,
):
    """Return the first moment minus its share of the rounding error of the weights."""
    if SPEC.geometry == "linear":
        error = tl.math.div_rn(target - rounded, inverse)
        if SPEC.stiffness != "none":
            error = tl.math.div_rn(error, _field_factor(record, ulp, scale, SPEC))
    elif SPEC.metric == "ulp":
        target_coordinate = floats.chart_forward(target, lowest, highest, SPEC.format)
        error = target_coordinate - floats.chart_forward(rounded, lowest, highest, SPEC.format)
    else:
        error = target - rounded
    if SPEC.direction == "adam":
        error = error * denominator
    return first - error * _load_inject(record, SPEC)
