"""The matrices behind the heat maps: layers over grid positions, layers over stiffness, patterns over formats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanogpt_bench.config.metrics import CODE_COUNTS, OPERANDS
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.series import format_value
from nanogpt_bench.runs.load import Histogram, Run

MOST_PANELS = 12  # more heat maps than these are no longer compared, and each carries a cell a code and layer
MOST_LAYERS = 48
MOST_OPERANDS = 4  # rows whose activations and gradients are mapped as well
FLOWING = tuple(operand for operand in OPERANDS if operand != "weight")


@dataclass(frozen=True)
class Field:
    """Shares by layer (from top to bottom) and column; a cell is log10 of its share, None where it is empty."""

    label: str
    format: str
    layers: list[str]
    columns: list[float]
    ticks: dict[float, str]
    cells: list[list[float | None]]


def code_use(results: Sequence[Result]) -> list[Field]:
    """Which codes each layer's weights use, in every row's first run that has weights on a grid."""
    return _fields(results, _code_columns, _code_counts)


def stiffness(results: Sequence[Result]) -> list[Field]:
    """How stiff each layer's weights are: the share of them at each stiffness S, by log2 of S over the scale."""
    return _fields(results, _stiffness_columns, _stiffness_counts)


def operand_code_use(results: Sequence[Result], operand: str) -> list[Field]:
    """Which codes each layer's activations or gradients used when last recorded, for the first rows that say so."""
    prefix, shown = CODE_COUNTS.by(operand).of(""), f"{operand.replace('_', ' ')}s"
    found = []
    for result in results:
        recorded = result.row.runs[0].distributions if result.row.runs else {}
        layers = {
            name.removeprefix(prefix): Histogram(shown, one.values, tuple(map(int, one.counts)))
            for name, one in recorded.items()
            if name.startswith(prefix) and one.values is not None
        }
        found += _fields_of(result.row.label, layers, _code_columns, _code_counts)
    return found[:MOST_OPERANDS]


def fields_left_out(results: Sequence[Result]) -> int:
    """How many rows have weights on a grid and no panel, because the page shows the first few only."""
    return max(0, sum(_run_on_grid(result) is not None for result in results) - MOST_PANELS)


def _run_on_grid(result: Result) -> Run | None:
    return next((run for run in result.row.runs if run.weights), None)


Columns = Callable[[Sequence[Histogram]], dict[float, str]]
Counts = Callable[[Histogram], Mapping[float, float]]


def _fields(results: Sequence[Result], columns_of: Columns, counts_of: Counts) -> list[Field]:
    found = []
    for result in results:
        run = _run_on_grid(result)
        found += _fields_of(result.row.label, run.weights, columns_of, counts_of) if run else []
    return found[:MOST_PANELS]


def _fields_of(label: str, weights: Mapping[str, Histogram], columns_of: Columns, counts_of: Counts) -> list[Field]:
    """One field for the layers of each format."""
    found = []
    for fmt in dict.fromkeys(layer.format for layer in weights.values()):
        layers = {name: layer for name, layer in weights.items() if layer.format == fmt and layer.values}
        shown = dict(list(layers.items())[:MOST_LAYERS])
        if shown:
            ticks = columns_of(list(shown.values()))
            cells = [_shares(counts_of(layer), list(ticks)) for layer in shown.values()]
            found.append(Field(label, fmt, list(shown), list(ticks), ticks, cells))
    return found


def _code_counts(layer: Histogram) -> dict[float, float]:
    return dict(zip(_positions(layer), layer.counts, strict=True))


def _shares(counts: Mapping[float, float], columns: Sequence[float]) -> list[float | None]:
    total = sum(counts.values())
    return [math.log10(counts[c] / total) if counts.get(c) else None for c in columns]


def _positions(layer: Histogram) -> list[float]:
    """Signed grid positions, 0 at zero."""
    zero = sum(value < 0 for value in layer.values)
    return [float(i - zero) for i in range(len(layer.values))]


def _code_columns(layers: Sequence[Histogram]) -> dict[float, str]:
    """The positions of the finest grid among the layers (activations may have several formats)."""
    finest = max(layers, key=lambda layer: len(layer.values))
    return dict(zip(_positions(finest), map(format_value, finest.values), strict=True))


def stiffness_of(values: Sequence[float]) -> dict[float, float]:
    """S of every value of a grid: its distance to the next one outwards, and the grid's first step at zero.

    >>> stiffness_of((-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0))[4.0], stiffness_of((0.0, 1.0, 1.5, 2.0, 3.0))[3.0]
    (4.0, 1.0)
    """
    sizes = sorted({abs(value) for value in values})
    steps = {low: high - low for low, high in pairwise(sizes)}
    if len(sizes) > 1:
        top, below = sizes[-1], sizes[-2]
        # Without mantissa bits the largest value opens a binade of its own; else it shares the one below's.
        steps[top] = top if top == 2 * below else top - below
    return {value: steps.get(abs(value), 0.0) for value in values}


def _stiffness_counts(layer: Histogram) -> dict[float, float]:
    steps = stiffness_of(layer.values)
    counts: Counter[float] = Counter()
    for value, count in zip(layer.values, layer.counts, strict=True):
        if steps[value] > 0:
            counts[float(round(math.log2(steps[value])))] += count
    return dict(counts)


def _stiffness_columns(layers: Sequence[Histogram]) -> dict[float, str]:
    """Every exponent from the least to the greatest that is in use."""
    used = [c for layer in layers for c, count in _stiffness_counts(layer).items() if count]
    if not used:
        return {}
    return {float(c): f"2^{c}" for c in range(int(min(used)), int(max(used)) + 1)}


def spread(columns: Sequence[float], most: int) -> list[float]:
    """About `most` evenly spaced columns to label, zero among them where there is one."""
    step = max(1, -(-len(columns) // most))
    start = columns.index(0.0) % step if 0.0 in columns else 0
    return list(columns[start::step])
