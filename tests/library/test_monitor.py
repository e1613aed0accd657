"""Stall measures and histograms against a count by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from optimizer_cases import ROWS, grid_weight, normal, put_gradients, record

import fp8manifold as fm
from fp8manifold.monitor import code_histogram, code_unchanged, update_lost
from fp8manifold.optim import StiffnessAdamW

settings = hypothesis_settings(derandomize=True, deadline=None, database=None, max_examples=100)
small = st.integers(0, 2).map(float)
triples = st.lists(st.tuples(small, small, small), max_size=30)


@settings
@given(triples)
def test_update_lost_is_the_count(rows: list[tuple[float, float, float]]) -> None:
    before, target, after = (torch.tensor([r[i] for r in rows]) for i in range(3))
    lost = sum(t != b and a == b for b, t, a in rows)
    assert update_lost(before, target, after) == lost / max(len(rows), 1)


@settings
@given(triples)
def test_code_unchanged_is_the_count(rows: list[tuple[float, float, float]]) -> None:
    before, after = (torch.tensor([r[i] for r in rows]) for i in range(2))
    codes = [(int(b) // 2, int(a) // 2) for b, a, _ in rows]
    old, new = (torch.tensor([c[i] for c in codes], dtype=torch.uint8) for i in range(2))
    unchanged = sum(b != a and int(b) // 2 == int(a) // 2 for b, a, _ in rows)
    assert code_unchanged(old, new, before, after) == unchanged / max(len(rows), 1)


def test_special_values() -> None:
    """A NaN asked for and refused is a lost update; +0 and -0 are one weight."""
    one, nan = torch.ones(1), torch.tensor([math.nan])
    assert update_lost(one, nan, one) == 1.0
    assert update_lost(one, nan, nan) == 0.0
    assert update_lost(torch.zeros(1), -torch.zeros(1), torch.zeros(1)) == 0.0
    assert update_lost(torch.empty(0), torch.empty(0), torch.empty(0)) == 0.0
    assert update_lost(torch.tensor(1.0), torch.tensor(1.1), torch.tensor(1.0)) == 1.0


@pytest.mark.parametrize(("writeback", "lost"), [("nearest", 1.0), ("stochastic", None)])
def test_a_stalled_optimizer_loses_every_update(writeback: str, lost: float | None) -> None:
    """Steps of a thousandth of an ULP: nearest loses them all, stochastic all but as many as its draws say."""
    weight = grid_weight("E4M3", (3, 4000), ROWS, std=0.5)
    optimizer = StiffnessAdamW([weight], lr=1e-4, stiffness=1.0, writeback=writeback)
    views = record(optimizer)
    put_gradients([weight], 0)
    optimizer.step()
    view = views[0]
    share = update_lost(view.before, view.target, view.after)
    moved = (view.after != view.before).double().mean().item()
    assert (view.target != view.before).all()
    assert share == pytest.approx(1 - moved)
    assert share == 1.0 if lost else 0.9 < share < 1.0


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E7M0", "E2M1", "E4M3FNUZ"])
def test_histogram_counts_codes(name: str) -> None:
    fmt = fm.FloatFormat.from_string(name)
    x = normal(3, 1000, std=2.0)
    counts = code_histogram(x, fmt, ROWS * 8)
    codes = fm.encode(x / (ROWS * 8), fmt).flatten().tolist()
    assert counts.dtype == torch.int64
    assert counts.tolist() == [codes.count(c) for c in range(2**fmt.bits)]
    assert counts.sum() == x.numel()


def test_histogram_of_grid_weights_nan_and_nothing() -> None:
    weight = grid_weight("E4M3", (3, 7), ROWS)
    assert torch.equal(code_histogram(weight, "E4M3", ROWS), code_histogram(weight.detach() / ROWS, "E4M3"))
    assert not weight.grad
    nan = code_histogram(torch.tensor([math.nan, 1.0]), "E4M3")
    assert nan[127] == 1
    assert code_histogram(torch.empty(0), "E4M3").tolist() == [0] * 256
