"""FloatFormat: the table of formats line by line, every fact derived, names read and
refused.
"""

import dataclasses
from itertools import product

import gfloat
import numpy as np
import pytest
from grid_inputs import NAMED, ODD, finite_values
from hypothesis import given
from hypothesis import strategies as st
from test_grid_external import GFLOAT

import fp8manifold as fm
from fp8manifold import reference

ALL = NAMED | ODD
every_format = pytest.mark.parametrize("fmt", ALL.values(), ids=ALL)


def format_of(name):
    return fm.FloatFormat.from_string(name)


@pytest.mark.parametrize("name", GFLOAT)
def test_facts_and_values_are_gfloats(name):
    fmt = format_of(name)
    info = GFLOAT[name]
    assert (fmt.bits, fmt.bias, fmt.mantissa_bits + 1) == (info.k, info.bias, info.precision)
    assert fmt.has_negative_zero == info.has_nz
    assert len(fmt.nan_codes) == info.num_nans
    # gfloat's own is wrong only for IEEE specials with one exponent bit: not here.
    assert fmt.max == info.max
    codes = range(1 << fmt.bits)
    values = [fmt.decode_code(code) for code in codes]
    np.testing.assert_array_equal(values, [gfloat.decode_float(info, code).fval for code in codes])


@every_format
def test_derived_facts_follow_from_the_codes(fmt):
    values = finite_values(fmt)
    positive = sorted(v for v in values if v > 0)
    gaps = [high - low for low, high in zip([0.0, *positive], positive, strict=False)]
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert fmt.emin == 1 - fmt.bias
    assert fmt.max == positive[-1]
    assert fmt.max_code == reference.max_code(fmt) == len(positive)
    assert fmt.finite_codes == len(values)
    assert fmt.ulp_min == min(gaps) == positive[0]
    assert fmt.ulp_max == float(reference.ulp(fmt.max, fmt)) >= max(gaps)
    assert fmt.min_normal == 2.0 ** (1 - fmt.bias)
    assert fmt.min_subnormal == (positive[0] if fmt.mantissa_bits else None)


@every_format
def test_names_codes_and_values_are_the_oracles(fmt):
    assert [str(v) for v in fmt.values] == [str(v) for v in finite_values(fmt)]
    decoded = [str(fmt.decode_code(code)) for code in range(1 << fmt.bits)]
    assert decoded == [str(reference.decode(code, fmt)) for code in range(1 << fmt.bits)]
    assert sorted(fmt.nan_codes) == sorted(reference.nan_codes(fmt))
    assert fmt.inf_code == reference.inf_code(fmt)
    assert fmt.has_negative_zero == (reference.sign_bit(fmt) not in reference.nan_codes(fmt))
    spellings = (fmt.name, fmt.name.lower(), fmt.name.upper(), str(fmt))
    assert {format_of(name) for name in spellings} == {fmt}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("e4m3", (4, 3, 7, "fn")),
        ("E4M3FN", (4, 3, 7, "fn")),
        ("e4m3fnuz", (4, 3, 8, "fnuz")),
        ("E4M3IEEE", (4, 3, 7, "ieee")),
        ("E4M3FINITE", (4, 3, 7, "finite")),
        ("E3M4IEEE", (3, 4, 3, "ieee")),
        ("E3M4", (3, 4, 3, "ieee")),
        ("E3M4FNUZ", (3, 4, 4, "fnuz")),
        ("E5M2FN", (5, 2, 15, "fn")),
        ("E1M6FINITE", (1, 6, 0, "finite")),
        ("E1M6IEEE", (1, 6, 0, "ieee")),
        ("E3M3", (3, 3, 3, "finite")),
        ("E1M0", (1, 0, 0, "finite")),
        ("E2M0", (2, 0, 1, "finite")),
        ("E5M1", (5, 1, 15, "finite")),
        ("E1M5", (1, 5, 0, "finite")),
        ("p3109_8p7", (1, 6, 1, "p3109e")),
        ("P3109_8P7F", (1, 6, 1, "p3109f")),
        ("P3109_8p1f", (7, 0, 64, "p3109f")),
    ],
)
def test_a_name_gives_bits_bias_and_layout(text, fields):
    fmt = format_of(text)
    assert (fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, fmt.layout) == fields


BAD_NAMES = [
    "",
    " ",
    "E4",
    "4M3",
    "E4N3",
    "M3E4",
    "E4M3FNX",
    "E4M3FN FN",
    "E4M-3",
    "E-4M3",
    "E4.0M3",
    "fp8",
]
TOO_WIDE = [
    "E8M0",
    "E0M7",
    "E0M0",
    "E4M4",
    "E5M3",
    "E99M99",
    "P3109_8P8",
    "P3109_8P0",
    "P3109_9P3",
    "E4M3P3109",
]


@pytest.mark.parametrize("text", BAD_NAMES + TOO_WIDE)
def test_bad_names_are_refused_with_all_that_helps(text):
    with pytest.raises(ValueError, match="ExMy") as caught:
        format_of(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"unknown float format {text!r}; did you mean ")
    assert all(part in message for part in ("FNUZ", "FINITE", "P3109_8P1 to P3109_8P7"))
    assert len(message) < 250


@given(
    st.text(max_size=12)
    | st.from_regex(r"[eE]\d{0,3}[mM]\d{0,3}\w{0,4}")
    | st.from_regex(r"[pP]3109_\w{0,4}")
)
def test_any_text_is_read_or_refused_with_a_value_error(text):
    fmt = None
    message = ""
    try:
        fmt = format_of(text)
    except ValueError as error:
        message = str(error)
    if fmt is None:
        beginning_of_long_text = repr(f"{text[:40]}...")
        assert repr(text) in message or beginning_of_long_text in message
    else:
        assert format_of(fmt.name) == fmt


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits"),
    [(e, m) for e, m in product(range(1, 8), range(7)) if e + m <= 7],
)
def test_defaults_follow_from_the_widths(exponent_bits, mantissa_bits):
    fmt = fm.FloatFormat(exponent_bits, mantissa_bits)
    assert fmt == format_of(f"E{exponent_bits}M{mantissa_bits}")


def test_a_layout_or_a_bias_may_be_given():
    assert fm.FloatFormat(4, 3, layout="fnuz") == format_of("E4M3FNUZ")
    assert fm.FloatFormat(4, 3, bias=7, layout="fn") == format_of("E4M3")


def test_named_formats_have_their_names():
    assert [fmt.name for fmt in fm.NAMED_FORMATS.values()] == [*fm.NAMED_FORMATS]


def test_frozen_and_hashable():
    fmt = format_of("E4M3")
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.bias = 8
    assert hash(fmt) == hash(fm.FloatFormat(4, 3))
    assert len({*ALL.values()}) == len(ALL)
    assert fmt != fm.FloatFormat(4, 3, bias=8)


SPELLINGS = {
    "E1M6": ["E0M7", "INT8", "int8", "torch.int8", "uint8", "INT_8", "E1M7"],
    "E1M4": ["int6", "E0M5"],
    "E1M2": ["int4", "E0M3"],
    "E4M3": ["fp8", "float8", "FP8_E4M3", "float8_e4m3fn", "torch.float8_e4m3fn", "mxfp8", "hf8"],
    "E5M2": ["fp8_e5m2", "torch.float8_e5m2", "F8_E5M2", "bf8"],
    "E4M3FNUZ": ["float8_e4m3fnuz", "fp8e4m3fnuz", "E4M3FNUS"],
    "E5M2FNUZ": ["torch.float8_e5m2fnuz", "e5m2fnu"],
    "E2M1": ["fp4", "nvfp4", "MXFP4", "fp4_e2m1", "float4_e2m1fn_x2"],
    "E2M3": ["fp6", "fp6_e2m3"],
    "E3M2": ["fp6_e3m2"],
    "E7M0": ["E8M0", "float8_e8m0fnu"],
    "P3109_8P4": ["P3109_8Q4", "P31098P4"],
}


ANSWERS = []
for name, spellings in SPELLINGS.items():
    ANSWERS += product(spellings, [name])


@pytest.mark.parametrize(("spelling", "suggestion"), ANSWERS)
def test_another_librarys_name_is_answered_by_the_formats(spelling, suggestion) -> None:
    """One that is a uniform grid says so, as E1M6 does not look like an integer."""
    with pytest.raises(ValueError, match=f"did you mean '{suggestion}'") as refused:
        format_of(spelling)
    is_uniform = suggestion.startswith("E1M") and spelling != "E1M7"
    assert ("evenly spaced" in str(refused.value)) == is_uniform
    assert "\n" not in str(refused.value)
    format_of(suggestion)
