"""Code histograms and what they say of bits, against counts by hand."""

import math

import pytest
import torch
from laws import each
from watched_models import NAMES, SCALES, layer_of, normal, observers_of, of, one_step, watched

import fp8manifold as fm
from fp8manifold import reference
from nanogpt_bench.monitors.bits import CODES_USED, TOP_EXPONENT, UNIFORMITY, bit_figures, code_histogram


@each("name", NAMES)
def test_figures_are_the_counts(name):
    fmt = of(name)
    x = normal(1000, seed=5, std=2.0 if name == "E7M0" else fmt.max / 4)
    codes = [reference.encode(v, fmt) for v in fm.round_to_grid(x, fmt).tolist()]
    size, found = bit_figures(code_histogram(x, fmt), fmt)
    m = fmt.mantissa_bits
    fields = [(c & (fmt.sign_bit - 1)) >> m for c in codes]
    finite = [c for c in range(2**fmt.bits) if math.isfinite(reference.decode(c, fmt))]
    top = max((c & (fmt.sign_bit - 1)) >> m for c in finite)
    assert size == 1000
    shares = [codes.count(code) / 1000 for code in set(codes)]
    assert found.pop(UNIFORMITY) == pytest.approx(-sum(p * math.log2(p) for p in shares) / math.log2(len(finite)))
    assert found.pop(CODES_USED) == len(set(codes)) / len(finite)
    assert found.pop(TOP_EXPONENT) == fields.count(top) / 1000
    assert (fields.count(top) > 0) is (name != "E7M0")
    assert not found


def test_codes_that_are_no_number_are_left_out():
    counts = code_histogram(torch.tensor([1.0, math.nan, 2.0]), of("E4M3"))
    assert counts[127] == 1
    size, found = bit_figures(counts, of("E4M3"))
    assert (size, found[CODES_USED]) == (2, 2 / 254)
    size, empty = bit_figures(code_histogram(torch.empty(0), of("E5M2")), of("E5M2"))
    assert (size, set(empty.values())) == (0, {0.0})


@each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_counts_are_those_of_encode(dtype):
    for fmt in map(of, NAMES):
        x = normal(3, 60_000, dtype=dtype)  # more than a piece
        x[0, :3] = torch.tensor([math.inf, -math.inf, 1e30])
        codes = fm.encode(x.to(torch.promote_types(dtype, torch.float32)) / (SCALES * 8), fmt)
        counts = torch.bincount(codes.flatten(), minlength=2**fmt.bits)
        assert torch.equal(code_histogram(x, fmt, SCALES * 8), counts)
        assert torch.equal(code_histogram(codes, fmt), counts)


def test_weights_and_activations_that_are_quantised_have_codes():
    model = layer_of({"weight": {"format": "E4M3", "scale": 1.0}}, torch.tensor([[1.0, 1.5, 448.0, 448.0]]))
    record = one_step(model, observers_of(watched(model), "bits"), torch.ones(1, 4)).record
    assert record["bits/uniformity/weight/0"] == 1.5 / math.log2(254)
    assert record["bits/top_exponent/weight/0"] == 0.5
    model = layer_of({"activation": {"format": "E2M1", "scale": 1.0}}, torch.ones(1, 2))
    record = one_step(model, observers_of(watched(model), "bits"), torch.tensor([[1.0, 6.0]])).record
    assert record["bits/codes_used/activation/0"] == 2 / 16
    assert "bits/codes_used/weight/0" not in record
