"""The stall observer: what it counts on the grid and with master weights, and when it looks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.observers import Stall, Step, UpdateObserver
from nanogpt_bench.setup.surgery import quantized_layers


def model_on(storage: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    return fm.quantize_model(model, "E4M3", storage)


def watch(model: nn.Module, storage: str, interval: int = 1, detail: int = 10**9) -> tuple[Stall, UpdateObserver]:
    layers = quantized_layers(model)
    stall = Stall(layers, storage, interval, detail)
    return stall, UpdateObserver(layers, storage, [stall])


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, observer: UpdateObserver, number: int) -> Step:
    step = Step(number, model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    observer.before_step(step)
    optimizer.step()
    observer.after_step(step)
    return step


@pytest.mark.parametrize(("lr", "stalled"), [(1e-6, 1.0), (10.0, 0.0)])
def test_on_the_grid_nearest_loses_all_tiny_updates_and_no_huge_one(lr: float, stalled: float) -> None:
    model = model_on("grid")
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=lr, stiffness=0.0, writeback="nearest")
    stall, observer = watch(model, "grid")
    record = step_once(model, optimizer, observer, 1).record
    lost = {key: value for key, value in record.items() if key.startswith("stall/update_lost")}
    assert lost == {"stall/update_lost": stalled, "stall/update_lost/0": stalled, "stall/update_lost/1": stalled}
    assert stall.mean == stalled
    assert stall.arrived == record["stall/arrived"]
    assert (stall.arrived == 0.0) is (stalled == 1.0)
    assert optimizer.observer is None


@pytest.mark.parametrize(("lr", "stalled"), [(1e-6, 1.0), (10.0, 0.0)])
def test_with_a_master_copy_the_codes_are_compared(lr: float, stalled: float) -> None:
    model = model_on("master")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for layer in quantized_layers(model).values():
        layer.weight.data.fill_(1.0)
        layer.weight.data[:, 0] = -4.0  # the row's amax, so that its scale stays when the others move
    stall, observer = watch(model, "master")
    if stalled == 0.0:
        for layer in quantized_layers(model).values():
            layer.weight.data.normal_()
    record = step_once(model, optimizer, observer, 1).record
    assert stall.metric == "stall/code_unchanged"
    assert record["stall/code_unchanged"] == pytest.approx(stalled, abs=0.25)


def test_it_looks_at_its_interval_and_at_the_last_step() -> None:
    model = model_on("grid")
    optimizer = fm.optim.StiffnessAdamW(model.parameters(), lr=1e-3)
    _, observer = watch(model, "grid", interval=3)
    assert [bool(step_once(model, optimizer, observer, number).record) for number in range(1, 7)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    last = Step(7, model, optimizer, last=True)
    observer.before_step(last)
    optimizer.step()
    observer.after_step(last)
    assert "stall/update_lost" in last.record


def larger_model(writeback: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers whose updates lie far below a spacing."""
    torch.manual_seed(0)
    model = fm.quantize_model(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8, bias=False)), "E4M3", "fp8")
    return model, fm.optim.StiffnessAdamW(model.parameters(), lr=1e-4, stiffness=1.0, writeback=writeback)


@pytest.mark.parametrize(("writeback", "share"), [("stochastic", 1.0), ("residual8", 1.0), ("nearest", 0.0)])
def test_what_arrives_is_all_where_the_write_back_is_unbiased_and_nothing_where_it_stalls(
    writeback: str, share: float
) -> None:
    model, optimizer = larger_model(writeback)
    stall, observer = watch(model, "fp8")
    records = [step_once(model, optimizer, observer, number).record for number in range(1, 6)]
    shares = [record["stall/arrived"] for record in records]
    assert stall.arrived == pytest.approx(sum(shares) / 5)
    assert stall.arrived == pytest.approx(share, abs=0.1)
    if writeback == "stochastic":
        assert (stall.mean or 0.0) > 0.8  # which says nothing here
    assert {key for key in records[0] if "arrived" in key} == {*("stall/arrived", "stall/arrived/0", "stall/arrived/1")}


def test_what_arrived_of_all_layers_is_of_their_movement_together() -> None:
    """A layer that was asked for next to nothing says next to nothing, however many weights it has."""
    model = model_on("grid")
    optimizer = fm.optim.StiffnessAdamW(
        [{"params": [model[0].weight], "lr": 1e-9}, {"params": [model[1].weight], "lr": 1.0}],
        stiffness=0.0,
        writeback="nearest",
    )
    record = step_once(model, optimizer, watch(model, "grid")[1], 1).record
    assert record["stall/arrived/0"] == 0.0
    assert record["stall/arrived"] == pytest.approx(record["stall/arrived/1"])
