"""Runs in several processes: what each of them holds, what it sends, and how fast they are together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nanogpt_bench.report.markup import Section
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import finite

HEADINGS = ("run", "parallel", "processes", "held by a process", "peak of a process", "sent in a step", "tokens/s")
NOTE = (
    "Held: weights and optimizer state after the training, of the process with most of it. Peak: of its memory, all "
    "that Python and torch take included. Sent: by a process in one step, as a ring of the processes sends it."
)


def processes_section(rows: Sequence[Row]) -> Section | None:
    """The table of the runs that had several processes; None where none had."""
    lines = [_line(row.label, run) for row in rows for run in row.runs if _facts(run)]
    if not lines:
        return None
    head = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    return Section("processes", "Processes", f'{table}<p class="muted">{NOTE}</p>')


def _facts(run: Run) -> Mapping[str, Any]:
    found = run.summary.get("processes")
    return found if isinstance(found, Mapping) else {}


def _line(label: str, run: Run) -> str:
    facts, speed = _facts(run), run.number("tokens_per_s")
    words = [
        f"{label} · {run.name}",
        str(facts.get("parallel")),
        _count(facts.get("count")),
        _largest(facts.get("held_bytes")),
        _largest(facts.get("peak_bytes")),
        _count(facts.get("sent_bytes"), " bytes"),
        "-" if speed is None else f"{speed:,.0f}",
    ]
    return f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in words)}</tr>"


def _largest(each: Any) -> str:
    known = [size for size in map(finite, each if isinstance(each, list) else []) if size is not None]
    return _count(max(known, default=None), " bytes")


def _count(number: Any, unit: str = "") -> str:
    value = finite(number)
    return "-" if value is None else f"{value:,.0f}{unit}"
