"""Stall figures, residuals, drift and zero-gradient zones on tensors whose answers are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optimizer_cases import ROWS, normal, stored_weight

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

NAMES = ["E4M3", "E5M2", "E1M6", "E7M0", "E2M1", "E4M3FNUZ"]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def on_grid(name: str, *shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return fm.round_to_grid(normal(*shape, seed=seed, std=std), name)


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
    with pytest.raises(ValueError, match="one shape"):
        update_arrived(before, target, target[:1])
    with pytest.raises(TypeError):
        update_arrived(before, target, target.long())


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
    with pytest.raises(ValueError, match="one shape"):
        stall_figures(x, x, x[0], "E4M3")
    with pytest.raises(ValueError, match="does not fit"):
        stall_figures(x, x, x, "E4M3", torch.ones(3))


# Residuals and codes


def test_residuals_at_their_ends() -> None:
    residual = torch.zeros(100, dtype=torch.int8)
    residual[:7], residual[7:12], residual[12:20] = 127, -128, 126
    assert residual_saturation(residual) == 0.12
    assert residual_saturation(torch.arange(-128, 128).to(torch.int8)) == 2 / 256
    assert residual_saturation(torch.empty(0, dtype=torch.int8)) == 0
    with pytest.raises(TypeError, match="float32"):
        residual_saturation(torch.zeros(3))


def test_packed_residuals_at_their_ends() -> None:
    """How many bits each has is what the number of bytes says; the same bytes stand for others in each width."""
    packed = torch.tensor([0b01_10_11_00, 0b01_00_00_01], dtype=torch.uint8)
    assert residual_saturation(packed, 8) == 4 / 8
    assert residual_saturation(packed, 7) == 4 / 7
    assert residual_saturation(packed, 4) == 0
    assert residual_saturation(packed.view(2, 1), 8) == 4 / 8
    assert residual_saturation(packed.view(2, 1), 3 * 2) == 4 / 6
    with pytest.raises(ValueError, match="residual has 2 bytes: size=9 weights of 4 bits take 5, of 2 bits 3"):
        residual_saturation(packed, 9)


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
    with pytest.raises(TypeError, match=r"start must be a uint8 tensor, not torch\.int32"):
        code_drift(zeros.int(), zeros, "E4M3")
    with pytest.raises(ValueError, match="one shape"):
        code_drift(zeros, zeros[:1], "E4M3")


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
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(4, 2\)"):
        zero_gradient_zone(w, torch.ones(4, 2), "E4M3")
    with pytest.raises(TypeError, match="float64"):
        zero_gradient_zone(w, torch.ones(4, 3), "E4M3", output=torch.float64)


def test_zones_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = on_grid("E4M3", 30, 50, std=0.2), normal(3, 50, seed=1)
    whole = zero_gradient_zone(w, x, "E4M3", output="E4M3")
    monkeypatch.setattr("fp8manifold.monitor.gradients.BLOCK", 120)
    assert zero_gradient_zone(w, x, "E4M3", output="E4M3") == whole
    assert 0 < whole < 1
