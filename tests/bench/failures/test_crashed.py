"""A run whose process died wrote no summary: the sweep writes it, the classes of failure included."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.sweep.record import SweepRecord

Make = Callable[..., Path]


@pytest.fixture
def note(make: Make, tmp_path: Path) -> Make:
    """Return a function that has a sweep note how a run without a summary failed; gives the summary's path."""
    record = SweepRecord(tmp_path / "out", "grid")

    def noting(error: dict[str, object], **look: object) -> Path:
        path = make("01-dead", **look)
        (path / "summary.json").unlink()
        record.folder = path.parent
        record.note_failure(
            PlannedRun("E4M3 nearest", "nearest", "E4M3", 42, path.name, {"train.max_steps": 100}), error
        )
        return path / "summary.json"

    return noting


def test_the_sweep_judges_what_a_dead_process_left(note: Make) -> None:
    look = {"loss": [5.0, 4.9, 30.0, 300.0], "series": {"grad/norm": [1.0, 1.2, 400.0, None]}}
    summary = json.loads(note({"kind": "crash", "message": "out of memory"}, **look).read_text())
    assert (summary["status"], summary["failure"]["kind"]) == ("failed", "crash")
    assert {entry["kind"]: entry["step"] for entry in summary["failures"]} == {
        "divergence": 3,
        "exploding_gradients": 3,
        "nan": 4,
    }


def test_nothing_is_written_of_a_run_that_a_full_disk_ended(note: Make) -> None:
    assert not note({"kind": "disk", "message": "no space", "step": 1}, loss=[5.0, 4.9]).exists()
