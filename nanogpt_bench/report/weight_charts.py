"""The charts of weights on their grids: histograms over the codes, and heat maps of code use and stiffness by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nanogpt_bench.report import fields, series
from nanogpt_bench.report.chart import Chart, Look, category, ink, labelled, names, quantity
from nanogpt_bench.report.results import Result

ROW_HEIGHT, FRAME_HEIGHT = 22, 70
FAINTEST = -5.0  # log10 of the share at which a heat map begins
UNITS = "in units of the row's scale"


def histogram_charts(results: Sequence[Result], looks: Mapping[str, Look]) -> list[Chart]:
    """Where on the grid each row's weights ended, over the grid's codes."""
    found = enumerate(series.grid_histograms(results))
    return [_histogram_chart(place, histogram, looks[histogram.label]) for place, histogram in found]


def _histogram_chart(place: int, histogram: series.GridHistogram, look: Look) -> Chart:
    reach = 1.02 * max(abs(histogram.positions[0]), abs(histogram.positions[-1]))
    x = quantity("x", f"value {UNITS}", (-reach, reach), grid=False, **labelled(*series.position_ticks(histogram, 2)))
    y = quantity("y", "share of weights", zero=True, format="~%", tickCount=4)
    values = [
        {
            "name": "values",
            "x": histogram.positions,
            "y": histogram.shares,
            "text": list(map(series.format_value, histogram.values)),
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
    """Which codes each layer's weights use."""
    return [_layer_map(f"codes-{i}", field, "value") for i, field in enumerate(fields.code_use(results))]


def operand_charts(results: Sequence[Result]) -> list[Chart]:
    """The codes that activations and gradients use, where a monitor recorded them."""
    found = [(o, i, f) for o in fields.FLOWING for i, f in enumerate(fields.operand_code_use(results, o))]
    return [_layer_map(f"codes-{operand}-{i}", field, "value") for operand, i, field in found]


def stiffness_charts(results: Sequence[Result]) -> list[Chart]:
    """How stiff each layer's weights are."""
    maps = [field for field in fields.stiffness(results) if field.columns]
    return [_layer_map(f"stiffness-{i}", field, "stiffness S") for i, field in enumerate(maps)]


def _layer_map(name: str, field: fields.Field, what: str) -> Chart:
    """The share of each layer's weights in each column, by a colour for its log10."""
    first, last = field.columns[0], field.columns[-1]
    marked = fields.spread(field.columns, 3)
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
