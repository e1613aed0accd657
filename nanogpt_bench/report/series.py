"""The series that every chart draws, computed once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nanogpt_bench.report.results import Result
from nanogpt_bench.runs.load import Run


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
