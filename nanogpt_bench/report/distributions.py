"""Distributions of what the monitors watched, as recorded last, one line a row over all of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from nanogpt_bench.report.charts import Chart, axes, colour
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row
from nanogpt_bench.runs.metrics import LOG, SPREADS, Metric, Spread
from nanogpt_bench.runs.watched import Distribution

FEW = 8  # bins that would hardly show as a line alone


def distribution_charts(rows: Sequence[Row], looks: Mapping[str, Look]) -> list[Chart]:
    """A chart for each distribution that some row's first run with distributions has recorded."""
    found = [_chart(spread, rows, looks) for spread in SPREADS if spread.chart]
    return [chart for chart in found if chart is not None]


def _chart(spread: Spread, rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    traces = [trace for row in rows for trace in _traces(spread, row, looks)]
    if not traces:
        return None
    layout = axes(spread.unit, "share")
    layout["yaxis"] |= {"tickformat": ".3~p", "rangemode": "tozero"}
    if spread.chart == LOG:
        layout["xaxis"] |= {"type": "log", "exponentformat": "power", "nticks": 6}
    name = _drawn(spread).name.replace("/", "-")
    return Chart(f"spread-{name}", spread.title, spread.meaning, traces, layout, height=300)


def _drawn(spread: Spread) -> Metric:
    """Of several operands the weights."""
    return spread.by("weight") if spread.operands else spread


def _traces(spread: Spread, row: Row, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    prefix = _drawn(spread).of("")
    shares = merged([d for run in row.runs[:1] for n, d in run.distributions.items() if n.startswith(prefix)])
    xs = [x for x in shares if x > 0 or spread.chart != LOG]
    if not xs:
        return []
    look = looks[row.label]
    return [
        {
            "type": "scatter",
            "mode": "lines" if len(xs) > FEW else "lines+markers",
            "x": xs,
            "y": [shares[x] for x in xs],
            "name": escape(row.label),
            "meta": {"row": row.label},
            "line": {"color": colour(look), "dash": look.dash, "width": look.width, "shape": "hvh"},
            "marker": {"color": colour(look), "symbol": look.marker, "size": 5},
            "hovertemplate": "%{fullData.name}<br>%{x:.4~g}: %{y:.2%}<extra></extra>",
        }
    ]


def merged(distributions: Sequence[Distribution]) -> dict[float, float]:
    """The share at each value, or in the bin that begins there, over all of them together, in increasing order.

    >>> merged([Distribution(1, (1, 1), edges=(0, 1, 2)), Distribution(1, (2,), edges=(1, 2))])
    {0: 0.25, 1: 0.75}
    """
    counts: Counter[float] = Counter()
    for distribution in distributions:
        places = distribution.values or (distribution.edges or ())[:-1]
        counts.update(dict(zip(places, distribution.counts, strict=True)))
    total = sum(counts.values())
    return {place: counts[place] / total for place in sorted(counts)} if total else {}
