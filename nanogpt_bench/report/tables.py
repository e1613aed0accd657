"""Tables: results as CSV (full precision) and Markdown, and the tuning of a sweep.

Tables for people, in Markdown, on the terminal and on the page, have the columns in
which rows differ, as many as fit.
"""

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.report.columns import (
    BEST,
    COLUMNS,
    GAP,
    NOTHING,
    PAIRED,
    RUN,
    VERDICT_COLUMN,
    Column,
    FieldReader,
    format_figure,
)
from nanogpt_bench.report.paired import MARK, Difference
from nanogpt_bench.report.results import Result, reference_name
from nanogpt_bench.report.rows import shortfall
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import cell, one_line

#: suffix of the first heading if all gaps rest on one seed
LEAD = "one seed: a hint"
#: characters per line of a table
WIDEST = 120
#: the most characters of a verdict that count towards the width; a failed run's message
#: makes only its line longer
WIDEST_VERDICT = 24


def shown_columns(results: Sequence[Result]) -> tuple[Column, ...]:
    """Return the columns of a table of these rows, as many as fit into 120 characters.

    A column is dropped if it is empty, if its known cells are all equal, or if it
    repeats the column before (the best loss where it is the last). The heading of the
    gap names the reference. The first heading says if all gaps are from one seed (then
    there are no intervals) and how many runs are missing. Without a reference there is
    no gap.
    """
    hidden = _hidden_headings(results)
    shown = [
        column for column in COLUMNS if column.heading not in hidden and _informs(column, results)
    ]
    headings = {column.heading: _heading_text(column, results) for column in shown}
    widths = {column.heading: _width(column, headings[column.heading], results) for column in shown}
    # The paired difference is never dropped, or without it the gap.
    protected = PAIRED if PAIRED in widths else GAP
    for column in _in_drop_order(shown):
        if line_width(widths.values()) > WIDEST and column.heading != protected:
            del widths[column.heading]
    return tuple(
        replace(column, heading=headings[column.heading])
        for column in shown
        if column.heading in widths
    )


def _hidden_headings(results: Sequence[Result]) -> set[str]:
    """Return the headings of columns that say nothing of these rows, whatever they hold."""
    hidden = set()
    if not any(result.reference for result in results):
        hidden.add(GAP)
    if all(difference.is_lead for difference in _known_differences(results)):
        hidden.add(PAIRED)
    return hidden


def _known_differences(results: Sequence[Result]) -> list[Difference]:
    return [result.difference for result in results if result.difference is not None]


def _informs(column: Column, results: Sequence[Result]) -> bool:
    """Return whether a column is worth its width.

    It is for one row if it is filled, and for several if they differ in it.
    """
    if column.drop_order is None or column.heading == GAP:
        return True
    cells = [column.cell(result) for result in results]
    known = [text for text in cells if text != NOTHING]
    if len(results) < 2:
        return bool(known) or not column.optional
    final_losses = [format_figure(result.final_val_loss) for result in results]
    if column.heading == BEST and cells == final_losses:
        return False
    different = set(cells if column.dash_counts else known)
    # A single known cell differs from the dashes of the others.
    return bool(known) and (len(different) > 1 or len(known) == 1)


def _heading_text(column: Column, results: Sequence[Result]) -> str:
    """Return the heading of a column above these rows, with what it says of them all."""
    differences = _known_differences(results)
    if column.heading == RUN:
        lead = bool(differences) and all(difference.is_lead for difference in differences)
        return run_heading(results, lead=lead)
    if column.heading == GAP:
        return f"{GAP} to {reference_name(results)}"
    if column.heading == PAIRED and any(difference.apart for difference in differences):
        return f"{PAIRED}{MARK}: two processors"
    return column.heading


def _width(column: Column, heading: str, results: Sequence[Result]) -> int:
    """Return the characters that a column takes, heading and cells."""
    lengths = [len(one_line(column.cell(result))) for result in results]
    if column.heading == VERDICT_COLUMN:
        lengths = [min(length, WIDEST_VERDICT) for length in lengths]
    return max([len(heading), *lengths])


def _in_drop_order(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that may be dropped, the first to go first."""
    droppable = [column for column in columns if column.drop_order is not None]
    return sorted(droppable, key=lambda column: column.drop_order or 0)


def line_width(widths: Iterable[int]) -> int:
    """Return the characters per line of a table with columns of these widths.

    >>> line_width([3, 4]) == len("| run | loss |")
    True
    """
    known = list(widths)
    return sum(known) + 3 * len(known) + 1


def run_heading(results: Sequence[Result], *, lead: bool = False) -> str:
    """Return the heading of the rows' names.

    Notes in brackets tell of missing runs, and of gaps from one seed if `lead` is set.
    """
    notes = [shortfall(result.row for result in results)]
    if lead:
        notes.append(LEAD)
    text = "; ".join(note for note in notes if note)
    return f"{RUN} ({text})" if text else RUN


def to_csv(results: Sequence[Result]) -> str:
    """Return one line per row as CSV.

    Numbers are in full, cells of unknown ones are empty, and no text is a formula.
    Other metrics of the validation (F1, R-precision, the loss on another text) get
    columns if any row has them. If runs are missing, every line has their count in a
    last column.
    """
    fields = _csv_fields(results)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    for result in results:
        writer.writerow([cell(read_field(result)) for read_field in fields.values()])
    return text.getvalue()


def _csv_fields(results: Sequence[Result]) -> dict[str, FieldReader]:
    """Return the readers of the CSV's fields by name, in order."""
    fields: dict[str, FieldReader] = {}
    for column in COLUMNS:
        fields.update(column.csv)
    # Other metrics come last, and only those that some row has.
    for metric in BESIDE_LOSS:
        reader = fields.pop(metric.figure)
        if any(metric.figure in result.other_metrics for result in results):
            fields[metric.figure] = reader
    missing = shortfall(result.row for result in results)
    if missing:
        fields["partial"] = lambda _: missing
    return fields


def to_text(results: Sequence[Result]) -> str:
    """Return the table as plain text with aligned columns.

    A verdict that is too long continues on the next lines.
    """
    return _table(results, one_line, fold=True)


def to_markdown(results: Sequence[Result]) -> str:
    """Return a GitHub table whose padded columns are also readable as plain text."""
    return _table(results, _escape_markdown)


def _escape_markdown(text: str) -> str:
    return one_line(re.sub(r"([\\|<>*_`\[\]])", r"\\\1", text))


def _table(
    results: Sequence[Result], format_cell: Callable[[str], str], *, fold: bool = False
) -> str:
    columns = shown_columns(results)
    heading = [column.heading for column in columns]
    lines = [[format_cell(column.cell(result)) for column in columns] for result in results]
    widths = column_widths([heading, *lines])
    # The verdict, in the last column, gets what the other columns leave.
    verdict_width = max(WIDEST_VERDICT, WIDEST - line_width([*widths[:-1], 0]))
    if fold:
        lines = _fold_last_cells(lines, verdict_width)
    return padded([heading, *lines], [column.numeric for column in columns], verdict_width)


def _fold_last_cells(lines: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Continue last cells that are wider than `width` on further lines."""
    folded = []
    for *cells, last in lines:
        pieces = textwrap.wrap(last, width) or [""]
        folded.append([*cells, pieces[0]])
        blank = [""] * len(cells)
        folded += [[*blank, piece] for piece in pieces[1:]]
    return folded


def column_widths(lines: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def padded(
    lines: Sequence[Sequence[str]],
    numeric: Sequence[bool] | None = None,
    last_width_limit: int | None = None,
) -> str:
    """Return lines of cells, the heading first, as a GitHub table.

    By default all columns but the first are numeric. A cell in the last column with
    more than `last_width_limit` characters makes only its own line longer.

    >>> print(padded([["run", "loss"], ["fp32", "2.1"]]), end="")
    | run  | loss |
    | ---- | ---: |
    | fp32 |  2.1 |
    """
    if numeric is None:
        numeric = [False, *(True for _ in lines[0][1:])]
    widths = column_widths(lines)
    if last_width_limit is not None:
        widths[-1] = min(widths[-1], last_width_limit)
    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, numeric, strict=True)
    ]
    text = ""
    for line in (lines[0], rule, *lines[1:]):
        cells = [
            content.rjust(width) if right else content.ljust(width)
            for content, width, right in zip(line, widths, numeric, strict=True)
        ]
        text += _pipes(cells)
    return text


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


TUNING_HEADINGS = ("tuned", "key", "best", "tried", "trials", "steps", "seconds")
TUNING_COSTS = ("runs", "steps", "seconds")
#: how many of these columns have text, the first ones; the others have numbers
TUNING_TEXT_COLUMNS = 2


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tuned values and the cost of tuning as a Markdown table."""
    numbers = len(TUNING_HEADINGS) - TUNING_TEXT_COLUMNS
    rule = ["---"] * TUNING_TEXT_COLUMNS + ["---:"] * numbers
    return "".join(_pipes(cells) for cells in (TUNING_HEADINGS, rule, *tuning_cells(rows)))


def tuning_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table's lines, one per row and key, and a last one with the total cost."""
    total = dict.fromkeys(TUNING_COSTS, 0.0)
    for row in rows:
        label = one_line(str(row.get("label") or ""))
        cost = {name: finite(_part_of(row, "cost").get(name)) or 0.0 for name in TUNING_COSTS}
        for name in TUNING_COSTS:
            total[name] += cost[name]
        cost_cells = _cost_cells(cost)
        for key in _part_of(row, "start"):
            best = finite(_part_of(row, "best").get(key))
            best_cell = NOTHING if best is None else f"{best:g}"
            yield [label, key, best_cell, _tried_range(row, key), *cost_cells]
            # One search tries all keys of a row, so its cost is in its first line only.
            cost_cells = [""] * len(TUNING_COSTS)
    yield ["all", "", "", "", *_cost_cells(total)]


def _cost_cells(cost: Mapping[str, float]) -> list[str]:
    return [f"{value:,.0f}" for value in cost.values()]


def _part_of(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = row.get(key)
    return part if isinstance(part, Mapping) else {}


def _tried_range(row: Mapping[str, Any], key: str) -> str:
    """Return the range of values tried.

    A note follows if the best of a finished search is at an end of it.
    """
    trials = row.get("trials")
    if not isinstance(trials, list):
        return NOTHING
    values = [
        finite(_part_of(trial, "values").get(key)) for trial in trials if isinstance(trial, Mapping)
    ]
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    at_end = row.get("over") and not _part_of(row, "inside").get(key)
    note = ", best at an end" if at_end else ""
    return f"{min(known):g} to {max(known):g}{note}"
