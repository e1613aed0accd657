"""The table and the measured gaps that `compare` ends with."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from nanogpt_bench.report.results import Result, findings
from nanogpt_bench.report.tables import shown_columns, to_text
from nanogpt_bench.report.verdict import Outcome

STYLES = {
    Outcome.WITHIN: "green",
    Outcome.BEHIND: "yellow",
    Outcome.OUTSIDE: "red",
    Outcome.FAILED: "red",
    Outcome.DOUBTFUL: "yellow",
    Outcome.REFERENCE: "bold",
}


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
