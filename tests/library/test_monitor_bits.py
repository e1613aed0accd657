"""Code histograms, what they say of bits and gaps, and histograms of magnitudes, against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch
from optimizer_cases import ROWS, normal, stored_weight

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.monitor import (
    bit_figures,
    code_histogram,
    gap_lengths,
    magnitude_histogram,
    residual_histogram,
    stiffness_histogram,
)

NAMES = ["E4M3", "E5M2", "E3M4", "E1M6", "E7M0", "E2M1", "E4M3FNUZ", "P3109_8P3F"]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def of(name: str) -> fm.FloatFormat:
    return fm.FloatFormat.from_string(name)


def finite_codes(fmt: fm.FloatFormat) -> list[int]:
    return [c for c in range(2**fmt.bits) if math.isfinite(reference.decode(c, fmt))]


def histogram_of_codes(codes: list[int], fmt: fm.FloatFormat) -> torch.Tensor:
    return code_histogram(torch.tensor(codes, dtype=torch.uint8), fmt)


def entropy_of(items: list[int]) -> float:
    return -sum(items.count(i) / len(items) * math.log2(items.count(i) / len(items)) for i in set(items))


@EVERY_FORMAT
def test_every_code_used_alike(name: str) -> None:
    fmt = of(name)
    found = bit_figures(histogram_of_codes(finite_codes(fmt) * 3, fmt), fmt)
    assert found.size == 3 * fmt.finite_codes
    assert found.entropy == pytest.approx(math.log2(fmt.finite_codes))
    assert found.uniformity == pytest.approx(1)
    assert (found.codes_used, found.codes_ever_used, found.binades_occupied, found.longest_gap) == (1, 1, 1, 0)
    assert all(0 < share < 1 for share in (*found.exponent_bits, *found.mantissa_bits))
    assert (found.mantissa_utilisation is None) == (fmt.mantissa_bits == 0)
    assert found.exponent_utilisation > 0.95


@EVERY_FORMAT
def test_figures_are_the_counts(name: str) -> None:
    fmt = of(name)
    x = normal(1000, seed=5, std=fmt.max / 10 if name in ("E1M6", "E2M1") else 1.0)
    codes = [reference.encode(v, fmt) for v in fm.round_to_grid(x, fmt).tolist()]
    found = bit_figures(code_histogram(x, fmt), fmt)
    m = fmt.mantissa_bits
    fields = [(c & (fmt.sign_bit - 1)) >> m for c in codes]
    mantissas = [c & ((1 << m) - 1) for c in codes]
    top = max((c & (fmt.sign_bit - 1)) >> m for c in finite_codes(fmt))
    assert found.entropy == pytest.approx(entropy_of(codes))
    assert found.codes_used == len(set(codes)) / fmt.finite_codes
    assert found.binades_occupied == len(set(fields)) / (top + 1)
    assert found.top_exponent == fields.count(top) / len(codes)
    assert found.exponent_utilisation == pytest.approx(entropy_of(fields) / math.log2(top + 1))
    if m:
        assert found.mantissa_utilisation == pytest.approx(entropy_of(mantissas) / m)
    for shares, values, width in (
        (found.exponent_bits, fields, fmt.exponent_bits),
        (found.mantissa_bits, mantissas, m),
    ):
        assert list(shares) == [sum(v >> i & 1 for v in values) / len(codes) for i in range(width)]


def test_a_bit_never_used_reports_0() -> None:
    small = torch.tensor([0.125, 0.25, 0.3125, -0.4375])  # multiples of 1/16 below 1/2: exponent fields 4 and 5
    found = bit_figures(code_histogram(small, "E4M3"), "E4M3")
    assert found.exponent_bits[3] == found.exponent_bits[1] == 0
    assert found.exponent_bits[2] == 1
    assert found.mantissa_bits[0] == 0
    assert found.mantissa_bits[1] == 0.5  # of 0.3125 and 0.4375
    assert found.top_exponent == 0


def test_saturation_shows_in_the_top_exponent() -> None:
    x = torch.cat([torch.full((3,), 1e6), torch.full((5,), 1.0)])
    assert bit_figures(code_histogram(x, "E4M3"), "E4M3").top_exponent == 3 / 8
    assert bit_figures(code_histogram(x, "E5M2"), "E5M2").top_exponent == 3 / 8
    assert bit_figures(code_histogram(x, "E5M2", 1e4), "E5M2").top_exponent == 0


def test_codes_of_earlier_steps_count_as_ever_used() -> None:
    first, second = (code_histogram(torch.tensor(v), "E2M1") for v in ([1.0, 2.0], [2.0, 3.0]))
    found = bit_figures(second, "E2M1", first)
    assert (found.codes_used, found.codes_ever_used) == (2 / 16, 3 / 16)


def test_codes_that_are_no_number_are_left_out() -> None:
    x = torch.tensor([1.0, math.nan, 2.0])
    found = bit_figures(code_histogram(x, "E4M3"), "E4M3")
    assert found.size == 2
    assert found.entropy == 1
    empty = bit_figures(torch.zeros(256, dtype=torch.int64), "E5M2")
    assert (empty.entropy, empty.uniformity, empty.codes_used, empty.longest_gap) == (0, 0, 0, 0)
    assert empty.exponent_bits == (0.0,) * 5


@EVERY_FORMAT
def test_gaps_are_the_runs_of_unused_values(name: str) -> None:
    fmt = of(name)
    x = normal(60 if fmt.bits == 8 else 6, seed=2, std=fmt.max / 10 if name in ("E1M6", "E2M1", "E3M4") else 0.5)
    values = sorted(set(fmt.values))
    used = set(fm.round_to_grid(x, fmt).tolist())
    inner = [v in used for v in values if min(used) <= v <= max(used)]
    runs = [len(run) for run in "".join("x" if u else "." for u in inner).split("x") if run]
    counts = code_histogram(x, fmt)
    assert gap_lengths(counts, fmt) == runs
    assert bit_figures(counts, fmt).longest_gap == max(runs, default=0)


def test_both_zeros_fill_one_gap() -> None:
    for zero in (0.0, -0.0):
        assert gap_lengths(code_histogram(torch.tensor([-0.5, zero, 0.5]), "E2M1"), "E2M1") == []
    assert gap_lengths(code_histogram(torch.tensor([-0.5, 0.5]), "E2M1"), "E2M1") == [1]
    assert gap_lengths(torch.zeros(16, dtype=torch.int64), "E2M1") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@EVERY_FORMAT
def test_counts_are_those_of_encode(name: str, dtype: torch.dtype) -> None:
    fmt = of(name)
    x = normal(3, 60_000, dtype=dtype)
    x[0, :3] = torch.tensor([math.inf, -math.inf, 1e30])
    scale = ROWS.to(dtype) * 8
    codes = fm.encode(x.to(torch.promote_types(dtype, torch.float32)) / scale.to(torch.float32), fmt)
    assert torch.equal(code_histogram(x, fmt, scale), torch.bincount(codes.flatten(), minlength=2**fmt.bits))


def test_codes_of_a_stored_weight() -> None:
    weight = stored_weight("E5M2")
    direct = code_histogram(weight.codes, "E5M2")
    assert torch.equal(direct, code_histogram(weight, "E5M2", weight.expanded_scale()))
    assert direct.sum() == weight.numel()


# Histograms of magnitudes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_magnitudes_are_counted_by_binade(dtype: torch.dtype) -> None:
    x = normal(200_000, std=1e-3, dtype=dtype)
    x[:10] = 0
    found = magnitude_histogram(x)
    counts = [
        int(((x.abs() >= low) & (x.abs() < high)).sum())
        for low, high in zip(found.edges, found.edges[1:], strict=False)
    ]
    assert list(found.counts) == counts
    assert sum(found.counts) == x.numel()
    assert found.counts[0] == 10
    assert found.counts[1]
    assert found.counts[-1]
    assert all(math.log2(edge).is_integer() for edge in found.edges[1:])


def test_magnitudes_of_nothing_and_of_no_numbers() -> None:
    assert magnitude_histogram(torch.empty(0)).counts == (0,)
    zeros = magnitude_histogram(torch.zeros(3))
    assert (zeros.edges, zeros.counts) == ((0.0, 1.0), (3,))
    found = magnitude_histogram(torch.tensor([math.nan, math.inf, 1e-42, 3e38]))
    assert found.counts == (1, 1)
    assert found.edges[1:] == (2.0**127, 2.0**128)


@EVERY_FORMAT
def test_stiffness_is_counted_by_value(name: str) -> None:
    fmt = of(name)
    w = normal(3, 500, std=0.2)
    found = stiffness_histogram(w, fmt, ROWS)
    stiffness = fm.ulp(w / ROWS, fmt) * ROWS
    expected = {v.item(): int(n) for v, n in zip(*stiffness.unique(return_counts=True), strict=True)}
    assert {edge: n for edge, n in zip(found.edges, found.counts, strict=False) if n} == expected


@EVERY_FORMAT
def test_residuals_of_rounding(name: str) -> None:
    fmt = of(name)
    w = normal(3, 5000, seed=4, std=0.2) if name != "E1M6" else normal(3, 5000, seed=4, std=0.02)
    scale = ROWS * (1.0 if name != "E2M1" else 4.0)
    found = residual_histogram(w, fmt, scale, bins=10)
    units = w.double() / scale
    residual = (units - fm.round_to_grid(units, fmt)) / fm.ulp(units, fmt)
    place = ((residual + 0.5) * 10).floor().clamp(0, 9).int().flatten()
    expected = torch.bincount(place, minlength=10)
    assert found.edges == pytest.approx([i / 10 - 0.5 for i in range(11)])
    assert sum(found.counts) == w.numel()
    assert (torch.tensor(found.counts) - expected).abs().sum() <= 4  # float32 next to an edge


def test_residuals_at_the_ends() -> None:
    found = residual_histogram(torch.tensor([1e9, -1e9, math.nan, math.inf, 1.0]), "E4M3", bins=4)
    assert found.counts == (1, 0, 1, 1)
    assert residual_histogram(torch.empty(0), "E4M3", bins=2).counts == (0, 0)
