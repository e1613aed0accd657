"""A chart: a description in Vega-Lite, in the colours and dashes of its rows, drawn by
the page or as a picture.

Pictures are some of the page's charts side by side as SVG files, drawn by Vega without
a browser.

A description has its data as columns (an object per line, with lists that `flatten`
expands) and its colours by name, as `{"$": "ink"}`; page and pictures insert those of a
light or dark theme. Text of a run is only in the data, never in the name of a field or
in an expression, so that nothing evaluates it.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert

from nanogpt_bench.report.rows import Row
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text

# Okabe and Ito's set, lightened for a dark page, and three more; (light page, dark
# page).
COLOURS = (
    ("#D55E00", "#F2853D"),
    ("#0072B2", "#56A9E0"),
    ("#009E73", "#33C79B"),
    ("#B8578F", "#E08BBB"),
    ("#E69F00", "#F0E442"),
    ("#1F9BC9", "#7FD0F0"),
    ("#6F4BB0", "#AE92E6"),
    ("#7A6A3A", "#C9B46E"),
    ("#882255", "#D9749F"),
)
INK = ("#1A1A1A", "#F0F0F0")
# A colour scale from below to above, for the light and the dark page.
SCALES = {
    "diverging": (
        ("#08519C", "#7FB3DA", "#F5F5F3", "#F2A07B", "#B2330B"),
        ("#8CCBF8", "#2C6794", "#252A32", "#A4532A", "#FFA46B"),
    )
}
# The order in which rules take colours, so that a rule has the same colour in every
# report.
RULE_ORDER = (
    *(
        "nearest",
        "stochastic",
        "riemannian",
        "stiffness-anneal",
        "master",
        "fp32",
        "muon-stochastic",
        "muon",
    ),
    *("muon-residual8", "stiffness", "bf16-pure", "sgd"),
)
DASHES = {
    "solid": [1, 0],
    "dash": [7, 4],
    "dot": [2, 3],
    "dashdot": [7, 3, 2, 3],
    "longdash": [11, 4],
}
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross")
DASH_ORDER = tuple(DASHES)


@dataclass(frozen=True)
class Style:
    """A row's colour (an index into COLOURS, None for ink), dash, marker and line width
    in pixels.
    """

    colour: int | None
    dash: str
    marker: str
    width: float

    @property
    def variable(self) -> str:
        """The CSS variable of the colour on the page."""
        return "--ink" if self.colour is None else f"--c{self.colour}"


def styles(rows: Sequence[Row], *references: Row | None) -> dict[str, Style]:
    """Return each row's style by label: references in ink, other rows by rule and
    format, different if possible.
    """
    inked = list(dict.fromkeys(row.label for row in references if row is not None))
    formats = list(dict.fromkeys(row.format for row in rows if row.format != "none"))
    chosen: dict[str, Style] = {}
    taken: set[tuple[int, int]] = set()
    for row in rows:
        width = 2.0 if len(row.runs) < 2 else 1.2  # curves of several seeds are close to each other
        if row.label in inked:
            dash = inked.index(row.label) % len(DASH_ORDER)
            chosen[row.label] = Style(None, DASH_ORDER[dash], MARKERS[dash], 0.9 * width)
            continue
        form = formats.index(row.format) if row.format != "none" else 0
        place = (
            RULE_ORDER.index(row.rule) % len(COLOURS)
            if row.rule in RULE_ORDER
            else len(COLOURS) - 1
        )
        colour, dash = _free(place, form % len(DASH_ORDER), taken)
        taken.add((colour, dash))
        chosen[row.label] = Style(colour, DASH_ORDER[dash], MARKERS[dash], width)
    return chosen


def _free(colour: int, dash: int, taken: set[tuple[int, int]]) -> tuple[int, int]:
    """Return the pair if it is free, else another dash, else another colour; the pair
    again if all are taken.
    """
    for c in range(len(COLOURS)):
        for d in range(len(DASH_ORDER)):
            pair = ((colour + c) % len(COLOURS), (dash + d) % len(DASH_ORDER))
            if pair not in taken:
                return pair
    return colour, dash


@dataclass(frozen=True)
class Line:
    """One run's curve under its row's label; None in `ys` is a gap."""

    label: str
    seed: int | None
    xs: list[float]
    ys: list[float | None]


Spec = dict[str, Any]
MARKED_POINTS = 60  # a curve with at most this many points shows them
PERCENT = ".3~p"
DOTTED = {"strokeDash": [2, 3], "strokeWidth": 1.5}


@dataclass(frozen=True)
class Chart:
    """A chart: its name on the page, title and caption (plain text), description, and
    height in pixels.

    `rows` are the rows that the page's legend can hide, `drag` the axes that dragging
    magnifies. On a screen narrower than `least` pixels the chart scrolls sideways.
    """

    name: str
    title: str
    caption: str
    spec: Spec
    height: int = 300
    wide: bool = False
    least: int = 0
    rows: tuple[str, ...] = ()
    drag: str = "xy"

    @property
    def values(self) -> list[dict[str, Any]]:
        """The objects of the chart's data."""
        found: list[dict[str, Any]] = self.spec["data"]["values"]
        return found


def ink(name: int | str | None) -> dict[str, str]:
    """Return a colour by name, which differs by theme: an index of COLOURS, or `ink`,
    `muted`, `page`.
    """
    return {"$": "ink" if name is None else f"c{name}" if isinstance(name, int) else name}


def quantity(
    field: str, title: str | None, ends: Sequence[float] | None = None, /, **more: Any
) -> Spec:
    """Return an axis of numbers, between `ends` if given; `log` and `zero` set its
    scale, `more` the axis.
    """
    scale: Spec = {"zero": more.pop("zero", False)}
    if more.pop("log", False):
        scale = {"type": "log"}
    if ends is not None:
        scale |= {"domain": list(ends), "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": more}


def category(text: str) -> str:
    """Return a text as a name on an axis; not `__proto__`, since Vega has names as keys
    of JavaScript objects.
    """
    return f"{text} " if text == "__proto__" else text


def names(field: str, order: Iterable[str], /, **more: Any) -> Spec:
    """Return an axis of categories, in their order."""
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(order)},
        "axis": more,
    }


def of_row(channel: str, styles: Mapping[str, Style]) -> Spec:
    """Return one channel of rows' styles: `color`, `strokeDash`, `strokeWidth` or
    `shape`.
    """
    value: Callable[[Style], Any] = {
        "color": lambda style: ink(style.colour),
        "strokeDash": lambda style: DASHES[style.dash],
        "strokeWidth": lambda style: style.width,
        "shape": lambda style: style.marker,
    }[channel]
    scale = {"domain": list(styles), "range": [value(style) for style in styles.values()]}
    kind = "ordinal" if channel == "strokeWidth" else "nominal"
    return {"field": "row", "type": kind, "scale": scale, "legend": None}


def lines(
    drawn: Sequence[Line], styles: Mapping[str, Style], x: Spec, y: Spec, *, marked: bool = True
) -> Spec:
    """Return curves in their rows' styles, references on top; `marked` shows the points
    of short curves.
    """
    ordered = sorted(drawn, key=lambda line: styles[line.label].colour is None)
    values = [
        {
            "row": line.label,
            "name": line.label if line.seed is None else f"{line.label} · seed {line.seed}",
            "line": i,
            "few": marked and len(line.xs) <= MARKED_POINTS,
            "x": line.xs,
            "y": line.ys,
        }
        for i, line in enumerate(ordered)
    ]
    return curves(values, styles, x, y)


def curves(values: list[dict[str, Any]], styles: Mapping[str, Style], x: Spec, y: Spec) -> Spec:
    """Return curves from objects with `row`, `name`, `line` (a unique number), `few`,
    and the lists `x` and `y`.
    """
    pen = {channel: of_row(channel, styles) for channel in ("color", "strokeDash", "strokeWidth")}
    line = {
        "mark": {"type": "line", "clip": True},
        "encoding": {"x": x, "y": y, **pen, "detail": {"field": "line", "type": "nominal"}},
    }
    layers = [line]
    if any(value["few"] for value in values):
        dots = {"color": of_row("color", styles), "shape": of_row("shape", styles)}
        point = {"type": "point", "filled": True, "size": 26, "opacity": 1, "clip": True}
        layers.append(
            {
                "transform": [{"filter": "datum.few"}],
                "mark": point,
                "encoding": {"x": x, "y": y, **dots},
            }
        )
    return {"data": {"values": values}, "transform": [{"flatten": ["x", "y"]}], "layer": layers}


def over(values: Sequence[Mapping[str, Any]], mark: Mapping[str, Any], **encoding: Any) -> Spec:
    """Return a layer with its own data."""
    return {"data": {"values": list(values)}, "mark": dict(mark), "encoding": encoding}


def limit_line(at: float, **channel: Spec) -> Spec:
    """Return a dotted line across the chart at a value of the named axis."""
    ((name, axis),) = channel.items()
    return over(
        [{axis["field"]: at}], {"type": "rule", "color": ink("muted"), **DOTTED}, **{name: axis}
    )


DIGITS = 5  # significant digits of a number in a chart's data: more than a screen shows
THEMES = {
    "light": {"page": "#FFFFFF", "shade": "#F3F4F6", "rule": "#D9DCE1", "muted": "#5B616B"},
    "dark": {"page": "#15181D", "shade": "#20242B", "rule": "#3A404A", "muted": "#A3AAB5"},
}
STATE_COLOURS = {
    "good": ("#00694B", "#4CD1A5"),
    "bad": ("#B03A00", "#FF9A5C"),
    "doubt": ("#7A5B00", "#E8C54A"),
}
WORDS = {
    "labelColor": ink("ink"),
    "titleColor": ink("ink"),
    "labelFontSize": 12,
    "titleFontSize": 12,
}
CONFIG: dict[str, Any] = {
    "background": None,
    "font": "system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {
        **WORDS,
        "titleFontWeight": "normal",
        "gridColor": ink("rule"),
        "domainColor": ink("rule"),
        "tickColor": ink("rule"),
        "labelLimit": 130,
    },
    "axisX": {"labelFlush": False, "labelOverlap": "parity", "labelSeparation": 8},
    "legend": {**WORDS, "labelLimit": 280},
    "title": {"color": ink("ink"), "anchor": "start", "fontSize": 14, "limit": 420},
    "text": {"fontSize": 12},
    # Texts for screen readers, of thousands of cells and points, would be most of a
    # picture's file.
    "mark": {"aria": False},
}


def theme_colours(theme: str) -> dict[str, Any]:
    """Return all colours that a description may name, in one theme; a scale is a list
    of them.
    """
    place = list(THEMES).index(theme)
    pairs: Mapping[str, Sequence[Any]] = {f"c{i}": pair for i, pair in enumerate(COLOURS)} | {
        "ink": INK
    }
    pairs = {**pairs, **STATE_COLOURS, **SCALES}
    return {**THEMES[theme], **{name: pair[place] for name, pair in pairs.items()}}


def coloured(node: Any, colours: Mapping[str, Any]) -> Any:
    """Return a description with its colours inserted; its data, which have none, stay
    as they are.

    >>> coloured({"fill": {"$": "ink"}, "data": {"$": "ink"}}, {"ink": "#000"})
    {'fill': '#000', 'data': {'$': 'ink'}}
    """
    if isinstance(node, dict):
        if "$" in node:
            found = colours[node["$"]]
            return list(found) if isinstance(found, tuple) else found
        return {
            key: value if key == "data" else coloured(value, colours) for key, value in node.items()
        }
    return [coloured(value, colours) for value in node] if isinstance(node, list) else node


def short(node: Any) -> Any:
    """Round every float of plain data to the digits that a chart shows, whole numbers
    without a point.

    >>> short({"x": [1.0, 0.123456789, None, 1234567.0]})
    {'x': [1, 0.12346, None, 1234567]}
    """
    if isinstance(node, float):
        return int(node) if node.is_integer() and abs(node) < 2**53 else float(f"{node:.{DIGITS}g}")
    if isinstance(node, dict):
        return {key: short(value) for key, value in node.items()}
    return [short(value) for value in node] if isinstance(node, list | tuple) else node


#: id of the process that started Vega, whose threads do not survive a fork
_process: list[int] = []
# The charts in each picture, by name, without the numbers of several of a kind.
FIGURES: Mapping[str, Sequence[str]] = {
    "loss_curves": ("val-step", "train-step"),
    "stall": ("stall",),
    "gradient_cosine": ("watch-grad-cosine",),
    "learning_rates": ("rates",),
}
ACROSS = 3  # charts side by side
PIXELS, PANEL_PIXELS = 800, 340  # widths of a chart alone and of one of several
FRAME = 60  # pixels of a chart's height for axis and title
LETTER_PIXELS, KEY_PIXELS, LONGEST_LABEL = 7, 60, 36


@cache
def javascript(code: str) -> str:
    """Return Vega's code bundled with `code`; this takes seconds."""
    _start()
    bundle: str = vl_convert.javascript_bundle(code)
    return bundle


def svg(spec: Mapping[str, Any]) -> str:
    """Draw a description as SVG."""
    _start()
    try:
        drawn: str = vl_convert.vegalite_to_svg(dict(spec))
    except ValueError as error:
        raise BenchError(f"a figure can't be drawn: {one_line(error)}") from None
    return drawn


def _start() -> None:
    if _process and _process[0] != os.getpid():
        raise BenchError(
            "charts can't be drawn in a process that was forked from one that drew: start it by "
            "spawn"
        )
    _process[:] = [os.getpid()]


def write_figures(charts: Sequence[Chart], styles: Mapping[str, Style], folder: Path) -> list[Path]:
    """Draw every figure that has charts into `folder` as NAME.svg; return the files
    written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: svg(figure(shown, styles)) for name, shown in chosen(charts).items()}
    return [write_text(folder / f"{name}.svg", text) for name, text in drawn.items()]


def drawn_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have names of figures."""
    names = re.compile(rf"({'|'.join(FIGURES)}|sensitivity(_\d+)?)\.svg")
    return sorted(path for path in folder.glob("*") if names.fullmatch(path.name))


def chosen(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    """Return the charts of each figure by its name; each table of sensitivities is its
    own figure.
    """
    found = {
        name: [
            chart
            for wanted in names
            for chart in charts
            if re.fullmatch(rf"{wanted}(-\d+)?", chart.name)
        ]
        for name, names in FIGURES.items()
    }
    tables = [chart for chart in charts if chart.name.startswith("sensitivity-")]
    found |= {"sensitivity" + (f"_{i}" if i else ""): [chart] for i, chart in enumerate(tables)}
    return {name: shown for name, shown in found.items() if shown}


def figure(shown: Sequence[Chart], styles: Mapping[str, Style]) -> Spec:
    """Return charts side by side as one description, above one legend of their rows."""
    across = min(ACROSS, len(shown))
    width = PIXELS if across == 1 else PANEL_PIXELS
    panels = [
        {
            **chart.spec,
            "title": chart.title,
            "width": _whole(chart, width),
            "height": chart.height - FRAME,
        }
        for chart in shown
    ]
    rows = {row: styles[row] for chart in shown for row in chart.rows}
    whole = {"concat": panels, "columns": across, "spacing": 30}
    parts = [whole, _legend(rows, across * width)] if rows else [whole]
    spec = {"vconcat": parts, "config": CONFIG, "background": "white", "padding": 12}
    found: Spec = coloured(short(spec), theme_colours("light"))
    return found


def _whole(chart: Chart, width: int) -> int:
    """Return the width, for a heat map rounded so that columns are whole pixels:
    blurred edges take bytes.
    """
    columns = len(chart.values[0].get("z", ()))
    return columns * max(1, width // columns) if columns else width


def _legend(styles: Mapping[str, Style], width: int) -> Spec:
    """Return samples of the rows' lines with their names, as many side by side as fit."""
    wide = KEY_PIXELS + LETTER_PIXELS * min(max(map(len, styles)), LONGEST_LABEL)
    columns = max(1, width // wide)
    values = [
        {
            "row": row,
            "x": i % columns * wide,
            "end": i % columns * wide + 36,
            "y": 10 + i // columns * 20,
        }
        for i, row in enumerate(styles)
    ]
    x, y = ({"field": name, "type": "quantitative", "scale": None, "axis": None} for name in "xy")
    pen = {channel: of_row(channel, styles) for channel in ("color", "strokeDash", "strokeWidth")}
    text = {"type": "text", "align": "left", "dx": 6, "limit": wide - 44, "color": ink("ink")}
    return {
        "data": {"values": values},
        "width": width,
        "height": 20 * -(-len(styles) // columns),
        "layer": [
            {"mark": {"type": "rule"}, "encoding": {"x": x, "x2": {"field": "end"}, "y": y, **pen}},
            {
                "mark": text,
                "encoding": {"x": x | {"field": "end"}, "y": y, "text": {"field": "row"}},
            },
        ],
    }
