"""Put the trials of a results file back into the folder of its sweep, which then goes on.

    git checkout COMMIT  # that of the file's runs
    python study/resume.py SWEEP.yaml RESULTS.json OUT
    nanogpt-bench sweep SWEEP.yaml --out OUT

Where the folder of a sweep is gone, its export has the losses of all trials, which are
all that a search needs. Runs of rows are not put back: they have records that no export
has. The script uses no more of the bench than commit 53e0bc1a has, so that it runs on
the commits of all results.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.sweep.file import read_sweep
from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.sweep.tuning import FULL, Search, Tuning


def put_back(sweep: Path, results: Path, out: Path) -> int:
    """Write a summary for each trial of a results file, and return how many."""
    record = SweepRecord(out, "tune")
    entries = {}
    for entry in json.loads(results.read_text(encoding="utf-8")):
        if entry["kind"] == "search":
            entries.setdefault(entry["label"], entry)
    count = 0
    for search in Tuning(read_sweep(sweep), record).searches:
        entry = entries.get(search.start.label)
        if entry is None:
            # The search of this row has not begun.
            continue
        seconds = entry["cost.seconds"] / max(entry["cost.runs"], 1)
        for run, loss in _trials(search, entry):
            _write_summary(record.run_dir(run), run, loss, seconds)
            count += 1
    record.write_manifest()
    return count


def _write_summary(folder: Path, run: PlannedRun, loss: float, seconds: float) -> None:
    summary = {
        "name": run.name,
        "status": "finished",
        "seed": run.seed,
        "steps": run.settings["train.max_steps"],
        "seconds": seconds,
        "final_val_loss": loss,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def _trials(search: Search, entry: Mapping[str, Any]) -> Iterator[tuple[PlannedRun, float]]:
    """Yield the trials of a search that have a loss, each as the sweep plans it."""
    for number in range(len(entry["trial.loss"])):
        values = {key: entry[f"trial.{key}"][number] for key in search.first_values}
        place = tuple(_half_steps(search, key, value) for key, value in values.items())
        if search.values(place) != values:
            sys.exit(
                f"{entry['label']}: {values} is no trial of this sweep: take the file and the "
                f"commit of its runs"
            )
        search._try(place)
        for run in search.trials[place]:
            loss = entry[f"trial.loss.{run.seed}"][number]
            if loss is not None:
                yield run, loss


def _half_steps(search: Search, key: str, value: float) -> int:
    """Return the number of half steps from the start of the search to a value."""
    first = search.first_values[key]
    choices = search.options.choices
    if key in choices:
        return FULL * (choices[key].index(value) - choices[key].index(first))
    return round(FULL * math.log(value / first) / math.log(search.options.factor))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sweep, results, out = map(Path, sys.argv[1:])
    print(f"{put_back(sweep, results, out)} trials")
