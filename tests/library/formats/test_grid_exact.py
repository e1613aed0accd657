"""round_to_grid, encode and decode against the scalar oracle, bit for bit."""

import itertools
from functools import cache

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
from laws import each
from numpy.typing import NDArray
from tables import Int64, StochasticSteps, mirrored, steps, stochastic_steps

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold._numerics.codec import OVERFLOWS, ROUNDINGS

pytestmark = pytest.mark.covering(2)

DETERMINISTIC = ROUNDINGS[:4]
named = each("fmt", NAMED.values(), ids=NAMED)
COVERING = covering([{"e": f.exponent_bits, "m": f.mantissa_bits, "layout": f.layout} for f in ODD.values()], 2)
#: of the others every two of these together in the default run: a table of every way of rounding asks the oracle
LATER = [fmt for place, fmt in enumerate(ODD.values()) if place not in COVERING]
EVERY = NAMED | ODD
every = each("fmt", EVERY.values(), ids=EVERY)
every_in_turn = each(
    "fmt", [pytest.param(fmt, marks=[pytest.mark.slow] if fmt in LATER else []) for fmt in EVERY.values()], ids=EVERY
)
rounding = each("rounding", DETERMINISTIC)
overflow = each("overflow", OVERFLOWS)


def as_float64(x: torch.Tensor) -> NDArray[np.float64]:
    return x.detach().to(torch.float64).numpy()


@cache
def oracle_rounding(fmt: fm.FloatFormat, rounding: str, overflow: str) -> NDArray:
    bits, where = np.unique(critical64(fmt).view(np.int64), return_inverse=True)
    values = bits.view(np.float64)
    return np.array([reference.round_to_grid(float(v), fmt, rounding, overflow) for v in values])[where]


def critical_draws(x: NDArray[np.float64], table: StochasticSteps) -> list[Int64]:
    _, excess, gap = table.split(x)
    turn = np.ceil(excess / np.where(gap == 0, 1, gap) * reference.DRAWS)
    last = reference.DRAWS - 1
    random = np.random.default_rng(3).integers(0, last + 1, len(x))
    draws = [turn - 1, turn, np.zeros_like(x), np.full_like(x, last), random]
    return [mirrored(np.clip(d, 0, last).astype(np.int64), x) for d in draws]


def bits_tensor(draws: Int64) -> torch.Tensor:
    return torch.from_numpy(draws.astype(np.int32))


@named
def test_tables_agree_with_the_oracle(fmt: fm.FloatFormat) -> None:
    x = critical64(fmt)
    for mode, policy in itertools.product(DETERMINISTIC, OVERFLOWS):
        expected = oracle_rounding(fmt, mode, policy)
        np.testing.assert_array_equal(steps(fmt, mode, policy)(x), expected)
        np.testing.assert_array_equal(np.signbit(steps(fmt, mode, policy)(x)), np.signbit(expected))


@named
@overflow
def test_stochastic_table_agrees_with_the_oracle(fmt: fm.FloatFormat, overflow: str) -> None:
    x, table = critical64(fmt), stochastic_steps(fmt, overflow)
    for draws in critical_draws(x, table)[:2]:
        pairs = zip(x, draws, strict=True)
        expected = np.array([reference.round_to_grid(float(v), fmt, "stochastic", overflow, int(r)) for v, r in pairs])
        np.testing.assert_array_equal(table(x, draws), expected)


@every_in_turn
def test_every_16_bit_pattern(fmt, compare_bits) -> None:
    for dtype, mode, policy in itertools.product((torch.bfloat16, torch.float16), DETERMINISTIC, OVERFLOWS):
        if dtype == torch.float16 and not float16_holds(fmt):
            with pytest.raises(TypeError, match=rf"float16.*{fmt.name}|{fmt.name}.*float16"):
                fm.round_to_grid(torch.ones(3, dtype=dtype), fmt, mode, policy)
            continue
        x = every_16_bit(dtype)
        expected = steps(fmt, mode, policy)(as_float64(x))
        compare_bits(fm.round_to_grid(x, fmt, mode, policy), expected, x, f"{fmt.name} {mode} {policy}")


@every_in_turn
def test_critical_points(fmt, compare_bits) -> None:
    """Every code, midpoint and neighbour, tiny, huge and special values: those of float64 are rounded once."""
    x64 = torch.cat([torch.from_numpy(critical64(fmt)), random_float64(fmt.max, 10_000)])
    x32 = torch.cat([torch.from_numpy(critical(fmt)).float(), random_in_range(fmt.max, 5_000)])
    for x, mode, policy in itertools.product((x64, x32), DETERMINISTIC, OVERFLOWS):
        expected = steps(fmt, mode, policy)(as_float64(x))
        compare_bits(fm.round_to_grid(x, fmt, mode, policy), expected, x, f"{fmt.name} {mode} {policy}")


@every
def test_stochastic_turns_at_the_exact_draw(fmt, compare_bits) -> None:
    """Away from zero iff r < f * 2^24, with 2^24 - 1 - r below 0: on either side, for every critical point."""
    points = torch.from_numpy(critical64(fmt))
    inputs = [points[: len(critical(fmt))].float()]
    if fmt.name in NAMED:
        dtypes = (torch.bfloat16, torch.float16) if float16_holds(fmt) else (torch.bfloat16,)
        inputs = [points, points.float(), *map(every_16_bit, dtypes)]
    for x, policy in itertools.product(inputs, OVERFLOWS):
        table = stochastic_steps(fmt, policy)
        for draws in critical_draws(as_float64(x), table):
            ours = fm.round_to_grid(x, fmt, "stochastic", policy, bits=bits_tensor(draws))
            compare_bits(ours, table(as_float64(x), draws), x, f"{fmt.name} {policy}")


@named
def test_stochastic_with_a_seed_uses_random_bits(fmt, compare_bits) -> None:
    x = random_in_range(fmt.max, 20_000)
    key = {"seed": 11, "step": 5, "stream": 3, "offset": 2**33 + 17}
    draws = fm.random_bits(x.shape, **key)
    expected = stochastic_steps(fmt, "saturate")(as_float64(x), draws.numpy().astype(np.int64))
    compare_bits(fm.round_to_grid(x, fmt, "stochastic", **key), expected, x, fmt.name)
    key["offset"] = 0
    without_offset = fm.round_to_grid(x, fmt, "stochastic", seed=11, step=5, stream=3)
    expected = stochastic_steps(fmt, "saturate")(as_float64(x), fm.random_bits(x.shape, **key).numpy().astype(np.int64))
    compare_bits(without_offset, expected, x, fmt.name)


@every
def test_decode_every_code(fmt, compare_bits) -> None:
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8)
    expected = np.array([reference.decode(code, fmt) for code in codes.tolist()])
    compare_bits(fm.decode(codes, fmt), expected, torch.empty(len(codes)), fmt.name)
    dtypes = [torch.float32, torch.float64, torch.bfloat16] + [torch.float16] * float16_holds(fmt)
    for dtype in dtypes if fmt.name in NAMED else ():
        compare_bits(fm.decode(codes, fmt, dtype), expected, torch.empty(len(codes), dtype=dtype), fmt.name)


@named
@each("dtype", [torch.float32, torch.float64], ids=str)
def test_encode_gives_the_code_of_the_rounded_value(fmt, dtype) -> None:
    x = torch.from_numpy(critical64(fmt)).to(dtype)
    x = x[~x.isnan()]
    for mode in DETERMINISTIC:
        rounded = steps(fmt, mode, "saturate")(as_float64(x))
        code_of = {float(v): reference.encode(float(v), fmt) for v in np.unique(rounded)}
        zero_codes = np.where(np.signbit(rounded), reference.sign_bit(fmt), 0)
        expected = np.where(rounded == 0, zero_codes, [code_of[float(v)] for v in rounded])
        ours = fm.encode(x, fmt, rounding=mode)
        assert ours.dtype == torch.uint8
        np.testing.assert_array_equal(ours.numpy(), expected)


@named
def test_decode_of_encode_is_round_to_grid(fmt, compare_bits) -> None:
    has_nan = bool(reference.nan_codes(fmt))
    for x in (random_float32(), every_16_bit(torch.bfloat16), torch.from_numpy(critical64(fmt))):
        x = x if has_nan else x[~x.isnan()]
        for mode, policy in itertools.product(ROUNDINGS, OVERFLOWS):
            key = {"seed": 9, "step": 2, "stream": 1} if mode == "stochastic" else {}
            codes = fm.encode(x, fmt, rounding=mode, overflow=policy, **key)
            rounded = as_float64(fm.round_to_grid(x, fmt, mode, policy, **key))
            compare_bits(fm.decode(codes, fmt, x.dtype), rounded, x, f"{fmt.name} {mode} {policy}")


def test_inputs_that_require_grad_are_left_alone_and_a_name_is_as_good_as_a_format() -> None:
    x = torch.linspace(-3, 3, 101, requires_grad=True)
    assert torch.equal(fm.round_to_grid(x, "E4M3"), fm.round_to_grid(x.detach(), "E4M3"))
    assert torch.equal(fm.encode(x, "E4M3"), fm.encode(x.detach(), "E4M3"))
    assert x.grad is None
    x, fmt = torch.linspace(-9, 9, 99), fm.FloatFormat.from_string("E3M4")
    assert torch.equal(fm.round_to_grid(x, "e3m4"), fm.round_to_grid(x, fmt))
    assert torch.equal(fm.encode(x, "E3M4"), fm.encode(x, fmt))
    assert torch.equal(fm.decode(fm.encode(x, fmt), "E3M4"), fm.round_to_grid(x, fmt))
    assert torch.equal(fm.ulp(x, "E3M4"), fm.ulp(x, fmt))


@each("shape", [(), (0,), (2, 0, 3)])
def test_encode_and_decode_keep_odd_shapes(shape: tuple[int, ...]) -> None:
    codes = fm.encode(torch.ones(shape), "E4M3")
    assert codes.shape == shape
    assert fm.decode(codes, "E4M3").shape == shape
    assert fm.round_to_grid(torch.ones(shape), "E4M3", "stochastic", seed=0).shape == shape
