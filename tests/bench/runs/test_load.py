"""Run folders, found at any depth and read whatever state they are in.

Records as columns, and how far a run is.
"""

import io
import json
import math
import random
import tracemalloc

import pytest
from bench_runs import refusal
from rich.console import Console
from run_folders import write_run

from nanogpt_bench.cli import main
from nanogpt_bench.runs.load import find_runs, load_run
from nanogpt_bench.runs.read import Records, finite
from nanogpt_bench.sweep import session
from nanogpt_bench.sweep.session import Bar, Entry
from nanogpt_bench.sweep.workers import FIRST_WINDOW, JobEvent, NewRecords


def test_all_runs_below_a_folder_are_found_and_links_are_counted_and_not_followed(tmp_path):
    runs = tmp_path / "runs"
    for place in (
        "e4m3",
        "compare-1/a",
        "sweep-lr/grid/b",
        "sweep-lr/grid/a",
        "sweep-lr/tune/c",
        "../elsewhere/d",
    ):
        write_run(runs / place, steps=20)
    (runs / "compare-1" / "corpus").mkdir()
    (runs / "linked").symlink_to(tmp_path / "elsewhere")
    (runs / "sweep-lr" / "back").symlink_to(runs)  # a circle
    messages = []
    names = [path.relative_to(runs).as_posix() for path in find_runs([runs], messages.append)]
    assert names == ["e4m3", "compare-1/a", "sweep-lr/grid/a", "sweep-lr/grid/b", "sweep-lr/tune/c"]
    assert messages[0] == f"{runs}: 5 runs found in 4 folders (2 links not followed)"
    links = tmp_path / "links"
    links.mkdir()
    (links / "d").symlink_to(tmp_path / "elsewhere" / "d")
    with refusal(r"contains none \(1 link not followed\)"):
        find_runs([links])
    assert len(find_runs([links / "d"])) == 1  # one that is named is meant


def test_a_run_is_loaded_as_it_was_written(tmp_path):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5, seed=7)
    run = load_run(folder)
    assert (run.name, run.rule, run.format, run.seed, run.status) == (
        "a",
        "nearest",
        "E4M3",
        7,
        "finished",
    )
    assert (run.notes, run.number("final_val_loss"), run.last_step) == ((), 2.5, 200)


@pytest.mark.usefixtures("_no_figures")
@pytest.mark.parametrize(
    ("end", "addition", "last"),
    [(-25, b"", 199), (None, '{"step": 201, "note": "ü'.encode()[:-1], 200)],
    ids=["in a line", "in a character"],
)
def test_a_truncated_last_line_costs_that_line_only_and_the_page_says_so(
    tmp_path, end, addition, last
):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5, seed=7)
    content = (folder / "metrics.jsonl").read_bytes()[:end] + addition
    (folder / "metrics.jsonl").write_bytes(content)
    note = f"metrics.jsonl: the last line is cut off; the {last + 1} complete records were read"
    assert (load_run(folder).last_step, load_run(folder).notes) == (last, (note,))
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    assert "the last line is cut off" in (tmp_path / "page" / "report.html").read_text(
        encoding="utf-8"
    )
    assert (folder / "metrics.jsonl").read_bytes() == content


def test_damaged_and_repeated_lines_are_named(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(
        "\n".join([lines[0], "{oops", lines[1], lines[1], lines[2]]) + "\n"
    )
    run = load_run(folder)
    assert run.metrics.values("step") == [0, 1, 2]
    assert [note.split(":")[1].split()[1] for note in run.notes] == ["2", "4"]


def test_without_a_summary_the_records_speak(tmp_path):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5)
    (folder / "summary.json").unlink()
    run = load_run(folder)
    assert (run.status, run.format, run.stall_metric) == ("incomplete", "E4M3", "stall/update_lost")
    assert run.number("final_val_loss") == pytest.approx(2.5)
    assert run.number("stall") == pytest.approx(
        0.81 * 0.85
    )  # the mean of the looks, which rise from 0.7 of it


NAMES = ("step", "train/loss", "val/loss", "time/elapsed_s", "stall/arrived")


@pytest.mark.parametrize("seed", range(5))
def test_columns_say_what_the_records_said(seed):
    """Records with gaps, nulls, flags and what no run writes."""

    def known(value):
        return float(value) if isinstance(value, bool) else finite(value)

    draw, records = random.Random(seed), []
    values = (1, 2.5, -0.0, 1e300, None, True, False, 2**60, math.inf, math.nan, 10**400)
    for step in range(60):
        chosen = [name for name in NAMES[1:] if draw.random() < 0.6]
        records.append(
            {
                "step": step,
                **{name: draw.choice(values) for name in chosen},
                "note": "x",
                "deep": [1],
            }
        )
    columns = Records(records)
    plain = [
        {name: known(value) for name, value in record.items() if name in NAMES}
        for record in records
    ]
    assert (len(columns), columns.last_step) == (60, 59)
    assert set(columns.names) <= set(NAMES)
    for name in NAMES:
        has = [(row, record[name]) for row, record in enumerate(plain) if name in record]
        assert list(columns.rows(name)) == has, name
        assert columns.values(name) == [value for _, value in has if value is not None], name
        for against in ("step", "time/elapsed_s", "absent"):
            points = [
                (r[against], r[name]) for r in plain if name in r and r.get(against) is not None
            ]
            assert columns.curve(name, against) == (
                [x for x, _ in points],
                [y for _, y in points],
            ), (name, against)


def test_a_run_is_read_into_less_than_half_the_size_of_its_file(tmp_path):
    """The records are large.

    To read a small file takes a buffer for the largest that is read.
    """
    draw = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(3000):
            file.write(
                json.dumps(
                    {"step": step, **{f"figure/number{i}": draw.random() for i in range(20)}}
                )
                + "\n"
            )
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    try:
        assert load_run(tmp_path).last_step == 2999
        held_bytes, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < peak < 0.5 * size


def line(step: int, **figures: float) -> str:
    return (
        json.dumps({"step": step, "train/loss": 3.0, "time/elapsed_s": float(step), **figures})
        + "\n"
    )


def test_the_newest_whole_line_and_the_last_validation_are_told_and_of_a_long_file_the_end_is_read(
    tmp_path,
):
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
    path.write_text("".join(map(line, range(FIRST_WINDOW // 40))))
    assert NewRecords({"run_dir": str(tmp_path)}).new()["step"] == FIRST_WINDOW // 40 - 1
    # a record of many layers is longer than what is read at first, and is read whole
    of_layers = {f"stall/update_lost/layer{i}": 0.5 for i in range(FIRST_WINDOW // 20)}
    last = json.dumps({"step": 8, "val/loss": 2.5} | of_layers) + "\n"
    assert len(last) > FIRST_WINDOW
    path.write_text(line(7) + last)
    assert NewRecords({"run_dir": str(tmp_path)}).new()["val_loss"] == 2.5


def progress(step: int) -> dict[str, object]:
    return {"step": step, "max_steps": 100, "val_loss": 2.0}


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    return now


def test_runs_count_by_their_size_and_those_to_come_too(clock):
    bar = Bar(Console(file=io.StringIO()))
    bar.entries += [Entry("large", 3.0), Entry("small", 1.0)]
    clock[0] = 30.0
    bar.show(JobEvent(0, "progress", progress(0)))
    assert bar.words() == "0 of 2 runs ended"
    clock[0] = 90.0
    bar.show(JobEvent(0, "progress", progress(50)))
    assert (bar.share(), bar.words()) == (1.5 / 4, "0 of 2 runs ended, about 2 min left")
    bar.to_come = lambda: [4.0]
    assert bar.share() == 1.5 / 8
    bar.show(JobEvent(0, "done"))
    assert bar.share() == 3 / 8
    bar.show(JobEvent(1, "failed", {"error": {"message": "gone"}}))
    assert (bar.share(), bar.words().split(",")[0]) == (4 / 8, "2 of 2 runs ended")


def test_the_estimate_is_a_line_from_the_first_minute_on_and_one_bar_on_a_terminal(
    clock,
):
    text = io.StringIO()
    bar = Bar(Console(file=text, width=100))
    bar.entries += [Entry("a"), Entry("b")]
    bar.show(JobEvent(0, "started"))
    for second in range(1, 301):
        clock[0] = float(second)
        bar.show(
            JobEvent(0, "progress", progress(second // 10))
            if second >= 10
            else JobEvent(None, "tick")
        )
    bar.show(JobEvent(0, "done"))
    bar.show(JobEvent(1, "failed", {"error": {"message": "one\nline"}}))
    lines = text.getvalue().splitlines()
    assert lines[0] == "[   20 s] 0 of 2 runs ended, about 33 min left"
    assert [line[:9] for line in lines] == [
        f"[{seconds:5} s]" for seconds in (20, 80, 140, 200, 260, 300, 300)
    ]
    assert lines[-2:] == ["[  300 s] a: done  val 2.000", "[  300 s] b: failed  one line"]

    text, clock[0] = io.StringIO(), 0.0
    with Bar(Console(file=text, width=100, force_terminal=True)) as bar:
        bar.entries.append(Entry("a"))
        clock[0] = 30.0
        bar.show(JobEvent(0, "progress", progress(50)))
        bar.show(JobEvent(0, "done"))
    assert "a: done  val 2.000" in text.getvalue()
    assert (
        "] 0 of 1 runs ended" not in text.getvalue()
    )  # no line of the estimate, which the bar has
