"""How far a run is: lines of records, and what remains."""

import io
import json

import pytest
from rich.console import Console

from nanogpt_bench.sweep import session
from nanogpt_bench.sweep.session import Bar, Entry
from nanogpt_bench.sweep.workers import MOST_BYTES, Event, NewRecords


def line(step: int, **more: float) -> str:
    return json.dumps({"step": step, "train/loss": 3.0, "time/elapsed_s": float(step), **more}) + "\n"


def test_the_newest_whole_line_and_the_last_validation_are_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = NewRecords({"run_dir": str(tmp_path), "settings": {"train.max_steps": 9}})
    assert records.new() is None
    path.write_text(line(0, **{"val/loss": 5.0}) + line(1) + line(2)[:9])
    first = {"max_steps": 9, "step": 1, "train_loss": 3.0, "val_loss": 5.0, "elapsed_s": 1.0}
    assert (records.new(), records.new()) == (first, None)
    with path.open("a") as file:
        file.write(line(2)[9:])
    assert records.new() == first | {"step": 2, "elapsed_s": 2.0}
    path.write_text(line(1))  # as a run that goes on cuts it back
    assert records.new() == first


def test_of_a_long_file_the_end_is_read(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(map(line, range(MOST_BYTES // 40))))
    found = NewRecords({"run_dir": str(tmp_path)}).new()
    assert found is not None
    assert found["step"] == MOST_BYTES // 40 - 1


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
