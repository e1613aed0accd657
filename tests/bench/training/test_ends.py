"""Ends of a run: which of them are results, and which the same command tries again."""

import pytest
from bench_runs import summary_of
from laws import each

from nanogpt_bench.checkpoint import step_file
from nanogpt_bench.loop.outcome import Outcome
from nanogpt_bench.runs.load import has_ended, make_ready
from nanogpt_bench.sweep.plan import plan_point
from nanogpt_bench.sweep.record import SweepRecord

FAILED = {"status": "failed", "stop": None}


@each(
    ("summary", "ended"),
    [
        ({"status": "finished"}, True),
        ({**FAILED, "failure": {"kind": "nan"}}, True),
        ({**FAILED, "failure": {"kind": "divergence"}}, True),
        ({"status": "stopped", "stop": {"kind": "plateau"}}, True),
        ({"status": "stopped", "stop": {"kind": "time"}}, True),
        *(({**FAILED, "failure": {"kind": kind}}, False) for kind in ("crash", "OSError", "BenchError", "MemoryError")),
        *(({"status": "stopped", "stop": {"kind": kind}}, False) for kind in ("signal", "disk", "killed")),
        ({"status": "stopped", "stop": None}, False),
        ({**FAILED, "failure": None}, False),
        ({}, False),
    ],
)
def test_only_what_the_training_brought_about_is_an_end(summary, ended):
    assert has_ended(summary) is ended


def test_a_run_can_fail_in_no_other_way():
    with pytest.raises(AssertionError):
        Outcome().fail("disk", "no space left", 3)


@pytest.mark.parametrize(("kind", "again"), [("FileNotFoundError", True), ("crash", True), ("nan", False)])
def test_a_sweep_tries_again_what_an_outside_cause_ended(tmp_path, kind, again):
    run, record = plan_point({"train.max_steps": 4}, {"rule": "fp32"}), SweepRecord(tmp_path, "grid")
    record.add(run)
    record.note_failure(run, {"kind": kind, "message": "it is gone", "traceback": "Traceback"})
    assert summary_of(tmp_path / run.name)["failure"]["kind"] == kind
    assert record.left() == ([run] if again else [])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_a_failed_attempt_left_does_not_stay(tmp_path, checkpoint):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "traceback.txt").touch()
    if checkpoint:
        (folder / "checkpoints").mkdir()
        step_file(folder, 3).touch()
    assert make_ready(folder) is checkpoint
    assert not (folder / "traceback.txt").exists()
