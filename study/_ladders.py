"""The gap by length, by size of the data or of the model.

A ladder is such a number, and a rung one value of it. Rows that differ in that number
alone have one label without it, and make one line of the table and of the chart.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from nanogpt_bench.report.paired import Difference, difference_text
from nanogpt_bench.report.results import Result, reference_name
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import loss_unit
from nanogpt_bench.report.tables import run_heading
from nanogpt_bench.report.vega_spec import (
    Chart,
    curves,
    data_layer,
    limit_line,
    quantity,
    row_channel,
)
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.errors import one_line

#: distance in octaves between the points of two rows at the same number
APART = 0.03


@dataclass(frozen=True)
class Ladder:
    """A number by which rows differ."""

    name: str
    #: title of the chart
    title: str
    unit: str
    #: reads the number of a run
    number_of: Callable[[Run], Any]
    #: patterns of its spelling in labels; the first applies that keeps rows apart
    spellings: tuple[re.Pattern[str], ...]
    #: heading of the column with the first number whose interval excludes 0; "" for no
    #: such column
    appearance_heading: str = ""


def _data_size(run: Run) -> Any:
    data = run.config.get("data")
    return data.get("train_tokens") if isinstance(data, Mapping) else None


LADDERS = (
    Ladder(
        "length",
        "Gap by length",
        "steps",
        lambda run: run.number("steps_planned"),
        (re.compile(r" ?max_steps=\d+"),),
    ),
    Ladder(
        "data",
        "Gap by size of the data",
        "tokens",
        _data_size,
        (re.compile(r" ?(train_tokens|max_steps)=\d+"), re.compile(r" ?train_tokens=\d+")),
        "gap appears at",
    ),
    Ladder(
        "size",
        "Gap by size of the model",
        "parameters",
        lambda run: run.number("parameters"),
        (re.compile(r" ?(n_embd|n_layer|n_head|size)=[\w.]+"),),
    ),
)

Rungs = Mapping[int, Result]
"""The results of one line, by number."""


def ladder_results(ladder: Ladder, results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return the rungs of each line that has several, by label without the number.

    References have no gap and are left out.
    """
    numbered = []
    for result in results:
        number = _number_of_row(ladder, result)
        if number is not None and result.difference is not None:
            numbered.append((int(number), result))
    lines: dict[str, dict[int, Result]] = {}
    for spelling in ladder.spellings:
        lines = {}
        for number, result in numbered:
            label = spelling.sub("", result.row.label)
            lines.setdefault(label, {})[number] = result
        if sum(map(len, lines.values())) == len(numbered):
            break
    return {label: rungs for label, rungs in lines.items() if len(rungs) > 1}


def _number_of_row(ladder: Ladder, result: Result) -> Any:
    numbers = map(ladder.number_of, result.row.runs)
    return next(filter(None, numbers), None)


def appearance(rungs: Rungs) -> int | None:
    """Return the first number at which the interval of the difference excludes 0."""
    for number in sorted(rungs):
        paired = rungs[number].difference
        if paired is not None and paired.is_found:
            return number
    return None


def cells_of(ladder: Ladder, lines: Mapping[str, Rungs]) -> list[list[str]]:
    """Return the table's lines, the heading first.

    There is a line per row and a column per number, with differences in nats.
    """
    numbers = _numbers(lines)
    results = list(chain.from_iterable(rungs.values() for rungs in lines.values()))
    heading = [run_heading(results), *(f"{number:,} {ladder.unit}" for number in numbers)]
    if ladder.appearance_heading:
        heading.append(ladder.appearance_heading)
    table = [heading]
    for label, rungs in lines.items():
        line = [one_line(label)]
        for number in numbers:
            line.append(difference_text(rungs[number].difference) if number in rungs else "-")
        if ladder.appearance_heading:
            first = appearance(rungs)
            line.append("-" if first is None else f"{first:,}")
        table.append(line)
    return table


def _numbers(lines: Mapping[str, Rungs]) -> list[int]:
    return sorted(set().union(*lines.values()))


def line_styles(
    ladder: Ladder, results: Sequence[Result], styles: Mapping[str, Style]
) -> dict[str, Style]:
    """Return each line's style by its label: that of the row at its first number."""
    styles_of_lines = {}
    for label, rungs in ladder_results(ladder, results).items():
        first = next(iter(rungs.values()))
        styles_of_lines[label] = styles[first.row.label]
    return styles_of_lines


class ChartPoint(NamedTuple):
    """A point of the chart."""

    #: its place on the axis, a little to the side of the number
    x: float
    number: int
    difference: Difference


def ladder_chart(
    ladder: Ladder, results: Sequence[Result], styles: Mapping[str, Style]
) -> Chart | None:
    """Return the paired differences by number, with their 95% intervals as bars.

    Returns None if no row has two numbers.
    """
    lines = ladder_results(ladder, results)
    if not lines:
        return None
    values, bars, rings = [], [], []
    for place, (label, rungs) in enumerate(lines.items()):
        points = _chart_points(rungs, place - (len(lines) - 1) / 2)
        values.append(
            {
                "row": label,
                "name": label,
                "line": place,
                "few": True,
                "x": [point.x for point in points],
                "y": [point.difference.mean for point in points],
            }
        )
        first = appearance(rungs) if ladder.appearance_heading else None
        for point in points:
            paired = point.difference
            text = f"{label}, {point.number:,} {ladder.unit}: {difference_text(paired)}"
            words = {"row": label, "text": text, "x": point.x}
            if paired.low is not None:
                bars.append({**words, "low": paired.low, "high": paired.high})
            if point.number == first:
                rings.append({**words, "y": paired.mean})
    numbers = _numbers(lines)
    x = quantity(
        "x",
        ladder.unit,
        (numbers[0] / 1.25, numbers[-1] * 1.25),
        log=True,
        values=numbers,
        format=",",
        labelOverlap=False,
        grid=False,
    )
    y = quantity("y", loss_unit(result.row for result in results), zero=True)
    line_styles_by_label = line_styles(ladder, results, styles)
    spec = curves(values, line_styles_by_label, x, y)
    colour = row_channel("color", line_styles_by_label)
    tooltip = {"field": "text"}
    if bars:
        bar = {"type": "rule", "strokeWidth": 1.5, "clip": True}
        interval = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
        spec["layer"].append(data_layer(bars, bar, x=x, **interval, color=colour, tooltip=tooltip))
    if rings:
        ring = {"type": "point", "filled": False, "size": 180, "strokeWidth": 2, "clip": True}
        spec["layer"].append(data_layer(rings, ring, x=x, y=y, color=colour, tooltip=tooltip))
    spec["layer"].append(limit_line(0.0, y=y))
    title = f"Gap to {reference_name(results)} by {ladder.title.removeprefix('Gap by ')}"
    return Chart(ladder.name, title, _caption(ladder), spec, 400, wide=True, rows=tuple(lines))


def _chart_points(rungs: Rungs, offset: float) -> list[ChartPoint]:
    """Return the points of a line.

    Lines stand side by side on the logarithmic axis, so that no bar hides another.
    """
    points = []
    for number in sorted(rungs):
        paired = rungs[number].difference
        if paired is not None:
            points.append(ChartPoint(number * 2 ** (APART * offset), number, paired))
    return points


def _caption(ladder: Ladder) -> str:
    caption = (
        "Paired difference of final validation losses and its 95% interval;"
        " a point alone is a hint of one seed."
    )
    if ladder.appearance_heading:
        caption += " Ringed: the first size whose interval leaves 0 out."
    return caption
