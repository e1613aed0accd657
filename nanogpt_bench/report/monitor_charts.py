"""Curves of what the monitors watched, one chart a figure, for those figures that some run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanogpt_bench.config.metrics import LOG, SHARE, Metric
from nanogpt_bench.report import series
from nanogpt_bench.report.chart import SHARE as PERCENT
from nanogpt_bench.report.chart import Chart, limit_line, lines, quantity
from nanogpt_bench.report.loss_charts import shown
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row

#: titles of the namespaces that are not called by their own names
TITLES = {"grad": "Gradients", "quant": "Ranges", "val": "Labels"}


def watched_charts(
    rows: Sequence[Row], looks: Mapping[str, Look], figures: Sequence[Metric], limits: Mapping[str, float]
) -> list[Chart]:
    """A chart for each of `figures` that some run recorded; `limits` draws a dotted line, by name."""
    recorded = {key for row in rows for run in row.runs for key in run.metrics.names}
    found = [_chart(rows, looks, figure, limits.get(figure.name)) for figure in figures if figure.name in recorded]
    return [chart for chart in found if chart is not None]


def _chart(rows: Sequence[Row], looks: Mapping[str, Look], figure: Metric, limit: float | None) -> Chart | None:
    drawn = series.lines(rows, figure.name)
    if not drawn:
        return None
    share = {"format": PERCENT, "zero": True} if figure.unit == SHARE else {}
    bent = {"log": True, "format": "~g", "tickCount": 5} if figure.chart == LOG and _spans(drawn) else {}
    y = quantity("y", figure.unit, _ends(drawn, share=bool(share)), **(share | bent))
    spec = lines(drawn, looks, quantity("x", "step"), y)
    spec["layer"] += [] if limit is None else [limit_line(limit, y=y)]
    return Chart(f"watch-{figure.name.replace('/', '-')}", figure.title, figure.meaning, spec, rows=shown(drawn))


def _ends(drawn: Sequence[series.Line], *, share: bool) -> tuple[float, float] | None:
    """The ends of an axis for curves that are all of one value, which have none of their own."""
    known = {y for line in drawn for y in line.ys if y is not None}
    if len(known) > 1 or (share and known != {0}):
        return None
    return (0.0, 1.0) if share else (min(known) - 1, max(known) + 1)


def _spans(drawn: Sequence[series.Line]) -> bool:
    """Whether positive values differ by a factor of thirty or more, so that a linear axis would hide the small."""
    known = [y for line in drawn for y in line.ys if y is not None]
    return min(known) > 0 and max(known) / min(known) >= 30
