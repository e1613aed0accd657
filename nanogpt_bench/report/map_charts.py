"""Heat maps as plotly figures: code use, stiffness, and which format works where."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from nanogpt_bench.report import fields
from nanogpt_bench.report.charts import Chart, axes, category
from nanogpt_bench.report.results import Result
from nanogpt_bench.report.studies import Sensitivity

ROW_HEIGHT, FRAME_HEIGHT = 22, 96


def code_use_charts(results: Sequence[Result]) -> list[Chart]:
    return [_layer_map(f"codes-{i}", field, "value") for i, field in enumerate(fields.code_use(results))]


def operand_charts(results: Sequence[Result]) -> list[Chart]:
    """The codes that activations and gradients use, where a monitor recorded them."""
    found = [(o, i, f) for o in fields.FLOWING for i, f in enumerate(fields.operand_code_use(results, o))]
    return [_layer_map(f"codes-{operand}-{i}", field, "value") for operand, i, field in found]


def stiffness_charts(results: Sequence[Result]) -> list[Chart]:
    maps = [field for field in fields.stiffness(results) if field.columns]
    return [_layer_map(f"stiffness-{i}", field, "stiffness S") for i, field in enumerate(maps)]


def _layer_map(name: str, field: fields.Field, what: str) -> Chart:
    trace = {
        "type": "heatmap",
        "x": field.columns,
        "y": [category(layer) for layer in field.layers],
        "z": [[None if cell is None else round(cell, 2) for cell in line] for line in field.cells],
        "labels": list(field.ticks.values()),  # of the columns; the page's script gives them to every row
        "colorscale": "@sequential",
        "zmin": -5,
        "zmax": 0,
        "colorbar": _bar([-4, -2, 0], ["0.01%", "1%", "100%"]),
        "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>{what} %{{customdata}}: 10^%{{z:.2f}} of them<extra></extra>",
    }
    layout = axes(f"{what} in units of the row's scale", "")
    ticks = fields.spread(field.columns, 3)
    layout["xaxis"] |= {
        "tickvals": ticks,
        "ticktext": [field.ticks[c] for c in ticks],
        "tickangle": 0,
        "showgrid": False,
    }
    layout["yaxis"] |= _named_rows()
    height = FRAME_HEIGHT + ROW_HEIGHT * max(3, min(len(field.layers), 20))
    return Chart(name, field.label, f"{field.format}, share by layer.", [trace], layout, height=height)


def _named_rows() -> dict[str, Any]:
    return {
        "type": "category",
        "autorange": "reversed",
        "showgrid": False,
        "tickfont": {"size": 11},
        "title": {"text": ""},
    }


def _bar(values: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    return {
        "thickness": 10,
        "outlinewidth": 0,
        "tickvals": list(values),
        "ticktext": list(texts),
        "tickfont": {"size": 11},
        "xpad": 4,
    }


def sensitivity_charts(studies: Sequence[Sensitivity]) -> list[Chart]:
    """Which format works where: the loss gap when one layer pattern alone is quantised."""
    return [_sensitivity_chart(f"sensitivity-{i}", study) for i, study in enumerate(studies)]


def _sensitivity_chart(name: str, study: Sensitivity) -> Chart:
    known = [abs(gap) for line in study.gap for gap in line if gap is not None]
    reach = max(known, default=0.0) or 1.0
    trace = {
        "type": "heatmap",
        "x": [category(fmt) for fmt in study.formats],
        "y": [category(pattern) for pattern in study.patterns],
        "z": [list(line) for line in study.gap],
        "text": [["" if gap is None else f"{gap:+z.3f}" for gap in line] for line in study.gap],
        "texttemplate": "%{text}",
        "textfont": {"size": 12},
        "xgap": 2,
        "ygap": 2,
        "colorscale": "@diverging",
        "zmin": -reach,
        "zmax": reach,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"size": 11}, "nticks": 5, "xpad": 4},
        "hoverongaps": False,
        "hovertemplate": "%{y} in %{x}: %{z:+.4f} nats<extra></extra>",
    }
    layout = axes("", "") | {"annotations": _failed_cells(study)}
    layout["xaxis"] |= {"type": "category", "side": "top", "showgrid": False, "tickangle": 0}
    layout["yaxis"] |= _named_rows()
    height = FRAME_HEIGHT + 34 * len(study.patterns)
    of = f"; the weights of {study.of}, rounded after the training" if study.of else ""
    loss = "Validation loss" if study.of else "Final validation loss"
    words = (
        f"{loss} above that of the unquantised model, in nats; one pattern at a time in a format"
        f"{f' ({study.operand}s)' if study.operand else ''}{f', under {study.rule}' if study.rule else ''}{of}."
    )
    return Chart(name, "Which format works where", words, [trace], layout, height=height, wide=True)


def _failed_cells(study: Sensitivity) -> list[dict[str, Any]]:
    """How the runs ended where they left no loss."""
    plain = {"showarrow": False, "font": {"size": 11}}
    return [
        {"x": category(fmt), "y": category(pattern), "text": escape(study.ending(i, j)), **plain}
        for i, pattern in enumerate(study.patterns)
        for j, fmt in enumerate(study.formats)
        if study.gap[i][j] is None
    ]
