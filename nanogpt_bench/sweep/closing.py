"""The end of a sweep or a comparison: its report, its table and measured gaps, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from nanogpt_bench.report.results import Result, findings
from nanogpt_bench.report.tables import shown_columns, to_text
from nanogpt_bench.report.verdict import Outcome
from nanogpt_bench.sweep.record import Record
from nanogpt_bench.system.errors import printable
from nanogpt_bench.system.signals import RESUMABLE

STYLES = {
    Outcome.WITHIN: "green",
    Outcome.BEHIND: "yellow",
    Outcome.OUTSIDE: "red",
    Outcome.FAILED: "red",
    Outcome.DOUBTFUL: "yellow",
    Outcome.REFERENCE: "bold",
}


def close(
    record: Record, *, whole: bool, table: str | None = None, rows: bool = False, command: str | None = None
) -> int:
    """Write the report, print the table given, or else or with `rows` that of all runs; returns the exit code.

    The last line printed is the page's path. What is left is said on standard error, with the `command` that goes on.
    """
    page = record.write_page(running=False)
    if table is not None:
        print("".join(f"{printable(line)}\n" for line in table.splitlines()))
    if table is None or rows:
        print_results(record.results(), Console())
    print(page, flush=True)
    if not whole:
        if command is not None:
            print(f"to go on: {command}", file=sys.stderr)
        return RESUMABLE
    if left := record.left():
        going_on = "the same command goes on with them" if command is None else f"to go on: {command}"
        print(f"runs not brought to their end: {len(left)}; {going_on}", file=sys.stderr)
        return 1
    return 0 if any(record.summary(run).get("status") == "finished" for run in record.planned) else 1


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print the table, in plain text where there is no terminal, and a sentence on every row of nearest rounding."""
    if console.is_terminal:
        console.print(_table(results))
    else:
        print(to_text(results))
    for sentence in findings(results):
        console.print(Text(sentence), soft_wrap=True)
    console.print()


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = shown_columns(results)
    for column in columns:
        justify: JustifyMethod = "right" if column.numeric else "left"
        table.add_column(column.heading, justify=justify, no_wrap=column is columns[0], overflow="fold")
    for result in results:
        table.add_row(*(Text(column.cell(result)) for column in columns), style=STYLES.get(result.verdict.outcome, ""))
    return table
