"""The gap of every row to the reference, as bars of plain HTML that rearrange themselves on a narrow screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Figure, Result
from nanogpt_bench.report.tables import format_gap

HATCH = "repeating-linear-gradient(135deg, var(--page) 0 2px, transparent 2px 7px)"


def gap_bars(results: Sequence[Result], looks: Mapping[str, Look]) -> str:
    """A bar a row from zero to its gap in nats, seeds' spread as a whisker; empty when no gap is known."""
    others = [result for result in results if not result.reference]
    known = [result.gap for result in others if result.gap is not None]
    if not known:
        return ""
    ends = [gap.mean + sign * (gap.spread or 0.0) for gap in known for sign in (-1, 1)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    scale = _Scale(low, (high - low) or 1.0)
    rows = "".join(_row(result, looks[result.row.label], scale) for result in others)
    caption = "Final validation loss above the reference's, in nats per token and per cent of it."
    return (
        f"<figure><h3>Gap to the reference</h3><figcaption>{caption}</figcaption>"
        f'<div class="bars" style="--zero:{scale.place(0.0):.2f}%">{rows}</div></figure>'
    )


class _Scale:
    """Where on a track, in per cent of its width, a gap lies."""

    def __init__(self, low: float, width: float) -> None:
        self._low, self._width = low, width

    def place(self, gap: float) -> float:
        return 100 * (gap - self._low) / self._width

    def span(self, start: float, end: float) -> str:
        left, right = sorted((self.place(start), self.place(end)))
        return f"left:{left:.2f}%;width:{right - left:.2f}%"


def _row(result: Result, look: Look, scale: _Scale) -> str:
    number = format_gap(result) if result.gap is not None else result.verdict.text
    return (
        f'<div class="bar-row"><span class="bar-label">{escape(result.row.label)}</span>'
        f'<span class="bar-track">{_bar(result.gap, look, scale) if result.gap is not None else ""}</span>'
        f'<span class="bar-number">{escape(number)}</span></div>'
    )


def _bar(gap: Figure, look: Look, scale: _Scale) -> str:
    hatch = "" if look.dash == "solid" else f"background-image:{HATCH};"
    bar = f'<i class="bar" style="{scale.span(0.0, gap.mean)};background-color:var({look.variable});{hatch}"></i>'
    if gap.spread is None:
        return bar
    return bar + f'<i class="whisker" style="{scale.span(gap.mean - gap.spread, gap.mean + gap.spread)}"></i>'
