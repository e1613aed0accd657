"""Which runs a sweep or a comparison means to make, row by row: by its list of runs, and by what it tuned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanogpt_bench.runs.find import TRIALS


@dataclass
class PlannedRow:
    """A row of the table: (seed, folder) of every run that it means to have; None while the run is not planned."""

    label: str
    rule: str = "unknown"
    format: str = "none"
    runs: list[tuple[int | None, str | None]] = field(default_factory=list)
    #: why there will be none
    why: str = ""


def planned_rows(manifest: Mapping[str, Any], tuning: Mapping[str, Any]) -> list[PlannedRow]:
    """Return the rows of sweep.json or compare.json in the order of the table, those of tuning.json among them.

    A row whose rates are still sought means to have a run at every seed of the confirmation; one none of whose trials
    came to its end has none, and says why.
    """
    rows = {str(label): PlannedRow(str(label)) for label in manifest.get("order") or ()}
    for row in manifest.get("rows") or ():  # a comparison's
        settings = manifest.get("settings") or {}
        _row(rows, row).runs += [(_seed(settings.get(name)), str(name)) for name in dict.fromkeys(row["runs"])]
    for run in manifest.get("runs") or ():  # a sweep's
        if run.get("of_plan", True) and not str(run["name"]).startswith(f"{TRIALS}/"):
            _row(rows, run).runs.append((run.get("seed"), str(run["name"])))
    seeds = (tuning.get("confirm") or {}).get("seeds") or ()
    for search in tuning.get("rows") or ():
        for label in search.get("rows") or ():
            told = _row(rows, {**search, "label": label})
            if not told.runs:
                told.why = given_up(search)
                told.runs = [] if told.why else [(seed, None) for seed in seeds]
    return list(rows.values())


def _seed(settings: Any) -> int | None:
    seed: int | None = (settings or {}).get("seed")
    return seed


def planned_trials(tuning: Mapping[str, Any]) -> list[PlannedRow]:
    """Return the searches of tuning.json as rows whose runs are their trials, as far as it names these."""
    return [
        PlannedRow(
            str(search.get("label")),
            str(search.get("rule")),
            str(search.get("format")),
            [
                (int(seed), str(name))
                for trial in search.get("trials") or ()
                for seed, name in zip(trial.get("losses") or (), trial["runs"], strict=False)
            ],
        )
        for search in tuning.get("rows") or ()
    ]


def _row(rows: dict[str, PlannedRow], told: Mapping[str, Any]) -> PlannedRow:
    """The row of that label, with the rule and the format that it is told to have."""
    row = rows.setdefault(str(told["label"]), PlannedRow(str(told["label"])))
    row.rule, row.format = str(told.get("rule") or row.rule), str(told.get("format") or row.format)
    return row


def given_up(search: Mapping[str, Any]) -> str:
    """Return in words that no trial of a search came to its end, by its row of tuning.json; "" where one did."""
    if not search.get("over") or search.get("best"):
        return ""
    trials = search.get("trials")
    runs = sum(len(trial.get("runs") or ()) for trial in trials) if isinstance(trials, Sequence) else 0
    return f"failed: none of {runs} trials came to its end with a loss"
