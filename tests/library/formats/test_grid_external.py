"""round_to_grid, encode and decode against ml_dtypes and gfloat: independent
implementations, bit for bit.
"""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_p3109
from gfloat.types import Domain, FormatInfo
from grid_inputs import critical, critical64, every_16_bit, random_float32, random_in_range
from numpy.typing import NDArray

import fp8manifold as fm

Float64 = NDArray[np.float64]

ML_DTYPES = {
    "E3M4": ml_dtypes.float8_e3m4,
    "E4M3IEEE": ml_dtypes.float8_e4m3,
    "E5M2": ml_dtypes.float8_e5m2,
}
ML_DTYPES |= {
    name: getattr(ml_dtypes, f"float8_{name.lower()}") for name in ("E4M3FNUZ", "E5M2FNUZ")
}
ML_DTYPES |= {"E4M3": ml_dtypes.float8_e4m3fn, "E2M1": ml_dtypes.float4_e2m1fn}
ML_DTYPES |= {name: getattr(ml_dtypes, f"float6_{name.lower()}fn") for name in ("E2M3", "E3M2")}
GFLOAT_ROUNDINGS = {
    "nearest": gfloat.RoundMode.TiesToEven,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}
#: gfloat is the slowest here: it sees every fourth of the random patterns, 275,000 of
#: 1,100,000.
GFLOAT_STRIDE = 4


def gfloat_info(e, m, *, domain=Domain.Finite, high_nans=0, nz=True, bias=None):
    fixed = {"is_signed": True, "has_subnormals": True, "is_twos_complement": False}
    shape = {"k": 1 + e + m, "precision": m + 1, "bias": 2 ** (e - 1) - 1 if bias is None else bias}
    return FormatInfo(
        f"e{e}m{m}", domain=domain, has_nz=nz, num_high_nans=high_nans, **shape, **fixed
    )


OCP = ("E4M3", "E5M2", "E2M3", "E3M2", "E2M1")
GFLOAT = {
    **{name: getattr(gfloat.formats, f"format_info_ocp_{name.lower()}") for name in OCP},
    "E3M4": gfloat_info(3, 4, domain=Domain.Extended, high_nans=15),
    "E4M3IEEE": gfloat_info(4, 3, domain=Domain.Extended, high_nans=7),
    "E4M3FNUZ": gfloat_info(4, 3, nz=False, bias=8),
    "E5M2FNUZ": gfloat_info(5, 2, nz=False, bias=16),
    **{
        f"E{e}M{m}": gfloat_info(e, m)
        for e, m in ((1, 6), (2, 5), (6, 1), (7, 0), (3, 3), (1, 5), (5, 1))
    },
    **{f"P3109_8P{p}": format_info_p3109(8, p) for p in range(1, 8)},
    **{f"P3109_8P{p}F": format_info_p3109(8, p, domain=Domain.Finite) for p in range(1, 8)},
}


def inputs(fmt, stride=1):
    """Codes, midpoints, +-1 ULP; all of 16 bits; random patterns and values in range,
    every so many of them.
    """
    halves = [every_16_bit(dtype).float() for dtype in (torch.bfloat16, torch.float16)]
    random = [random_float32()[::stride], random_in_range(fmt.max)[::stride]]
    return torch.cat([torch.from_numpy(critical(fmt)).float(), *halves, *random])


@pytest.mark.parametrize("name", ML_DTYPES)
def test_nearest_against_ml_dtypes(name, compare_bits):
    fmt = fm.FloatFormat.from_string(name)
    dtype = ML_DTYPES[name]
    x = inputs(fmt)
    if ml_dtypes.finfo(dtype).bits < 8:
        x = x[~x.isnan()]  # there they turn a NaN into a number; ours keeps it
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.numpy().astype(dtype).astype(np.float64)
        saturated = x.clamp(-fmt.max, fmt.max).numpy().astype(dtype).astype(np.float64)
    compare_bits(fm.round_to_grid(x, fmt, "nearest", "inf_or_nan"), expected, x, name)
    compare_bits(fm.round_to_grid(x, fmt), saturated, x, name)


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("rounding", GFLOAT_ROUNDINGS)
@pytest.mark.parametrize("overflow", ["saturate", "inf_or_nan"])
def test_rounding_against_gfloat(name, rounding, overflow, compare_bits):
    """Its NaN is left to itself: it refuses one where the format has none."""
    fmt = fm.FloatFormat.from_string(name)
    info = GFLOAT[name]
    has_specials = info.domain == Domain.Extended or info.num_nans > 0
    saturate = overflow == "saturate" or not has_specials
    for x in (inputs(fmt, GFLOAT_STRIDE), torch.from_numpy(critical64(fmt))):
        with np.errstate(invalid="ignore", over="ignore"):
            expected = gfloat.round_ndarray(
                info, x.double().numpy(), GFLOAT_ROUNDINGS[rounding], saturate
            )
        compare_bits(
            fm.round_to_grid(x, fmt, rounding, overflow), expected, x, f"{name} {rounding}"
        )


@pytest.mark.parametrize("name", GFLOAT)
def test_stochastic_against_gfloat(name, compare_bits):
    """Ours moves up iff r < f * 2^24; gfloat moves away iff f * 2^24 + s >= 2^24: the
    same with s = 2^24 - 1 - r.

    Below 0 up is towards 0, and s = r: gfloat rounds magnitudes, ours has one direction
    on the line for both signs.

    gfloat first rounds f * 2^24 to an integer, ours does not: only values where it is
    one are compared (all but the subnormals of the format and the zeros below them).
    """
    fmt = fm.FloatFormat.from_string(name)
    x = inputs(fmt, GFLOAT_STRIDE)
    x = x[x.isfinite() & (x.abs() <= fmt.max)]
    draws_to_go_away = x.double() / fm.ulp(x.double(), fmt) * 2.0**24
    x = x[draws_to_go_away == draws_to_go_away.round()]
    draws = fm.random_bits(x.shape, seed=17)
    bits = torch.where(x.signbit(), draws, 2**24 - 1 - draws).numpy().astype(np.int64)
    stochastic = {"sat": True, "srbits": bits, "srnumbits": 24}
    expected = gfloat.round_ndarray(
        GFLOAT[name], x.double().numpy(), gfloat.RoundMode.Stochastic, **stochastic
    )
    compare_bits(fm.round_to_grid(x, fmt, "stochastic", bits=draws), expected, x, name)
