"""The report: one HTML file that carries its data, its charts' code and its styles, and needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources

from nanogpt_bench.report import figures
from nanogpt_bench.report.chart import CONFIG, THEMES, Chart, Spec, short, theme_colours
from nanogpt_bench.report.markup import Section
from nanogpt_bench.report.sections import Page

RELOAD_SECONDS = 15
# Nothing but what is in the page itself may run or be shown: a report from elsewhere can't call home.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# Of Vega's code the page uses what draws, and the interpreter that reads expressions instead of compiling them.
VEGA = "window.vegaEmbed = vegaEmbed;"


def render(page: Page, sections: Sequence[Section]) -> str:
    """The whole page as one string of HTML; every text that a run brings is escaped."""
    drawn = [chart for section in sections for chart in section.charts]
    reload = f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">' if page.running else ""
    return "".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark">{reload}',
            f"<title>{escape(page.title)}</title><style>{_theme()}{_asset('page.css')}</style></head>\n<body><main>",
            _header(page, sections),
            *(section.html() for section in sections),
            f'</main>\n<script id="charts" type="application/json">{_packed(drawn)}</script>\n',
            f"<script>{_vega()}</script>\n<script>{_asset('page.js')}</script>\n</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _vega() -> str:
    """The code that draws the charts; putting it together takes seconds."""
    return figures.javascript(VEGA)


def _packed(charts: Sequence[Chart]) -> str:
    """JSON that can stand inside a script element: no `<`, `>` or `&` is left in it."""
    content = {"config": CONFIG, "charts": [short(_on_page(chart)) for chart in charts]}
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _on_page(chart: Chart) -> Spec:
    """A chart as wide as its place, whose rows can be hidden and whose axes take what a drag magnifies."""
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
        select = {"type": "interval", "encodings": list(chart.drag), "translate": False, "zoom": False, "clear": False}
        first = next(i for i, layer in enumerate(spec["layer"]) if "data" not in layer)
        dragged = {**spec["layer"][first], "params": [{"name": "zoom", "select": select, "bind": "scales"}]}
        spec["layer"] = [*spec["layer"][:first], dragged, *spec["layer"][first + 1 :]]
    return {"name": chart.name, "rows": chart.rows, "drag": chart.drag, "spec": spec}


def _hiding(view: Spec) -> Spec:
    """A view whose own data, if they tell of rows, leave out those that are hidden."""
    if "row" not in next(iter(view.get("data", {}).get("values", ())), ()):
        return view
    return view | {"transform": [{"filter": "indexof(hidden, datum.row) < 0"}, *view.get("transform", ())]}


def _theme() -> str:
    """The two themes as CSS variables, from the same palette as the pictures."""
    blocks = [
        ":root{" + "".join(f"--{name}:{_css(value)};" for name, value in theme_colours(theme).items()) + "}"
        for theme in THEMES
    ]
    return f"{blocks[0]}@media (prefers-color-scheme: dark){{{blocks[1]}}}\n"


def _css(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _header(page: Page, sections: Sequence[Section]) -> str:
    live = f'<p class="live">Still running: this page reloads every {RELOAD_SECONDS} seconds.</p>'
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    return f"<h1>{escape(page.title)}</h1>{live if page.running else ''}<nav>{links}</nav>"
