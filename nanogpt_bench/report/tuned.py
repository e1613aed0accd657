"""What a sweep tuned, from its tuning.json: the best values of every row, between which, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from nanogpt_bench.report.section import Section
from nanogpt_bench.runs.read import finite
from nanogpt_bench.system.errors import one_line

HEADINGS = ("tuned", "key", "best", "tried", "trials", "steps", "seconds")
COSTS = ("runs", "steps", "seconds")
#: how many of the columns hold words
WORDS = 2


def tuning_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what was tuned and what it cost as a Markdown table."""
    lines = [HEADINGS, ["---"] * WORDS + ["---:"] * (len(HEADINGS) - WORDS), *tuning_cells(rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def tuning_cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the table's lines, one a row and key, and one of what all cost."""
    for row in rows:
        costs = [_whole(_of(row, "cost").get(name)) for name in COSTS]
        for key in _of(row, "start"):
            yield [one_line(str(row.get("label") or "")), key, _best(row, key), _tried(row, key), *costs]
            costs = [""] * len(COSTS)  # what was tried for one key was tried for the others
    total = [sum(finite(_of(row, "cost").get(name)) or 0.0 for row in rows) for name in COSTS]
    yield ["all", "", "", "", *map(_whole, total)]


def _of(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = row.get(key)
    return part if isinstance(part, Mapping) else {}


def _best(row: Mapping[str, Any], key: str) -> str:
    value = finite(_of(row, "best").get(key))
    return "-" if value is None else f"{value:g}"


def _tried(row: Mapping[str, Any], key: str) -> str:
    """From which value to which, and whether the best of a search that is over is at an end of these."""
    trials = row.get("trials")
    trials = [trial for trial in trials if isinstance(trial, Mapping)] if isinstance(trials, list) else []
    values = [finite(_of(trial, "values").get(key)) for trial in trials]
    known = [value for value in values if value is not None]
    edge = ", best not inside" if row.get("over") and not _of(row, "inside").get(key) else ""
    return f"{min(known):g} to {max(known):g}{edge}" if known else "-"


def _whole(value: Any) -> str:
    return f"{finite(value) or 0.0:,.0f}"


def tuned_section(tunings: Sequence[Sequence[Mapping[str, Any]]]) -> Section | None:
    """The tables of all tunings of a report; None without any."""
    if not tunings:
        return None
    words = (
        "Every row of the table above was trained at the values in the column best. They had the lowest final "
        "validation loss, a mean over the tuning's own seeds, among those tried, from neighbour to neighbour."
    )
    return Section("tuned", "What was tuned", f'<p class="muted">{words}</p>{"".join(map(_html, tunings))}')


def _html(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = [""] * WORDS + [' class="number"'] * (len(HEADINGS) - WORDS)
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, HEADINGS, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
        for cells in tuning_cells(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
