"""The heat maps and the learning-rate curves as matplotlib figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from nanogpt_bench.report import fields
from nanogpt_bench.report.figure_legend import legend_below
from nanogpt_bench.report.palette import MATPLOTLIB_DASHES, MATPLOTLIB_MARKERS, SCALES, Look, figure_label
from nanogpt_bench.report.rates import RateCurve, rate_curves, rate_ticks
from nanogpt_bench.report.results import Result, Row
from nanogpt_bench.report.studies import Sensitivity

FAINTEST = -5.0  # log10 of the share at which a heat map begins


def colour_map(name: str) -> LinearSegmentedColormap:
    """One of the page's colour scales, for a light page."""
    return LinearSegmentedColormap.from_list(name, list(SCALES[name][0]))


def code_use(results: Sequence[Result]) -> Figure | None:
    """Which codes each layer's weights use, a panel a row."""
    return _layer_maps(fields.code_use(results), "value in units of the row's scale")


def stiffness(results: Sequence[Result]) -> Figure | None:
    """How stiff each layer's weights are, a panel a row."""
    return _layer_maps([f for f in fields.stiffness(results) if f.columns], "stiffness S in units of the row's scale")


def _layer_maps(shown: Sequence[fields.Field], words: str) -> Figure | None:
    if not shown:
        return None
    across = min(3, len(shown))
    down = -(-len(shown) // across)
    drawn = Figure(figsize=(4.4 * across, 3.4 * down), layout="constrained")
    panels = drawn.subplots(down, across, squeeze=False).ravel()
    for axes, field in zip(panels, shown, strict=False):
        image = _layer_map(axes, field)
    for axes in panels[len(shown) :]:
        axes.remove()
    bar = drawn.colorbar(image, ax=list(panels[: len(shown)]), shrink=0.6, ticks=[-4, -2, 0])
    bar.ax.set_yticklabels(["0.01%", "1%", "100%"])
    bar.set_label("share of the layer's weights")
    drawn.supxlabel(words, fontsize=11)
    return drawn


def _layer_map(axes: Axes, field: fields.Field) -> Any:
    cells = [[math.nan if cell is None else cell for cell in line] for line in field.cells]
    image = axes.imshow(
        cells, aspect="auto", cmap=colour_map("sequential"), vmin=FAINTEST, vmax=0, interpolation="none"
    )
    marked = fields.spread(field.columns, 3)
    axes.set_xticks([field.columns.index(c) for c in marked], [field.ticks[c] for c in marked], fontsize=9)
    axes.set_yticks(range(len(field.layers)), [figure_label(layer) for layer in field.layers], fontsize=7)
    axes.set_title(figure_label(field.label), fontsize=11)
    axes.grid(visible=False)
    return image


def sensitivity(study: Sensitivity) -> Figure:
    """Which format works where: the loss gap when one layer pattern alone is quantised."""
    cells = [[math.nan if gap is None else gap for gap in line] for line in study.gap]
    reach = max((abs(gap) for line in study.gap for gap in line if gap is not None), default=0.0) or 1.0
    size = (2.6 + 1.05 * len(study.formats), 1.6 + 0.5 * len(study.patterns))
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots()
    image = axes.imshow(cells, aspect="auto", cmap=colour_map("diverging"), vmin=-reach, vmax=reach)
    for i, line in enumerate(study.gap):
        for j, gap in enumerate(line):
            shade = "white" if gap is not None and abs(gap) > 0.6 * reach else "black"
            text = study.ending(i, j) if gap is None else f"{gap:+z.3f}"
            axes.text(j, i, figure_label(text), ha="center", va="center", color=shade, fontsize=9)
    axes.set_xticks(range(len(study.formats)), [figure_label(name) for name in study.formats])
    axes.set_yticks(range(len(study.patterns)), [figure_label(name) for name in study.patterns])
    axes.grid(visible=False)
    axes.set_title("Loss gap by layer and format")
    drawn.colorbar(image, ax=axes, label="nats per token")
    return drawn


def learning_rates(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """Final validation loss over the learning rate; crosses along the top where runs failed."""
    curves = rate_curves(rows)
    losses = [point.loss for curve in curves for point in curve.points if point.loss is not None]
    if not losses:
        return None
    top = max(losses) + 0.1 * ((max(losses) - min(losses)) or 1.0)
    drawn = Figure(figsize=(9, 4.9), layout="constrained")
    axes = drawn.subplots()
    for curve in curves:
        _rate_curve(axes, curve, looks[curve.row], top)
    axes.set_xscale("log")
    marked = rate_ticks(point.rate for curve in curves for point in curve.points)
    axes.set_xticks(marked, [f"{rate:.3g}" for rate in marked])
    axes.set_xticks([], minor=True)
    axes.set(title="Loss by learning rate", xlabel="learning rate", ylabel="final val loss, nats per token")
    legend_below(drawn, *axes.get_legend_handles_labels())
    return drawn


def _rate_curve(axes: Axes, curve: RateCurve, look: Look, top: float) -> None:
    rates = [point.rate for point in curve.points]
    losses = [math.nan if point.loss is None else point.loss for point in curve.points]
    style = {"color": look.hex(), "marker": MATPLOTLIB_MARKERS[look.marker], "markersize": 4}
    axes.plot(rates, losses, linestyle=MATPLOTLIB_DASHES[look.dash], label=figure_label(curve.label), **style)
    failed = [point.rate for point in curve.points if point.failed]
    axes.plot(failed, [top] * len(failed), linestyle="", marker="X", markersize=7, color=look.hex())
