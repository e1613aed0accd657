"""round_to_grid, encode and decode against the scalar oracle, bit for bit."""

import itertools

import numpy as np
import pytest
import torch
from covering import covering
from grid_inputs import (
    NAMED,
    ODD,
    critical,
    critical64,
    every_16_bit,
    float16_holds,
    random_float32,
    random_float64,
    random_in_range,
)
from tables import mirrored, steps, stochastic_steps

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._numerics.codec import OVERFLOWS, ROUNDINGS

pytestmark = pytest.mark.covering(2)
#: of a test of three parameters every case stays in the default run
all_cases = pytest.mark.covering(3)

DETERMINISTIC = ROUNDINGS[:4]
named = pytest.mark.parametrize("fmt", NAMED.values(), ids=NAMED)
COVERING = covering(
    [{"e": f.exponent_bits, "m": f.mantissa_bits, "layout": f.layout} for f in ODD.values()], 2
)
#: odd formats that the default run leaves out: to tabulate every way of rounding takes long.
#: What it keeps has every two values of exponent bits, mantissa bits and layout together
LATER = [fmt for place, fmt in enumerate(ODD.values()) if place not in COVERING]
FORMATS = NAMED | ODD
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
every_in_turn = pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, marks=[pytest.mark.slow] if fmt in LATER else [])
        for fmt in FORMATS.values()
    ],
    ids=FORMATS,
)
overflow = pytest.mark.parametrize("overflow", OVERFLOWS)


def as_float64(x):
    return x.detach().to(torch.float64).numpy()


def critical_draws(x, table):
    """Return draws on either side of where each value turns, the ends, and random ones."""
    _, excess, gap = table.split(x)
    turn = np.ceil(excess / np.where(gap == 0, 1, gap) * reference.DRAWS)
    last = reference.DRAWS - 1
    random = np.random.default_rng(3).integers(0, last + 1, len(x))
    draws = [turn - 1, turn, np.zeros_like(x), np.full_like(x, last), random]
    return [mirrored(np.clip(d, 0, last).astype(np.int64), x) for d in draws]


@all_cases
@named
@overflow
@pytest.mark.parametrize("mode", DETERMINISTIC)
def test_tables_agree_with_the_oracle(fmt, overflow, mode):
    x = critical64(fmt)
    different, places = np.unique(x.view(np.int64), return_inverse=True)
    values = different.view(np.float64).tolist()
    rounded = np.array([reference.round_to_grid(v, fmt, mode, overflow) for v in values])
    expected = rounded[places]
    tabulated = steps(fmt, mode, overflow)(x)
    np.testing.assert_array_equal(tabulated, expected)
    np.testing.assert_array_equal(np.signbit(tabulated), np.signbit(expected))


@named
@overflow
def test_tables_of_draws_agree_with_the_oracle(fmt, overflow):
    """By draws just below and at where each value turns."""
    x = critical64(fmt)
    table = stochastic_steps(fmt, overflow)
    below, at_turn, *_ = critical_draws(x, table)
    for draws in (below, at_turn):
        expected = [
            reference.round_to_grid(v, fmt, "stochastic", overflow, draw)
            for v, draw in zip(x.tolist(), draws.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(table(x, draws), expected)


@every_in_turn
def test_rounding_is_the_oracles(fmt, compare_bits):
    """Every 16-bit pattern; every code, midpoint and neighbour, tiny, huge and special
    values in wider floats.
    """
    x64 = torch.cat([torch.from_numpy(critical64(fmt)), random_float64(fmt.max, 10_000)])
    x32 = torch.cat([torch.from_numpy(critical(fmt)).float(), random_in_range(fmt.max, 5_000)])
    inputs = (x64, x32, every_16_bit(torch.bfloat16), every_16_bit(torch.float16))
    for x, mode, policy in itertools.product(inputs, DETERMINISTIC, OVERFLOWS):
        if x.dtype == torch.float16 and not float16_holds(fmt):
            with pytest.raises(TypeError, match=rf"float16.*{fmt.name}|{fmt.name}.*float16"):
                fm.round_to_grid(x, fmt, mode, policy)
            continue
        expected = steps(fmt, mode, policy)(as_float64(x))
        compare_bits(
            fm.round_to_grid(x, fmt, mode, policy), expected, x, f"{fmt.name} {mode} {policy}"
        )


@every_format
def test_stochastic_turns_at_the_exact_draw(fmt, compare_bits):
    """Away from zero iff r < f * 2^24, with 2^24 - 1 - r below 0: on either side, for
    every critical point.
    """
    points = torch.from_numpy(critical64(fmt))
    inputs = [points[: len(critical(fmt))].float()]
    if fmt.name in NAMED:
        inputs = [points, points.float(), every_16_bit(torch.bfloat16)]
        if float16_holds(fmt):
            inputs.append(every_16_bit(torch.float16))
    for x, policy in itertools.product(inputs, OVERFLOWS):
        table = stochastic_steps(fmt, policy)
        for draws in critical_draws(as_float64(x), table):
            rounded = fm.round_to_grid(
                x, fmt, "stochastic", policy, bits=torch.from_numpy(draws.astype(np.int32))
            )
            compare_bits(rounded, table(as_float64(x), draws), x, f"{fmt.name} {policy}")


@named
@pytest.mark.parametrize("offset", [2**33 + 17, 0])
def test_stochastic_with_a_seed_uses_random_bits(fmt, offset, compare_bits):
    x = random_in_range(fmt.max, 20_000)
    key = {"seed": 11, "step": 5, "stream": 3}
    draws = fm.random_bits(x.shape, **key, offset=offset).numpy().astype(np.int64)
    expected = stochastic_steps(fmt, "saturate")(as_float64(x), draws)
    if offset:
        key["offset"] = offset
    compare_bits(fm.round_to_grid(x, fmt, "stochastic", **key), expected, x, fmt.name)


def decoded_by_the_oracle(fmt):
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8)
    return codes, np.array([reference.decode(code, fmt) for code in codes.tolist()])


@every_format
def test_decode_every_code(fmt, compare_bits):
    codes, expected = decoded_by_the_oracle(fmt)
    compare_bits(fm.decode(codes, fmt), expected, torch.empty(len(codes)), fmt.name)


@named
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_decode_every_code_into_every_dtype(fmt, dtype, compare_bits):
    codes, expected = decoded_by_the_oracle(fmt)
    if dtype == torch.float16 and not float16_holds(fmt):
        with pytest.raises(TypeError, match="float16"):
            fm.decode(codes, fmt, dtype)
        return
    like_result = torch.empty(len(codes), dtype=dtype)
    compare_bits(fm.decode(codes, fmt, dtype), expected, like_result, fmt.name)


@all_cases
@named
@pytest.mark.parametrize("mode", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_encode_gives_the_code_of_the_rounded_value(fmt, dtype, mode):
    x = torch.from_numpy(critical64(fmt)).to(dtype)
    x = x[~x.isnan()]
    rounded = steps(fmt, mode, "saturate")(as_float64(x))
    code_of = {float(v): reference.encode(float(v), fmt) for v in np.unique(rounded)}
    zero_codes = np.where(np.signbit(rounded), reference.sign_bit(fmt), 0)
    expected = np.where(rounded == 0, zero_codes, [code_of[float(v)] for v in rounded])
    codes = fm.encode(x, fmt, rounding=mode)
    assert codes.dtype == torch.uint8
    np.testing.assert_array_equal(codes.numpy(), expected)


@all_cases
@named
@overflow
@pytest.mark.parametrize("mode", ROUNDINGS)
def test_decode_of_encode_is_round_to_grid(fmt, mode, overflow, compare_bits):
    """Over random bits, every bfloat16 and all critical points; NaN where it has a code."""
    has_nan = bool(reference.nan_codes(fmt))
    key = {"seed": 9, "step": 2, "stream": 1} if mode == "stochastic" else {}
    for x in (random_float32(), every_16_bit(torch.bfloat16), torch.from_numpy(critical64(fmt))):
        x = x if has_nan else x[~x.isnan()]
        codes = fm.encode(x, fmt, rounding=mode, overflow=overflow, **key)
        rounded = as_float64(fm.round_to_grid(x, fmt, mode, overflow, **key))
        decoded = fm.decode(codes, fmt, x.dtype)
        compare_bits(decoded, rounded, x, f"{fmt.name} {mode} {overflow}")


def test_inputs_that_require_grad_are_rounded_without_it():
    x = torch.linspace(-3, 3, 101, requires_grad=True)
    assert torch.equal(fm.round_to_grid(x, "E4M3"), fm.round_to_grid(x.detach(), "E4M3"))
    assert torch.equal(fm.encode(x, "E4M3"), fm.encode(x.detach(), "E4M3"))
    assert x.grad is None


def test_a_name_stands_for_its_format():
    x = torch.linspace(-9, 9, 99)
    fmt = fm.FloatFormat.from_string("E3M4")
    assert torch.equal(fm.round_to_grid(x, "e3m4"), fm.round_to_grid(x, fmt))
    assert torch.equal(fm.encode(x, "E3M4"), fm.encode(x, fmt))
    assert torch.equal(fm.decode(fm.encode(x, fmt), "E3M4"), fm.round_to_grid(x, fmt))
    assert torch.equal(fm.ulp(x, "E3M4"), fm.ulp(x, fmt))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)], ids=str)
def test_scalars_and_empty_tensors_keep_their_shape(shape):
    x = torch.ones(shape)
    codes = fm.encode(x, "E4M3")
    assert codes.shape == shape
    assert fm.decode(codes, "E4M3").shape == shape
    assert fm.round_to_grid(x, "E4M3", "stochastic", seed=0).shape == shape
