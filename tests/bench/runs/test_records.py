"""The progress of a run is read from whole lines of its records, whatever happens to the file meanwhile."""

import json

from nanogpt_bench.sweep.workers import MOST_BYTES, NewRecords


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
