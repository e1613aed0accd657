"""The three predictions about E7M0: confirmed, refuted and left open."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import Records

#: a loss that falls for eight steps and then stays
STUCK = [5.5 - 0.2 * step for step in range(8)] + [4.0 + 0.02 * (step % 2) for step in range(192)]
LEARNS = [2.2 + 3.3 * (step + 1) ** -0.5 for step in range(200)]


@pytest.fixture
def e7m0(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "study")
    return import_module("e7m0")


def run_of(losses: list[float], lost: float | None = None, zone: float | None = None, **more: Any) -> Run:
    shares = {"stall/update_lost": lost, "stall/zero_gradient_zone": zone}
    known = {name: share for name, share in shares.items() if share is not None}
    records = [
        {"step": step, "train/loss": loss, **(known if step % 20 == 0 else {})} for step, loss in enumerate(losses, 1)
    ]
    return Run(Path("a"), more, metrics=Records(records), summary={"format": "E7M0"})


@pytest.mark.parametrize(
    ("run", "answers"),
    [
        (run_of(STUCK, 0.97, 0.6), [True, True, True]),
        (run_of(LEARNS, 0.5, 0.01), [False, False, False]),
        (run_of(STUCK[:9]), [None, None, None]),
    ],
)
def test_each_is_confirmed_refuted_or_open(e7m0: Any, run: Run, answers: list[bool | None]) -> None:
    assert [each.confirmed for each in e7m0.predictions(run)] == answers


def test_they_are_about_nearest_rounding(e7m0: Any) -> None:
    nearest, other = (
        run_of(STUCK, 0.97, 0.2, optimizer={"writeback": writeback}) for writeback in ("nearest", "stochastic")
    )
    lines = e7m0.table([nearest, other]).splitlines()[2:]
    assert [line.split("|")[3].strip() for line in lines] == ["confirmed", "confirmed", "refuted"]
    assert "97.0%, 97.0% at step 20 and 97.0% at step 200" in lines[1]
