"""The estimate of the time left: what it is made of, and where it is shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nanogpt_bench.sweep import board as board_module
from nanogpt_bench.sweep.board import Board, Work, seconds_left
from nanogpt_bench.system.words import rough_time
from nanogpt_bench.workers.pool import Event

DONE = Work(done=1.0, seconds=60.0, ended=True)


@pytest.mark.parametrize(
    ("runs", "workers", "expected"),
    [
        ([Work(), Work()], 2, None),
        ([Work(running=True), Work()], 2, None),  # no step is over
        ([DONE, DONE], 2, 0.0),
        ([DONE, Work(), Work(), Work()], 1, 180.0),
        ([DONE, Work(), Work(), Work()], 2, 120.0),
        ([DONE, Work(), Work()], 8, 60.0),
        ([DONE, Work(size=3.0)], 1, 180.0),
        ([DONE, Work(size=1.0), Work(size=1.0), Work(size=2.0)], 2, 120.0),  # the largest first
        ([Work(done=0.25, seconds=10.0, running=True)], 2, 30.0),
        ([Work(done=0.5, seconds=10.0, running=True), Work(done=0.1, seconds=10.0, running=True)], 2, 90.0),
        ([Work(done=0.5, seconds=10.0, running=True), Work(running=True)], 2, 20.0),  # of which nothing is known yet
        ([Work(done=0.1, seconds=6.0, ended=True), Work()], 1, 60.0),  # one that failed early
    ],
)
def test_the_time_left_by_hand(runs: list[Work], workers: int, expected: float | None) -> None:
    assert seconds_left(runs, workers) == pytest.approx(expected)


def test_a_steady_session_is_foreseen_from_its_first_steps() -> None:
    """Nine runs of 30 s a unit on two workers, at every tenth of it."""
    sizes = [2.0, 1.0, 1.2, 1.0, 1.0, 1.5, 1.0, 1.0, 1.0]
    ends, begun, free = [], [], [0.0, 0.0]
    for size in sorted(sizes, reverse=True):
        worker = free.index(min(free))
        begun.append((free[worker], 30.0 * size, size))
        free[worker] += 30.0 * size
        ends.append(free[worker])
    whole = max(ends)
    for now in (whole * tenth / 10 for tenth in range(1, 10)):
        works = []
        for start, length, size in begun:
            done = min(1.0, max(0.0, (now - start) / length))
            works.append(Work(size, done, done * length, running=start <= now and done < 1, ended=done >= 1.0))
        assert seconds_left(works, 2) == pytest.approx(whole - now, abs=0.1)


def test_times_are_said_no_better_than_they_are_known() -> None:
    words = ["some seconds", "about 20 s", "about 2 min", "about 89 min", "about 1 h 30 min", "about 30 h 0 min"]
    assert [rough_time(seconds) for seconds in (0, 17, 90, 5340, 5400, 108000)] == words


def progress(step: int, seconds: float) -> dict[str, object]:
    return {"step": step, "max_steps": 100, "val_loss": 2.0, "stall": None, "elapsed_s": seconds}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_the_estimate_is_a_line_from_the_first_minute_on(clock: list[float]) -> None:
    text = io.StringIO()
    board = Board(Console(file=text, width=100))
    for name in ("a", "b"):
        board.add(name)
    board.show(Event(0, "started"))
    for second in range(1, 301):
        clock[0] = float(second)
        if second >= 10:
            board.show(Event(0, "progress", progress(second // 10, float(second))))
        else:
            board.show(Event(None, "tick"))
    lines = [line for line in text.getvalue().splitlines() if "left" in line]
    assert lines[0] == "[   20 s] 0 of 2 runs ended, about 33 min left"
    assert [line[:9] for line in lines] == ["[   20 s]", "[   80 s]", "[  140 s]", "[  200 s]", "[  260 s]"]
    assert lines[-1].endswith("0 of 2 runs ended, about 29 min left")


def test_a_terminal_has_it_above_the_table(clock: list[float]) -> None:
    board = Board(Console(file=io.StringIO(), width=100, force_terminal=True), workers=1)
    for name in ("a", "b"):
        board.add(name)
    board.show(Event(0, "started"))
    assert board.table().title == "0 of 2 runs ended · 0 s"
    clock[0] = 30.0
    board.show(Event(0, "progress", progress(50, 30.0)))
    assert board.table().title == "0 of 2 runs ended · 30 s · about 2 min left"
