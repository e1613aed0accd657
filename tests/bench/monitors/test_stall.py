"""Stall on the grid and with master weights.

The share of the updates that moves weights, and its steps.
"""

import math

import pytest
import torch
from torch import nn
from watched_models import NAMES, format_of, normal, on_grid, watched

import fp8manifold as fm
from fp8manifold import reference
from nanogpt_bench.model.weights import quantized_layers
from nanogpt_bench.monitors import Step
from nanogpt_bench.monitors.capture import UpdateObserver
from nanogpt_bench.monitors.stall import (
    Arrival,
    Stall,
    code_unchanged,
    residual_saturation,
    update_arrived,
    update_lost,
    update_ulps,
)


def test_shares_are_the_counts():
    draw = torch.Generator().manual_seed(1)
    old, target, new = torch.randint(0, 3, (3, 1000), generator=draw).float()
    rows = list(zip(old.tolist(), target.tolist(), new.tolist(), strict=True))
    assert update_lost(old, target, new) == sum(t != b and a == b for b, t, a in rows) / 1000
    codes = (old // 2).to(torch.uint8), (new // 2).to(torch.uint8)
    assert (
        code_unchanged(*codes, old, new)
        == sum(b != a and b // 2 == a // 2 for b, _, a in rows) / 1000
    )


def test_special_values():
    """An update to NaN that is not taken is lost; +0 and -0 are the same weight."""
    one, nan = torch.ones(1), torch.tensor([math.nan])
    assert (update_lost(one, nan, one), update_lost(one, nan, nan), update_lost(nan, one, nan)) == (
        1.0,
        0.0,
        0.0,
    )
    assert update_lost(torch.zeros(1), -torch.zeros(1), torch.zeros(1)) == 0.0
    assert update_lost(torch.empty(0), torch.empty(0), torch.empty(0)) == 0.0
    assert update_ulps(one[:0], one[:0], format_of("E4M3")) == 0.0
    assert residual_saturation(torch.arange(-128, 128).to(torch.int8)) == 2 / 256
    assert residual_saturation(torch.empty(0, dtype=torch.int8)) == 0
    assert math.isnan(update_ulps(one, nan, format_of("E4M3")))
    assert update_ulps(one, one * math.inf, format_of("E4M3")) == math.inf


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_in_spacings_at_the_weight(name):
    fmt = format_of(name)
    old = on_grid(name, 300) * 0.25
    target = old + normal(300, seed=1) * 0.3 * fm.ulp(old / 0.25, fmt) * 0.25
    pairs = zip((old / 0.25).tolist(), (target / 0.25).tolist(), strict=True)
    ulps = [abs(t - b) / float(reference.ulp(b, fmt)) for b, t in pairs]
    assert update_ulps(old, target, fmt, 0.25) == pytest.approx(sum(ulps) / 300, rel=1e-5)


def test_sizes_are_exact_to_the_last_digit_of_a_weight():
    large = torch.full((200_000,), 256.0)
    assert update_ulps(large, torch.nextafter(large, 2 * large), format_of("E4M3")) == 2.0**-15 / 32


@pytest.mark.parametrize("name", NAMES)
def test_what_arrives_is_all_under_stochastic_rounding_and_nothing_of_a_stalled_step(name):
    fmt = format_of(name)
    std = 0.2 * fmt.max if fmt.max < 100 else 1.0
    old = on_grid(name, 200_000, seed=3, std=std).clamp(-fmt.max / 4, fmt.max / 4)
    old = fm.round_to_grid(old, fmt)
    target = old + normal(200_000, seed=4).clamp(-1, 1) * 0.2 * fm.ulp(old, fmt)
    stochastic = fm.round_to_grid(target, fmt, "stochastic", seed=5)
    # Most stand still.
    assert (stochastic == old).double().mean() > 0.7
    assert update_arrived(old, target, stochastic).share == pytest.approx(1.0, abs=0.05)
    assert update_arrived(old, target, old).share == 0.0
    assert update_arrived(old, target, target).share == 1.0


def test_what_arrives_is_the_definition_adds_up_and_counts_what_saturates():
    old, target = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    figures = update_arrived(old, target, torch.tensor([2.0, 2.0]))
    assert (figures.projected, figures.requested, figures.share) == (0.5, 1.25, 0.4)
    assert (figures + Arrival(1.0, 0.25)).share == 1.0
    assert update_arrived(old, old, old).share is None
    assert update_arrived(torch.empty(0), torch.empty(0), torch.empty(0)) == Arrival(0.0, 0.0)
    top = torch.tensor([448.0])
    assert update_arrived(top, top + 64, fm.round_to_grid(top + 64, "E4M3")).share == 0.0
    tiny = torch.full((3,), 1e-30)  # its square is below float32's smallest
    assert update_arrived(tiny, 2 * tiny, 1.5 * tiny).share == pytest.approx(0.5)


def model_on(storage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    return fm.quantize_model(model, "E4M3", storage)


def watch(model, interval=1):
    of_run = watched(model, interval=interval)
    stall = Stall(of_run)
    return stall, UpdateObserver(of_run, [stall])


def step_once(model, optimizer, observer, number, *, last=False):
    step = Step(number, model, optimizer, last)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    observer.before_step(step)
    optimizer.step()
    observer.after_step(step)
    return step.record


@pytest.mark.parametrize(("lr", "stalled"), [(1e-6, 1.0), (10.0, 0.0)])
def test_on_the_grid_nearest_loses_all_tiny_updates_and_no_huge_one(lr, stalled):
    model = model_on("grid")
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=lr, stiffness=0.0, writeback="nearest"
    )
    stall, observer = watch(model)
    record = step_once(model, optimizer, observer, 1)
    lost = {key: value for key, value in record.items() if key.startswith("stall/update_lost")}
    assert lost == dict.fromkeys(
        ("stall/update_lost", "stall/update_lost/0", "stall/update_lost/1"), stalled
    )
    assert stall.mean == stalled
    assert stall.arrived == record["stall/arrived"]
    assert (stall.arrived == 0.0) is (stalled == 1.0)
    assert optimizer.observer is None


@pytest.mark.parametrize(("lr", "stalled"), [(1e-6, 1.0), (10.0, 0.0)])
def test_with_a_master_copy_the_codes_are_compared(lr, stalled):
    model = model_on("master")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    stall, observer = watch(model)
    for layer in quantized_layers(model).values():
        layer.weight.data.fill_(1.0)
        layer.weight.data[
            :, 0
        ] = -4.0  # the row's amax, so that its scale stays when the others move
        if stalled == 0.0:
            layer.weight.data.normal_()
    record = step_once(model, optimizer, observer, 1)
    assert stall.metric == "stall/code_unchanged"
    assert record["stall/code_unchanged"] == pytest.approx(stalled, abs=0.25)


def test_it_looks_at_its_interval_and_at_the_last_step():
    model = model_on("grid")
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-3)
    stall, observer = watch(model, interval=3)
    looks = [
        step_once(model, optimizer, observer, number, last=number == 7) for number in range(1, 8)
    ]
    assert [
        number for number, record in enumerate(looks, start=1) if "stall/update_lost" in record
    ] == [3, 6, 7]
    assert stall.arrived is not None
    step = Step(9, model, optimizer)  # in which no weight is asked to move
    observer.before_step(step)
    observer.after_step(step)
    assert stall.arrived is None


@pytest.mark.parametrize(
    ("writeback", "share"), [("stochastic", 1.0), ("residual8", 1.0), ("nearest", 0.0)]
)
def test_what_arrives_is_all_where_the_write_back_is_unbiased_and_nothing_where_it_stalls(
    writeback, share
):
    torch.manual_seed(0)  # two layers whose updates lie far below a spacing
    model = fm.quantize_model(
        nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8, bias=False)), "E4M3", "codes"
    )
    optimizer = fm.optim.StiffnessAdamW(
        model.parameters(), lr=1e-4, stiffness=1.0, writeback=writeback
    )
    stall, observer = watch(model)
    records = [step_once(model, optimizer, observer, number) for number in range(1, 6)]
    assert stall.arrived == pytest.approx(sum([record["stall/arrived"] for record in records]) / 5)
    assert stall.arrived == pytest.approx(share, abs=0.1)
    if writeback == "stochastic":
        assert (stall.mean or 0.0) > 0.8  # which says nothing here
    assert {key for key in records[0] if "arrived" in key} == {
        *("stall/arrived", "stall/arrived/0", "stall/arrived/1")
    }
    assert ("stall/residual_saturation/0" in records[-1]) is (writeback == "residual8")


def test_what_arrived_of_all_layers_is_of_their_movement_together():
    """A layer with tiny updates hardly counts in the mean over layers.

    How many weights it has does not matter.
    """
    model = model_on("grid")
    groups = [{"params": [model[0].weight], "lr": 1e-9}, {"params": [model[1].weight], "lr": 1.0}]
    optimizer = fm.optim.StiffnessAdamW(groups, stiffness=0.0, writeback="nearest")
    record = step_once(model, optimizer, watch(model)[1], 1)
    assert record["stall/arrived/0"] == 0.0
    assert record["stall/arrived"] == pytest.approx(record["stall/arrived/1"])
