"""The report: one HTML file that carries its data, its charts' code and its styles, and needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from plotly.offline import get_plotlyjs

from nanogpt_bench.report.packed import packed
from nanogpt_bench.report.palette import COLOURS, INK, SCALES
from nanogpt_bench.report.section import Section
from nanogpt_bench.report.sections import Page, all_sections

RELOAD_SECONDS = 15
# Nothing but what is in the page itself may run or be shown: a report from elsewhere can't call home.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
THEMES = {
    "light": {"page": "#FFFFFF", "shade": "#F3F4F6", "rule": "#D9DCE1", "muted": "#5B616B"},
    "dark": {"page": "#15181D", "shade": "#20242B", "rule": "#3A404A", "muted": "#A3AAB5"},
}
STATE_COLOURS = {"good": ("#00694B", "#4CD1A5"), "bad": ("#B03A00", "#FF9A5C"), "doubt": ("#7A5B00", "#E8C54A")}


def render(page: Page) -> str:
    """The whole page as one string of HTML; every text that a run brings is escaped."""
    sections = all_sections(page)
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
            f'</main>\n<script id="charts" type="application/json">{packed(drawn)}</script>\n',
            f"<script>{get_plotlyjs()}</script>\n<script>{_asset('page.js')}</script>\n</body></html>\n",
        )
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _theme() -> str:
    """The two themes as CSS variables, from the same palette as the pictures."""
    pairs: dict[str, Sequence[str]] = {f"c{i}": pair for i, pair in enumerate(COLOURS)} | {"ink": INK} | STATE_COLOURS
    blocks = []
    for place, theme in enumerate(("light", "dark")):
        colours = THEMES[theme] | {name: pair[place] for name, pair in pairs.items()}
        colours |= {name: " ".join(scale[place]) for name, scale in SCALES.items()}
        blocks.append(":root{" + "".join(f"--{name}:{value};" for name, value in colours.items()) + "}")
    return f"{blocks[0]}@media (prefers-color-scheme: dark){{{blocks[1]}}}\n"


def _header(page: Page, sections: Sequence[Section]) -> str:
    live = f'<p class="live">Still running: this page reloads every {RELOAD_SECONDS} seconds.</p>'
    links = "".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    return f"<h1>{escape(page.title)}</h1>{live if page.running else ''}<nav>{links}</nav>"
