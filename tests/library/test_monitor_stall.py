"""Stall figures, residuals, drift and zero-gradient zones on tensors whose answers are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizer_cases import ROWS, grid_weight, normal, put_gradients, record, stored_weight

import fp8manifold as fm
from fp8manifold import reference
from fp8manifold.monitor import (
    Arrival,
    code_drift,
    residual_saturation,
    stall_figures,
    update_arrived,
    update_lost,
    zero_gradient_zone,
)
from fp8manifold.optim import StiffnessAdamW

NAMES = ["E4M3", "E5M2", "E1M6", "E7M0", "E2M1", "E4M3FNUZ"]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def on_grid(name: str, *shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return fm.round_to_grid(normal(*shape, seed=seed, std=std), name)


def test_a_stalled_update_reports_the_stalled_share() -> None:
    """Of 1000 weights at 1.0, 250 are not asked to move, 600 to move too little, 150 far enough."""
    before = torch.ones(1000)
    target = before.clone()
    target[:600] += 0.03
    target[600:750] += 0.11
    after = fm.round_to_grid(target, "E4M3")
    found = stall_figures(before, target, after, "E4M3")
    assert found.update_lost == 0.6
    assert found.update_success == 150 / 750
    assert found.update_ulps == pytest.approx((600 * 0.03 + 150 * 0.11) / 0.125 / 1000, rel=1e-5)
    assert found.move_probability == pytest.approx(found.update_ulps, rel=1e-5)
    assert found.size == 1000


@EVERY_FORMAT
@pytest.mark.parametrize("size", [1e-3, 0.3, 3.0])
def test_figures_are_the_definitions(name: str, size: float) -> None:
    fmt = fm.FloatFormat.from_string(name)
    before = on_grid(name, 300) * 0.25
    target = before + normal(300, seed=1) * size * fm.ulp(before / 0.25, fmt) * 0.25
    target[:50] = before[:50]
    after = fm.round_to_grid(target / 0.25, fmt) * 0.25
    found = stall_figures(before, target, after, fmt, 0.25)
    pairs = [(b, t) for b, t in zip((before / 0.25).tolist(), (target / 0.25).tolist(), strict=True)]
    ulps = [abs(t - b) / float(reference.ulp(b, fmt)) for b, t in pairs]
    steps = [abs(reference.to_chart(t, fmt) - reference.to_chart(b, fmt)) for b, t in pairs]
    assert found.update_ulps == pytest.approx(sum(ulps) / 300, rel=1e-5)
    assert found.move_probability == pytest.approx(float(sum(min(s, 1) for s in steps)) / 300, rel=1e-5)
    assert found.update_lost == update_lost(before, target, after)
    asked = target != before
    assert found.update_success == pytest.approx(((after != before) & asked).sum().item() / asked.sum().item())


@pytest.mark.parametrize("name", ["E4M3", "E7M0"])
def test_move_probability_is_how_often_stochastic_rounding_moves(name: str) -> None:
    before = on_grid(name, 200_000, seed=3)
    target = before + normal(200_000, seed=4) * 0.2 * fm.ulp(before, name)
    after = fm.round_to_grid(target, name, "stochastic", seed=5)
    found = stall_figures(before, target, after, name)
    assert (after != before).double().mean().item() == pytest.approx(found.move_probability, abs=4e-3)
    assert found.update_success == pytest.approx(found.move_probability, abs=4e-3)


@EVERY_FORMAT
def test_what_arrives_is_all_under_stochastic_rounding_and_nothing_of_a_stalled_step(name: str) -> None:
    fmt = fm.FloatFormat.from_string(name)
    before = on_grid(name, 200_000, seed=3, std=0.2 * fmt.max if fmt.max < 100 else 1.0).clamp(
        -fmt.max / 4, fmt.max / 4
    )
    before = fm.round_to_grid(before, fmt)
    target = before + normal(200_000, seed=4).clamp(-1, 1) * 0.2 * fm.ulp(before, fmt)
    stochastic = fm.round_to_grid(target, fmt, "stochastic", seed=5)
    assert (stochastic == before).double().mean() > 0.7  # most stand still
    assert update_arrived(before, target, stochastic).share == pytest.approx(1.0, abs=0.05)
    assert update_arrived(before, target, before).share == 0.0
    assert update_arrived(before, target, target).share == 1.0


def test_what_arrives_is_the_definition_adds_up_and_counts_what_saturates() -> None:
    before, target = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    found = update_arrived(before, target, torch.tensor([2.0, 2.0]))
    assert (found.projected, found.requested, found.share) == (0.5, 1.25, 0.4)
    assert (found + found).share == found.share
    assert update_arrived(before, before, before).share is None
    assert update_arrived(torch.empty(0), torch.empty(0), torch.empty(0)) == Arrival(0.0, 0.0)
    top = torch.tensor([448.0])
    assert update_arrived(top, top + 64, fm.round_to_grid(top + 64, "E4M3")).share == 0.0
    tiny = torch.full((3,), 1e-30)  # its square is below float32's smallest
    assert update_arrived(tiny, 2 * tiny, 1.5 * tiny).share == pytest.approx(0.5)


def test_what_arrives_of_one_byte_weights_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored_weight()
    target = weight.dequantize() + 0.01
    whole = update_arrived(weight, target, target)
    assert whole.share == pytest.approx(1.0)
    monkeypatch.setattr("fp8manifold.monitor._passes.BLOCK", 5)
    monkeypatch.setattr("fp8manifold.monitor._passes.runs_in_blocks", lambda device, numel: True)
    assert update_arrived(weight, target, target).requested == pytest.approx(whole.requested)


def test_small_steps_keep_their_digits() -> None:
    """A step of a millionth of an ULP at a coordinate of a hundred: the coordinates' difference would be lost."""
    before = torch.full((100,), 256.0)
    target = torch.nextafter(before, torch.tensor(1e9))
    found = stall_figures(before, target, before, "E4M3")
    assert found.update_ulps == found.move_probability == 2.0**-15 / 32


def test_figures_of_an_optimizer_that_stalls() -> None:
    weight = grid_weight("E4M3", (3, 4000), ROWS, std=0.5)
    optimizer = StiffnessAdamW([weight], lr=1e-4, stiffness=1.0, writeback="nearest")
    views = record(optimizer)
    put_gradients([weight], 0)
    optimizer.step()
    view = views[0]
    found = stall_figures(view.before, view.target, view.after, "E4M3", ROWS)
    assert (found.update_lost, found.update_success) == (1.0, 0.0)
    assert 0 < found.move_probability < 0.1


def test_nothing_asked_and_nothing_there() -> None:
    x = torch.ones(3, 2)
    assert stall_figures(x, x, x, "E4M3").update_success is None
    empty = torch.empty(0)
    found = stall_figures(empty, empty, empty, "E4M3")
    assert (found.update_lost, found.update_success, found.update_ulps, found.move_probability) == (0, None, 0, 0)
    found = stall_figures(x, x * math.nan, x, "E4M3")
    assert found.update_lost == 1
    assert math.isnan(found.update_ulps)
    assert math.isnan(found.move_probability)


# Residuals and codes


def test_residuals_at_their_ends() -> None:
    residual = torch.zeros(100, dtype=torch.int8)
    residual[:7], residual[7:12], residual[12:20] = 127, -128, 126
    assert residual_saturation(residual) == 0.12
    assert residual_saturation(torch.arange(-128, 128).to(torch.int8)) == 2 / 256
    assert residual_saturation(torch.empty(0, dtype=torch.int8)) == 0


def test_residuals_of_an_optimizer_are_spread_evenly() -> None:
    weight = stored_weight("E4M3", (201, 99))
    optimizer = StiffnessAdamW([weight], lr=0.01, writeback="residual8", seed=0)
    for step in range(5):
        put_gradients([weight], step)
        optimizer.step()
    found = residual_saturation(optimizer.state[weight]["residual"])
    assert found == pytest.approx(2 / 256, rel=0.15)


@EVERY_FORMAT
def test_drift_is_the_distance_on_the_chart(name: str) -> None:
    fmt = fm.FloatFormat.from_string(name)
    a, b = on_grid(name, 500, seed=1), on_grid(name, 500, seed=2)
    expected = (fm.to_chart(a.double(), fmt) - fm.to_chart(b.double(), fmt)).abs().mean().item()
    assert code_drift(fm.encode(a, fmt), fm.encode(b, fmt), fmt) == pytest.approx(expected)
    assert code_drift(fm.encode(a, fmt), fm.encode(a, fmt), fmt) == 0


def test_drift_of_zeros_and_of_nothing() -> None:
    zeros = fm.encode(torch.tensor([0.0, -0.0]), "E4M3")
    assert code_drift(zeros, zeros.flip(0), "E4M3") == 0
    assert code_drift(zeros[:0], zeros[:0], "E4M3") == 0


# Zero-gradient zones


def zone_by_trial(w: torch.Tensor, x: torch.Tensor, fmt: str, scale: Any, rounded: Any) -> float:
    """Move every weight up and down by half an ULP and look at the rounded outputs, in float64."""
    half = fm.ulp((w / scale).double(), fmt) * torch.as_tensor(scale).double() / 2
    y, unchanged = x.double() @ w.double().T, 0
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            moved = (y[:, i] + sign * x[:, j].double() * half.expand(w.shape)[i, j] for sign in (-1, 1))
            unchanged += all(torch.equal(rounded(m), rounded(y[:, i])) for m in moved)
    return unchanged / w.numel()


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E7M0"])
@pytest.mark.parametrize("output", ["E4M3", "E7M0", torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_zones_are_found_by_trial(name: str, output: Any, rows: int) -> None:
    w = fm.round_to_grid(normal(5, 40, std=0.3) / ROWS[0], name) * ROWS[0]
    x = normal(rows, 40, seed=1) * torch.logspace(-3, 0, 40)
    x[:, 3] = 0

    def rounded(y: torch.Tensor) -> torch.Tensor:
        return y.to(output) if isinstance(output, torch.dtype) else fm.round_to_grid(y / 0.5, output)

    found = zero_gradient_zone(w, x, name, ROWS[0], output=output, output_scale=0.5)
    assert found == pytest.approx(zone_by_trial(w, x, name, ROWS[0], rounded), abs=1.5 / 200)
    assert 0 < found <= 1


def test_more_rows_leave_fewer_zones() -> None:
    w, x = on_grid("E4M3", 6, 50, std=0.2), normal(32, 50, seed=1)
    shares = [zero_gradient_zone(w, x[:n], "E4M3", output="E4M3") for n in (0, 1, 4, 32)]
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[1]


def test_zones_at_the_edges() -> None:
    w = on_grid("E4M3", 2, 3)
    assert zero_gradient_zone(w, torch.zeros(4, 3), "E4M3") == 1
    assert zero_gradient_zone(w, torch.ones(4, 3), "E4M3", output=torch.float32) == 0
    beyond = torch.full((2,), 1e6)
    assert zero_gradient_zone(w, torch.ones(1, 3), "E4M3", output="E4M3", bias=beyond) == 1
    for sign in (1.0, -1.0):  # an output of 446 +- 3 rounds to 448, and one of 435 - 6 to 416
        one, near = sign * torch.ones(1, 1), sign * torch.tensor([398.0])
        assert zero_gradient_zone(one, torch.tensor([[48.0]]), "E4M3", output="E4M3", bias=near) == 1
        assert zero_gradient_zone(one, torch.tensor([[96.0]]), "E4M3", output="E4M3", bias=near - sign * 59) == 0
    assert zero_gradient_zone(torch.empty(0, 3), torch.ones(1, 3), "E4M3") == 0
    assert zero_gradient_zone(stored_weight(), torch.ones(2, 2, 7), "E4M3") < 1


def test_zones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = on_grid("E4M3", 30, 50, std=0.2), normal(3, 50, seed=1)
    whole = zero_gradient_zone(w, x, "E4M3", output="E4M3")
    monkeypatch.setattr("fp8manifold.monitor.gradients.BLOCK", 120)
    assert zero_gradient_zone(w, x, "E4M3", output="E4M3") == whole
    assert 0 < whole < 1
