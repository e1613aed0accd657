"""Put the trials of a results file back into the folder of its sweep, which then goes
on behind them.

    git checkout COMMIT  # that of the file's runs
    python study/resume.py SWEEP.yaml RESULTS.json OUT
    nanogpt-bench sweep SWEEP.yaml --out OUT

Where the folder of a sweep is gone, its export has the losses of all trials, which are
all that a search needs. Runs of rows are not put back: they have records that no export
has. It uses no more of the bench than commit 53e0bc1a has.
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
    """Write a summary for each trial of a results file; returns how many."""
    record, found = SweepRecord(out, "tune"), 0
    entries = [
        each for each in json.loads(results.read_text(encoding="utf-8")) if each["kind"] == "search"
    ]
    for search in Tuning(read_sweep(sweep), record).searches:
        entry = next((each for each in entries if each["label"] == search.start.label), None)
        if entry is None:  # this row's search has not begun
            continue
        for run, loss in _trials(search, entry):
            seconds = entry["cost.seconds"] / max(entry["cost.runs"], 1)
            steps = run.settings["train.max_steps"]
            summary = {
                "name": run.name,
                "status": "finished",
                "seed": run.seed,
                "steps": steps,
                "seconds": seconds,
            }
            folder = record.run_dir(run)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(
                json.dumps(summary | {"final_val_loss": loss}), encoding="utf-8"
            )
            found += 1
    record.write_manifest()
    return found


def _trials(search: Search, entry: Mapping[str, Any]) -> Iterator[tuple[PlannedRun, float]]:
    """The trials of a search that have a loss, each as the sweep plans it."""
    for at in range(len(entry["trial.loss"])):
        values = {key: entry[f"trial.{key}"][at] for key in search.first}
        place = tuple(_index(search, key, value) for key, value in values.items())
        if search.values(place) != values:
            sys.exit(
                f"{entry['label']}: {values} is no trial of this sweep: take the file and the "
                f"commit of its runs"
            )
        search._try(place)
        for run in search.trials[place]:
            if (loss := entry[f"trial.loss.{run.seed}"][at]) is not None:
                yield run, loss


def _index(search: Search, key: str, value: float) -> int:
    """The number of half steps from the start of the search to a value."""
    first, choices = search.first[key], search.options.choices
    if key in choices:
        return FULL * (choices[key].index(value) - choices[key].index(first))
    return round(FULL * math.log(value / first) / math.log(search.options.factor))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    print(f"{put_back(*map(Path, sys.argv[1:]))} trials")
