"""Run folders are read whatever state an interruption left them in, and what is missing is named."""

import pytest
from damages import cut
from run_folders import write_run

from nanogpt_bench.cli import main
from nanogpt_bench.runs.load import load_run


def test_a_truncated_last_line_costs_that_line_only(tmp_path):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5, seed=7)
    run = load_run(folder)
    assert (run.name, run.rule, run.format, run.seed, run.status) == ("a", "nearest", "E4M3", 7, "finished")
    assert (run.notes, run.number("final_val_loss"), run.last_step) == ((), 2.5, 200)
    whole = (folder / "metrics.jsonl").read_bytes()
    note = "metrics.jsonl: the last line is cut off; the {} whole records were read"
    for content, last in ((whole[:-25], 199), (whole + '{"step": 201, "note": "ü'.encode()[:-1], 200)):
        (folder / "metrics.jsonl").write_bytes(content)
        assert (load_run(folder).last_step, load_run(folder).notes) == (last, (note.format(last + 1),))


def test_damaged_and_repeated_lines_are_named(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", lines[1], lines[1], lines[2]]) + "\n")
    run = load_run(folder)
    assert run.metrics.values("step") == [0, 1, 2]
    assert [note.split(":")[1].split()[1] for note in run.notes] == ["2", "4"]


def test_without_a_summary_the_records_speak(tmp_path):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5)
    (folder / "summary.json").unlink()
    run = load_run(folder)
    assert run.status == "incomplete"
    assert run.format == "E4M3"
    assert run.number("final_val_loss") == pytest.approx(2.5)
    assert run.number("stall") == pytest.approx(0.81 * 0.85)  # the mean of the looks, which rise from 0.7 of it
    assert run.stall_metric == "stall/update_lost"


@pytest.mark.usefixtures("_no_figures")
def test_the_page_says_what_is_cut_off(tmp_path):
    metrics = write_run(tmp_path / "a") / "metrics.jsonl"
    cut(7)(metrics)
    whole = metrics.read_bytes()
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "page")]) == 0
    assert "the last line is cut off" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert metrics.read_bytes() == whole
