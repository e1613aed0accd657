"""Rows of several results files and run folders together: each run once, and of every row what is missing in all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanogpt_bench.config.metrics import ELAPSED, VAL_LOSS
from nanogpt_bench.report.exported import Exported
from nanogpt_bench.report.planned import given_up
from nanogpt_bench.report.results import Row, group_rows, setting_of
from nanogpt_bench.runs.ends import has_ended
from nanogpt_bench.runs.load import Run


def merged(runs: Sequence[Run], files: Sequence[Exported]) -> list[Row]:
    """Return the rows of run folders and results files; a run that several hold is taken from where it went furthest.

    A row without runs of its own is there if no file has runs under its label. Seeds are missing that no file has.
    """
    every = [*runs, *(run for file in files for row in file.rows for run in row.runs)]
    rows = group_rows(distinct(every))
    place = {identity(run): at for at, row in enumerate(rows) for run in row.runs}
    labels = {row.label for file in files for row in file.rows if row.runs}
    there = {(row.label, run.seed) for file in files for row in file.rows for run in row.runs}
    for row in (row for file in files for row in file.rows):
        missing = tuple(seed for seed in row.missing if (row.label, seed) not in there)
        there |= {(row.label, seed) for seed in missing}  # another file may miss it too
        if row.runs:
            whole = rows[place[identity(row.runs[0])]]
            there_now = {run.seed for run in whole.runs}  # those of a run folder among them
            missing = tuple(seed for seed in missing if seed is None or seed not in there_now)
            rows[place[identity(row.runs[0])]] = replace(whole, missing=(*whole.missing, *missing))
        elif (missing or row.why) and row.label not in labels:
            labels.add(row.label)
            rows.append(replace(row, missing=missing))
    return rows


def distinct(runs: Iterable[Run]) -> list[Run]:
    """Return every run once, in order of first appearance; of several records of one that which tells most."""
    kept: dict[Hashable, Run] = {}
    for run in runs:
        key = identity(run)
        kept[key] = max(kept.get(key, run), run, key=lambda each: (has_ended(each.summary), each.last_step or 0))
    return list(kept.values())


def identity(run: Run) -> Hashable:
    """Return what two records of one run have in common, and no two runs: settings, name, seed, first validation.

    When that was, to the last bit of the time elapsed, tells runs of the same settings apart.
    """
    times, losses = run.curve(VAL_LOSS.name, ELAPSED.name)
    return (setting_of(run), run.name, run.seed, times[0], losses[0]) if times else str(run.path)


def with_given_up(
    rows: Sequence[Row], tunings: Iterable[Iterable[Mapping[str, Any]]], order: Sequence[str] = ()
) -> list[Row]:
    """Return the rows, and those of a tuning none of whose trials came to its end, in the order of their labels."""
    found = {row.label: row for row in rows}
    for search in (search for tuning in tunings for search in tuning):
        labels = search.get("rows")
        for label in labels if isinstance(labels, list) and (why := given_up(search)) else ():
            told = (str(search.get(key) or "none") for key in ("rule", "format"))
            found.setdefault(str(label), Row(str(label), *told, (), why=why))
    places = {label: at for at, label in enumerate(order)}
    return sorted(found.values(), key=lambda row: places.get(row.label, len(places)))
