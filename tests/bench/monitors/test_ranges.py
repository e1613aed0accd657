"""Range figures against exact rounding and definitions in float64.

Also which tensors a run measures.
"""

import math
from fractions import Fraction

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
    one_step,
    watched,
)

import fp8manifold as fm
from fp8manifold import reference
from nanogpt_bench.monitors.ranges import (
    AMAX,
    CLAMPED,
    KURTOSIS,
    LOG2_SKEWNESS,
    LOG2_STD,
    OVERFLOW,
    UNDERFLOW,
    range_figures,
)

SHARES = (OVERFLOW, UNDERFLOW, CLAMPED)


def shares_by_definition(values: list[float], fmt: fm.FloatFormat) -> list[float]:
    """Round every value in exact arithmetic.

    The grid goes on beyond the largest value.
    """
    counts = [0, 0, 0]
    for value in map(abs, values):
        low = max(
            c for c in range(fmt.max_code + 1) if reference.magnitude(c, fmt) <= Fraction(value)
        )
        middle = (reference.magnitude(low, fmt) + reference.magnitude(low + 1, fmt)) / 2
        is_above = Fraction(value) > middle
        is_tie = Fraction(value) == middle
        # Of two equally near codes the even one.
        code = low + low % 2 if is_tie else low + is_above
        answers = code > fmt.max_code, value > 0 and code == 0, value > fmt.max * (1 + 2**-20)
        counts = [count + hit for count, hit in zip(counts, answers, strict=True)]
    return [count / len(values) for count in counts]


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_those_of_exact_rounding(name):
    fmt = format_of(name)
    middle = float(
        (reference.magnitude(fmt.max_code, fmt) + reference.magnitude(fmt.max_code + 1, fmt)) / 2
    )
    least = fmt.ulp_min / 2
    ends = torch.tensor([fmt.max, middle, least, 2 * least], dtype=torch.float32)
    near = [torch.nextafter(ends, ends + sign) for sign in (-1, 1)]
    values = torch.cat([ends, *near, -ends, ends * 1.001, torch.tensor([0.0, -0.0, 1.0])]).tolist()
    figures = range_figures(torch.tensor(values), fmt)
    assert [figures[share] for share in SHARES] == shares_by_definition(values, fmt)
    assert figures[OVERFLOW]
    assert figures[UNDERFLOW]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_shares_of_channels_in_pieces_and_in_every_dtype(dtype):
    x = normal(3, 50_000, std=0.1, dtype=dtype)
    figures, units = (
        range_figures(x, format_of("E4M3"), SCALES * 2.0**-6),
        x.double() / (SCALES * 2.0**-6),
    )
    assert figures[OVERFLOW] == (units.abs() > 464).double().mean().item() > 0
    assert figures[AMAX] == x.abs().max().item()


@pytest.mark.parametrize("shape", [(7,), (400, 500)])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_moments(shape, offset):
    x = normal(*shape, seed=3, std=2.0) ** 3 + offset
    figures, wide = range_figures(x), x.double()
    centred, logs = wide - wide.mean(), wide.abs().log2()
    assert figures[KURTOSIS] == pytest.approx(
        (centred.pow(4).mean() / centred.square().mean() ** 2).item(), rel=1e-4
    )
    assert figures[LOG2_STD] == pytest.approx(logs.std(correction=0).item(), rel=1e-5)
    third = (logs - logs.mean()).pow(3).mean() / logs.std(correction=0) ** 3
    assert figures[LOG2_SKEWNESS] == pytest.approx(third.item(), rel=1e-4, abs=1e-5)
    assert not set(SHARES) & set(figures)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_a_constant_has_no_moments(value):
    figures = range_figures(torch.full((1000,), value), format_of("E4M3"))
    assert (figures[KURTOSIS], figures[LOG2_SKEWNESS]) == (None, None)
    assert figures[AMAX] == pytest.approx(abs(value))
    assert figures[LOG2_STD] == (0.0 if value else None)


@pytest.mark.parametrize(
    "nothing", [torch.full((3,), math.nan), torch.empty(0, 3)], ids=["nan", "empty"]
)
def test_nothing_finite_has_no_range(nothing):
    figures = range_figures(nothing, format_of("E7M0"))
    assert [figures[m] for m in (OVERFLOW, AMAX, KURTOSIS, LOG2_STD)] == [0.0, 0.0, None, None]


def test_what_is_not_finite_is_counted_and_left_out():
    x = torch.cat([normal(997), torch.tensor([math.nan, math.inf, -math.inf])])
    figures, finite = range_figures(x, format_of("E5M2")), range_figures(x[:997], format_of("E5M2"))
    assert figures[OVERFLOW] == figures[CLAMPED] == 2 / 1000
    assert [figures[m] for m in (AMAX, KURTOSIS, LOG2_STD)] == [
        finite[m] for m in (AMAX, KURTOSIS, LOG2_STD)
    ]
    for seed in range(50):  # the largest value under its own scale is not clamped
        x = normal(20, seed=seed)
        assert range_figures(x, format_of("E4M3"), fm.amax_scale(x, "E4M3"))[CLAMPED] == 0, seed


def test_thirty_seven_overflowing_weights_of_64_are_37_in_64():
    weight = torch.full((8, 8), 0.5)
    weight.view(-1)[:37] = 1000.0
    model = layer_of({"weight": {"format": "E4M3", "scale": 1.0}}, weight)
    record = one_step(model, observers_of(watched(model), "ranges"), torch.ones(2, 8)).record
    assert record["quant/overflow/weight/0"] == record["quant/overflow/weight"] == 37 / 64
    assert record["quant/clamped/weight/0"] == 37 / 64
    assert record["quant/amax/weight/0"] == 1000.0


def test_weights_on_the_grid_are_measured_as_the_step_asked_for_them():
    model = layer_of({"weight": "E4M3"}, torch.full((4, 4), 0.25), "grid")
    limit = float(model[0].weight_scale().max()) * 448
    inputs = torch.ones(1, 4)
    inputs[0, 0] = -2 * limit  # the gradient of column 0
    record = one_step(model, observers_of(watched(model), "ranges"), inputs, lr=1.0).record
    assert record["quant/overflow/weight/0"] == 0.25
    assert float(model[0].weight.detach().max()) == limit


def test_activations_and_gradients_are_measured_before_they_are_quantised():
    spec = {"activation": {"format": "E4M3", "scale": 1.0}, "gradient": {"activation": "E5M2"}}
    model = layer_of(spec, torch.eye(4))
    inputs = torch.tensor([[1000.0, 1.0, 1e-6, 0.0]])
    record = one_step(model, observers_of(watched(model), "ranges"), inputs).record
    assert record["quant/overflow/activation/0"] == 0.25
    assert record["quant/underflow/activation/0"] == 0.25
    assert record["quant/amax/gradient/0"] == 1.0


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_gradients_of_weights_are_measured_where_they_are_quantised(granularity):
    fixed = {"scale": 1.0} if granularity == "tensor" else {"granularity": granularity}
    model = layer_of({"gradient": {"weight": {"format": "E5M2", **fixed}}}, torch.ones(2, 32))
    inputs = torch.ones(1, 32)
    inputs[0, :3] = torch.tensor([1e6, 1e-9, 0.0])
    of_run = watched(model)
    record = one_step(model, observers_of(of_run, "ranges", "bits"), inputs).record
    assert record["quant/amax/weight_gradient/0"] == 1e6
    assert record["quant/underflow/weight_gradient/0"] == 1 / 32
    assert record["quant/overflow/weight_gradient/0"] == (
        1 / 32 if granularity == "tensor" else 0.0
    )
    assert record["bits/codes_used/weight_gradient/0"] == 3 / 248
    assert not of_run.capture.weight_gradients
    assert not model[0].weight_gradient_scaler._forward_pre_hooks


def test_what_has_no_format_is_measured_in_that_of_the_setting_and_a_block_by_its_scale():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    inputs = torch.tensor([[1.0, 2.0, 3.0, 1e-9]])
    record = one_step(model, observers_of(watched(model), "ranges"), inputs).record
    assert record["quant/amax/activation/0"] == 3.0
    assert not [key for key in record if key.startswith("quant/overflow")]
    record = one_step(
        model, observers_of(watched(model, activation_format="E4M3"), "ranges"), inputs
    ).record
    assert record["quant/underflow/activation/0"] == 0.25
    assert "quant/underflow/gradient/0" not in record
    model = layer_of({"activation": {"format": "E4M3", "granularity": "block"}}, torch.ones(2, 64))
    inputs = torch.cat([torch.ones(3, 32), torch.full((3, 32), 2.0**20)], 1)
    record = one_step(model, observers_of(watched(model), "ranges"), inputs).record
    assert record["quant/overflow/activation/0"] == record["quant/underflow/activation/0"] == 0.0
