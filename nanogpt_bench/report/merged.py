"""Rows of several sources: run folders and results files, and rows that were given up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanogpt_bench.config.schema import NO_FORMAT
from nanogpt_bench.report.results_file import Exported, why_given_up
from nanogpt_bench.report.rows import Row, group_rows, identity
from nanogpt_bench.runs.load import Run


def merged_rows(runs: Sequence[Run], files: Sequence[Exported]) -> list[Row]:
    """Return the rows of run folders and results files together.

    A seed has one run, the longest. A row without runs stays if no file has runs under
    its label. A seed counts as missing if no file has it.
    """
    file_rows: list[Row] = []
    for file in files:
        file_rows += file.rows
    all_runs = list(runs)
    for row in file_rows:
        all_runs += row.runs
    rows = group_rows(all_runs)
    places = _places_of_runs(rows)
    # Grouped with runs of other sources, a file's row may have a longer label now. The
    # label that it has in the file still leads to it.
    labels = {row.label: place for place, row in enumerate(rows)}
    for row in file_rows:
        if row.runs:
            labels[row.label] = places[identity(row.runs[0])]
    for row in file_rows:
        place = places[identity(row.runs[0])] if row.runs else labels.get(row.label)
        if place is not None:
            rows[place] = _with_missing(rows[place], row.missing)
        elif row.missing or row.reason:
            labels[row.label] = len(rows)
            rows.append(row)
    return rows


def _places_of_runs(rows: Sequence[Row]) -> dict[Any, int]:
    """Return the index of each run's row, by the run's identity."""
    places = {}
    for place, row in enumerate(rows):
        for run in (*row.runs, *row.uncounted):
            places[identity(run)] = place
    return places


def _with_missing(row: Row, seeds: Iterable[int | None]) -> Row:
    """Return a row with further missing seeds, except those that it has already."""
    seeds_of_row = {*row.missing}
    for run in row.runs:
        # A run of unknown seed says nothing of which seeds are there.
        if run.seed is not None:
            seeds_of_row.add(run.seed)
    missing = [seed for seed in seeds if seed not in seeds_of_row]
    return replace(row, missing=(*row.missing, *missing))


def with_given_up(
    rows: Sequence[Row], tunings: Iterable[Iterable[Mapping[str, Any]]], order: Sequence[str] = ()
) -> list[Row]:
    """Return the rows, and those of tunings whose trials all failed.

    Labels in `order` come first, in that order.
    """
    all_rows = list(rows)
    labels = {row.label for row in rows}
    for tuning in tunings:
        for search in tuning:
            for row in _given_up_rows(search):
                if row.label not in labels:
                    labels.add(row.label)
                    all_rows.append(row)
    places = {label: place for place, label in enumerate(order)}
    return sorted(all_rows, key=lambda row: places.get(row.label, len(places)))


def _given_up_rows(search: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a search, from tuning.json, whose trials all failed."""
    labels = search.get("rows")
    if not isinstance(labels, list):
        return []
    reason = why_given_up(search)
    if not reason:
        return []
    rule = str(search.get("rule") or "none")
    fmt = str(search.get("format") or NO_FORMAT)
    return [Row(str(label), rule, fmt, (), reason=reason) for label in labels]
