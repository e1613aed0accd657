"""The charts as one small JSON text: what many traces share is written once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from nanogpt_bench.report.charts import Chart

DIGITS = 5  # of a number in the charts' data: more than a screen can show
# What a trace has of its own; the rest is its style, which it shares with the same row's traces in other charts.
OWN = ("x", "y", "z", "name", "text", "customdata", "labels")


def packed(charts: Iterable[Chart]) -> str:
    """JSON that can stand inside a script element: no `<`, `>` or `&` is left in it.

    {"styles": [...], "xs": [...], "charts": [...]}, where a trace names its style and its x by their places.
    """
    styles, xs = _Pool(), _Pool()
    figures = [_packed(chart.figure(), styles, xs) for chart in charts]
    text = _text({"styles": styles.entries, "xs": xs.entries, "charts": figures})
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Pool:
    """Distinct values by their JSON, in order of first appearance."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        place = self._places.setdefault(_text(value), len(self.entries))
        if place == len(self.entries):
            self.entries.append(value)
        return place


def _packed(figure: dict[str, Any], styles: _Pool, xs: _Pool) -> dict[str, Any]:
    return figure | {"layout": short(figure["layout"]), "traces": [_trace(t, styles, xs) for t in figure["traces"]]}


def _trace(trace: dict[str, Any], styles: _Pool, xs: _Pool) -> dict[str, Any]:
    own = {key: short(trace[key]) for key in OWN if key in trace}
    style = {key: value for key, value in trace.items() if key not in OWN}
    return own | {"x": xs.place(own["x"]), "style": styles.place(short(style))}


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


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
