"""The stages of a step over a tile, as in ``fp8manifold/_native/elements.h`` and
``stages.c``.

``words`` points to a parameter's record, the one that native code reads; ``S`` and
``T`` are ``KernelSpec`` and ``Tile`` of ``kinds.py``.
"""

import triton
import triton.language as tl

from fp8manifold._numerics.records import JOB
from fp8manifold._triton import format as floats

WORD = 4


def _at(name: str, more: int = 0) -> tl.constexpr:
    """Offset of a field of a record, in words."""
    assert JOB.fields is not None
    return tl.constexpr(JOB.fields[name][1] // WORD + more)


WORDS: tl.constexpr = tl.constexpr(JOB.itemsize // WORD)
ROWS: tl.constexpr = _at("rows")
LENGTH: tl.constexpr = _at("length")
REPEATS: tl.constexpr = _at("facts", 1)
LOW: tl.constexpr = _at("facts", 2)
KEYS: tl.constexpr = _at("keys")
HYPER: tl.constexpr = _at("hyper")


@triton.jit
def pointer(words, SLOT: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    place = tl.load(words.to(tl.pointer_type(tl.int64)) + SLOT).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def hyper(words, i: tl.constexpr):
    return tl.load((words + HYPER + i).to(tl.pointer_type(tl.float32)))


@triton.jit
def load(words, SLOT: tl.constexpr, DTYPE: tl.constexpr, at, inside, ALIGNED: tl.constexpr):
    return tl.load(pointer(words, SLOT, DTYPE, ALIGNED) + at, mask=inside, other=0)


@triton.jit
def store(words, SLOT: tl.constexpr, DTYPE: tl.constexpr, at, value, inside, ALIGNED: tl.constexpr):
    tl.store(pointer(words, SLOT, DTYPE, ALIGNED) + at, value, mask=inside)


@triton.jit
def load_float(words, SLOT: tl.constexpr, KIND: tl.constexpr, at, inside, ALIGNED: tl.constexpr):
    if KIND == "bfloat16":
        x = floats.of_bfloat16(load(words, SLOT, tl.uint16, at, inside, ALIGNED))
    elif KIND == "float16":
        x = load(words, SLOT, tl.float16, at, inside, ALIGNED).to(tl.float32)
    else:
        x = load(words, SLOT, tl.float32, at, inside, ALIGNED)
    return x


@triton.jit
def place_of(row, in_rows, start, length, T: tl.constexpr):
    """Positions of a tile's elements and which of them there are; it begins at column
    ``start`` of its rows.
    """
    column = start + tl.arange(0, T.width)[None, :]
    inside = in_rows[:, None]
    if T.length != T.width:
        inside = inside & (column < length)
    return (row.to(tl.int64) * length)[:, None] + column, inside


@triton.jit
def load_scales(words, SLOT: tl.constexpr, at, inside, S: tl.constexpr):
    """Scales, stored as exponents or as float32."""
    if S.exponents:
        exponents = tl.load(pointer(words, SLOT, tl.uint8, False) + at, mask=inside, other=127)
        scale = floats.float_of(exponents.to(tl.int32) << 23)
    else:
        scale = tl.load(pointer(words, SLOT, tl.float32, False) + at, mask=inside, other=1.0)
    return scale


@triton.jit
def scale_at(words, row, at, inside, in_rows, S: tl.constexpr, T: tl.constexpr):
    """The scale, in a shape that broadcasts."""
    if S.storage == "plain":
        scale = tl.full((1, 1), 1.0, tl.float32)
    elif T.scales == "one":
        scale = tl.full((1, 1), 1.0, tl.float32) * load_scales(words, 3, 0, True, S)
    elif T.scales == "element":
        scale = load_scales(words, 3, at, inside, S)
    elif T.scales == "row":
        scale = load_scales(words, 3, row // tl.load(words + REPEATS), in_rows, S)[:, None]
    else:
        scale = load_scales(words, 3, at // tl.load(words + REPEATS), inside, S)
    return scale


@triton.jit
def ends_at(words, scale, S: tl.constexpr):
    """Exponents between which the chart follows the format, in units of the scale."""
    lowest, highest = 0, 0
    if S.covector and S.metric == "ulp":
        exponent = (floats.bits_of(scale) >> 23) - 127
        tiny = (floats.bits_of(scale * 16777216.0) >> 23) - (127 + 24)
        exponent = tl.where(exponent == -127, tiny, exponent)
        lowest = tl.maximum(tl.load(words + LOW) - exponent, S.format.EMIN)
        highest = tl.maximum(tl.minimum(tl.load(words + LOW + 1) - exponent, S.format.EMAX), lowest)
    return lowest, highest


@triton.jit
def inverse_of(scale, S: tl.constexpr):
    inverse = scale
    if S.storage == "codes" and S.exponents:
        inverse = floats.reciprocal(scale)
    elif S.storage != "plain":
        inverse = tl.math.div_rn(scale * 0.0 + 1.0, scale)
    return inverse


@triton.jit
def _joined(code, rest, S: tl.constexpr):
    """Code and residual as one signed code of the format with that many more mantissa
    bits.
    """
    negative = -((code & S.format.SIGN) >> (S.format.BITS - 1))
    return ((((code & (S.format.SIGN - 1)) ^ negative) - negative) << S.extra) + rest


@triton.jit
def decoded(code, rest, S: tl.constexpr):
    """Values and spacing, in units of the scale."""
    if S.extra:
        count = _joined(code, rest, S)
        magnitude = tl.abs(count)
        value = floats.float_of(
            floats.bits_of(floats.magnitude_value(magnitude, S.format, S.extra))
            | (count & -2147483648)
        )
    else:
        magnitude, value = code & (S.format.SIGN - 1), floats.code_value(code, S.format)
    return value, floats.magnitude_ulp(magnitude, S.format, S.extra)


@triton.jit
def load_weights(words, at, inside, scale, S: tl.constexpr, T: tl.constexpr):
    """The stored weights, and their values and spacing in units of the scale."""
    rest = 0
    if S.extra:
        rest = load(words, 4, tl.int8, at, inside, T.aligned).to(tl.int32)
    if S.storage == "codes":
        old = load(words, 1, tl.uint8, at, inside, T.aligned).to(tl.int32)
        x, ulp = decoded(old, rest, S)
    else:
        old = load_float(words, 1, S.weight, at, inside, T.aligned)
        x, ulp = old, old
        if S.storage != "plain":
            x = tl.math.div_rn(old, scale)
            if S.storage == "grid" and not S.exact:
                x = floats.round_value(x, 0, S.format, False)
            if S.extra:
                x, ulp = decoded(floats.encode_finite(x, 0, S.format, False, False), rest, S)
            else:
                ulp = floats.chart_stiffness(
                    x, S.format.EMIN, tl.full((), S.format.EMAX, tl.int32), S.format
                )
    return old, x, ulp


@triton.jit
def load_gradient(words, at, inside, x, scale, lowest, highest, S: tl.constexpr, T: tl.constexpr):
    """The gradient with respect to the coordinates that the direction is taken in."""
    g = load_float(words, 2, S.gradient, at, inside, T.aligned)
    if S.maximize:
        g = -g
    if S.covector:
        unit = scale * hyper(words, 15)
        g = (
            g * (floats.chart_stiffness(x, lowest, highest, S.format) * unit)
            if S.metric == "ulp"
            else g * unit
        )
    return g


@triton.jit
def _scale_of_bound(bound, ROOT: tl.constexpr):
    field = floats.bits_of(bound) >> 23
    if ROOT:
        field = ((field - 125) >> 1) + 120
    else:
        field = tl.maximum(field - 6, 1)
    return floats.float_of(field << 23)


@triton.jit
def _fitted_scale(largest, F: tl.constexpr):
    """The smallest power of two that takes a magnitude, given as float32 bits, within
    the format.
    """
    CARRY: tl.constexpr = 0x7FFFFF - F.TOP % 0x800000
    return floats.float_of(tl.maximum(((largest + CARRY) >> 23) - F.EMAX, 1) << 23)


@triton.jit
def fitted_scales(words, row, in_rows, S: tl.constexpr):
    """The scales of the rows' average before the step."""
    largest = tl.load(pointer(words, 8, tl.float32, False) + row, mask=in_rows, other=0.0)
    return _fitted_scale(floats.bits_of(largest), S.average)[:, None]


@triton.jit
def refit(words, largest, row, in_rows, S: tl.constexpr):
    """Store the largest magnitudes after the step (float32 bits), and return 1 over
    their scales.
    """
    tl.store(pointer(words, 8, tl.float32, False) + row, floats.float_of(largest), mask=in_rows)
    return floats.reciprocal(_fitted_scale(largest, S.average))[:, None]


@triton.jit
def next_bounds(words, largest, row, in_rows, S: tl.constexpr):
    """Advance the bounds of the rows' averages; the averages' scales before the step,
    and 1 over those after it.
    """
    one = floats.float_of(largest) * 0.0 + 1.0
    first, first_inverse, second, second_inverse = one, one, one, one
    if S.first:
        SECOND: tl.constexpr = 2 if S.direction == "lion" else 0
        bounds = pointer(words, 8, tl.float32, False) + row
        before = tl.load(bounds, mask=in_rows, other=0.0)
        after = before * hyper(words, SECOND) + tl.abs(hyper(words, SECOND + 1)) * floats.float_of(
            largest
        )
        tl.store(bounds, after, mask=in_rows)
        first, first_inverse = (
            _scale_of_bound(before, False),
            floats.reciprocal(_scale_of_bound(after, False)),
        )
    if S.second:
        bounds = pointer(words, 9, tl.float32, False) + row
        before = tl.load(bounds, mask=in_rows, other=0.0)
        after = before * hyper(words, 2) + tl.abs(hyper(words, 3)) * (
            floats.float_of(largest) * floats.float_of(largest)
        )
        tl.store(bounds, after, mask=in_rows)
        second, second_inverse = (
            _scale_of_bound(before, True),
            floats.reciprocal(_scale_of_bound(after, True)),
        )
    return first[:, None], first_inverse[:, None], second[:, None], second_inverse[:, None]


@triton.jit
def load_average(words, SLOT: tl.constexpr, at, inside, scale, S: tl.constexpr, T: tl.constexpr):
    if S.moments != "8bit":
        average = load_float(words, SLOT, S.moments, at, inside, T.aligned)
    else:
        code = load(words, SLOT, tl.uint8, at, inside, T.aligned).to(tl.int32)
        if SLOT == 5:
            average = floats.code_value(code, S.average) * scale
        else:
            average = floats.magnitude_value(code, S.average, 0) * scale
            average = average * average
    return average


@triton.jit
def _root_code(root, inverse, draw, S: tl.constexpr):
    """The code of a root, for which the mean of 1 over it is right; a root that is not
    0 does not become 0.
    """
    steps, below = floats.encoding_steps(floats.bits_of(root * inverse), S.average, 0, 0)
    whole = steps.to(tl.int32)
    unit, part = (4 * whole + 2).to(tl.float32), steps - whole.to(tl.float32)
    away = draw.to(tl.float32) * 5.9604644775390625e-08 * unit < part * (unit + (1.0 - part))
    return tl.maximum(whole + below + away.to(tl.int32), tl.minimum(floats.bits_of(root), 1))


@triton.jit
def store_average(
    words,
    SLOT: tl.constexpr,
    at,
    inside,
    value,
    inverse,
    root,
    word,
    S: tl.constexpr,
    T: tl.constexpr,
):
    UPPER: tl.constexpr = SLOT == 6 and S.first
    if S.moments == "float32":
        store(words, SLOT, tl.float32, at, value, inside, T.aligned)
    else:
        half = ((word >> 16) if UPPER else (word & 0xFFFF)).to(tl.int32)
        if S.moments == "bfloat16":
            bits = ((floats.bits_of(value) + half) >> 16).to(tl.uint16)
            store(words, SLOT, tl.uint16, at, bits, inside, T.aligned)
        elif SLOT == 5:
            draw = floats.draw_of(word) if S.fitted else (half << 8) | 0x80
            code = floats.encode_finite(value * inverse, draw, S.average, True, True)
            store(words, SLOT, tl.uint8, at, code.to(tl.uint8), inside, T.aligned)
        else:
            code = _root_code(root, inverse, floats.draw_of(word), S)
            store(words, SLOT, tl.uint8, at, code.to(tl.uint8), inside, T.aligned)


@triton.jit
def descend(words, at, inside, g, m, v, S: tl.constexpr, T: tl.constexpr):
    """The direction, both averages after the step, the second's root, and the
    denominator of the first.
    """
    root, denominator = g, g
    if S.direction == "adam":
        m = m * hyper(words, 0) + g * hyper(words, 1)
    if S.second:
        v = v * hyper(words, 2) + (g * hyper(words, 3)) * g
        root = tl.math.sqrt_rn(v)
        denominator = root + hyper(words, 4)
    if S.amsgrad:
        largest = load(words, 7, tl.float32, at, inside, T.aligned)
        largest = tl.where(largest > v, largest, v)
        store(words, 7, tl.float32, at, largest, inside, T.aligned)
        denominator = tl.math.sqrt_rn(largest) + hyper(words, 4)
    if S.direction == "adam":
        direction = tl.math.div_rn(m, denominator)
    elif S.direction == "lion":
        mixed = m * hyper(words, 0) + g * hyper(words, 1)
        direction = (mixed > 0.0).to(tl.float32) - (mixed < 0.0).to(tl.float32)
        m = m * hyper(words, 2) + g * hyper(words, 3)
    elif S.first:
        m = m * hyper(words, 0) + g * hyper(words, 1)
        direction = m
        if S.nesterov:
            share = g * hyper(words, 1) if S.direction == "muon" else g
            direction = share + m * hyper(words, 0)
    else:
        direction = g
    return direction, m, v, root, denominator


@triton.jit
def _factor(words, ulp, scale, S: tl.constexpr):
    stiffness = ulp * scale if S.metric == "ulp" else scale
    reference = (words + HYPER + 7).to(tl.pointer_type(tl.float32))
    return floats.field_factor(stiffness, scale, reference, S.stiffness, S.exponents)


@triton.jit
def move(words, x, ulp, direction, scale, inverse, lowest, highest, S: tl.constexpr):
    """The value before rounding, in units of the scale."""
    if S.decays:
        x = x * hyper(words, 6)
    rate = hyper(words, 5)
    if S.storage == "plain":
        moved = x - direction * rate
    elif S.geometry == "linear":
        if S.stiffness != "none":
            direction = direction * _factor(words, ulp, scale, S)
        moved = x - direction * (rate * inverse)
    else:
        moved = _moved_on_chart(
            x, floats.bounded(direction * -rate, -16777216.0, 16777216.0), lowest, highest, S
        )
    return moved


@triton.jit
def _moved_on_chart(x, steps, lowest, highest, S: tl.constexpr):
    if S.geometry == "tangent":
        if S.metric == "ulp":
            steps = steps * floats.chart_stiffness(x, lowest, highest, S.format)
        moved = x + steps
    elif S.metric == "ulp":
        moved = tl.where(steps == 0.0, x, floats.chart_shift(x, steps, lowest, highest, S.format))
    else:
        moved = tl.where(steps == 0.0, x, x + steps)
    return floats.bounded(moved, -S.format.LARGEST, S.format.LARGEST)


@triton.jit
def with_error(
    words, m, target, after, ulp, denominator, scale, inverse, lowest, highest, S: tl.constexpr
):
    """The first average minus its share of the rounding error of the weights."""
    if S.geometry == "linear":
        error = tl.math.div_rn(target - after, inverse)
        if S.stiffness != "none":
            error = tl.math.div_rn(error, _factor(words, ulp, scale, S))
    elif S.metric == "ulp":
        error = floats.chart_forward(target, lowest, highest, S.format) - floats.chart_forward(
            after, lowest, highest, S.format
        )
    else:
        error = target - after
    if S.direction == "adam":
        error = error * denominator
    return m - error * hyper(words, 14)
