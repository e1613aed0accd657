"""Zones without gradient: found by trial, and at the edges."""

from typing import Any

import pytest
import torch
from watched_models import SCALES, layer_of, normal, observers_of, of, on_grid, one_step, watched

import fp8manifold as fm
from nanogpt_bench.monitors.zones import zero_gradient_zone


def zone_by_trial(w: torch.Tensor, x: torch.Tensor, fmt: str, scale: Any, output: torch.dtype) -> float:
    """Move every weight up and down by half a spacing and look at the rounded outputs, in float64."""
    half = (fm.ulp((w / scale).double(), fmt) * scale.double() / 2).expand(w.shape)
    y, unchanged = x.double() @ w.double().T, 0
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            moved = (y[:, i] + sign * x[:, j].double() * half[i, j] for sign in (-1, 1))
            unchanged += all(torch.equal(m.to(output), y[:, i].to(output)) for m in moved)
    return unchanged / w.numel()


@pytest.mark.parametrize("output", [torch.bfloat16, torch.float16])
def test_zones_are_found_by_trial(output):
    for name in ("E4M3", "E5M2", "E7M0"):
        for rows in (1, 4):
            w = on_grid(name, 5, 40, std=3.0) * SCALES[0]
            x = normal(rows, 40, seed=1) * torch.logspace(-4, 0, 40)
            x[:, 3] = 0
            found = zero_gradient_zone(w, x, of(name), SCALES[0], output=output)
            assert found == pytest.approx(zone_by_trial(w, x, name, SCALES[0], output), abs=1.5 / 200)
            assert 0 < found < 1


def test_more_rows_leave_fewer_zones_and_pieces_the_same(monkeypatch):
    w, x = on_grid("E4M3", 30, 50, std=0.2), normal(32, 50, seed=1) * torch.logspace(-4, 0, 50)
    shares = [zero_gradient_zone(w, x[:n], of("E4M3")) for n in (0, 1, 4, 32)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[1]
    monkeypatch.setattr("nanogpt_bench.monitors.zones.BLOCK", 120)
    assert zero_gradient_zone(w, x[:4], of("E4M3")) == shares[2]


def test_zones_at_the_edges():
    w = on_grid("E4M3", 2, 3)
    assert zero_gradient_zone(w, torch.zeros(4, 3), of("E4M3")) == 1
    assert zero_gradient_zone(w, torch.ones(4, 3), of("E4M3"), output=torch.float32) == 0
    assert zero_gradient_zone(w, torch.ones(1, 3), of("E4M3"), bias=torch.full((2,), 1e6)) == 1
    assert zero_gradient_zone(w, torch.ones(1, 3), of("E4M3"), bias=torch.full((2,), torch.inf)) == 1
    assert zero_gradient_zone(torch.empty(0, 3), torch.ones(1, 3), of("E4M3")) == 0


@pytest.mark.parametrize(("inputs", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_weights_that_meet_no_input_are_in_a_zone(inputs, share):
    model = layer_of({"weight": "E4M3"}, normal(4, 4))
    record = one_step(model, observers_of(watched(model), "zones"), torch.full((2, 4), inputs)).record
    assert record["stall/zero_gradient_zone/0"] == record["stall/zero_gradient_zone"] == share
