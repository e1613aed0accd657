"""Parallel coordinates: one line per run across settings and results.

Every axis is vertical, from 0 at its lowest value to 1 at its highest, and all stand
side by side. A run without a value on an axis passes above it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.config.keys import short_names
from nanogpt_bench.report.columns import COLUMNS
from nanogpt_bench.report.results import FIGURES
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import Row, distinguishes_rows, flat, row_runs
from nanogpt_bench.report.vega_spec import (
    LOG_SPAN,
    Chart,
    Spec,
    curves,
    data_layer,
    named_colour,
    quantity,
)
from nanogpt_bench.runs.load import Run
from nanogpt_bench.runs.read import finite

#: the place of a missing value, above the axis
MISSING_PLACE = 1.08
#: characters of a mark's text
LONGEST_MARK = 18
#: axes of settings
MOST_AXES = 5
#: pixels of an axis on a narrow screen
AXIS_PIXELS = 150
# Settings without an axis of their own: format, rule, rate and seed are shown
# otherwise, or the setting names a place.
LEFT_OUT = frozenset(
    {
        "rule",
        "seed",
        "data.seed",
        "model.seed",
        "data.dir",
        "optimizer.lr",
        "optimizer.float_lr",
        "runtime.threads",
    }
)
CAPTION = (
    "One line per run, in its row's colour. A run without a value on an axis, such as a failed "
    "one, passes above that axis."
)
HEADING = {
    "type": "text",
    "fontWeight": "bold",
    "align": "left",
    "limit": 140,
    "color": named_colour("ink"),
}
MARK_TEXT = {"type": "text", "align": "left", "dx": 5, "color": named_colour("ink")}
# An outline in the page's colour, so that no line crosses the text.
MARK_OUTLINE = {
    "type": "text",
    "align": "left",
    "dx": 5,
    "stroke": named_colour("page"),
    "strokeWidth": 4,
    "opacity": 0.85,
}


@dataclass(frozen=True)
class Mark:
    """A text beside an axis, at a height from 0 to 1."""

    height: float
    text: str

    @property
    def short_text(self) -> str:
        if len(self.text) <= LONGEST_MARK:
            return self.text
        return self.text[: LONGEST_MARK - 1] + "…"


@dataclass(frozen=True)
class DrawnAxis:
    """An axis with its marks, and the height of each run on it."""

    name: str
    marks: list[Mark]
    heights: list[float]


def parallel_chart(rows: Sequence[Row], styles: Mapping[str, Style]) -> Chart | None:
    """Return parallel coordinates; None below two runs or three axes."""
    pairs = row_runs(rows)
    axes = _axes([run for _, run in pairs])
    if len(pairs) < 2 or len(axes) < 3:
        return None
    x = _bare_axis("x", (-0.1, len(axes) - 0.4))
    y = _bare_axis("y", (-0.05, MISSING_PLACE + 0.16))
    values = []
    for number, (row, run) in enumerate(pairs):
        line = {
            "row": row.label,
            "name": run.name,
            "line": number,
            "few": False,
            "x": list(range(len(axes))),
            "y": [axis.heights[number] for axis in axes],
        }
        values.append(line)
    spec = curves(values, styles, x, y)
    rules = [{"x": place, "y": 0, "end": 1} for place in range(len(axes))]
    rule = {"type": "rule", "color": named_colour("ink")}
    marks = []
    headings = []
    for place, axis in enumerate(axes):
        headings.append({"x": place, "y": MISSING_PLACE + 0.11, "text": axis.name})
        for mark in axis.marks:
            marks.append({"x": place, "y": mark.height, "text": mark.short_text})
    text = {"x": x, "y": y, "text": {"field": "text"}}
    spec["layer"] = [
        data_layer(rules, rule, x=x, y=y, y2={"field": "end"}),
        *spec["layer"],
        data_layer(marks, MARK_OUTLINE, **text),
        data_layer(marks, MARK_TEXT, **text),
        data_layer(headings, HEADING, **text),
    ]
    return Chart(
        "parallel",
        "All runs across all axes",
        CAPTION,
        spec,
        440,
        wide=True,
        min_width=AXIS_PIXELS * len(axes),
        rows=tuple(dict.fromkeys(row.label for row, _ in pairs)),
    )


def _bare_axis(field: str, ends: tuple[float, float]) -> Spec:
    return quantity(field, None, ends, labels=False, ticks=False, grid=False, domain=False)


def _axes(runs: Sequence[Run]) -> list[DrawnAxis]:
    """Return the axes in which runs differ.

    They are format, rule, rate, settings that vary within a rule and format, results.
    """
    columns: dict[str, list[Any]] = {
        "format": [run.format for run in runs],
        "rule": [run.rule for run in runs],
        "learning rate": [run.summary.get("lr") for run in runs],
    }
    configs = [flat(run.config) for run in runs]
    results = [column.axis for column in COLUMNS if column.axis is not None]
    varying = _varying_settings(runs, configs)[:MOST_AXES]
    names = short_names(varying, taken=[*columns, *(axis.name for axis in results)])
    for key in varying:
        columns[names[key]] = [config.get(key) for config in configs]
    for axis in sorted(results, key=lambda axis: axis.place):
        columns[axis.name] = [FIGURES[axis.figure](run) for run in runs]
    drawn = []
    for name, values in columns.items():
        drawn_axis = _axis(name, values)
        if drawn_axis is not None:
            drawn.append(drawn_axis)
    return drawn


def _varying_settings(runs: Sequence[Run], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which runs of one rule and format differ."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run, config in zip(runs, configs, strict=True):
        groups.setdefault((run.rule, run.format), []).append(config)
    keys: dict[str, None] = {}
    for config in configs:
        keys.update(dict.fromkeys(config))
    varying = []
    for key in keys:
        has_axis = key not in LEFT_OUT and distinguishes_rows(key)
        if has_axis and any(_has_several_values(key, group) for group in groups.values()):
            varying.append(key)
    return varying


def _has_several_values(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return len({str(config.get(key)) for config in configs}) > 1


def _axis(name: str, values: Sequence[Any]) -> DrawnAxis | None:
    """Return an axis of numbers if all values are numbers, else of words.

    It is None if all are equal.
    """
    known = [value for value in values if value is not None]
    if len({str(value) for value in known}) < 2:
        return None
    if any(finite(value) is None for value in known):
        return _axis_of_words(name, values)
    return _axis_of_numbers(name, values, float(min(known)), float(max(known)))


def _axis_of_words(name: str, values: Sequence[Any]) -> DrawnAxis:
    words = list(dict.fromkeys(str(value) for value in values if value is not None))
    heights = {word: place / (len(words) - 1) for place, word in enumerate(words)}
    marks = [Mark(heights[word], word) for word in words]
    places = [MISSING_PLACE if value is None else heights[str(value)] for value in values]
    return DrawnAxis(name, marks, places)


def _axis_of_numbers(name: str, values: Sequence[Any], low: float, high: float) -> DrawnAxis:
    logarithmic = low > 0 and high / low >= LOG_SPAN
    linear_in = math.log if logarithmic else float
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2

    def height_of(value: float) -> float:
        return (linear_in(value) - linear_in(low)) / (linear_in(high) - linear_in(low))

    marks = [Mark(height_of(value), _number_text(value)) for value in (low, middle, high)]
    heights = [MISSING_PLACE if value is None else height_of(float(value)) for value in values]
    return DrawnAxis(name, marks, heights)


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
