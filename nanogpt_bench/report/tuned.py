"""What a sweep tuned, from its tuning.json: the best values of every row, between which, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nanogpt_bench.report.markup import Section
from nanogpt_bench.report.tables import TUNING_HEADINGS, TUNING_WORDS, tuning_cells


def tuned_section(tunings: Sequence[Sequence[Mapping[str, Any]]]) -> Section | None:
    """The tables of all tunings of a report; None without any."""
    if not tunings:
        return None
    words = (
        "Every row of the table above was trained at the values in the column best. They had the lowest final "
        "validation loss, a mean over the tuning's own seeds, among those tried, from neighbour to neighbour."
    )
    return Section("tuned", "What was tuned", f'<p class="muted">{words}</p>{"".join(map(_tuning_html, tunings))}')


def _tuning_html(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = [""] * TUNING_WORDS + [' class="number"'] * (len(TUNING_HEADINGS) - TUNING_WORDS)
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, TUNING_HEADINGS, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
        for cells in tuning_cells(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
