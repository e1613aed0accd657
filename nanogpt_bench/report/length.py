"""The gap by length: rows that differ in their number of steps alone, each measured against its own length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from nanogpt_bench.report.chart import Chart, curves, limit_line, of_row, over, quantity
from nanogpt_bench.report.paired import in_words
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Result, loss_unit, reference_name
from nanogpt_bench.report.section import Section, figures, legend
from nanogpt_bench.report.tables import run_heading
from nanogpt_bench.system.errors import one_line

#: octaves of steps between the points of two rows at one length
APART = 0.03
_STEPS = re.compile(r" ?max_steps=\d+")


def by_length(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return, by label without the length, the results of every length in steps; rows of one length are left out.

    A reference has no gap and is left out as well.
    """
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        steps = next((run.number("steps_planned") for run in result.row.runs), None)
        if steps is not None and result.difference is not None:
            found.setdefault(_STEPS.sub("", result.row.label), {})[int(steps)] = result
    return {label: lengths for label, lengths in found.items() if len(lengths) > 1}


def length_cells(found: Mapping[str, Mapping[int, Result]]) -> list[list[str]]:
    """Return the table's lines, the heading first: a line a row, a column a length, differences in nats."""
    lengths = sorted({steps for row in found.values() for steps in row})
    every = [result for row in found.values() for result in row.values()]
    lines = [[run_heading(every), *(f"{steps:,} steps" for steps in lengths)]]
    for label, row in found.items():
        cells = (in_words(row[steps].difference) if steps in row else "-" for steps in lengths)
        lines.append([one_line(label), *cells])
    return lines


def looks_by_length(results: Sequence[Result], looks: Mapping[str, Look]) -> dict[str, Look]:
    """Return the look of every line of the chart by its label: that of the row of its first length."""
    return {label: looks[next(iter(row.values())).row.label] for label, row in by_length(results).items()}


def length_chart(results: Sequence[Result], looks: Mapping[str, Look]) -> Chart | None:
    """The paired difference by length, its 95% interval as a bar; None where no row was trained at several lengths."""
    found, places = by_length(results), looks_by_length(results, looks)
    if not found:
        return None
    values, bars = [], []
    for at, (label, row) in enumerate(found.items()):
        # Beside each other on the logarithmic axis, so that no bar hides another.
        aside = 2 ** (APART * (at - (len(found) - 1) / 2))
        known = [(steps * aside, steps, row[steps].difference) for steps in sorted(row)]
        points = [(x, steps, each) for x, steps, each in known if each is not None]
        xs, ys = [x for x, _, _ in points], [each.mean for _, _, each in points]
        values.append({"row": label, "name": label, "line": at, "few": True, "x": xs, "y": ys})
        bars += [
            {
                "row": label,
                "x": x,
                "low": each.low,
                "high": each.high,
                "text": f"{label}, {n:,} steps: {in_words(each)}",
            }
            for x, n, each in points
            if each.low is not None
        ]
    lengths = sorted({steps for row in found.values() for steps in row})
    ends = (lengths[0] / 1.25, lengths[-1] * 1.25)
    x = quantity("x", "steps", ends, log=True, values=lengths, format=",", labelOverlap=False, grid=False)
    y = quantity("y", loss_unit(result.row for result in results), zero=True)
    spec = curves(values, places, x, y)
    bar, colour = {"type": "rule", "strokeWidth": 1.5, "clip": True}, of_row("color", places)
    drawn = {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}, "color": colour, "tooltip": {"field": "text"}}
    spec["layer"] += [*([over(bars, bar, **drawn)] if bars else []), limit_line(0.0, y=y)]
    title = f"Gap to {reference_name(results)} by length"
    words = "Paired difference of final validation losses and its 95% interval; a point alone is a lead of one seed."
    return Chart("length", title, words, spec, 400, wide=True, rows=tuple(found))


def length_section(results: Sequence[Result], looks: Mapping[str, Look]) -> Section | None:
    """Table and chart of the gaps by length; None where no row was trained at several."""
    found, chart = by_length(results), length_chart(results, looks)
    if chart is None:
        return None
    head, *lines = length_cells(found)
    words = (
        "Final validation loss less that of the reference at the same seed and length, in nats, with its 95% "
        "t-interval. Every length was trained on its own, with the whole of its schedules."
    )
    body = "".join(f"<tr>{_line('td', line)}</tr>" for line in lines)
    table = f"<table><thead><tr>{_line('th', head)}</tr></thead><tbody>{body}</tbody></table>"
    drawn = legend(list(found), looks_by_length(results, looks), [chart]) + figures([chart])
    shown = f'<p class="muted">{words}</p><div class="scroll">{table}</div>{drawn}'
    return Section("length", "Gap by length", shown, [chart])


def _line(tag: str, cells: Sequence[str]) -> str:
    label, *numbers = (escape(cell) for cell in cells)
    return f"<{tag}>{label}</{tag}>" + "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
