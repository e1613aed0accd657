"""The codec of steps: bit for bit the grid's own encode, decode and ulp, and a grid
that is finer.
"""

from functools import cache

import numpy as np
import pytest
import torch
from grid_inputs import NAMED, ODD, critical, random_float32, random_in_range
from tables import mirrored

import fp8manifold as fm
from fp8manifold._numerics import codec

DRAWS = 1 << 24
FORMATS = NAMED | ODD
#: All layouts and ends, no mantissa, one exponent bit, short codes, and the lowest and
#: highest bias there are.
SAMPLE = (
    "E4M3",
    "E5M2",
    "E3M4",
    "E2M5",
    "E6M1",
    "E1M6",
    "E7M0",
    "E4M3FNUZ",
    "E5M2FNUZ",
    "P3109_8P3",
    "E2M3",
    "E2M1",
)
BIASED = [fmt for fmt in ODD.values() if "_B" in fmt.name]

every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
sample = pytest.mark.parametrize(
    "fmt", [*(FORMATS[name] for name in SAMPLE), *BIASED], ids=lambda fmt: fmt.name
)
extra = pytest.mark.parametrize("extra", [0, 4, 8])


@cache
def fine(fmt, extra):
    """Return the values of codes with `extra` more mantissa bits, and the step above each.

    They are those without a sign, and exact.
    """
    bits = fmt.mantissa_bits + extra
    fields = np.arange((fmt.max_code << extra) + 1) >> bits
    spacings = np.ldexp(1.0, np.maximum(fields, 1) - fmt.bias - bits)
    return np.concatenate([[0.0], np.cumsum(spacings[:-1])]), spacings


def split(x, fmt, extra):
    """Return the codes below magnitudes, and what fraction of a step is beyond them.

    Magnitudes end at the largest value.
    """
    values, spacings = fine(fmt, extra)
    a = np.minimum(x.double().abs().numpy(), values[-1])
    code = np.searchsorted(values, a, side="right") - 1
    return code, (a - values[code]) / spacings[code]


def expected_codes(x, fmt, extra, draws):
    """Return codes by the definition.

    To nearest with ties to even codes, or away from zero where the draw is below the
    fraction. Draws are mirrored for negative numbers.
    """
    wide = x.double().numpy()
    code, fraction = split(x, fmt, extra)
    if draws is None:
        goes_up = (fraction > 0.5) | ((fraction == 0.5) & (code % 2 == 1))
    else:
        goes_up = mirrored(draws.numpy(), wide) < fraction * DRAWS
    code = code + goes_up
    is_negative = np.signbit(wide) & (fmt.has_negative_zero | (code > 0))
    return code + is_negative * (fmt.sign_bit << extra)


def turning_draws(x, fmt, extra):
    """Return draws on either side of where each element turns, the ends, and random ones."""
    turn = np.ceil(split(x, fmt, extra)[1] * DRAWS)
    random = np.random.default_rng(5).integers(0, DRAWS, len(turn))
    draws = [turn - 1, turn, np.zeros_like(turn), np.full_like(turn, DRAWS - 1), random]
    wide = x.double().numpy()
    return [
        torch.from_numpy(mirrored(np.clip(d, 0, DRAWS - 1), wide).astype(np.int32)) for d in draws
    ]


@cache
def inputs(fmt, extra=0):
    x = [
        torch.from_numpy(critical(fmt)).float(),
        random_in_range(fmt.max, 20_000),
        random_float32(40_000),
    ]
    if extra:
        x.append(_between(fmt, extra))
    x = torch.cat(x)
    return x[~x.isnan()]


def _between(fmt, extra):
    """Fine codes and fine midpoints +-1 float32 ULP, of both signs: all of the lowest
    and highest, some between.
    """
    values, spacings = fine(fmt, extra)
    index = np.arange(len(values))
    chosen = index[(index < 600) | (index % 97 == 0) | (index >= len(values) - 600)]
    points = np.concatenate([values[chosen], values[chosen] + spacings[chosen] / 2]).astype(
        np.float32
    )
    around = [
        points,
        np.nextafter(points, np.float32(np.inf)),
        np.nextafter(points, np.float32(-np.inf)),
    ]
    positive = torch.from_numpy(np.concatenate(around))
    return torch.cat([positive, -positive])


def codes_of(fmt):
    return torch.arange(2 * fmt.sign_bit, dtype=torch.uint8)


def same_floats(a, b):
    assert a.dtype == b.dtype == torch.float32
    nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | nan).all())


def same_bits(a, b):
    if a.is_floating_point():
        return same_floats(a, b)
    return a.dtype == b.dtype and torch.equal(a, b)


def finite(codes, fmt):
    return (codes & (fmt.sign_bit - 1)) <= fmt.max_code


@every_format
def test_decode_is_the_grids(fmt):
    codes = codes_of(fmt)
    assert same_floats(codec.decode_with_specials(codes, fmt), fm.decode(codes, fmt))
    value, ulp = codec.decode_with_ulp(codes, fmt)
    numbers = finite(codes, fmt) & ~fm.decode(codes, fmt).isnan()
    assert same_floats(value[numbers], fm.decode(codes, fmt)[numbers])
    assert same_floats(ulp[numbers], fm.ulp(fm.decode(codes, fmt), fmt)[numbers])
    value, ulp = codec.decode_magnitude(codes[: fmt.max_code + 1].int(), fmt)
    assert same_floats(value, fm.decode(codes, fmt)[: fmt.max_code + 1])
    assert same_floats(ulp, fm.ulp(value, fmt))


@every_format
def test_codes_of_specials_decode_to_numbers_that_are_not_smaller_than_the_largest(fmt):
    """But for the one NaN in place of -0, which comes out as the zero that it replaces."""
    codes = codes_of(fmt)
    value, ulp = codec.decode_with_ulp(codes[~finite(codes, fmt)], fmt)
    assert bool((value.abs() > fmt.max).all())
    assert bool(value.isfinite().all())
    assert bool((ulp >= fmt.ulp_max).all())
    if fmt.nan_codes == (fmt.sign_bit,):
        value, ulp = codec.decode_with_ulp(torch.tensor([fmt.sign_bit], dtype=torch.uint8), fmt)
        assert value.item() == 0
        assert ulp.item() == fmt.ulp_min


@extra
@sample
def test_decode_of_finer_codes(fmt, extra):
    values, spacings = (torch.from_numpy(part).float() for part in fine(fmt, extra))
    codes = torch.arange(len(values), dtype=torch.int32)
    value, ulp = codec.decode_with_ulp(codes, fmt, extra)
    assert same_floats(value, values)
    assert same_floats(ulp, spacings)
    value, ulp = codec.decode_with_ulp(codes | (fmt.sign_bit << extra), fmt, extra)
    assert same_floats(value, -values)
    assert same_floats(ulp, spacings)
    value, ulp = codec.decode_magnitude(codes, fmt, extra)
    assert same_floats(value, values)
    assert same_floats(ulp, spacings)


@every_format
def test_encode_is_the_grids(fmt):
    """To nearest, and by draws on either side of where each element turns."""
    x = inputs(fmt)
    assert torch.equal(codec.encode_with_nan(x, fmt), fm.encode(x, fmt))
    for draws in turning_draws(x, fmt, 0):
        codes = codec.encode_with_nan(x, fmt, draws)
        assert torch.equal(codes, fm.encode(x, fmt, "stochastic", bits=draws))


@extra
@sample
def test_encode_is_the_definitions(fmt, extra):
    """To nearest, and by draws on either side of where each element turns."""
    x = inputs(fmt, extra)
    assert codec.encode_finite(x, fmt, None, extra).dtype == torch.int32
    for draws in (None, *turning_draws(x, fmt, extra)):
        codes = codec.encode_finite(x, fmt, draws, extra).numpy()
        np.testing.assert_array_equal(codes, expected_codes(x, fmt, extra, draws))


@extra
@sample
def test_encode_of_magnitudes_is_the_definitions(fmt, extra):
    x = inputs(fmt, extra).abs()
    codes = codec.encode_magnitude(x, fmt, None, extra).numpy()
    np.testing.assert_array_equal(codes, expected_codes(x, fmt, extra, None))


@every_format
def test_nan(fmt):
    """Both signs, quiet and signalling: the format's code, or left to the caller where
    there is none.
    """
    patterns = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, 0x7FFFFFFF], dtype=torch.int32)
    x = patterns.view(torch.float32)
    if fmt.nan_code is None:
        assert codec.encode_with_nan(x, fmt).dtype == torch.uint8
        with pytest.raises(ValueError, match="no code for NaN"):
            fm.encode(x, fmt)
        return
    assert codec.encode_with_nan(x, fmt).tolist() == [fmt.nan_code] * 4
    assert (
        codec.encode_with_nan(x, fmt, torch.zeros(4, dtype=torch.int32)).tolist()
        == [fmt.nan_code] * 4
    )


@every_format
def test_a_step_keeps_the_codes_of_nan_and_of_inf_where_several_codes_are_nan(fmt):
    kept_codes = set(fmt.nan_codes)
    if len(kept_codes) > 1 and fmt.inf_code is not None:
        kept_codes |= {fmt.inf_code, fmt.inf_code | fmt.sign_bit}
    old_codes = torch.arange(2 * fmt.sign_bit, dtype=torch.int32).to(torch.uint8)
    codes = codec.keep_nan_codes(torch.ones_like(old_codes, dtype=torch.int32), old_codes, fmt)
    assert codes.tolist() == [code if code in kept_codes else 1 for code in old_codes.tolist()]


@pytest.mark.parametrize("place", [0, 1, 5000, 9999])
@pytest.mark.parametrize("scheme", ["nearest", "stochastic"])
def test_a_nan_without_a_code_is_refused_wherever_it_is(scheme, place):
    x = torch.ones(100, 100)
    x.view(-1)[place] = torch.nan
    seed = {"seed": 1} if scheme == "stochastic" else {}
    with pytest.raises(ValueError, match="x holds 1 NaN, and E2M1 has no code for NaN"):
        fm.encode(x, "E2M1", rounding=scheme, **seed)


@pytest.mark.skipif(
    torch.__version__ < (2, 9), reason="torch 2.8 cannot shift by sizes that it takes for dynamic"
)
@pytest.mark.usefixtures("cpp_compiler")
@pytest.mark.parametrize("name", ["E4M3", "E5M2FNUZ", "E7M0"])
def test_compiled(name):
    """One graph of everything, over two lengths: the bits of eager code."""
    fmt = FORMATS[name]

    def everything(codes, x, draws):
        return (
            codec.decode_with_specials(codes, fmt),
            *codec.decode_with_ulp(codes, fmt),
            codec.encode_with_nan(x, fmt),
            codec.encode_with_nan(x, fmt, draws),
            codec.encode_finite(x, fmt, draws, 4),
            codec.encode_finite(x, fmt, None, 8),
            *codec.decode_with_ulp(codec.encode_finite(x, fmt, draws, 8), fmt, 8),
        )

    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, dynamic=True)
    for x in (inputs(fmt, 4), inputs(fmt)):
        codes = codes_of(fmt).repeat(len(x) // (2 * fmt.sign_bit) + 1)[: len(x)]
        for draws in turning_draws(x, fmt, 4):
            results = compiled(codes, x, draws)
            expected = everything(codes, x, draws)
            assert len(results) == len(expected)
            assert all(map(same_bits, results, expected))
