"""A run whose process died wrote no summary: the comparison writes it, the classes of failure included."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nanogpt_bench.compare.plan import PlannedRun
from nanogpt_bench.compare.record import Record

Make = Callable[..., Path]


def test_the_comparison_judges_what_a_dead_process_left(make: Make) -> None:
    path = make("01-dead", loss=[5.0, 4.9, 30.0, 300.0], series={"grad/norm": [1.0, 1.2, 400.0, None]})
    (path / "summary.json").unlink()
    planned = PlannedRun("E4M3 nearest", "nearest", "E4M3", 42, path.name, {"train.max_steps": 100})
    Record(path.parent, [planned]).note_failure(planned, {"kind": "crash", "message": "out of memory"})
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["status"], summary["failure"]["kind"]) == ("failed", "crash")
    assert {entry["kind"]: entry["step"] for entry in summary["failures"]} == {
        "divergence": 3,
        "exploding_gradients": 3,
        "nan": 4,
    }


def test_nothing_is_written_of_a_run_that_a_full_disk_ended(make: Make) -> None:
    path = make("01-full", loss=[5.0, 4.9])
    (path / "summary.json").unlink()
    planned = PlannedRun("E4M3 nearest", "nearest", "E4M3", 42, path.name, {"train.max_steps": 100})
    Record(path.parent, [planned]).note_failure(planned, {"kind": "disk", "message": "no space", "step": 1})
    assert not (path / "summary.json").exists()
