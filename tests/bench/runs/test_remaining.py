"""The bar over all runs: how far they are, what is left of the time, and where that is said."""

import io

import pytest
from rich.console import Console

from nanogpt_bench.sweep import session
from nanogpt_bench.sweep.session import Bar, Entry
from nanogpt_bench.sweep.workers import Event


def progress(step: int) -> dict[str, object]:
    return {"step": step, "max_steps": 100, "val_loss": 2.0}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    return now


def test_runs_count_by_their_size_and_those_to_come_too(clock):
    bar = Bar(Console(file=io.StringIO()))
    for size in (3.0, 1.0):
        bar.entries.append(Entry(f"run {size}", size))
    clock[0] = 30.0
    bar.show(Event(0, "progress", progress(0)))
    assert bar.words() == "0 of 2 runs ended"
    clock[0] = 90.0
    bar.show(Event(0, "progress", progress(50)))
    assert (bar.share(), bar.words()) == (1.5 / 4, "0 of 2 runs ended, about 2 min left")
    bar.to_come = lambda: [4.0]
    assert bar.share() == 1.5 / 8
    bar.show(Event(0, "done"))
    assert bar.share() == 3 / 8
    bar.show(Event(1, "failed", {"error": {"message": "gone"}}))
    assert (bar.share(), bar.words().split(",")[0]) == (4 / 8, "2 of 2 runs ended")


def test_without_a_terminal_the_estimate_is_a_line_from_the_first_minute_on(clock):
    text = io.StringIO()
    bar = Bar(Console(file=text, width=100))
    for name in ("a", "b"):
        bar.entries.append(Entry(name))
    bar.show(Event(0, "started"))
    for second in range(1, 301):
        clock[0] = float(second)
        bar.show(Event(0, "progress", progress(second // 10)) if second >= 10 else Event(None, "tick"))
    bar.show(Event(0, "done"))
    bar.show(Event(1, "failed", {"error": {"message": "one\nline"}}))
    lines = text.getvalue().splitlines()
    assert lines[0] == "[   20 s] 0 of 2 runs ended, about 33 min left"
    assert [line[:9] for line in lines] == [f"[{at:5} s]" for at in (20, 80, 140, 200, 260, 300, 300)]
    assert lines[-2:] == ["[  300 s] a: done  val 2.000", "[  300 s] b: failed  one line"]


def test_a_terminal_has_one_bar_and_lines_above_it(clock):
    text = io.StringIO()
    with Bar(Console(file=text, width=100, force_terminal=True)) as bar:
        bar.entries.append(Entry("a"))
        clock[0] = 30.0
        bar.show(Event(0, "progress", progress(50)))
        bar.show(Event(0, "done"))
    assert "a: done  val 2.000" in text.getvalue()
    assert "] 0 of 1 runs ended" not in text.getvalue()  # no line of the estimate, which the bar has
