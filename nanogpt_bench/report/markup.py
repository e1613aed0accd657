"""HTML of the page: sections, places for charts, legends and tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from nanogpt_bench.report.chart import DASHES, Chart, Look

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
    """Return places for charts, two abreast."""
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
    body = "".join(f"<tr{css_class(kind)}>{_cells('td', line)}</tr>" for kind, line in zip(classes, lines, strict=True))
    return f'<div class="scroll"><table><thead><tr>{_cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(tag: str, cells: Sequence[Cell]) -> str:
    return "".join(f"<{tag}{css_class(kind)}>{escape(text)}</{tag}>" for text, kind in cells)


def legend(labels: Sequence[str], looks: Mapping[str, Look], charts: Sequence[Chart]) -> str:
    """Return the legend of line charts: a button per row, which shows and hides that row everywhere."""
    drawn = {row for chart in charts for row in chart.rows}
    keys = "".join(_key(label, looks[label]) for label in labels if label in drawn)
    if not keys:
        return ""
    opened = " open" if len(drawn) <= SHORT_LEGEND else ""
    return (
        f'<details class="legend"{opened}><summary>Rows ({len(drawn)}): press to show or hide</summary>'
        f'<div class="keys">{keys}</div></details>'
    )


def _key(label: str, look: Look) -> str:
    dash = " ".join(map(str, DASHES[look.dash]))
    sample = (
        '<svg width="30" height="8" aria-hidden="true"><line x1="0" x2="30" y1="4" y2="4" stroke-width="2.5" '
        f'style="stroke:var({look.variable})" stroke-dasharray="{dash}"/></svg>'
    )
    text = escape(label)
    return (
        f'<button class="key" type="button" aria-pressed="true" data-row="{text}">{sample}<span>{text}</span></button>'
    )
