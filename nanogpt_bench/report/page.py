"""The page: sections in one HTML file with data, code and styles, without a network.

    sections.py             what a section shows: text, tables, charts
    templates/page.html     the page around the sections
    templates/section_*.html   one per layout of a section
    templates/parts.html    table, legend, places for charts
    page.css, page.js       styles, and what draws the charts and hides rows

Jinja escapes everything that a template inserts. Only the bench's own styles, scripts
and JSON are marked as safe, below.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from nanogpt_bench.report.row_styles import DASHES, THEMES, Style, theme_colours
from nanogpt_bench.report.svg_figures import javascript
from nanogpt_bench.report.vega_spec import CHART_CONFIG, Chart, Spec, round_numbers

# Only the page's own content may run or be shown: a report from somebody else can't
# contact a server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
# POLICY forbids to compile text as code. The page therefore has Vega's interpreter,
# which reads expressions and does not compile them.
VEGA = "window.vegaEmbed = vegaEmbed;"
#: a longer legend starts closed
SHORT_LEGEND = 16


class SectionLayout(StrEnum):
    """How a section is laid out: the name of its template."""

    FACTS = "facts"
    TABLES = "tables"
    CURVES = "curves"
    LISTING = "listing"
    FAILURES = "failures"
    CONFIGS = "configs"


@dataclass(frozen=True)
class PageSection:
    """A section: its address, title, layout, what its template shows, and charts."""

    name: str
    title: str
    layout: SectionLayout
    content: Mapping[str, Any]
    charts: Sequence[Chart] = field(default=())


class Cell(NamedTuple):
    """A cell of a table: its text and its CSS class."""

    text: str
    kind: str = ""


class TableLine(NamedTuple):
    """A line of a table: its cells and its CSS class."""

    cells: Sequence[Cell]
    kind: str = ""


class Table(NamedTuple):
    """A table of the page."""

    head: Sequence[Cell]
    lines: Sequence[TableLine]


class LegendKey(NamedTuple):
    """A row's button in the legend."""

    label: str
    #: the CSS variable of its colour
    variable: str
    #: lengths of dashes and gaps, in pixels, as SVG has them
    dashes: str


class Legend(NamedTuple):
    """The legend of line charts."""

    keys: Sequence[LegendKey] = ()
    is_open: bool = True


def make_legend(
    labels: Sequence[str], styles: Mapping[str, Style], charts: Sequence[Chart]
) -> Legend:
    """Return the legend of the rows that some chart draws, in the order of `labels`."""
    drawn: set[str] = set()
    for chart in charts:
        drawn.update(chart.rows)
    keys = []
    for label in labels:
        if label in drawn:
            style = styles[label]
            keys.append(LegendKey(label, style.variable, " ".join(map(str, DASHES[style.dash]))))
    return Legend(keys, is_open=len(keys) <= SHORT_LEGEND)


def render(title: str, sections: Sequence[PageSection]) -> str:
    """Return the page as one string of HTML."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts: list[Chart] = []
    for section in sections:
        charts += section.charts
    return environment.get_template("page.html").render(
        title=title,
        sections=sections,
        policy=Markup(POLICY),
        style=Markup(_theme() + _asset("page.css")),
        charts_json=Markup(_packed(charts)),
        vega=Markup(javascript(VEGA)),
        script=Markup(_asset("page.js")),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _packed(charts: Sequence[Chart]) -> str:
    """Return JSON for a script element, without `<`, `>` and `&`."""
    content = {
        "config": CHART_CONFIG,
        "charts": [round_numbers(_on_page(chart)) for chart in charts],
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _on_page(chart: Chart) -> Spec:
    """Return a chart as wide as its place.

    Its rows can be hidden, and dragging magnifies its axes.
    """
    spec = {
        **chart.spec,
        "width": "container",
        "height": chart.height,
        "autosize": {"type": "fit", "contains": "padding"},
    }
    if chart.rows:
        spec = _without_hidden_rows(spec)
        spec["params"] = [{"name": "hidden", "value": []}]
        spec["layer"] = [_without_hidden_rows(layer) for layer in spec["layer"]]
    if chart.drag:
        spec["layer"] = _with_zoom(spec["layer"], chart.drag)
    return {"name": chart.name, "rows": chart.rows, "drag": chart.drag, "spec": spec}


def _with_zoom(layers: Sequence[Spec], axes: str) -> list[Spec]:
    """Return layers, with the zoom of a drag in the first with the chart's data."""
    select = {
        "type": "interval",
        "encodings": list(axes),
        "translate": False,
        "zoom": False,
        "clear": False,
    }
    zoom = {"name": "zoom", "select": select, "bind": "scales"}
    place = next(i for i, layer in enumerate(layers) if "data" not in layer)
    zoomed = list(layers)
    zoomed[place] = {**layers[place], "params": [zoom]}
    return zoomed


def _without_hidden_rows(view: Spec) -> Spec:
    """Return a view that leaves out hidden rows, if its own data are of rows."""
    values = view.get("data", {}).get("values", ())
    if not values or "row" not in values[0]:
        return dict(view)
    visible = {"filter": "indexof(hidden, datum.row) < 0"}
    return {**view, "transform": [visible, *view.get("transform", ())]}


def _theme() -> str:
    """Return both themes as CSS variables, from the palette of the pictures."""
    light, dark = (_theme_rule(theme) for theme in THEMES)
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}\n"


def _theme_rule(theme: str) -> str:
    variables = ""
    for name, colour in theme_colours(theme).items():
        text = colour if isinstance(colour, str) else " ".join(colour)
        variables += f"--{name}:{text};"
    return f":root{{{variables}}}"
