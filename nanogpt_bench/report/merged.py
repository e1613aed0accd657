"""Rows of several results files and run folders together: each run once, and of every row what is missing in all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanogpt_bench.config.metrics import ELAPSED, VAL_LOSS
from nanogpt_bench.report.exported import Exported
from nanogpt_bench.report.planned import given_up
from nanogpt_bench.report.results import Row, group_rows, setting_of
from nanogpt_bench.runs.earlier import has_ended
from nanogpt_bench.runs.load import Run


def merged(runs: Sequence[Run], files: Sequence[Exported]) -> list[Row]:
    """Return the rows of run folders and results files; a run that several hold is taken from where it went furthest.

    A row without runs of its own is there if no file has runs under its label. Seeds are missing that no file has.
    """
    every = [*runs, *(run for file in files for row in file.rows for run in row.runs)]
    rows = group_rows(distinct(every))
    places = {identity(run): at for at, row in enumerate(rows) for run in (*row.runs, *row.aside)}
    labels = {row.label: at for at, row in enumerate(rows)}
    of_files = [row for file in files for row in file.rows]
    labels |= {row.label: places[identity(row.runs[0])] for row in of_files if row.runs}
    there = {(row.label, run.seed) for row in of_files for run in row.runs}
    for row in of_files:
        at = labels.get(row.label)
        known = set() if at is None else {run.seed for run in rows[at].runs}  # those of run folders among them
        missing = tuple(
            seed for seed in row.missing if (row.label, seed) not in there and (seed is None or seed not in known)
        )
        there |= {(row.label, seed) for seed in missing}  # another file may miss it too
        if at is not None:
            rows[at] = replace(rows[at], missing=(*rows[at].missing, *missing))
        elif missing or row.why:
            labels[row.label] = len(rows)
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
    found, labels = list(rows), {row.label for row in rows}
    for search in (search for tuning in tunings for search in tuning):
        named = search.get("rows")
        for label in map(str, named if isinstance(named, list) and (why := given_up(search)) else ()):
            if label not in labels:
                labels.add(label)
                rule, fmt = (str(search.get(key) or "none") for key in ("rule", "format"))
                found.append(Row(label, rule, fmt, (), why=why))
    places = {label: at for at, label in enumerate(order)}
    return sorted(found, key=lambda row: places.get(row.label, len(places)))
