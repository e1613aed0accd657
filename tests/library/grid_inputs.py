"""Inputs on which rounding is compared: where it can go wrong, and a great many others."""

import itertools
import math
from functools import cache

import numpy as np
import torch

import fp8manifold as fm
from fp8manifold import reference

#: Any ExMy in every layout, beside the named ones. IEEE or FN specials on two bits
#: leave nothing but zero.
LAYOUT_SUFFIXES = ("", "IEEE", "FN", "FNUZ", "FINITE")
ODD_NAMES = []
for exponent_bits in range(1, 8):
    for mantissa_bits in range(8 - exponent_bits):
        for suffix in LAYOUT_SUFFIXES:
            if exponent_bits + mantissa_bits > 1 or suffix not in ("IEEE", "FN"):
                ODD_NAMES.append(f"E{exponent_bits}M{mantissa_bits}{suffix}")
for widths in ("3P1", "5P2", "6P3", "7P6"):
    ODD_NAMES += [f"P3109_{widths}", f"P3109_{widths}F"]


def distinct(formats):
    return {fmt.name: fmt for fmt in dict.fromkeys(formats)}


NAMED = distinct(list(fm.NAMED_FORMATS.values()))
#: The lowest and the highest bias that each format can have, and one in between, by the
#: bits of exponent and mantissa.
ODD_BIASES = {
    (4, 3): (-26, 10, 100),
    (7, 0): (27, 103),
    (5, 2): (-25, 101),
    (1, 6): (-29, 97),
    (1, 0): (-23, 103),
}
ODD_FORMATS = [fm.FloatFormat.from_string(name) for name in ODD_NAMES]
for bits, biases in ODD_BIASES.items():
    ODD_FORMATS += [fm.FloatFormat(*bits, bias=bias) for bias in biases]
ODD = distinct(ODD_FORMATS)
ODD = {name: fmt for name, fmt in ODD.items() if name not in NAMED}

#: Magnitudes at which float32, float16 and bfloat16 themselves change behaviour.
EDGES = [
    *(0.0, 2.0**-149, 3 * 2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149, 2.0**-126, 1.5 * 2.0**-126),
    *(2.0**-63, 2.0**-24, 2.0**-14, 1.0, 65504.0, 65520.0, 2.0**24 + 2, 1e20, 1e30, 2.0**127),
    *(float(np.finfo(np.float32).max), np.inf),
]


def finite_values(fmt):
    """In code order: 0 up to max, then -0 (where there is one) down to -max."""
    values = [reference.decode(code, fmt) for code in range(2 * reference.sign_bit(fmt))]
    return [value for value in values if math.isfinite(value)]


def midpoints_and_codes(fmt):
    """Return every magnitude and midpoint, and four steps past the top as if codes went on."""
    codes = [float(reference.magnitude(m, fmt)) for m in range(reference.max_code(fmt) + 5)]
    middles = [(low + high) / 2 for low, high in itertools.pairwise(codes)]
    return np.array(sorted(codes + middles))


def both_neighbours(x, dtype):
    """Return x and the next values of dtype on both sides, as float64."""
    inexact = x.astype(dtype)
    around = [inexact, np.nextafter(inexact, dtype(np.inf)), np.nextafter(inexact, dtype(-np.inf))]
    return np.concatenate(around).astype(np.float64)


@cache
def critical(fmt):
    """Return float32 values: codes and midpoints +-1 ULP, edges of float32, specials."""
    positive = np.concatenate(
        [both_neighbours(midpoints_and_codes(fmt), np.float32), np.float32(EDGES)]
    )
    return np.concatenate([positive, -positive, [np.nan]])


@cache
def critical64(fmt):
    only64 = [
        5e-324,
        2.0**-1022,
        2.0**-150,
        1e300,
        float(np.finfo(np.float64).max),
        1.0625 + 2.0**-40,
    ]
    positive = np.concatenate([both_neighbours(midpoints_and_codes(fmt), np.float64), only64])
    return np.concatenate([critical(fmt), positive, -positive])


@cache
def every_16_bit(dtype):
    patterns = np.arange(-(2**15), 2**15, dtype=np.int32).astype(np.int16)
    return torch.from_numpy(patterns).view(dtype)


@cache
def random_float32(count=1_000_000, seed=20261121):
    """Random float32 bit patterns, ordered so that table look-ups are fast."""
    patterns = np.random.default_rng(seed).integers(0, 2**32, size=count, dtype=np.uint32)
    return torch.from_numpy(np.sort(patterns).view(np.int32)).view(torch.float32)


@cache
def random_float64(top, count=100_000, seed=8):
    """Return random patterns of float64, and values with 53 random bits near the format."""
    generator = np.random.default_rng(seed)
    patterns = generator.integers(0, 2**64, size=count // 2, dtype=np.uint64).view(np.float64)
    near = (
        np.exp2(generator.uniform(-40, 1, count // 2))
        * top
        * generator.choice([-1.0, 1.0], count // 2)
    )
    return torch.from_numpy(np.sort(np.concatenate([patterns, near])))


@cache
def random_in_range(top, count=100_000, seed=7):
    """Return float32 values, log-uniform over the 40 binades that end a little above top."""
    generator = np.random.default_rng(seed)
    size = np.exp2(generator.uniform(-40, 1, count)) * top
    return torch.from_numpy((size * generator.choice([-1.0, 1.0], count)).astype(np.float32))


@cache
def float16_holds(fmt):
    values = np.array(finite_values(fmt))
    with np.errstate(over="ignore"):
        return np.array_equal(values.astype(np.float16), values)
