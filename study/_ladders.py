"""The gap by length, by size of the data or of the model: rows that differ in that
number alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.report.paired import difference_text
from nanogpt_bench.report.results import Result, reference_name
from nanogpt_bench.report.row_styles import Style
from nanogpt_bench.report.rows import loss_unit
from nanogpt_bench.report.tables import run_heading
from nanogpt_bench.report.vega_spec import Chart, curves, limit_line, of_row, over, quantity
from nanogpt_bench.runs.load import Run
from nanogpt_bench.system.errors import one_line

#: distance in octaves between the points of two rows at the same number
APART = 0.03


@dataclass(frozen=True)
class Ladder:
    """A number by which rows differ: its name, its value in a run, and its spelling in
    labels.
    """

    name: str
    #: title of the chart
    title: str
    unit: str
    of: Callable[[Run], Any]
    #: patterns in labels; the first applies that keeps rows apart
    spelt: tuple[re.Pattern[str], ...]
    #: heading of the column with the first number whose interval excludes 0; "" for no
    #: such column
    appears: str = ""


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

Rungs = Mapping[str, Mapping[int, Result]]
"""Results by label without the number, then by number."""


def climbed(ladder: Ladder, results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return the results at every number, by label without the number, of rows with two
    numbers or more.

    References have no gap and are left out.
    """
    known = [
        (result, next(filter(None, map(ladder.of, result.row.runs)), None)) for result in results
    ]
    numbered = [
        (result, int(n)) for result, n in known if n is not None and result.difference is not None
    ]
    for spelt in ladder.spelt:
        found: dict[str, dict[int, Result]] = {}
        for result, number in numbered:
            found.setdefault(spelt.sub("", result.row.label), {})[number] = result
        if sum(map(len, found.values())) == len(numbered):
            break
    return {label: rungs for label, rungs in found.items() if len(rungs) > 1}


def appearance(rungs: Mapping[int, Result]) -> int | None:
    """Return the first number at which the interval of the difference excludes 0; None
    without one.
    """
    for number in sorted(rungs):
        found = rungs[number].difference
        if found is not None and found.is_found:
            return number
    return None


def cells_of(ladder: Ladder, found: Rungs) -> list[list[str]]:
    """Return the table's lines, the heading first: a line per row, a column per number,
    differences in nats.
    """
    numbers = sorted({number for row in found.values() for number in row})
    every = [result for row in found.values() for result in row.values()]
    lines = [[run_heading(every), *(f"{number:,} {ladder.unit}" for number in numbers)]]
    for label, row in found.items():
        cells = (
            difference_text(row[number].difference) if number in row else "-" for number in numbers
        )
        lines.append([one_line(label), *cells])
    if ladder.appears:
        firsts = [ladder.appears, *(appearance(row) for row in found.values())]
        for line, first in zip(lines, firsts, strict=True):
            line.append(first if isinstance(first, str) else "-" if first is None else f"{first:,}")
    return lines


def line_styles(
    ladder: Ladder, results: Sequence[Result], styles: Mapping[str, Style]
) -> dict[str, Style]:
    """Return each line's style by its label: that of the row at its first number."""
    return {
        label: styles[next(iter(row.values())).row.label]
        for label, row in climbed(ladder, results).items()
    }


def ladder_chart(
    ladder: Ladder, results: Sequence[Result], styles: Mapping[str, Style]
) -> Chart | None:
    """Return the paired differences by number, with their 95% intervals as bars; None
    if no row has two numbers.
    """
    found, places = climbed(ladder, results), line_styles(ladder, results, styles)
    if not found:
        return None
    values, bars, firsts = [], [], []
    for at, (label, row) in enumerate(found.items()):
        # Rows stand side by side on the logarithmic axis, so that no bar hides another.
        aside = 2 ** (APART * (at - (len(found) - 1) / 2))
        known = [(number * aside, number, row[number].difference) for number in sorted(row)]
        points = [(x, number, each) for x, number, each in known if each is not None]
        xs, ys = [x for x, _, _ in points], [each.mean for _, _, each in points]
        values.append({"row": label, "name": label, "line": at, "few": True, "x": xs, "y": ys})
        said = [
            {"row": label, "text": f"{label}, {n:,} {ladder.unit}: {difference_text(each)}"}
            for _, n, each in points
        ]
        bars += [
            {**words, "x": x, "low": each.low, "high": each.high}
            for words, (x, _, each) in zip(said, points, strict=True)
            if each.low is not None
        ]
        first = appearance(row) if ladder.appears else None
        firsts += [
            {**words, "x": x, "y": each.mean}
            for words, (x, number, each) in zip(said, points, strict=True)
            if number == first
        ]
    numbers = sorted({number for row in found.values() for number in row})
    ends = (numbers[0] / 1.25, numbers[-1] * 1.25)
    x = quantity(
        "x", ladder.unit, ends, log=True, values=numbers, format=",", labelOverlap=False, grid=False
    )
    y = quantity("y", loss_unit(result.row for result in results), zero=True)
    spec = curves(values, places, x, y)
    bar, colour = {"type": "rule", "strokeWidth": 1.5, "clip": True}, of_row("color", places)
    drawn = {
        "x": x,
        "y": y | {"field": "low"},
        "y2": {"field": "high"},
        "color": colour,
        "tooltip": {"field": "text"},
    }
    ring = {"type": "point", "filled": False, "size": 180, "strokeWidth": 2, "clip": True}
    ringed = {"x": x, "y": y, "color": colour, "tooltip": {"field": "text"}}
    spec["layer"] += [
        *([over(bars, bar, **drawn)] if bars else []),
        *([over(firsts, ring, **ringed)] if firsts else []),
        limit_line(0.0, y=y),
    ]
    title = f"Gap to {reference_name(results)} by {ladder.title.removeprefix('Gap by ')}"
    words = "Paired difference of final validation losses and its 95% interval; a point alone is a lead of one seed."
    if ladder.appears:
        words += " Ringed: the first size whose interval leaves 0 out."
    return Chart(ladder.name, title, words, spec, 400, wide=True, rows=tuple(found))
