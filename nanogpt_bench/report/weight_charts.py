"""Charts of weights on their grids: histograms over the codes, and maps of code use and stiffness by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanogpt_bench.config.metrics import OPERANDS
from nanogpt_bench.monitors.bits import CODE_COUNTS
from nanogpt_bench.report.chart import Chart, Look, category, ink, labelled, names, quantity
from nanogpt_bench.report.results import Result
from nanogpt_bench.runs.load import Histogram, Run

ROW_HEIGHT, FRAME_HEIGHT = 22, 70
FAINTEST = -5.0  # log10 of the share at which a heat map begins
UNITS = "in units of the row's scale"
MOST_PANELS = 12  # more heat maps than these are no longer compared, and each carries a cell a code and layer
MOST_LAYERS = 48
MOST_OPERANDS = 4  # rows whose activations and gradients are mapped as well
FLOWING = tuple(operand for operand in OPERANDS if operand != "weight")


def histogram_charts(results: Sequence[Result], looks: Mapping[str, Look]) -> list[Chart]:
    """Return a histogram of each row's final weights over the grid's codes."""
    found = enumerate(grid_histograms(results))
    return [_histogram_chart(place, histogram, looks[histogram.label]) for place, histogram in found]


def _histogram_chart(place: int, histogram: GridHistogram, look: Look) -> Chart:
    reach = 1.02 * max(abs(histogram.positions[0]), abs(histogram.positions[-1]))
    x = quantity("x", f"value {UNITS}", (-reach, reach), grid=False, **labelled(*position_ticks(histogram, 2)))
    y = quantity("y", "share of weights", zero=True, format="~%", tickCount=4)
    values = [
        {
            "name": "values",
            "x": histogram.positions,
            "y": histogram.shares,
            "text": list(map(format_value, histogram.values)),
        }
    ]
    # A filled step line looks like bars without a gap and is one path instead of one element a code.
    area = {"type": "area", "interpolate": "step", "color": ink(look.colour), "clip": True}
    spec = {
        "data": {"values": values},
        "transform": [{"flatten": ["x", "y"]}],
        "layer": [{"mark": area, "encoding": {"x": x, "y": y}}],
    }
    layers = "1 layer" if histogram.layers == 1 else f"{histogram.layers} layers"
    caption = f"{histogram.weights:,} weights of {layers}, {histogram.format}."
    return Chart(f"weights-{place}", histogram.label, caption, spec, height=250)


def code_use_charts(results: Sequence[Result]) -> list[Chart]:
    """Return a map of the codes that each layer's weights use."""
    return [_layer_map(f"codes-{i}", field, "value") for i, field in enumerate(code_use(results))]


def operand_charts(results: Sequence[Result]) -> list[Chart]:
    """Return maps of the codes that activations and gradients use, where a monitor recorded them."""
    found = [(o, i, f) for o in FLOWING for i, f in enumerate(operand_code_use(results, o))]
    return [_layer_map(f"codes-{operand}-{i}", field, "value") for operand, i, field in found]


def stiffness_charts(results: Sequence[Result]) -> list[Chart]:
    """Return a map of the stiffness of each layer's weights."""
    maps = [field for field in stiffness(results) if field.columns]
    return [_layer_map(f"stiffness-{i}", field, "stiffness S") for i, field in enumerate(maps)]


def _layer_map(name: str, field: LayerMap, what: str) -> Chart:
    """Return a heat map of the share of each layer's weights in each column, coloured by its log10."""
    first, last = field.columns[0], field.columns[-1]
    marked = spread_columns(field.columns, 3)
    ticks = labelled(marked, [field.ticks[column] for column in marked])
    x = quantity("x", f"{what} {UNITS}", (first - 0.5, last + 0.5), grid=False, **ticks)
    rounded = [[None if cell is None else round(cell, 2) for cell in line] for line in field.cells]
    layers = [category(layer) for layer in field.layers]
    cells = [{"layer": layer, "z": line} for layer, line in zip(layers, rounded, strict=True)]
    bar = {"type": "gradient", "values": [-4, -2, 0], "labelExpr": "format(pow(10, datum.value), '~p')", "title": None}
    colour = {
        "field": "z",
        "type": "quantitative",
        "scale": {"domain": [FAINTEST, 0], "range": ink("sequential"), "clamp": True},
        "legend": {**bar, "gradientThickness": 10, "gradientLength": ROW_HEIGHT * 3},
    }
    tip = [{"field": "layer", "title": "layer"}, {"field": "share", "title": "share", "format": ".2~p"}]
    spec = {
        "data": {"values": cells},
        # Columns are regular, so that a cell's place among its layer's says where it lies.
        "transform": [
            {"window": [{"op": "row_number", "as": "layer_number"}]},
            {"flatten": ["z"]},
            {"window": [{"op": "row_number", "as": "column"}], "groupby": ["layer_number"]},
            {"filter": "isValid(datum.z)"},
            {"calculate": f"datum.column + {first - 1.5!r}", "as": "x"},
            {"calculate": "datum.x + 1", "as": "x_end"},
            {"calculate": "pow(10, datum.z)", "as": "share"},
        ],
        "layer": [
            {
                # A cell reaches below the next one, for the seam between cells that end within a pixel.
                "mark": {"type": "rect", "x2Offset": 0.8, "clip": True},
                "encoding": {
                    "x": x,
                    "x2": {"field": "x_end"},
                    "y": names("layer", layers, labelFontSize=11, ticks=False),
                    "color": colour,
                    "tooltip": tip,
                },
            },
        ],
    }
    height = FRAME_HEIGHT + ROW_HEIGHT * max(3, min(len(field.layers), 20))
    return Chart(name, field.label, f"{field.format}, share by layer.", spec, height, drag="x")


@dataclass(frozen=True)
class LayerMap:
    """Shares by layer (from top to bottom) and column; a cell is the log10 of its share, None if empty."""

    label: str
    format: str
    layers: list[str]
    columns: list[float]
    ticks: dict[float, str]
    cells: list[list[float | None]]


def code_use(results: Sequence[Result]) -> list[LayerMap]:
    """Return the codes that each layer's weights use, of each row's first run with weights on a grid."""
    return _row_maps(results, _code_columns, _code_counts)


def stiffness(results: Sequence[Result]) -> list[LayerMap]:
    """Return the share of each layer's weights at each stiffness S, by log2 of S over the scale."""
    return _row_maps(results, _stiffness_columns, _stiffness_counts)


def operand_code_use(results: Sequence[Result], operand: str) -> list[LayerMap]:
    """Return the codes of each layer's activations or gradients when last recorded, of the first rows with any."""
    prefix, shown = CODE_COUNTS.by(operand).of(""), f"{operand.replace('_', ' ')}s"
    found = []
    for result in results:
        recorded = result.row.runs[0].distributions if result.row.runs else {}
        layers = {
            name.removeprefix(prefix): Histogram(shown, one.values, tuple(map(int, one.counts)))
            for name, one in recorded.items()
            if name.startswith(prefix) and one.values is not None
        }
        found += _format_maps(result.row.label, layers, _code_columns, _code_counts)
    return found[:MOST_OPERANDS]


def maps_left_out(results: Sequence[Result]) -> int:
    """Count the rows with weights on a grid beyond the panels shown."""
    return max(0, sum(_run_on_grid(result) is not None for result in results) - MOST_PANELS)


def _run_on_grid(result: Result) -> Run | None:
    return next((run for run in result.row.runs if run.weights), None)


Columns = Callable[[Sequence[Histogram]], dict[float, str]]
Counts = Callable[[Histogram], Mapping[float, float]]


def _row_maps(results: Sequence[Result], columns_of: Columns, counts_of: Counts) -> list[LayerMap]:
    found = []
    for result in results:
        run = _run_on_grid(result)
        found += _format_maps(result.row.label, run.weights, columns_of, counts_of) if run else []
    return found[:MOST_PANELS]


def _format_maps(
    label: str, weights: Mapping[str, Histogram], columns_of: Columns, counts_of: Counts
) -> list[LayerMap]:
    """Return one map of the layers of each format."""
    found = []
    for fmt in dict.fromkeys(layer.format for layer in weights.values()):
        layers = {name: layer for name, layer in weights.items() if layer.format == fmt and layer.values}
        shown = dict(list(layers.items())[:MOST_LAYERS])
        if shown:
            ticks = columns_of(list(shown.values()))
            cells = [_shares(counts_of(layer), list(ticks)) for layer in shown.values()]
            found.append(LayerMap(label, fmt, list(shown), list(ticks), ticks, cells))
    return found


def _code_counts(layer: Histogram) -> dict[float, float]:
    return dict(zip(_positions(layer), layer.counts, strict=True))


def _shares(counts: Mapping[float, float], columns: Sequence[float]) -> list[float | None]:
    total = sum(counts.values())
    return [math.log10(counts[c] / total) if counts.get(c) else None for c in columns]


def _positions(layer: Histogram) -> list[float]:
    """Return signed grid positions, 0 at zero."""
    zero = sum(value < 0 for value in layer.values)
    return [float(i - zero) for i in range(len(layer.values))]


def _code_columns(layers: Sequence[Histogram]) -> dict[float, str]:
    """Return the positions of the finest grid among the layers (activations may have several formats)."""
    finest = max(layers, key=lambda layer: len(layer.values))
    return dict(zip(_positions(finest), map(format_value, finest.values), strict=True))


def stiffness_of(values: Sequence[float]) -> dict[float, float]:
    """Return S of every value of a grid: the distance to the next value outwards, at zero to the first.

    >>> stiffness_of((-4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0))[4.0], stiffness_of((0.0, 1.0, 1.5, 2.0, 3.0))[3.0]
    (4.0, 1.0)
    """
    sizes = sorted({abs(value) for value in values})
    steps = {low: high - low for low, high in pairwise(sizes)}
    if len(sizes) > 1:
        top, below = sizes[-1], sizes[-2]
        # Without mantissa bits the largest value opens a binade; else it shares that of the value below.
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
    """Return every exponent from the least to the greatest in use."""
    used = [c for layer in layers for c, count in _stiffness_counts(layer).items() if count]
    if not used:
        return {}
    return {float(c): f"2^{c}" for c in range(int(min(used)), int(max(used)) + 1)}


def spread_columns(columns: Sequence[float], most: int) -> list[float]:
    """Return about `most` evenly spaced columns to label, zero among them if it is a column."""
    step = max(1, -(-len(columns) // most))
    start = columns.index(0.0) % step if 0.0 in columns else 0
    return list(columns[start::step])


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
    """Return the weights of each row's first run with some on a grid, one histogram per format."""
    found = []
    for result in results:
        run = next((run for run in result.row.runs if run.weights), None)
        if run is not None:
            found += [_grid_histogram(result.row.label, run, fmt) for fmt in _formats_in(run)]
    return [histogram for histogram in found if histogram.weights]


def _formats_in(run: Run) -> list[str]:
    return list(dict.fromkeys(layer.format for layer in run.weights.values()))


def _grid_histogram(label: str, run: Run, fmt: str) -> GridHistogram:
    """Add up all layers of one format; +0 and -0 are one grid value."""
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
    """Return evenly spaced grid positions around zero, `a_side` on each side, and their values."""
    reach = max(abs(histogram.positions[0]), abs(histogram.positions[-1]))
    step = max(1, reach // a_side)
    marked = [p for p in histogram.positions if p % step == 0]
    offset = histogram.positions[0]
    return marked, [format_value(histogram.values[p - offset]) for p in marked]


def format_value(value: float) -> str:
    """Format a grid value in few characters; far from 1 a power of two as a power.

    >>> format_value(0.203125), format_value(2.0**-40), format_value(-448.0), format_value(-3e9)
    ('0.203', '2^-40', '-448', '-3e+09')
    """
    mantissa, exponent = math.frexp(abs(value))
    power_of_two = mantissa == 0.5 and not -8 < exponent < 12
    return ("-" if value < 0 else "") + (f"2^{exponent - 1}" if power_of_two else f"{abs(value):.3g}")
