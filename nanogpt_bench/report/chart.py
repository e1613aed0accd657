"""A chart: one description in Vega-Lite, which the page and the pictures both draw.

A description holds its data as columns (an object a line, with lists that `flatten` spreads out) and its colours by
name, as `{"$": "ink"}`; whoever draws it puts in those of a light or a dark page. What a run says stands in the data
alone, never in the name of a field nor in an expression: nothing evaluates it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.report import series
from nanogpt_bench.report.palette import DASHES, Look

Spec = dict[str, Any]
MARKED_POINTS = 60  # a curve with at most this many points shows them
SHARE = ".3~p"
NUMBER = re.compile(r"[-+0-9.^e]+|-?inf|nan")
DOTTED = {"strokeDash": [2, 3], "strokeWidth": 1.5}


@dataclass(frozen=True)
class Chart:
    """One chart: its place on the page, title and caption (plain text), description, and height in pixels.

    `rows` are those that the page's legend hides; `drag` the axes that a drag magnifies. A chart that can't be read
    below `least` pixels of width scrolls sideways on a screen that is narrower.
    """

    name: str
    title: str
    caption: str
    spec: Spec
    height: int = 300
    wide: bool = False
    least: int = 0
    rows: tuple[str, ...] = ()
    drag: str = "xy"

    @property
    def values(self) -> list[dict[str, Any]]:
        """The objects that the chart draws."""
        found: list[dict[str, Any]] = self.spec["data"]["values"]
        return found


def ink(name: int | str | None) -> dict[str, str]:
    """A colour that differs between a light and a dark page: an entry of the palette, or `ink`, `muted`, `page`."""
    return {"$": "ink" if name is None else f"c{name}" if isinstance(name, int) else name}


def quantity(field: str, title: str | None, ends: Sequence[float] | None = None, /, **more: Any) -> Spec:
    """An axis of numbers, between `ends` if given; `more` is of the axis, but for `log` and `zero`, of its scale."""
    scale: Spec = {"zero": more.pop("zero", False)}
    if more.pop("log", False):
        scale = {"type": "log"}
    if ends is not None:
        scale |= {"domain": list(ends), "nice": False}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": more}


def category(text: str) -> str:
    """A text as a name on an axis; Vega keeps these by name in JavaScript objects, which have a `__proto__` already."""
    return f"{text} " if text == "__proto__" else text


def names(field: str, order: Iterable[str], /, **more: Any) -> Spec:
    """An axis of names that are categories, in their order."""
    return {"field": field, "type": "nominal", "title": None, "scale": {"domain": list(order)}, "axis": more}


def of_row(channel: str, looks: Mapping[str, Look]) -> Spec:
    """How a row looks in one channel: `color`, `strokeDash`, `strokeWidth` or `shape`."""
    value: Callable[[Look], Any] = {
        "color": lambda look: ink(look.colour),
        "strokeDash": lambda look: DASHES[look.dash],
        "strokeWidth": lambda look: look.width,
        "shape": lambda look: look.marker,
    }[channel]
    scale = {"domain": list(looks), "range": [value(look) for look in looks.values()]}
    kind = "ordinal" if channel == "strokeWidth" else "nominal"
    return {"field": "row", "type": kind, "scale": scale, "legend": None}


def lines(
    drawn: Sequence[series.Line],
    looks: Mapping[str, Look],
    x: Spec,
    y: Spec,
    *,
    marked: bool = True,
    step: bool = False,
) -> Spec:
    """Curves in their rows' looks, the references' last and so on top; `marked` those of few points show them."""
    ordered = sorted(drawn, key=lambda line: looks[line.label].colour is None)
    values = [
        {
            "row": line.label,
            "name": line.label if line.seed is None else f"{line.label} · seed {line.seed}",
            "line": i,
            "few": marked and len(line.xs) <= MARKED_POINTS,
            "x": line.xs,
            "y": line.ys,
        }
        for i, line in enumerate(ordered)
    ]
    return curves(values, looks, x, y, step=step)


def curves(values: list[dict[str, Any]], looks: Mapping[str, Look], x: Spec, y: Spec, *, step: bool = False) -> Spec:
    """Curves from objects with `row`, `name`, `line` (a number of its own), `few`, and the lists `x` and `y`."""
    pen = {channel: of_row(channel, looks) for channel in ("color", "strokeDash", "strokeWidth")}
    line = {
        "mark": {"type": "line", "clip": True, **({"interpolate": "step"} if step else {})},
        "encoding": {"x": x, "y": y, **pen, "detail": {"field": "line", "type": "nominal"}},
    }
    layers = [line]
    if any(value["few"] for value in values):
        dots = {"color": of_row("color", looks), "shape": of_row("shape", looks)}
        point = {"type": "point", "filled": True, "size": 26, "opacity": 1, "clip": True}
        layers.append({"transform": [{"filter": "datum.few"}], "mark": point, "encoding": {"x": x, "y": y, **dots}})
    return {"data": {"values": values}, "transform": [{"flatten": ["x", "y"]}], "layer": layers}


def over(values: Sequence[Mapping[str, Any]], mark: Mapping[str, Any], **encoding: Any) -> Spec:
    """A layer with data of its own."""
    return {"data": {"values": list(values)}, "mark": dict(mark), "encoding": encoding}


def limit_line(at: float, **channel: Spec) -> Spec:
    """A dotted line across the chart at a value of the axis that is named."""
    ((name, axis),) = channel.items()
    return over([{axis["field"]: at}], {"type": "rule", "color": ink("muted"), **DOTTED}, **{name: axis})


def labelled(places: Sequence[float], numbers: Sequence[str]) -> Spec:
    """Ticks of an axis at some places, under other numbers; these stand in an expression and so may be nothing else.

    Raises:
        ValueError: one of `numbers` is something else.
    """
    if not all(map(NUMBER.fullmatch, numbers)):
        raise ValueError(f"{numbers = }: expected numbers")
    texts = {f"{place:g}": number for place, number in zip(places, numbers, strict=True)}
    return {"values": list(places), "labelExpr": f"{json.dumps(texts)}[datum.value]"}
