"""What the page and the pictures have in common: Vega's settings, the colours of the themes, and small numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanogpt_bench.report.chart import ink
from nanogpt_bench.report.palette import COLOURS, INK, SCALES

DIGITS = 5  # of a number in the charts' data: more than a screen can show
THEMES = {
    "light": {"page": "#FFFFFF", "shade": "#F3F4F6", "rule": "#D9DCE1", "muted": "#5B616B"},
    "dark": {"page": "#15181D", "shade": "#20242B", "rule": "#3A404A", "muted": "#A3AAB5"},
}
STATE_COLOURS = {"good": ("#00694B", "#4CD1A5"), "bad": ("#B03A00", "#FF9A5C"), "doubt": ("#7A5B00", "#E8C54A")}
WORDS = {"labelColor": ink("ink"), "titleColor": ink("ink"), "labelFontSize": 12, "titleFontSize": 12}
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
    # What a screen reader would say of each of thousands of cells and points is most of a picture's file.
    "mark": {"aria": False},
}


def theme_colours(theme: str) -> dict[str, Any]:
    """Every colour that a description may name, in one theme; a scale is a list of them."""
    place = list(THEMES).index(theme)
    pairs: Mapping[str, Sequence[Any]] = {f"c{i}": pair for i, pair in enumerate(COLOURS)} | {"ink": INK}
    pairs = {**pairs, **STATE_COLOURS, **SCALES}
    return {**THEMES[theme], **{name: pair[place] for name, pair in pairs.items()}}


def coloured(node: Any, colours: Mapping[str, Any]) -> Any:
    """A description with its colours put in; its data, which hold none, as they are.

    >>> coloured({"fill": {"$": "ink"}, "data": {"$": "ink"}}, {"ink": "#000"})
    {'fill': '#000', 'data': {'$': 'ink'}}
    """
    if isinstance(node, dict):
        if "$" in node:
            found = colours[node["$"]]
            return list(found) if isinstance(found, tuple) else found
        return {key: value if key == "data" else coloured(value, colours) for key, value in node.items()}
    return [coloured(value, colours) for value in node] if isinstance(node, list) else node


def short(node: Any) -> Any:
    """Plain data with every float rounded to the digits a chart can show, whole numbers without a point.

    >>> short({"x": [1.0, 0.123456789, None, 1234567.0]})
    {'x': [1, 0.12346, None, 1234567]}
    """
    if isinstance(node, float):
        return int(node) if node.is_integer() and abs(node) < 2**53 else float(f"{node:.{DIGITS}g}")
    if isinstance(node, dict):
        return {key: short(value) for key, value in node.items()}
    return [short(value) for value in node] if isinstance(node, list | tuple) else node
