"""Curves of what the monitors watched, one chart a figure, for those figures that some run recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanogpt_bench.report import series
from nanogpt_bench.report.chart import SHARE as PERCENT
from nanogpt_bench.report.chart import Chart, limit_line, lines, quantity
from nanogpt_bench.report.loss_charts import shown
from nanogpt_bench.report.palette import Look
from nanogpt_bench.report.results import Row

OPERANDS = ("weight", "activation", "gradient", "weight_gradient", "residual")


@dataclass(frozen=True)
class Watched:
    """A figure of the record worth a chart: its key, the chart's title, what the axis counts, and one sentence."""

    key: str
    title: str
    unit: str
    caption: str
    logarithmic: bool = False

    @property
    def name(self) -> str:
        return f"watch-{self.key.replace('/', '-')}"


def _by_operand(key: str, title: str, unit: str, caption: str, *, logarithmic: bool = False) -> tuple[Watched, ...]:
    return tuple(
        Watched(f"{key}/{o}", f"{title}, {o.replace('_', ' ')}s", unit, caption, logarithmic) for o in OPERANDS
    )


SHARE, NATS = "share", "nats"
GRADIENTS = (
    Watched("grad/cosine", "Gradient cosine", "cosine", "Against the float32 shadow, mean over the layers."),
    Watched(
        "grad/cosine_min", "Lowest gradient cosine", "cosine", "Against the shadow, the layer that is furthest off."
    ),
    Watched("grad/quant_snr_db", "Signal to quantisation noise", "dB", "10 log10 of |g32|² / |g8 - g32|²."),
    Watched("grad/norm", "Gradient norm", "L2 norm", "Before clipping.", logarithmic=True),
    Watched("grad/snr", "Gradient signal to noise", "|mean| / std", "Mean over the layers.", logarithmic=True),
    Watched("grad/zero", "Zero gradients", SHARE, "Gradient elements that are exactly zero."),
    Watched("grad/dead", "Dead gradients", SHARE, "Elements that stayed next to zero for many steps."),
    Watched(
        "grad/update_to_noise",
        "Update against rounding noise",
        "ratio",
        "The requested update's power over the variance that stochastic rounding adds.",
        logarithmic=True,
    ),
)
STALL = (
    Watched("stall/arrived", "Movement that arrived", SHARE, "Of the movement asked for, along its direction."),
    Watched("stall/update_success", "Updates that moved a weight", SHARE, "Weights that moved, of those asked to."),
    Watched("stall/update_ulps", "Size of the updates", "ULPs", "Mean requested update.", logarithmic=True),
    Watched("stall/move_probability", "Probability of moving", SHARE, "Mean over the weights."),
    Watched("stall/residual_saturation", "Residuals at their bound", SHARE, "Stored residuals that are at their end."),
    Watched("stall/code_drift", "Drift from the first codes", "codes", "Mean distance from the initial code."),
    Watched(
        "stall/zero_gradient_zone",
        "Zero-gradient zones",
        SHARE,
        "Weights for which half a ULP to either side leaves the layer's output as it was.",
    ),
)
RANGES = (
    *_by_operand("quant/overflow", "Overflow", SHARE, "Values beyond the format's largest."),
    *_by_operand("quant/underflow", "Underflow", SHARE, "Values other than zero that become zero."),
    *_by_operand("quant/kurtosis", "Kurtosis", "raw, normal = 3", "The largest of the layers.", logarithmic=True),
    *_by_operand("quant/amax_over_std", "Largest over standard deviation", "ratio", "Mean over the layers."),
)
BITS = (
    *_by_operand("bits/uniformity", "Evenness of code use", SHARE, "Entropy over that of all finite codes alike."),
    *_by_operand("bits/codes_used", "Codes in use", SHARE, "Of all finite codes."),
    *_by_operand("bits/top_exponent", "Share in the top binade", SHARE, "Values in the largest exponent."),
)
MODEL = (
    Watched("attention/entropy", "Attention entropy", NATS, "Mean over heads, on a validation batch."),
    Watched("attention/entropy_min", "Lowest attention entropy", NATS, "The most collapsed head."),
)
GEOMETRY = (
    Watched("geometry/stiffness_mean", "Mean stiffness", "S", "Mean over the weights.", logarithmic=True),
    Watched(
        "geometry/gradient_stiffness_correlation",
        "Gradient and stiffness",
        "correlation",
        "Whether large gradients lie where the grid is coarse.",
    ),
    Watched("geometry/path_length", "Path length", "ULPs", "Mean distance walked by a weight.", logarithmic=True),
    Watched("geometry/displacement", "Displacement", "ULPs", "Mean distance from the start.", logarithmic=True),
    Watched("geometry/off_grid", "Off the grid", SHARE, "Weights that are no grid value; must stay 0."),
    Watched(
        "geometry/fisher_ratio", "Fisher trace against the shadow's", "ratio", "At the same batch.", logarithmic=True
    ),
)
GROUPS = {
    "gradients": ("Gradients", GRADIENTS),
    "updates": ("Updates", STALL),
    "ranges": ("Ranges", RANGES),
    "bits": ("Bits", BITS),
    "attention": ("Attention", MODEL),
    "geometry": ("Geometry", GEOMETRY),
}


def watched_charts(
    rows: Sequence[Row], looks: Mapping[str, Look], figures: Sequence[Watched], limits: Mapping[str, float]
) -> list[Chart]:
    """A chart for each of `figures` that some run recorded; `limits` draws a dotted line, by key."""
    recorded = {key for row in rows for run in row.runs for key in run.metrics.names}
    found = [_chart(rows, looks, figure, limits.get(figure.key)) for figure in figures if figure.key in recorded]
    return [chart for chart in found if chart is not None]


def _chart(rows: Sequence[Row], looks: Mapping[str, Look], figure: Watched, limit: float | None) -> Chart | None:
    drawn = series.lines(rows, figure.key)
    if not drawn:
        return None
    share = {"format": PERCENT, "zero": True} if figure.unit == SHARE else {}
    bent = {"log": True, "format": "~g", "tickCount": 5} if figure.logarithmic and _spans(drawn) else {}
    y = quantity("y", figure.unit, _ends(drawn, share=bool(share)), **(share | bent))
    spec = lines(drawn, looks, quantity("x", "step"), y)
    spec["layer"] += [] if limit is None else [limit_line(limit, y=y)]
    return Chart(figure.name, figure.title, figure.caption, spec, rows=shown(drawn))


def _ends(drawn: Sequence[series.Line], *, share: bool) -> tuple[float, float] | None:
    """The ends of an axis for curves that are all of one value, which have none of their own."""
    known = {y for line in drawn for y in line.ys if y is not None}
    if len(known) > 1 or (share and known != {0}):
        return None
    return (0.0, 1.0) if share else (min(known) - 1, max(known) + 1)


def _spans(drawn: Sequence[series.Line]) -> bool:
    """Whether positive values differ by a factor of thirty or more, so that a linear axis would hide the small."""
    known = [y for line in drawn for y in line.ys if y is not None]
    return min(known) > 0 and max(known) / min(known) >= 30
