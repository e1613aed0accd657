"""The page's interactive charts as plain plotly figures: lists and dictionaries that go into the page as JSON.

Colours are written as `@N` (an entry of the palette) or `@ink`; the page's script puts in the light or the dark
one. Every text is escaped for HTML, because plotly reads a little HTML in the texts it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanogpt_bench.report import series
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Result, Row
from nanogpt_bench.runs.metrics import TRAIN_LOSS, VAL_LOSS

#: names that a JavaScript object has without anybody's doing
OBJECT_HAS = (
    *("__defineGetter__", "__defineSetter__", "__lookupGetter__", "__lookupSetter__", "__proto__", "constructor"),
    *("hasOwnProperty", "isPrototypeOf", "propertyIsEnumerable", "toLocaleString", "toString", "valueOf"),
)
MARKED_POINTS = 60  # a curve with at most this many points shows them


@dataclass(frozen=True)
class Chart:
    """One chart: where it goes on the page, its caption (plain text), its height in pixels, and plotly's figure.

    A chart that can't be read below `least` pixels of width scrolls sideways on a screen that is narrower.
    """

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 420
    wide: bool = False
    least: int = 0

    def figure(self) -> dict[str, Any]:
        return {"name": self.name, "traces": self.traces, "layout": self.layout | {"height": self.height}}


def colour(look: Look) -> str:
    return "@ink" if look.colour is None else f"@{look.colour}"


def loss_charts(rows: Sequence[Row], looks: Mapping[str, Look], reference: str | None) -> list[Chart]:
    """Validation and training loss, by step and by wall-clock; those without data are left out."""
    charts: list[Chart] = []
    for name, metric in (("val", VAL_LOSS), ("train", TRAIN_LOSS)):
        for against, axis, words in ((series.BY_STEP, "step", "by step"), (series.BY_TIME, "seconds", "by wall-clock")):
            smoothed = metric is TRAIN_LOSS
            lines = series.lines(rows, metric.name, against, smoothed=smoothed)
            caption = "Exponential moving average over the steps." if smoothed else "On the same held-out batches."
            if lines:
                layout = axes(axis, "nats per token") | ranged(series.loss_range(lines))
                traces = line_traces(lines, looks, marked=not smoothed)
                traces += _mark_traces(series.marks(rows, lines, against), looks)
                charts.append(Chart(f"{name}-{axis}", f"{metric.title} {words}", caption, traces, layout))
        if metric is VAL_LOSS:
            charts += _close_chart(rows, looks, reference)
    return charts


def _mark_traces(marks: Sequence[series.Mark], looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Open diamonds at early divergence and failure."""
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [mark.x],
            "y": [mark.y],
            "name": escape(mark.label),
            "meta": {"row": mark.label},
            "cliponaxis": False,
            "marker": {
                "color": colour(looks[mark.label]),
                "symbol": "diamond-tall-open",
                "size": 13,
                "line": {"width": 2.5, "color": colour(looks[mark.label])},
            },
            "hovertemplate": in_template(f"{mark.label}: {mark.text}") + "<extra></extra>",
        }
        for mark in marks
    ]


def in_template(text: str) -> str:
    """A text that stands for itself in one of plotly's templates, where `%{x}` is the value of x."""
    return escape(text).replace("%{", "%&#123;")


def category(text: str) -> str:
    """A text as the name of a category, drawn as it is.

    Plotly keeps categories by name in a JavaScript object, and can't tell one from what every such object has; the
    first letter of these comes by its number.

    >>> category("a<b"), category("constructor")
    ('a&lt;b', '&#99;onstructor')
    """
    return f"&#{ord(text[0])};{text[1:]}" if text in OBJECT_HAS else escape(text)


def _close_chart(rows: Sequence[Row], looks: Mapping[str, Look], reference: str | None) -> list[Chart]:
    """The validation loss magnified near the reference, where most rows lie on each other otherwise."""
    lines = series.lines(rows, VAL_LOSS.name)
    limits = series.close_range(lines, reference)
    if limits is None:
        return []
    traces = line_traces(lines, looks, marked=True)
    layout = axes("step", "nats per token") | ranged(limits)
    caption = "Magnified: the scale ends where the reference was after a third of its steps."
    return [Chart("val-close", "Validation loss near the reference", caption, traces, layout, wide=True)]


def stall_chart(rows: Sequence[Row], looks: Mapping[str, Look]) -> Chart | None:
    """The share of weights that a requested update left unmoved, over the steps."""
    lines = series.stall_lines(rows)
    layout = axes("step", "share of weights")
    layout["yaxis"] |= {"range": [-0.02, 1.04], "tickformat": ".0%"}
    traces = line_traces(lines, looks, marked=True)
    return Chart("stall", "Stall by step", "", traces, layout, wide=True) if lines else None


def histogram_charts(results: Sequence[Result], looks: Mapping[str, Look]) -> list[Chart]:
    """Where on the grid each row's weights ended, over the grid's codes."""
    return [
        _histogram_chart(place, histogram, looks[histogram.label])
        for place, histogram in enumerate(series.grid_histograms(results))
    ]


def _histogram_chart(place: int, histogram: series.GridHistogram, look: Look) -> Chart:
    # A filled step line looks like bars without a gap and costs one path instead of one element a code.
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": histogram.positions,
        "y": histogram.shares,
        "customdata": [series.format_value(value) for value in histogram.values],
        "fill": "tozeroy",
        "fillcolor": colour(look),
        "line": {"shape": "hvh", "width": 0, "color": colour(look)},
        "hoveron": "points",
        "hovertemplate": "code %{x}, value %{customdata}: %{y:.2%}<extra></extra>",
    }
    marked, texts = series.position_ticks(histogram, 2)
    layout = axes("value in units of the row's scale", "share of weights")
    reach = 1.02 * max(abs(histogram.positions[0]), abs(histogram.positions[-1]))
    layout["xaxis"] |= {
        "tickvals": marked,
        "ticktext": texts,
        "tickangle": 0,
        "ticklabeloverflow": "allow",
        "showgrid": False,
    }
    layout["xaxis"]["range"] = [-reach, reach]
    layout["yaxis"] |= {"tickformat": "~%", "nticks": 5, "rangemode": "tozero"}
    layers = "1 layer" if histogram.layers == 1 else f"{histogram.layers} layers"
    caption = f"{histogram.weights:,} weights of {layers}, {histogram.format}."
    return Chart(f"weights-{place}", histogram.label, caption, [trace], layout, height=270)


def line_traces(lines: Sequence[series.Line], looks: Mapping[str, Look], *, marked: bool) -> list[dict[str, Any]]:
    """One trace a line; the reference, in ink, comes last and so lies on top."""
    ordered = sorted(lines, key=lambda line: looks[line.label].colour is None)
    return [_trace(line, looks[line.label], marked=marked) for line in ordered]


def _trace(line: series.Line, look: Look, *, marked: bool) -> dict[str, Any]:
    seed = f" · seed {line.seed}" if line.seed is not None else ""
    return {
        "type": "scatter",
        "mode": "lines+markers" if marked and len(line.xs) <= MARKED_POINTS else "lines",
        "x": line.xs,
        "y": line.ys,
        "name": escape(line.label + seed),
        # The shared legend of the page shows and hides traces by their row.
        "meta": {"row": line.label},
        "connectgaps": False,
        "line": {"color": colour(look), "dash": look.dash, "width": look.width},
        "marker": {"color": colour(look), "symbol": look.marker, "size": 5},
        "hovertemplate": "%{fullData.name}<br>%{x:.5~g}: %{y:.4f}<extra></extra>",
    }


def axes(x: str, y: str) -> dict[str, Any]:
    """The layout every chart begins with: two titled axes, no legend of its own."""
    return {
        "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False},
        "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False},
        "showlegend": False,
        "margin": {"l": 8, "r": 20, "t": 10, "b": 8},
        "hovermode": "closest",
    }


def ranged(limits: tuple[float, float] | None) -> dict[str, Any]:
    """The loss axis between two losses; {} leaves the range to plotly."""
    if limits is None:
        return {}
    axis = axes("", "nats per token")["yaxis"]
    return {"yaxis": axis | {"range": list(limits)}}
