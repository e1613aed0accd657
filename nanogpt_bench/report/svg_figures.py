"""Figures: some of the page's charts side by side as SVG files.

Vega draws them without a browser, in this process.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert

from nanogpt_bench.report.row_styles import Style, theme_colours
from nanogpt_bench.report.vega_spec import (
    CHART_CONFIG,
    Chart,
    Spec,
    named_colour,
    round_numbers,
    row_line_channels,
    with_colours,
)
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text

#: id of the process that started Vega, if any; its threads do not survive a fork
_process: list[int] = []
# The charts in each figure, by name, without the numbers of several of a kind.
CHARTS_OF_FIGURES: Mapping[str, Sequence[str]] = {
    "loss_curves": ("val-step", "train-step"),
    "stall": ("stall",),
    "gradient_cosine": ("watch-grad-cosine",),
    "learning_rates": ("rates",),
}
#: the most charts side by side
MOST_COLUMNS = 3
#: width of a chart alone, in pixels
PIXELS = 800
#: width of one chart of several, in pixels
PANEL_PIXELS = 340
#: part of a chart's height for axis and title, in pixels
FRAME = 60
LETTER_PIXELS = 7
#: width of a key of the legend without its name, in pixels
KEY_PIXELS = 60
#: width of the line in a key of the legend, in pixels
SAMPLE_PIXELS = 36
#: letters of a name in the legend
LONGEST_LABEL = 36


@cache
def javascript(code: str) -> str:
    """Return Vega's code bundled with `code`; this takes seconds."""
    _claim_process()
    bundle: str = vl_convert.javascript_bundle(code)
    return bundle


def svg(spec: Mapping[str, Any]) -> str:
    """Draw a description as SVG."""
    _claim_process()
    try:
        drawn: str = vl_convert.vegalite_to_svg(dict(spec))
    except ValueError as error:
        raise BenchError(f"a figure can't be drawn: {one_line(error)}") from None
    return drawn


def _claim_process() -> None:
    """Refuse a process that was forked from one in which Vega runs."""
    if _process and _process[0] != os.getpid():
        raise BenchError(
            "charts can't be drawn in a process that was forked after another drew charts; start "
            "it with the method spawn"
        )
    _process[:] = [os.getpid()]


def write_figures(charts: Sequence[Chart], styles: Mapping[str, Style], folder: Path) -> list[Path]:
    """Draw every figure that has charts into `folder` as NAME.svg; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    # All are drawn before any is written.
    drawn = {}
    for name, panels in figure_charts(charts).items():
        drawn[name] = svg(side_by_side(panels, styles))
    return [write_text(folder / f"{name}.svg", text) for name, text in drawn.items()]


def drawn_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have names of figures."""
    names = re.compile(rf"({'|'.join(CHARTS_OF_FIGURES)}|sensitivity(_\d+)?)\.svg")
    return sorted(path for path in folder.glob("*") if names.fullmatch(path.name))


def figure_charts(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    """Return the charts of each figure by its name.

    Each table of sensitivities is its own figure.
    """
    figures: dict[str, list[Chart]] = {}
    for figure, kinds in CHARTS_OF_FIGURES.items():
        panels = []
        for kind in kinds:
            panels += [chart for chart in charts if re.fullmatch(rf"{kind}(-\d+)?", chart.name)]
        if panels:
            figures[figure] = panels
    tables = [chart for chart in charts if chart.name.startswith("sensitivity-")]
    for number, chart in enumerate(tables):
        figures[f"sensitivity_{number}" if number else "sensitivity"] = [chart]
    return figures


def side_by_side(charts: Sequence[Chart], styles: Mapping[str, Style]) -> Spec:
    """Return charts side by side as one description, above one legend of their rows."""
    columns = min(MOST_COLUMNS, len(charts))
    width = PIXELS if columns == 1 else PANEL_PIXELS
    panels = [_panel(chart, width) for chart in charts]
    parts: list[Spec] = [{"concat": panels, "columns": columns, "spacing": 30}]
    rows: dict[str, Style] = {}
    for chart in charts:
        rows.update({row: styles[row] for row in chart.rows})
    if rows:
        parts.append(_legend(rows, columns * width))
    spec = {"vconcat": parts, "config": CHART_CONFIG, "background": "white", "padding": 12}
    drawn: Spec = with_colours(round_numbers(spec), theme_colours("light"))
    return drawn


def _panel(chart: Chart, width: int) -> Spec:
    return {
        **chart.spec,
        "title": chart.title,
        "width": width,
        "height": chart.height - FRAME,
    }


def _legend(styles: Mapping[str, Style], width: int) -> Spec:
    """Return samples of the rows' lines with their names, as many side by side as fit."""
    longest = max(len(label) for label in styles)
    key_width = KEY_PIXELS + LETTER_PIXELS * min(longest, LONGEST_LABEL)
    columns = max(1, width // key_width)
    values = []
    for number, row in enumerate(styles):
        start = number % columns * key_width
        top = 10 + number // columns * 20
        values.append({"row": row, "x": start, "end": start + SAMPLE_PIXELS, "y": top})
    text = {
        "type": "text",
        "align": "left",
        "dx": 6,
        "limit": key_width - 44,
        "color": named_colour("ink"),
    }
    x = _place("x")
    y = _place("y")
    sample = {"x": x, "x2": {"field": "end"}, "y": y, **row_line_channels(styles)}
    label = {"x": x | {"field": "end"}, "y": y, "text": {"field": "row"}}
    # as many lines as the keys need, rounded up
    lines = -(-len(styles) // columns)
    return {
        "data": {"values": values},
        "width": width,
        "height": 20 * lines,
        "layer": [
            {"mark": {"type": "rule"}, "encoding": sample},
            {"mark": text, "encoding": label},
        ],
    }


def _place(field: str) -> Spec:
    """Return a field whose values are pixels."""
    return {"field": field, "type": "quantitative", "scale": None, "axis": None}
