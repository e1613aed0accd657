"""The chart of the spacing, powers of two by a polynomial and the stiffness, as ``chart.h`` and ``elements.h`` do."""

import triton
import triton.language as tl

from fp8manifold._triton.format import binade_of, bits_of, float_of, power_of_two


@triton.jit
def sign_of(x):
    return float_of((bits_of(x) & -2147483648) | 0x3F800000)


@triton.jit
def chart_stiffness(x, lowest, highest, F: tl.constexpr):
    """One step at x: the exponent is held between lowest and highest."""
    return tl.minimum(binade_of(x, lowest), power_of_two(highest)) * (2.0**-F.M)


@triton.jit
def _below(stiffness, lowest, F: tl.constexpr):
    """The steps from 0 to the binade, short of those of its own."""
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
    value, neighbour = _inverse(start, lowest, highest, F), _inverse(start + 1.0, lowest, highest, F)
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
def field_factor(stiffness, reference, MODE: tl.constexpr):
    """(S / S_ref)^k of a spacing in value.

    ``reference`` points to 1 / S_ref, log2 S_ref, the bounds of the ratio, those of its logarithm, and k.
    """
    if MODE == "power":
        log = ((bits_of(stiffness) >> 23) - 127).to(tl.float32) - tl.load(reference + 1)
        log = tl.minimum(tl.maximum(log, tl.load(reference + 4)), tl.load(reference + 5))
        factor = exp2_exact(log * tl.load(reference + 6))
    else:
        low, high = bits_of(tl.load(reference + 2)), bits_of(tl.load(reference + 3))
        factor = float_of(tl.minimum(tl.maximum(bits_of(stiffness * tl.load(reference)), low), high))
        if MODE == "sqrt":
            factor = tl.math.sqrt_rn(factor)
        elif MODE == "square":
            factor = factor * factor
    return factor
