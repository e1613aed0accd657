"""The page: sections in one HTML file with data, code and styles, without a network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from nanogpt_bench.report.row_styles import DASHES, THEMES, Style, theme_colours
from nanogpt_bench.report.svg_figures import javascript
from nanogpt_bench.report.vega_spec import CONFIG, Chart, Spec, short

# Only the page's own content may run or be shown: a report from somebody else can't
# contact a server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
# The page uses Vega, with its interpreter, which reads expressions and does not compile
# them.
VEGA = "window.vegaEmbed = vegaEmbed;"
#: characters of a line's name above which it is cut after some lines
LONGEST_NAME = 100
#: a longer legend starts closed
SHORT_LEGEND = 16
#: a cell of a table: its text and its CSS class
Cell = tuple[str, str]


@dataclass(frozen=True)
class Section:
    """A section: its address, title, HTML (with all text escaped) and charts."""

    name: str
    title: str
    body: str
    charts: Sequence[Chart] = field(default=())

    def html(self) -> str:
        return f'<section id="{self.name}"><h2>{escape(self.title)}</h2>{self.body}</section>'


def chart_places(shown: Sequence[Chart]) -> str:
    """Return places for charts, two side by side."""
    if not shown:
        return ""
    return f'<div class="charts">{"".join(map(_figure, shown))}</div>'


def _figure(chart: Chart) -> str:
    least = f";min-width:{chart.least}px" if chart.least else ""
    place = f'<div id="chart-{chart.name}" style="height:{chart.height}px{least}"></div>'
    if chart.least:
        place = f'<div class="scroll">{place}</div>'
    wide = css_class("wide" if chart.wide else "")
    heading = f"<h3>{escape(chart.title)}</h3><figcaption>{escape(chart.caption)}</figcaption>"
    return f"<figure{wide}>{heading}{place}</figure>"


def css_class(name: str) -> str:
    return f' class="{name}"' if name else ""


def table(head: Sequence[Cell], lines: Sequence[Sequence[Cell]], kinds: Sequence[str] = ()) -> str:
    """Return a table that scrolls sideways; `kinds` are the CSS classes of its lines."""
    body = ""
    for kind, line in zip(kinds or [""] * len(lines), lines, strict=True):
        body += f"<tr{css_class(kind)}>{_cells('td', line)}</tr>"
    heading = f"<thead><tr>{_cells('th', head)}</tr></thead>"
    return f'<div class="scroll"><table>{heading}<tbody>{body}</tbody></table></div>'


def _cells(tag: str, cells: Sequence[Cell]) -> str:
    elements = ""
    for place, (text, kind) in enumerate(cells):
        content = escape(text)
        if place == 0 and len(text) > LONGEST_NAME:
            # the name of a line, of which some lines are shown, and all under the pointer
            content = f'<span class="clamp" tabindex="0">{content}</span>'
        elements += f"<{tag}{css_class(kind)}>{content}</{tag}>"
    return elements


def legend(labels: Sequence[str], styles: Mapping[str, Style], charts: Sequence[Chart]) -> str:
    """Return the legend of line charts.

    It has a button per row, which shows and hides that row everywhere.
    """
    drawn: set[str] = set()
    for chart in charts:
        drawn.update(chart.rows)
    keys = "".join(_key(label, styles[label]) for label in labels if label in drawn)
    if not keys:
        return ""
    opened = " open" if len(drawn) <= SHORT_LEGEND else ""
    summary = f"<summary>Rows ({len(drawn)}): press to show or hide</summary>"
    return f'<details class="legend"{opened}>{summary}<div class="keys">{keys}</div></details>'


def _key(label: str, style: Style) -> str:
    dash = " ".join(map(str, DASHES[style.dash]))
    line = (
        '<line x1="0" x2="30" y1="4" y2="4" stroke-width="2.5" '
        f'style="stroke:var({style.variable})" stroke-dasharray="{dash}"/>'
    )
    sample = f'<svg width="30" height="8" aria-hidden="true">{line}</svg>'
    text = escape(label)
    attributes = f'class="key" type="button" aria-pressed="true" data-row="{text}"'
    return f"<button {attributes}>{sample}<span>{text}</span></button>"


def render(title: str, sections: Sequence[Section]) -> str:
    """Return the page as one string of HTML; all text of a run is escaped."""
    charts: list[Chart] = []
    links = ""
    for section in sections:
        charts += section.charts
        links += f'<a href="#{section.name}">{escape(section.title)}</a>'
    body = "".join(section.html() for section in sections)
    style = f"{_theme()}{_asset('page.css')}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1><nav>{links}</nav>{body}</main>\n"
        f'<script id="charts" type="application/json">{_packed(charts)}</script>\n'
        f"<script>{javascript(VEGA)}</script>\n"
        f"<script>{_asset('page.js')}</script>\n</body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _packed(charts: Sequence[Chart]) -> str:
    """Return JSON for a script element, without `<`, `>` and `&`."""
    content = {"config": CONFIG, "charts": [short(_on_page(chart)) for chart in charts]}
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
    """Return layers of which the first with the chart's data follows a drag."""
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
