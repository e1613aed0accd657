"""The three predictions about E7M0, confirmed, refuted and left open."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from nanogpt_bench.failures import is_e7m0_nearest, predictions

Make = Callable[..., Path]
LOOKS = range(20, 201, 20)
#: a loss that falls for eight steps and then stays
STUCK = [5.5 - 0.2 * step for step in range(8)] + [4.0 + 0.02 * (step % 2) for step in range(192)]


def shares(metric: str, share: float) -> dict[str, dict[int, float]]:
    return {metric: dict.fromkeys(LOOKS, share), f"{metric}/mlp.fc": dict.fromkeys(LOOKS, min(1.0, share + 0.02))}


def test_a_stuck_run_confirms_all_three(make: Make) -> None:
    series = shares("stall/update_lost", 0.97) | shares("stall/zero_gradient_zone", 0.6)
    answers = predictions(make(loss=STUCK, series=series))
    assert [(answer.name, answer.confirmed) for answer in answers] == [
        ("plateau", True),
        ("update_sparsity", True),
        ("zero_gradient_zones", True),
    ]
    assert answers[0].figures["fall_after"] == pytest.approx(0.0, abs=0.02)
    assert answers[1].figures["mean"] == pytest.approx(0.97)
    assert answers[1].figures["highest_layer"] == "mlp.fc"
    json.dumps([asdict(answer) for answer in answers], allow_nan=False)


def test_a_run_that_learns_refutes_all_three(make: Make) -> None:
    series = shares("stall/update_lost", 0.5) | shares("stall/zero_gradient_zone", 0.01)
    answers = predictions(make(series=series))
    assert [answer.confirmed for answer in answers] == [False, False, False]
    share = answers[0].figures["share_after"]
    assert isinstance(share, float)
    assert 0.1 < share < 0.5
    assert answers[0].figures["steps"] == 200


def test_what_was_not_recorded_stays_open_and_is_named(make: Make) -> None:
    answers = predictions(make(loss=STUCK[:9]))
    assert [answer.confirmed for answer in answers] == [None, None, None]
    assert [answer.missing for answer in answers] == [
        ("train/loss",),
        ("stall/update_lost",),
        ("stall/zero_gradient_zone",),
    ]


@pytest.mark.parametrize(("fmt", "writeback", "asked"), [("E7M0", "nearest", True), ("E7M0", "stochastic", False)])
def test_the_predictions_are_about_e7m0_with_nearest_rounding(
    make: Make, fmt: str, writeback: str, asked: bool
) -> None:
    path = make(settings={"optimizer": {"writeback": writeback}}, summary={"format": fmt})
    assert is_e7m0_nearest(path) is asked
