"""Code histograms, spacings of the weights and constraints.

They are compared with counts and definitions by hand.
"""

import math

import geoopt
import pytest
import torch
from torch import nn
from watched_models import (
    NAMES,
    SCALES,
    format_of,
    layer_of,
    normal,
    observers_of,
    on_grid,
    one_step,
    watched,
)

import fp8manifold as fm
from fp8manifold import reference
from nanogpt_bench.monitors.bits import (
    CODES_USED,
    TOP_EXPONENT,
    UNIFORMITY,
    bit_figures,
    code_histogram,
)
from nanogpt_bench.monitors.geometry import (
    OFF_GRID,
    STIFFNESS_MEAN,
    geometry_figures,
    orthogonality,
    row_length_error,
)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_the_counts(name):
    fmt = format_of(name)
    x = normal(1000, seed=5, std=2.0 if name == "E7M0" else fmt.max / 4)
    codes = [reference.encode(v, fmt) for v in fm.round_to_grid(x, fmt).tolist()]
    size, figures = bit_figures(code_histogram(x, fmt), fmt)
    m = fmt.mantissa_bits
    fields = [(c & (fmt.sign_bit - 1)) >> m for c in codes]
    finite = [c for c in range(2**fmt.bits) if math.isfinite(reference.decode(c, fmt))]
    top = max((c & (fmt.sign_bit - 1)) >> m for c in finite)
    assert size == 1000
    shares = [codes.count(code) / 1000 for code in set(codes)]
    assert figures.pop(UNIFORMITY) == pytest.approx(
        -sum(p * math.log2(p) for p in shares) / math.log2(len(finite))
    )
    assert figures.pop(CODES_USED) == len(set(codes)) / len(finite)
    assert figures.pop(TOP_EXPONENT) == fields.count(top) / 1000
    assert (fields.count(top) > 0) is (name != "E7M0")
    assert not figures


def test_codes_that_are_no_number_are_left_out():
    counts = code_histogram(torch.tensor([1.0, math.nan, 2.0]), format_of("E4M3"))
    assert counts[127] == 1
    size, figures = bit_figures(counts, format_of("E4M3"))
    assert (size, figures[CODES_USED]) == (2, 2 / 254)
    size, empty = bit_figures(code_histogram(torch.empty(0), format_of("E5M2")), format_of("E5M2"))
    assert (size, set(empty.values())) == (0, {0.0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_counts_are_those_of_encode(name, dtype):
    fmt = format_of(name)
    # more than a piece
    x = normal(3, 60_000, dtype=dtype)
    x[0, :3] = torch.tensor([math.inf, -math.inf, 1e30])
    codes = fm.encode(x.to(torch.promote_types(dtype, torch.float32)) / (SCALES * 8), fmt)
    counts = torch.bincount(codes.flatten(), minlength=2**fmt.bits)
    assert torch.equal(code_histogram(x, fmt, SCALES * 8), counts)
    assert torch.equal(code_histogram(codes, fmt), counts)


def test_weights_and_activations_that_are_quantised_have_codes():
    model = layer_of(
        {"weight": {"format": "E4M3", "scale": 1.0}}, torch.tensor([[1.0, 1.5, 448.0, 448.0]])
    )
    record = one_step(model, observers_of(watched(model), "bits"), torch.ones(1, 4)).record
    assert record["bits/uniformity/weight/0"] == 1.5 / math.log2(254)
    assert record["bits/top_exponent/weight/0"] == 0.5
    model = layer_of({"activation": {"format": "E2M1", "scale": 1.0}}, torch.ones(1, 2))
    record = one_step(
        model, observers_of(watched(model), "bits"), torch.tensor([[1.0, 6.0]])
    ).record
    assert record["bits/codes_used/activation/0"] == 2 / 16
    assert "bits/codes_used/weight/0" not in record


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [50, 70_000])
def test_spacings_are_the_definition(name, columns):
    w = normal(3, columns, std=0.1)
    scale = fm.storage_scale(w, name)
    stiffness = fm.ulp(w / scale, name) * scale
    figures = geometry_figures(w, format_of(name), scale)
    assert figures[STIFFNESS_MEAN] == pytest.approx(stiffness.double().mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_off_grid_share(name):
    fmt = format_of(name)
    weight = on_grid(fmt.name, 3, 2000) * SCALES
    assert geometry_figures(weight, fmt, SCALES)[OFF_GRID] == 0
    weight[0, :37] += 0.3 * fm.ulp(weight[0, :37] / SCALES[0], fmt) * SCALES[0]
    weight[1, :5] = math.nan if fmt.name == "E7M0" else 3 * fmt.max * SCALES[1]
    assert geometry_figures(weight, fmt, SCALES)[OFF_GRID] == 42 / 6000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E1M6"])
def test_what_is_rounded_is_on_the_grid(name, dtype):
    fmt = format_of(name)
    x, scale = normal(200, 200).to(dtype), fm.amax_scale(normal(200, 200), fmt)
    assert geometry_figures(fm.fake_quantize(x, fmt, scale), fmt, scale)[OFF_GRID] == 0


def test_distances_from_constraints_and_fields_without_weights_or_numbers():
    assert list(geometry_figures(torch.empty(0), format_of("E4M3")).values()) == [0, 0]
    bad = geometry_figures(torch.tensor([1.0, math.nan, 2.0]), format_of("E4M3"))
    assert math.isnan(bad[STIFFNESS_MEAN])
    assert bad[OFF_GRID] == pytest.approx(1 / 3)
    q = geoopt.Stiefel().projx(normal(3, 8, 5))
    assert orthogonality(q) < 1e-5
    assert (
        orthogonality(q * 2) == orthogonality(q.mT * 2) == pytest.approx(3 * math.sqrt(5), rel=1e-5)
    )
    assert orthogonality(torch.empty(0, 3)[:, :0]) == row_length_error(torch.empty(0, 3)) == 0
    assert math.isnan(orthogonality(torch.full((2, 2), math.nan)))
    assert row_length_error(torch.tensor([[0.6, 0.8], [0.0, 0.5]])) == 0.5


def test_a_layer_on_the_grid_stays_there():
    model = layer_of({"weight": "E4M3"}, torch.full((2, 2), 1.0), "grid")
    scale = model[0].weight_scale()[0, 0]
    stiffness = float(fm.ulp(1 / scale, "E4M3") * scale)
    record = one_step(
        model, observers_of(watched(model), "geometry"), torch.ones(1, 2), lr=4 * stiffness
    ).record
    assert record["geometry/stiffness_mean/0"] == pytest.approx(stiffness)
    assert record["geometry/off_grid"] == 0.0


def test_parameters_on_geoopts_manifolds_are_checked():
    model = nn.Linear(2, 2, bias=False)
    for name, manifold in (("q", geoopt.Stiefel()), ("r", geoopt.Sphere())):
        parameter = geoopt.ManifoldParameter(
            torch.tensor([[1.0, 0.0], [0.0, 2.0]]), manifold=manifold
        )
        model.register_parameter(name, parameter)
    record = one_step(model, observers_of(watched(model), "geometry"), torch.ones(1, 2)).record
    assert record["geometry/orthogonality/q"] == record["geometry/orthogonality"] == 3.0
    assert record["geometry/off_sphere/r"] == 1.0
