"""What runs that differ in their settings say together: learning rates, and all runs across all axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nanogpt_bench.report.charts import Chart, axes, category, colour
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.parallel import NOTHING, Parallel, parallel
from nanogpt_bench.report.rates import RateCurve, rate_curves, rate_ticks
from nanogpt_bench.report.results import Row, row_label
from nanogpt_bench.report.studies import LearningRateLimit

LONGEST_MARK = 18


def rate_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Final validation loss over the learning rate; crosses along the top where no run came to its end."""
    curves = rate_curves(rows)
    losses = [point.loss for curve in curves for point in curve.points if point.loss is not None]
    if not losses:
        return None
    top = max(losses) + 0.12 * ((max(losses) - min(losses)) or 1.0)
    traces = [trace for curve in curves for trace in _rate_traces(curve, looks[curve.row], top)]
    layout = axes("learning rate", "nats per token")
    layout["xaxis"] |= _rate_axis(point.rate for curve in curves for point in curve.points)
    words = "Final validation loss, mean over seeds; a cross at the top is a learning rate at which runs failed."
    return Chart("rates", "Loss by learning rate", words, traces, layout, wide=True)


def _rate_axis(rates: Iterable[float]) -> dict[str, Any]:
    marked = rate_ticks(rates)
    return {"type": "log", "tickvals": marked, "ticktext": [f"{rate:.3g}" for rate in marked], "tickangle": 0}


def _rate_traces(curve: RateCurve, look: Look, top: float) -> list[dict[str, Any]]:
    common = {"type": "scatter", "name": escape(curve.label), "meta": {"row": curve.row}}
    line = common | {
        "mode": "lines+markers",
        "x": [point.rate for point in curve.points],
        "y": [point.loss for point in curve.points],
        "line": {"color": colour(look), "dash": look.dash, "width": look.width},
        "marker": {"color": colour(look), "symbol": look.marker, "size": 7},
        "hovertemplate": "%{fullData.name}<br>learning rate %{x:.3g}: %{y:.4f}<extra></extra>",
    }
    failed = [point for point in curve.points if point.failed]
    cross = common | {
        "mode": "markers",
        "x": [point.rate for point in failed],
        "y": [top] * len(failed),
        "customdata": [point.failed for point in failed],
        "marker": {"color": colour(look), "symbol": "x", "size": 9},
        "hovertemplate": "%{fullData.name}<br>learning rate %{x:.3g}: %{customdata} failed<extra></extra>",
    }
    return [line, cross] if failed else [line]


def limit_chart(limits: Sequence[LearningRateLimit]) -> Chart | None:
    """Between which learning rates each format and rule becomes unstable."""
    shown = [limit for limit in limits if limit.stable or limit.unstable]
    if not shown:
        return None
    labels = [category(row_label(limit.rule, limit.format)) for limit in shown]
    bridge = [
        _bridge(label, limit) for label, limit in zip(labels, shown, strict=True) if limit.stable and limit.unstable
    ]
    stable = _limit_marks("largest stable", labels, [limit.stable for limit in shown], "circle", "@2")
    unstable = _limit_marks("smallest unstable", labels, [limit.unstable for limit in shown], "x", "@0")
    layout = axes("learning rate", "")
    layout["xaxis"] |= _rate_axis(rate for limit in shown for rate in (limit.stable, limit.unstable) if rate)
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "categoryarray": labels, "title": {"text": ""}}
    words = "Found by bisection: the dot is the largest learning rate that held, the cross the smallest that did not."
    height = 96 + 26 * len(labels)
    return Chart(
        "limits", "Largest stable learning rate", words, [*bridge, stable, unstable], layout, height, wide=True
    )


def _bridge(label: str, limit: LearningRateLimit) -> dict[str, Any]:
    ends = [limit.stable, limit.unstable]
    line = {"color": "@ink", "width": 1.5}
    return {"type": "scatter", "mode": "lines", "x": ends, "y": [label, label], "line": line, "hoverinfo": "skip"}


def _limit_marks(
    name: str, labels: Sequence[str], rates: Sequence[float | None], symbol: str, ink: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(rates),
        "y": list(labels),
        "marker": {"color": ink, "symbol": symbol, "size": 10},
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:.3g}}<extra></extra>",
    }


def parallel_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """Every run as a line across settings and outcomes, drawn as plain lines (no WebGL)."""
    found = parallel(rows)
    if found is None:
        return None
    traces = [_parallel_trace(found, i, looks[label]) for i, label in enumerate(found.rows)]
    names = [axis.name for axis in found.axes]
    layout = axes("", "")
    layout["xaxis"] |= {
        "tickvals": list(range(len(names))),
        "ticktext": [escape(name) for name in names],
        "range": [-0.35, len(names) - 0.55],
        "side": "top",
        "tickangle": 0,
        "showgrid": False,
        "showline": False,
    }
    layout["yaxis"] |= {"visible": False, "range": [-0.05, NOTHING + 0.06], "title": {"text": ""}}
    layout |= {"shapes": [_axis_line(i) for i in range(len(names))], "annotations": _axis_marks(found)}
    words = (
        "A line a run, coloured as its row. Above an axis passes what has no value there, such as a run that failed."
    )
    return Chart(
        "parallel", "All runs across all axes", words, traces, layout, height=440, wide=True, least=150 * len(names)
    )


def _parallel_trace(found: Parallel, index: int, look: Look) -> dict[str, Any]:
    run, label = found.runs[index], found.rows[index]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(range(len(found.axes))),
        "y": [axis.places[index] for axis in found.axes],
        "name": escape(run.name),
        "meta": {"row": label},
        "line": {"color": colour(look), "dash": look.dash, "width": 1.8},
        "hovertemplate": "%{fullData.name}<extra></extra>",
    }


def _axis_line(place: int) -> dict[str, Any]:
    line = {"color": "@ink", "width": 1}
    return {"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "line": line, "layer": "below"}


def _axis_marks(found: Parallel) -> list[dict[str, Any]]:
    return [
        {
            "x": place,
            "y": height,
            "text": escape(text if len(text) <= LONGEST_MARK else text[: LONGEST_MARK - 1] + "…"),
            "showarrow": False,
            "xanchor": "left",
            "xshift": 4,
            "font": {"size": 11},
            "bgcolor": "@page",
            "opacity": 0.85,
        }
        for place, axis in enumerate(found.axes)
        for height, text in axis.marks
    ]
