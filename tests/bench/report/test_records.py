"""Records kept as columns say what the records said, in a fraction of their file's size."""

import json
import math
import random
import tracemalloc

from laws import each

from nanogpt_bench.runs.load import load_run
from nanogpt_bench.runs.read import Records, finite

NAMES = ("step", "train/loss", "val/loss", "time/elapsed_s", "stall/arrived")


def some_records(seed: int) -> list[dict[str, object]]:
    """Records with gaps, nulls, flags and what no run writes."""
    draw = random.Random(seed)
    values = (1, 2.5, -0.0, 1e300, None, True, False, 2**60, math.inf, math.nan, 10**400)
    made = []
    for step in range(60):
        chosen = [name for name in NAMES[1:] if draw.random() < 0.6]
        made.append({"step": step, **{name: draw.choice(values) for name in chosen}, "note": "x", "deep": [1]})
    return made


def known(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else finite(value)


@each("seed", range(5))
def test_columns_say_what_the_records_said(seed):
    made = some_records(seed)
    columns = Records(made)
    plain = [{name: known(value) for name, value in record.items() if name in NAMES} for record in made]
    assert len(columns) == len(made)
    assert columns.last_step == 59
    assert set(columns.names) <= set(NAMES)
    for name in NAMES:
        has = [(row, record[name]) for row, record in enumerate(plain) if name in record]
        assert list(columns.rows(name)) == has
        assert columns.values(name) == [value for _, value in has if value is not None]
        for against in ("step", "time/elapsed_s", "absent"):
            points = [(r[against], r[name]) for r in plain if name in r and r.get(against) is not None]
            assert columns.curve(name, against) == ([x for x, _ in points], [y for _, y in points])


def test_a_run_is_read_into_less_than_half_the_size_of_its_file(tmp_path):
    """Its records are large: to read a small file takes a buffer for the largest that is read."""
    draw = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(3000):
            file.write(json.dumps({"step": step, **{f"figure/number{i}": draw.random() for i in range(20)}}) + "\n")
    size = (tmp_path / "metrics.jsonl").stat().st_size
    tracemalloc.start()
    try:
        run = load_run(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert run.last_step == 2999
    assert held < peak < 0.5 * size
