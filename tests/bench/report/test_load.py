"""Run folders are read whatever state an interruption left them in, and what is missing is named."""

import pytest
from damages import cut

from nanogpt_bench.cli import main
from nanogpt_bench.runs.load import load_run


def test_a_whole_run_is_read_without_notes(tmp_path, write_run):
    run = load_run(write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5, seed=7))
    assert (run.name, run.rule, run.format, run.seed, run.status) == ("a", "nearest", "E4M3", 7, "finished")
    assert run.notes == ()
    assert run.number("final_val_loss") == 2.5
    assert run.last_step == 200


def test_a_truncated_last_line_costs_that_line_only(tmp_path, write_run):
    folder = write_run(tmp_path / "a")
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[:-25])
    run = load_run(folder)
    assert run.last_step == 199
    assert run.notes == ("metrics.jsonl: the last line is cut off; the 200 whole records were read",)


def test_a_line_cut_inside_a_character_is_read_too(tmp_path, write_run):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 201, "note": "ü'.encode()[:-1])
    assert load_run(folder).last_step == 200


def test_damaged_and_repeated_lines_are_named(tmp_path, write_run):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", lines[1], lines[1], lines[2]]) + "\n")
    run = load_run(folder)
    assert run.metrics.values("step") == [0, 1, 2]
    assert [note.split(":")[1].split()[1] for note in run.notes] == ["2", "4"]


def test_without_a_summary_the_records_speak(tmp_path, write_run):
    folder = write_run(tmp_path / "a", rule="nearest", fmt="E4M3", final=2.5)
    (folder / "summary.json").unlink()
    run = load_run(folder)
    assert run.status == "incomplete"
    assert run.format == "E4M3"
    assert run.number("final_val_loss") == pytest.approx(2.5)
    assert run.number("stall") == pytest.approx(0.81 * 0.85)  # the mean of the looks, which rise from 0.7 of it
    assert run.stall_metric == "stall/update_lost"


@pytest.mark.usefixtures("_no_figures")
def test_the_page_says_what_is_cut_off(tmp_path, write_run):
    metrics = write_run(tmp_path / "a") / "metrics.jsonl"
    cut(7)(metrics)
    whole = metrics.read_bytes()
    assert main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "page")]) == 0
    assert "the last line is cut off" in (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert metrics.read_bytes() == whole
