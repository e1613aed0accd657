"""The gap by length: rows that differ in their number of steps alone, each measured against its own length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from nanogpt_bench.report.paired import in_words
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.section import Section
from nanogpt_bench.report.tables import run_heading
from nanogpt_bench.system.errors import one_line

_STEPS = re.compile(r" ?max_steps=\d+")


def by_length(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return, by label without the length, the results of every length in steps; rows of one length are left out.

    A reference has no gap and is left out as well.
    """
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        steps = next((run.number("steps_planned") for run in result.row.runs), None)
        if steps is not None and result.difference is not None:
            found.setdefault(_STEPS.sub("", result.row.label), {})[int(steps)] = result
    return {label: lengths for label, lengths in found.items() if len(lengths) > 1}


def length_cells(found: Mapping[str, Mapping[int, Result]]) -> list[list[str]]:
    """Return the table's lines, the heading first: a line a row, a column a length, differences in nats."""
    lengths = sorted({steps for row in found.values() for steps in row})
    every = [result for row in found.values() for result in row.values()]
    lines = [[run_heading(every), *(f"{steps:,} steps" for steps in lengths)]]
    for label, row in found.items():
        cells = (in_words(row[steps].difference) if steps in row else "-" for steps in lengths)
        lines.append([one_line(label), *cells])
    return lines


def length_section(results: Sequence[Result]) -> Section | None:
    """The table of the gaps by length; None where no row was trained at several."""
    found = by_length(results)
    if not found:
        return None
    head, *lines = length_cells(found)
    words = (
        "Final validation loss less that of the reference at the same seed and length, in nats a token, with its 95% "
        "t-interval. Every length was trained on its own, with the whole of its schedules."
    )
    body = "".join(f"<tr>{_line('td', line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{_line('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    return Section("length", "Gap by length", f'<p class="muted">{words}</p><div class="scroll">{table}</div>')


def _line(tag: str, cells: Sequence[str]) -> str:
    label, *numbers = (escape(cell) for cell in cells)
    return f"<{tag}>{label}</{tag}>" + "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
