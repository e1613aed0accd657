"""Curves of what the monitors watched, one chart a figure, for those figures that some run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanogpt_bench.report import series
from nanogpt_bench.report.charts import Chart, axes, line_traces
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row
from nanogpt_bench.runs.metrics import LOG, SHARE, Metric

#: a group's title, and the namespace of its figures
GROUPS = {
    "gradients": ("Gradients", "grad"),
    "updates": ("Updates", "stall"),
    "ranges": ("Ranges", "quant"),
    "bits": ("Bits", "bits"),
    "attention": ("Attention", "attention"),
    "geometry": ("Geometry", "geometry"),
}


def watched_charts(
    rows: Sequence[Row], looks: Mapping[str, Look], figures: Sequence[Metric], limits: Mapping[str, float]
) -> list[Chart]:
    """A chart for each of `figures` that some run recorded; `limits` draws a dotted line, by name."""
    recorded = {key for row in rows for run in row.runs for key in run.metrics.names}
    found = [_chart(rows, looks, figure, limits.get(figure.name)) for figure in figures if figure.name in recorded]
    return [chart for chart in found if chart is not None]


def _chart(rows: Sequence[Row], looks: Mapping[str, Look], figure: Metric, limit: float | None) -> Chart | None:
    lines = series.lines(rows, figure.name)
    if not lines:
        return None
    layout = axes("step", figure.unit)
    if figure.unit == SHARE:
        layout["yaxis"] |= {"tickformat": ".3~p", "rangemode": "tozero"}
    if figure.chart == LOG and _spans(lines):
        layout["yaxis"] |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    if limit is not None:
        layout["shapes"] = [_limit_line(limit)]
    traces = line_traces(lines, looks, marked=True)
    return Chart(f"watch-{figure.name.replace('/', '-')}", figure.title, figure.meaning, traces, layout, height=300)


def _spans(lines: Sequence[series.Line]) -> bool:
    """Whether positive values differ by a factor of thirty or more, so that a linear axis would hide the small."""
    known = [y for line in lines for y in line.ys if y is not None]
    return min(known) > 0 and max(known) / min(known) >= 30


def _limit_line(limit: float) -> dict[str, Any]:
    line = {"color": "@ink", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": line}
