"""The series that every chart draws, computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nanogpt_bench.config.metrics import ELAPSED
from nanogpt_bench.report.chart import Line
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.rows import Row
from nanogpt_bench.runs.curves import MAX_POINTS, decimate, smooth, smoothing_window
from nanogpt_bench.runs.load import Run

BY_STEP, BY_TIME = "step", ELAPSED.name
FEWEST_POINTS, MOST_POINTS = 60, 50 * MAX_POINTS  # of a curve, and of all curves of a chart
EARLY_DIVERGENCE = "early_divergence"


@dataclass(frozen=True)
class Mark:
    """A point worth a look on the curve of a row, and what happened there."""

    label: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class GridHistogram:
    """Share of a run's quantised weights at each signed grid position (0 is zero, +1 the next value up)."""

    label: str
    format: str
    positions: list[int]
    values: list[float]
    shares: list[float]
    layers: int
    weights: int


def lines(
    rows: Sequence[Row], key: str, against: str = BY_STEP, *, smoothed: bool = False, points: int = MAX_POINTS
) -> list[Line]:
    """The curve of `key` for every run that has it, thinned; `smoothed` for series that are noisy step by step.

    With more than fifty runs each gets fewer than `points`, so that the whole stays small.
    """
    limit = min(points, max(FEWEST_POINTS, MOST_POINTS // max(1, sum(len(row.runs) for row in rows))))
    drawn = [_line(row, run, key, against, smoothed, limit) for row in rows for run in row.runs]
    return [line for line in drawn if any(y is not None for y in line.ys)]


def _line(row: Row, run: Run, key: str, against: str, smoothed: bool, limit: int) -> Line:
    xs, ys = run.curve(key, against)
    if smoothed:
        ys = smooth(ys, smoothing_window(len(ys)))
    kept = decimate(len(xs), limit)
    return Line(row.label, run.seed, [xs[i] for i in kept], [ys[i] for i in kept])


def first_lines(rows: Sequence[Row], key: str, steps: int) -> list[Line]:
    """The curves of `key` up to step `steps`, as recorded."""
    found = []
    for row in rows:
        for run in row.runs:
            xs, ys = run.curve(key)
            kept = [(x, y) for x, y in zip(xs, ys, strict=True) if x <= steps]
            found.append(Line(row.label, run.seed, [x for x, _ in kept], [y for _, y in kept]))
    return [line for line in found if any(y is not None for y in line.ys)]


def marks(rows: Sequence[Row], drawn: Sequence[Line], against: str = BY_STEP) -> list[Mark]:
    """Where on its curve a run was first said to diverge early, and where one that failed ended."""
    curves = {(line.label, line.seed): line for line in drawn}
    found = []
    for row in rows:
        for run in row.runs:
            line = curves.get((row.label, run.seed))
            found += [_mark(line, run, step, text, against) for step, text in _moments(run)] if line else []
    return [mark for mark in found if mark is not None]


def _moments(run: Run) -> list[tuple[int, str]]:
    """(step, words) of what is worth a mark on a loss curve."""
    early = next((alert for alert in run.alerts if alert.kind == EARLY_DIVERGENCE), None)
    moments = [(early.step, f"early divergence at step {early.step}")] if early else []
    if run.status == "failed" and run.last_step is not None:
        moments.append((run.last_step, f"failed at step {run.last_step}"))
    return moments


def _mark(line: Line, run: Run, step: int, text: str, against: str) -> Mark | None:
    """A mark on the last known point at or before `step`, by the clock the curve is drawn against."""
    steps, places = run.curve(against)
    before = [place for at, place in zip(steps, places, strict=True) if at <= step and place is not None]
    end = before[-1] if before else None
    known = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if y is not None and end is not None and x <= end]
    return Mark(line.label, end, known[-1][1], text) if known and end is not None else None


def stall_lines(rows: Sequence[Row]) -> list[Line]:
    """The stall over the steps of every row where it says something, under the measure that its storage has."""
    found = []
    for row in rows:
        metric = next((run.stall_metric for run in row.runs if run.stall_counts and run.stall_metric), None)
        if metric is not None:
            found += lines([row], metric)
    return found


def loss_range(drawn: Sequence[Line]) -> tuple[float, float] | None:
    """The loss axis: from the lowest loss to where the descent of the first steps is over.

    Every run falls from ln(vocabulary) at first; drawing that far up would press together what is
    compared, so the top is the highest of all the losses after a sixth of the steps.
    """
    last = max((line.xs[-1] for line in drawn if line.xs), default=0.0)
    known = [(x, y) for line in drawn for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    late = [y for x, y in known if x >= last / 6]
    if not late:
        return None
    bottom, top = min(late), max(late)
    margin = 0.04 * (top - bottom) or 0.05
    return bottom - margin, top + margin


def close_range(drawn: Sequence[Line], reference: str | None) -> tuple[float, float] | None:
    """The loss axis for telling apart the rows near the reference; None when there is no reference to be near to.

    From the lowest loss of all to the reference's own a third of the way on.
    """
    own = [(x, y) for line in drawn if line.label == reference for x, y in zip(line.xs, line.ys, strict=True)]
    late = [y for x, y in own if y is not None and x >= own[-1][0] / 3]
    if not late:
        return None
    low = min(y for line in drawn for y in line.ys if y is not None)
    margin = 0.06 * (max(late) - low) or 0.05
    return low - margin, max(late) + margin


def grid_histograms(results: Sequence[Result]) -> list[GridHistogram]:
    """The weights of every row's first run that has some on a grid, one histogram a format."""
    found = []
    for result in results:
        run = next((run for run in result.row.runs if run.weights), None)
        if run is not None:
            found += [_grid_histogram(result.row.label, run, fmt) for fmt in _formats_in(run)]
    return [histogram for histogram in found if histogram.weights]


def _formats_in(run: Run) -> list[str]:
    return list(dict.fromkeys(layer.format for layer in run.weights.values()))


def _grid_histogram(label: str, run: Run, fmt: str) -> GridHistogram:
    """All layers of one format added up; +0 and -0 are one grid value."""
    layers = [layer for layer in run.weights.values() if layer.format == fmt]
    counts: Counter[float] = Counter()
    for layer in layers:
        for value, count in zip(layer.values, layer.counts, strict=True):
            counts[value + 0.0] += count
    values = sorted(counts)
    total = sum(counts.values())
    zero = sum(value < 0 for value in values)
    return GridHistogram(
        label=label,
        format=fmt,
        positions=[i - zero for i in range(len(values))],
        values=values,
        shares=[counts[value] / total if total else 0.0 for value in values],
        layers=len(layers),
        weights=total,
    )


def position_ticks(histogram: GridHistogram, a_side: int = 3) -> tuple[list[int], list[str]]:
    """Evenly spaced grid positions, zero among them and `a_side` to each side of it, and the values that lie there."""
    reach = max(abs(histogram.positions[0]), abs(histogram.positions[-1]))
    step = max(1, reach // a_side)
    marked = [p for p in histogram.positions if p % step == 0]
    offset = histogram.positions[0]
    return marked, [format_value(histogram.values[p - offset]) for p in marked]


def format_value(value: float) -> str:
    """A grid value in few characters; far from 1, a power of two is written as one.

    >>> format_value(0.203125), format_value(2.0**-40), format_value(-448.0), format_value(-3e9)
    ('0.203', '2^-40', '-448', '-3e+09')
    """
    mantissa, exponent = math.frexp(abs(value))
    power_of_two = mantissa == 0.5 and not -8 < exponent < 12
    return ("-" if value < 0 else "") + (f"2^{exponent - 1}" if power_of_two else f"{abs(value):.3g}")
