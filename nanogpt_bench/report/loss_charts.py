"""The charts of losses: by step, by wall-clock, near the reference, the gap to it, and what stall there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanogpt_bench.config.metrics import TRAIN_LOSS, VAL_LOSS
from nanogpt_bench.report import series
from nanogpt_bench.report.chart import Chart, Look, Spec, category, ink, lines, names, of_row, over, quantity
from nanogpt_bench.report.results import Result, reference_name
from nanogpt_bench.report.rows import Row, loss_unit
from nanogpt_bench.report.tables import format_gap

BAR_HEIGHT = 42


def loss_charts(rows: Sequence[Row], looks: Mapping[str, Look], reference: str | None) -> list[Chart]:
    """Validation and training loss, by step and by wall-clock; those without data are left out."""
    charts: list[Chart] = []
    for name, metric in (("val", VAL_LOSS), ("train", TRAIN_LOSS)):
        for against, axis, words in ((series.BY_STEP, "step", "by step"), (series.BY_TIME, "seconds", "by wall-clock")):
            smoothed = metric is TRAIN_LOSS
            drawn = series.lines(rows, metric.name, against, smoothed=smoothed)
            caption = "Exponential moving average over the steps." if smoothed else "On the same held-out batches."
            if drawn:
                x, y = quantity("x", axis), quantity("y", loss_unit(rows), series.loss_range(drawn))
                spec = lines(drawn, looks, x, y, marked=not smoothed)
                spec["layer"] += _marks(series.marks(rows, drawn, against), looks, x, y)
                charts.append(Chart(f"{name}-{axis}", f"{metric.title} {words}", caption, spec, 380, rows=shown(drawn)))
        if metric is VAL_LOSS:
            charts += _close_chart(rows, looks, reference)
    return charts


def shown(drawn: Sequence[series.Line]) -> tuple[str, ...]:
    """The rows of some curves, each once."""
    return tuple(dict.fromkeys(line.label for line in drawn))


def _marks(marks: Sequence[series.Mark], looks: Mapping[str, Look], x: Spec, y: Spec) -> list[Spec]:
    """Open diamonds at early divergence and failure."""
    if not marks:
        return []
    values = [{"row": mark.label, "x": mark.x, "y": mark.y, "text": f"{mark.label}: {mark.text}"} for mark in marks]
    diamond = {"type": "point", "shape": "diamond", "size": 150, "strokeWidth": 2.5, "filled": False}
    colour = of_row("color", looks)
    return [over(values, diamond, x=x, y=y, color=colour, tooltip={"field": "text"})]


def _close_chart(rows: Sequence[Row], looks: Mapping[str, Look], reference: str | None) -> list[Chart]:
    """The validation loss magnified near the reference, where most rows lie on each other otherwise."""
    drawn = series.lines(rows, VAL_LOSS.name)
    limits = series.close_range(drawn, reference)
    if limits is None:
        return []
    spec = lines(drawn, looks, quantity("x", "step"), quantity("y", loss_unit(rows), limits))
    caption = "Magnified: the scale ends where the reference was after a third of its steps."
    return [Chart("val-close", "Validation loss near the reference", caption, spec, 380, wide=True, rows=shown(drawn))]


def stall_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """The share of weights that a requested update left unmoved, over the steps."""
    drawn = series.stall_lines(rows)
    if not drawn:
        return None
    spec = lines(drawn, looks, quantity("x", "step"), quantity("y", "share of weights", (-0.02, 1.04), format=".0%"))
    return Chart("stall", "Stall: weights a requested update did not move", "", spec, 380, wide=True, rows=shown(drawn))


def gap_chart(results: Sequence[Result], looks: Mapping[str, Look]) -> Chart | None:
    """The final validation loss above the reference's: a bar a row, under its name, seeds' spread as a whisker."""
    others = [result for result in results if not result.reference]
    if not any(result.gap for result in others):
        return None
    labels = [category(result.row.label) for result in others]
    x = quantity("gap", loss_unit(result.row for result in others), zero=True, grid=False)
    y = names("name", labels, labels=False, ticks=False, domain=False)
    text = {"type": "text", "yOffset": -9, "color": ink("ink")}
    left = text | {"align": "left", "limit": {"expr": "0.58 * width"}}
    right = text | {"align": "right", "limit": {"expr": "0.4 * width"}}
    bar = {"type": "bar", "height": 13, "yOffset": 8, "minBandSize": 2}
    whisker = {"type": "rule", "yOffset": 8, "strokeWidth": 2, "color": ink("ink")}
    layers = [
        {"mark": bar, "encoding": {"x": x, "y": y, "color": of_row("color", looks)}},
        {"mark": left, "encoding": {"x": {"value": 3}, "y": y, "text": {"field": "name"}}},
        {"mark": right, "encoding": {"x": {"value": "width"}, "y": y, "text": {"field": "number"}}},
        over([{"gap": 0}], {"type": "rule", "color": ink("muted")}, x=x),
    ]
    if any(result.gap and result.gap.spread for result in others):
        layers.append({"mark": whisker, "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}})
    spec = {"data": {"values": [_bar(result) for result in others]}, "layer": layers}
    title = f"Final validation loss above that of {reference_name(results)}"
    caption = (
        f"In {loss_unit(result.row for result in others)} and per cent; with several seeds their spread as a whisker."
    )
    return Chart("gap", title, caption, spec, 40 + BAR_HEIGHT * len(others), wide=True, drag="")


def _bar(result: Result) -> dict[str, object]:
    gap, label = result.gap, {"row": result.row.label, "name": category(result.row.label)}
    if gap is None:
        return {**label, "number": result.verdict.text, "gap": None, "low": None, "high": None}
    spread = gap.spread or 0.0
    ends = {"low": gap.mean - spread, "high": gap.mean + spread} if gap.spread else {"low": None, "high": None}
    return {**label, "number": format_gap(result), "gap": gap.mean, **ends}
