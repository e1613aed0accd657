"""Figures: some of the page's charts side by side as SVG files, drawn by Vega without a browser.

Vega runs JavaScript in threads of its own, which do not survive a fork of the process.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from nanogpt_bench.report.chart import CONFIG, Chart, Look, Spec, coloured, ink, of_row, short, theme_colours
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text

_process: list[int] = []
"""The process that started Vega."""
# The charts of each file by name, without the numbers of several of a kind.
FIGURES: Mapping[str, Sequence[str]] = {
    "loss_curves": ("val-step", "train-step"),
    "stall": ("stall",),
    "gradient_cosine": ("watch-grad-cosine",),
    "learning_rates": ("rates",),
}
ACROSS = 3  # charts beside each other
PIXELS, PANEL_PIXELS = 800, 340  # widths of a chart alone and of one of several
FRAME = 60  # pixels of a chart's height for axis and title
LETTER_PIXELS, KEY_PIXELS, LONGEST_LABEL = 7, 60, 36


def javascript(code: str) -> str:
    """Return Vega's code bundled with `code`; this takes seconds."""
    _start()
    bundle: str = vl_convert.javascript_bundle(code)
    return bundle


def svg(spec: Mapping[str, Any]) -> str:
    """Draw a description as SVG.

    Raises:
        BenchError: this process was forked from one that drew, or Vega refuses the description.
    """
    _start()
    try:
        drawn: str = vl_convert.vegalite_to_svg(dict(spec))
    except ValueError as error:
        raise BenchError(f"a figure can't be drawn: {one_line(error)}") from None
    return drawn


def _start() -> None:
    if _process and _process[0] != os.getpid():
        raise BenchError("charts can't be drawn in a process that was forked from one that drew: start it anew (spawn)")
    _process[:] = [os.getpid()]


def write_figures(charts: Sequence[Chart], looks: Mapping[str, Look], folder: Path) -> list[Path]:
    """Draw every figure that has charts into `folder` as NAME.svg; return the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: svg(figure(shown, looks)) for name, shown in chosen(charts).items()}
    return [write_text(folder / f"{name}.svg", text) for name, text in drawn.items()]


def drawn_in(folder: Path) -> list[Path]:
    """Return the files of a folder that have names of figures."""
    names = re.compile(rf"({'|'.join(FIGURES)}|sensitivity(_\d+)?)\.svg")
    return sorted(path for path in folder.glob("*") if names.fullmatch(path.name))


def chosen(charts: Sequence[Chart]) -> dict[str, list[Chart]]:
    """Return the charts of each figure by its name; each table of sensitivities is its own figure."""
    found = {
        name: [chart for wanted in names for chart in charts if re.fullmatch(rf"{wanted}(-\d+)?", chart.name)]
        for name, names in FIGURES.items()
    }
    tables = [chart for chart in charts if chart.name.startswith("sensitivity-")]
    found |= {"sensitivity" + (f"_{i}" if i else ""): [chart] for i, chart in enumerate(tables)}
    return {name: shown for name, shown in found.items() if shown}


def figure(shown: Sequence[Chart], looks: Mapping[str, Look]) -> Spec:
    """Return charts side by side as one description, above one legend of their rows."""
    across = min(ACROSS, len(shown))
    width = PIXELS if across == 1 else PANEL_PIXELS
    panels = [
        {**chart.spec, "title": chart.title, "width": _whole(chart, width), "height": chart.height - FRAME}
        for chart in shown
    ]
    rows = {row: looks[row] for chart in shown for row in chart.rows}
    whole = {"concat": panels, "columns": across, "spacing": 30}
    parts = [whole, _legend(rows, across * width)] if rows else [whole]
    spec = {"vconcat": parts, "config": CONFIG, "background": "white", "padding": 12}
    found: Spec = coloured(short(spec), theme_colours("light"))
    return found


def _whole(chart: Chart, width: int) -> int:
    """Return the width, for a heat map rounded so that its columns are whole pixels: blurred edges cost bytes."""
    columns = len(chart.values[0].get("z", ()))
    return columns * max(1, width // columns) if columns else width


def _legend(looks: Mapping[str, Look], width: int) -> Spec:
    """Return samples of the rows' lines with their names, as many abreast as fit."""
    wide = KEY_PIXELS + LETTER_PIXELS * min(max(map(len, looks)), LONGEST_LABEL)
    columns = max(1, width // wide)
    values = [
        {"row": row, "x": i % columns * wide, "end": i % columns * wide + 36, "y": 10 + i // columns * 20}
        for i, row in enumerate(looks)
    ]
    x, y = ({"field": name, "type": "quantitative", "scale": None, "axis": None} for name in "xy")
    pen = {channel: of_row(channel, looks) for channel in ("color", "strokeDash", "strokeWidth")}
    text = {"type": "text", "align": "left", "dx": 6, "limit": wide - 44, "color": ink("ink")}
    return {
        "data": {"values": values},
        "width": width,
        "height": 20 * -(-len(looks) // columns),
        "layer": [
            {"mark": {"type": "rule"}, "encoding": {"x": x, "x2": {"field": "end"}, "y": y, **pen}},
            {"mark": text, "encoding": {"x": x | {"field": "end"}, "y": y, "text": {"field": "row"}}},
        ],
    }
