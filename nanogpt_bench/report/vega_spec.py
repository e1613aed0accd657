"""Charts as descriptions in Vega-Lite, which the page draws, or `svg_figures` as pictures.

A description has its data as columns (an object per line, with lists that `flatten`
expands) and its colours by name, as `{"$": "ink"}`; page and pictures insert those of a
light or dark theme. Text of a run is only in the data, never in the name of a field or
in an expression, so that nothing evaluates it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.report.row_styles import DASHES, Style

#: a description, or a part of one
Spec = dict[str, Any]
#: a curve with at most this many points shows them
MARKED_POINTS = 60
#: significant digits of a number in a chart's data: more than a screen shows
CHART_DIGITS = 5
#: if positive values span this factor, a linear axis would hide the small ones
LOG_SPAN = 30
PERCENT = ".3~p"
DOTTED = {"strokeDash": [2, 3], "strokeWidth": 1.5}


@dataclass(frozen=True)
class Line:
    """One run's curve under its row's label; None in `ys` is a gap."""

    label: str
    seed: int | None
    xs: list[float]
    ys: list[float | None]


@dataclass(frozen=True)
class Chart:
    """A chart with its place on the page."""

    name: str
    #: plain text, as the caption
    title: str
    caption: str
    spec: Spec
    #: pixels
    height: int = 300
    wide: bool = False
    #: on a screen narrower than so many pixels the chart scrolls sideways
    min_width: int = 0
    #: the rows that the page's legend can hide
    rows: tuple[str, ...] = ()
    #: the axes that dragging magnifies
    drag: str = "xy"

    @property
    def values(self) -> list[dict[str, Any]]:
        """The objects of the chart's data."""
        values: list[dict[str, Any]] = self.spec["data"]["values"]
        return values


def named_colour(name: int | str | None) -> dict[str, str]:
    """Return the mark of a colour, for which a theme's colour is inserted later.

    The name is an index of COLOURS, or `ink` (also None), `muted`, `page` and so on.
    """
    if name is None:
        return {"$": "ink"}
    return {"$": f"c{name}" if isinstance(name, int) else name}


def quantity(
    field: str, title: str | None, ends: Sequence[float] | None = None, /, **options: Any
) -> Spec:
    """Return an axis of numbers, between `ends` if given.

    `log` and `zero` set its scale, other options the axis.
    """
    scale: Spec = {"zero": options.pop("zero", False)}
    if options.pop("log", False):
        scale = {"type": "log"}
    if ends is not None:
        scale |= {"domain": list(ends), "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": options}


def category(text: str) -> str:
    """Return a text as a name on an axis.

    It is not `__proto__`, since Vega has names as keys of JavaScript objects.
    """
    return f"{text} " if text == "__proto__" else text


def category_axis(field: str, order: Iterable[str], /, **options: Any) -> Spec:
    """Return an axis of categories, in their order."""
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(order)},
        "axis": options,
    }


def _style_colour(style: Style) -> dict[str, str]:
    return named_colour(style.colour)


def _style_dash(style: Style) -> list[int]:
    return DASHES[style.dash]


def _style_width(style: Style) -> float:
    return style.width


def _style_marker(style: Style) -> str:
    return style.marker


#: channels of Vega-Lite, and the part of a style that each shows
CHANNELS: Mapping[str, Callable[[Style], Any]] = {
    "color": _style_colour,
    "strokeDash": _style_dash,
    "strokeWidth": _style_width,
    "shape": _style_marker,
}
#: the channels of a line
LINE_CHANNELS = ("color", "strokeDash", "strokeWidth")


def row_channel(channel: str, styles: Mapping[str, Style]) -> Spec:
    """Return one channel of rows' styles, see `CHANNELS`."""
    part_of = CHANNELS[channel]
    scale = {"domain": list(styles), "range": [part_of(style) for style in styles.values()]}
    kind = "ordinal" if channel == "strokeWidth" else "nominal"
    return {"field": "row", "type": kind, "scale": scale, "legend": None}


def row_line_channels(styles: Mapping[str, Style]) -> Spec:
    """Return the channels of rows' lines."""
    return {channel: row_channel(channel, styles) for channel in LINE_CHANNELS}


def lines(
    drawn: Sequence[Line], styles: Mapping[str, Style], x: Spec, y: Spec, *, marked: bool = True
) -> Spec:
    """Return curves in their rows' styles, references on top.

    `marked` shows the points of short curves.
    """
    ordered = sorted(drawn, key=lambda line: styles[line.label].colour is None)
    values = []
    for number, line in enumerate(ordered):
        name = line.label if line.seed is None else f"{line.label} · seed {line.seed}"
        few = marked and len(line.xs) <= MARKED_POINTS
        value = {
            "row": line.label,
            "name": name,
            "line": number,
            "few": few,
            "x": line.xs,
            "y": line.ys,
        }
        values.append(value)
    return curves(values, styles, x, y)


def curves(values: list[dict[str, Any]], styles: Mapping[str, Style], x: Spec, y: Spec) -> Spec:
    """Return curves from objects with `row`, `name`, `line`, `few`, `x` and `y`.

    `line` is a unique number, `few` tells whether points are shown, and `x` and `y` are
    lists.
    """
    detail = {"field": "line", "type": "nominal"}
    line = {
        "mark": {"type": "line", "clip": True},
        "encoding": {"x": x, "y": y, **row_line_channels(styles), "detail": detail},
    }
    layers = [line]
    if any(value["few"] for value in values):
        layers.append(_points_layer(styles, x, y))
    return {"data": {"values": values}, "transform": [{"flatten": ["x", "y"]}], "layer": layers}


def _points_layer(styles: Mapping[str, Style], x: Spec, y: Spec) -> Spec:
    """Return the markers on curves with few points."""
    return {
        "transform": [{"filter": "datum.few"}],
        "mark": {"type": "point", "filled": True, "size": 26, "opacity": 1, "clip": True},
        "encoding": {
            "x": x,
            "y": y,
            "color": row_channel("color", styles),
            "shape": row_channel("shape", styles),
        },
    }


def data_layer(
    values: Sequence[Mapping[str, Any]], mark: Mapping[str, Any], **encoding: Any
) -> Spec:
    """Return a layer that draws data of its own, over or under the chart's."""
    return {"data": {"values": list(values)}, "mark": dict(mark), "encoding": encoding}


def limit_line(limit: float, **channel: Spec) -> Spec:
    """Return a dotted line across the chart at a value of the named axis."""
    ((name, axis),) = channel.items()
    mark = {"type": "rule", "color": named_colour("muted"), **DOTTED}
    return data_layer([{axis["field"]: limit}], mark, **{name: axis})


LABEL_STYLE = {
    "labelColor": named_colour("ink"),
    "titleColor": named_colour("ink"),
    "labelFontSize": 12,
    "titleFontSize": 12,
}
#: what all charts share
CHART_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **LABEL_STYLE,
        "titleFontWeight": "normal",
        "gridColor": named_colour("rule"),
        "domainColor": named_colour("rule"),
        "tickColor": named_colour("rule"),
        "labelLimit": 130,
    },
    "axisX": {"labelFlush": False, "labelOverlap": "parity", "labelSeparation": 8},
    "legend": {**LABEL_STYLE, "labelLimit": 280},
    "title": {"color": named_colour("ink"), "anchor": "start", "fontSize": 14, "limit": 420},
    "text": {"fontSize": 12},
    # Texts for screen readers, of thousands of cells and points, would be most of a
    # picture's file.
    "mark": {"aria": False},
}


def with_colours(node: Any, colours: Mapping[str, Any]) -> Any:
    """Return a description with its colours inserted.

    Its data, which have none, stay as they are.

    >>> with_colours({"fill": {"$": "ink"}, "data": {"$": "ink"}}, {"ink": "#000"})
    {'fill': '#000', 'data': {'$': 'ink'}}
    """
    if isinstance(node, list):
        return [with_colours(value, colours) for value in node]
    if not isinstance(node, dict):
        return node
    if "$" in node:
        colour = colours[node["$"]]
        return list(colour) if isinstance(colour, tuple) else colour
    return {
        key: value if key == "data" else with_colours(value, colours) for key, value in node.items()
    }


def round_numbers(node: Any) -> Any:
    """Round every float of plain data to the digits that a chart shows.

    Whole numbers have no point.

    >>> round_numbers({"x": [1.0, 0.123456789, None, 1234567.0]})
    {'x': [1, 0.12346, None, 1234567]}
    """
    if isinstance(node, float):
        exact = node.is_integer() and abs(node) < 2**53
        return int(node) if exact else float(f"{node:.{CHART_DIGITS}g}")
    if isinstance(node, dict):
        return {key: round_numbers(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [round_numbers(value) for value in node]
    return node
