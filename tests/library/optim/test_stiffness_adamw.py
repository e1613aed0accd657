"""StiffnessAdamW: its metrics, bounds, reference and schedules.

The step oracle compares its bits.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from optimizer_cases import (
    ROWS,
    free_weight,
    grid_weight,
    manifold_parameter,
    normal,
    put_gradients,
    record,
    step_from,
    values,
)
from torch import nn

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.optim import StiffnessAdamW, anneal

LR = 3e-3
double = torch.float64


def ulp_of(w, fmt):
    return float(reference.ulp(min(abs(w), fmt.max), fmt))


def log_of(w, fmt):
    return max(abs(w), 2.0**fmt.emin) / 2**fmt.mantissa_bits


def fancy(x, fmt):
    """Return a metric of the user's: a constant with a slope."""
    return 0.01 + x.abs() / 3


def fancy_of(w, fmt):
    """Return `fancy` in the middle between the neighbours of w on the grid."""
    positive = [v for v in fmt.values if v >= 0 and not (v == 0 and math.copysign(1, v) < 0)]
    below = max(v for v in positive if v <= abs(w))
    above = min((v for v in positive if v > abs(w)), default=below)
    return 0.01 + (below + above) / 2 / 3


FIELDS = {
    "ulp": ("ulp", ulp_of),
    "log": ("log", log_of),
    "euclidean": ("euclidean", lambda w, fmt: 1.0),
    "function": (fancy, fancy_of),
}


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0, 0.37, -1.0])
@pytest.mark.parametrize("metric", FIELDS)
@pytest.mark.parametrize("scale", [0.3, ROWS.double()], ids=["0.3", "rows"])
def test_every_metric_is_the_definition(metric, scale, k):
    """In float64, unrounded, the first step is ``lr (S / S_ref)^k``, weight by weight."""
    field, field_of = FIELDS[metric]
    weight = free_weight(normal(3, 5, dtype=double, std=0.05), "E4M3", scale)
    old_values = values([weight])[0]
    scales = torch.as_tensor(scale).to(double).expand(3, 5).flatten().tolist()
    fmt = fm.FloatFormat(4, 3)
    fields = [
        s * field_of(w / s, fmt) for w, s in zip(old_values.flatten().tolist(), scales, strict=True)
    ]
    mean = float(sum(Fraction(f) for f in fields) / 15)
    factors = [min(max(f / mean, 0.25), 2.0) ** k for f in fields]
    options = {
        "eps": 0.0,
        "weight_decay": 0.0,
        "stiffness": k,
        "metric": field,
        "damping": 0.25,
        "clip": 2.0,
    }
    optimizer = StiffnessAdamW([weight], LR, **options)
    step_from(optimizer, weight, torch.ones(3, 5, dtype=double))
    expected = torch.tensor(factors, dtype=double).view(3, 5)
    assert ((old_values - weight.detach()) / LR - expected).abs().max() < 1e-11


#: S of these is 1, 1, 2, 2, 4 and 4096 times 2^-20 in E7M0. The mean is 4106/6 of that,
#: the ratios are from 0.0015 to 6.
WEIGHTS = torch.tensor([1.0, -1.5, 2.0, -3.0, 7.0, 5000.0], dtype=double) * 2.0**-20


@pytest.mark.parametrize(
    ("damping", "clip", "bounded"), [(0.002, math.inf, 2), (0.0, 5.9, 1), (0.004, 5.0, 5)]
)
def test_the_bounded_share_is_weighted_by_size(damping, clip, bounded):
    weights = [
        free_weight(WEIGHTS.clone(), "E7M0"),
        free_weight(torch.ones(18, dtype=double), "E7M0"),
    ]
    optimizer = StiffnessAdamW(
        [*weights, nn.Parameter(torch.ones(100))], lr=0.0, damping=damping, clip=clip
    )
    assert optimizer.bounded_share == 0.0
    put_gradients(weights, 1)
    optimizer.step()
    assert optimizer.bounded_share == bounded / 24


@pytest.mark.parametrize("metric", ["ulp", "log", fancy])
@pytest.mark.parametrize("dtype", [torch.float32, double])
@pytest.mark.parametrize("shape", [(1001,), (7, 143)], ids=["shuffled", "transposed"])
def test_the_reference_is_the_exact_mean_in_any_order(metric, dtype, shape):
    x = normal(1001, dtype=dtype, std=5.0)
    order = torch.randperm(1001, generator=torch.Generator().manual_seed(3))
    references = []
    for points in (x, x[order].view(shape).t().contiguous()):
        weight = manifold_parameter(fm.FP8Manifold("E7M0", 0.3), points)
        put_gradients([weight], 0)
        optimizer = StiffnessAdamW([weight], metric=metric)
        views = record(optimizer)
        optimizer.step()
        references.append(optimizer.state[weight]["reference"])
        field = views[0].stiffness.flatten().tolist()
        assert references[-1] == pytest.approx(float(sum(map(Fraction, field)) / 1001), rel=2**-52)
    assert references[0] == references[1]


def test_anneal_is_linear_and_stops():
    k = anneal(1.0, -0.5, 10)
    assert [k(0), k(5), k(10), k(11), k(10**9)] == [1.0, 0.25, -0.5, -0.5, -0.5]


def test_a_schedule_that_leaves_its_range_changes_nothing():
    parameters = [grid_weight(), grid_weight()]
    optimizer = fm.optim.StiffnessAdamW(
        parameters, stiffness=lambda step: 0.0 if step < 1 else 99.0
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter.detach())
    optimizer.step()
    old_values = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(ValueError, match=r"stiffness=99"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(old_values, parameters, strict=True))
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [1, 1]


def test_a_metric_function_is_tabulated_once():
    sizes = []

    def metric(x, fmt):
        sizes.append(x.numel())
        return x.abs() + 1.0

    weight = grid_weight()
    optimizer = StiffnessAdamW([weight], metric=metric)
    for t in range(5):
        put_gradients([weight], t)
        optimizer.step()
    assert len(sizes) == 1


def test_rates_from_a_table_of_numpy_are_taken_as_numbers():
    results = []
    for cast in (float, np.float32):
        p = fm.FP8Parameter(normal(8, 8), "E4M3", seed=0)
        optimizer = StiffnessAdamW([p], lr=cast(0.25), stiffness=lambda step, cast=cast: cast(0.5))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step, cast=cast: cast(2.0**-step)
        )
        for _ in range(3):
            step_from(optimizer, p, normal(8, 8, seed=1))
            schedule.step()
        results.append(p.detach().dequantize())
    assert torch.equal(*results)
