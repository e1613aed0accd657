"""The page: sections in one HTML file with data, code and styles, which needs no
network.
"""

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
SHORT_LEGEND = 16  # a longer legend starts closed
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
    return (
        f"<figure{css_class('wide' if chart.wide else '')}><h3>{escape(chart.title)}</h3>"
        f"<figcaption>{escape(chart.caption)}</figcaption>{place}</figure>"
    )


def css_class(name: str) -> str:
    return f' class="{name}"' if name else ""


def table(head: Sequence[Cell], lines: Sequence[Sequence[Cell]], kinds: Sequence[str] = ()) -> str:
    """Return a table that scrolls sideways; `kinds` are the CSS classes of its lines."""
    classes = kinds or [""] * len(lines)
    body = "".join(
        f"<tr{css_class(kind)}>{_cells('td', line)}</tr>"
        for kind, line in zip(classes, lines, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{_cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(tag: str, cells: Sequence[Cell]) -> str:
    written = [escape(text) for text, _ in cells]
    if cells and len(cells[0][0]) > LONGEST_NAME:
        # the name of a line, of which some lines are shown, and all under the pointer
        written[0] = f'<span class="clamp" tabindex="0">{written[0]}</span>'
    return "".join(
        f"<{tag}{css_class(kind)}>{text}</{tag}>"
        for text, (_, kind) in zip(written, cells, strict=True)
    )


def legend(labels: Sequence[str], styles: Mapping[str, Style], charts: Sequence[Chart]) -> str:
    """Return the legend of line charts: a button per row, which shows and hides that
    row everywhere.
    """
    drawn = {row for chart in charts for row in chart.rows}
    keys = "".join(_key(label, styles[label]) for label in labels if label in drawn)
    if not keys:
        return ""
    opened = " open" if len(drawn) <= SHORT_LEGEND else ""
    return (
        f'<details class="legend"{opened}><summary>Rows ({len(drawn)}): press to show or '
        f'hide</summary><div class="keys">{keys}</div></details>'
    )


def _key(label: str, style: Style) -> str:
    dash = " ".join(map(str, DASHES[style.dash]))
    sample = (
        '<svg width="30" height="8" aria-hidden="true"><line x1="0" x2="30" y1="4" y2="4" '
        'stroke-width="2.5" '
        f'style="stroke:var({style.variable})" stroke-dasharray="{dash}"/></svg>'
    )
    text = escape(label)
    return f'<button class="key" type="button" aria-pressed="true" data-row="{text}">{sample}<span>{text}</span></button>'


def render(title: str, sections: Sequence[Section]) -> str:
    """Return the page as one string of HTML; all text of a run is escaped."""
    drawn = [chart for section in sections for chart in section.charts]
    links = "".join(
        f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections
    )
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title><style>{_theme()}{_asset('page.css')}</style></head>\n<body><main>",
            f"<h1>{escape(title)}</h1><nav>{links}</nav>",
            *(section.html() for section in sections),
            f'</main>\n<script id="charts" type="application/json">{_packed(drawn)}</script>\n',
            f"<script>{javascript(VEGA)}</script>\n<script>{_asset('page.js')}</script>\n</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _packed(charts: Sequence[Chart]) -> str:
    """Return JSON for a script element, without `<`, `>` and `&`."""
    content = {"config": CONFIG, "charts": [short(_on_page(chart)) for chart in charts]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _on_page(chart: Chart) -> Spec:
    """Return a chart as wide as its place, with rows that can be hidden and axes that
    dragging magnifies.
    """
    spec = {
        **chart.spec,
        "width": "container",
        "height": chart.height,
        "autosize": {"type": "fit", "contains": "padding"},
    }
    if chart.rows:
        spec |= _hiding(spec) | {"params": [{"name": "hidden", "value": []}]}
        spec["layer"] = [_hiding(layer) for layer in spec["layer"]]
    if chart.drag:
        select = {
            "type": "interval",
            "encodings": list(chart.drag),
            "translate": False,
            "zoom": False,
            "clear": False,
        }
        first = next(i for i, layer in enumerate(spec["layer"]) if "data" not in layer)
        dragged = {
            **spec["layer"][first],
            "params": [{"name": "zoom", "select": select, "bind": "scales"}],
        }
        spec["layer"] = [*spec["layer"][:first], dragged, *spec["layer"][first + 1 :]]
    return {"name": chart.name, "rows": chart.rows, "drag": chart.drag, "spec": spec}


def _hiding(view: Spec) -> Spec:
    """Return a view that leaves out hidden rows, if its own data are of rows."""
    if "row" not in next(iter(view.get("data", {}).get("values", ())), ()):
        return view
    return view | {
        "transform": [{"filter": "indexof(hidden, datum.row) < 0"}, *view.get("transform", ())]
    }


def _theme() -> str:
    """Both themes as CSS variables, from the palette of the pictures."""
    blocks = []
    for theme in THEMES:
        texts = {
            n: v if isinstance(v, str) else " ".join(v) for n, v in theme_colours(theme).items()
        }
        blocks.append(":root{" + "".join(f"--{name}:{text};" for name, text in texts.items()) + "}")
    return f"{blocks[0]}@media (prefers-color-scheme: dark){{{blocks[1]}}}\n"
