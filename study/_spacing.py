"""Distance of a rule from its float baseline, by the mean ULP of its weights.

The formats of a file differ in that spacing. If the distance is proportional to it, the
points of the figure lie on the grey line.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from _looks import STOCHASTIC
from _markdown import markdown
from _paired import in_figures
from _weights import data_of, mean_at_end, text_name
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import linregress, spearmanr

from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import find_reference

MEAN_ULP = "geometry/stiffness_mean"
FEWEST_FORMATS = 3
"""Fewer formats than this make no line."""
COARSEST = "E7M0"
"""The format without which a correlation is told, too, since it is far from the others."""
LOWEST = 0.002
"""Lower end of the figure's axis, in nats."""
MARKERS_OF_TEXTS = (
    {"marker": "o", "color": STOCHASTIC},
    {"marker": "s", "color": "#E69F00"},
)


@dataclass(frozen=True)
class FormatPoint:
    """A format on a text: mean ULP at the end of the training, and distance."""

    data: str
    format: str
    ulp: float
    distance: Difference


def format_points(file: Exported) -> list[FormatPoint]:
    """Return the formats of a file's only quantised rule, by mean ULP.

    Returns [] for several such rules, or for few formats.
    """
    reference = find_reference(file.rows, file.baseline)
    quantised = [row for row in file.rows if row.format != "none" and row.runs]
    if reference is None or len({row.rule for row in quantised}) != 1:
        return []
    points = []
    for result in measure(file.rows, reference):
        ulp = mean_at_end(result.row, MEAN_ULP)
        if result.row in quantised and result.difference and ulp is not None:
            data = data_of(result.row)
            points.append(FormatPoint(data, result.row.format, ulp, result.difference))
    if len({point.format for point in points}) < FEWEST_FORMATS:
        return []
    return sorted(points, key=lambda point: point.ulp)


def spacing_table(points: Sequence[FormatPoint]) -> str:
    """Return a line per format, with its mean ULP and its distance on every text.

    Below the table stands how the two correlate, with and without the coarsest format.
    """
    folders = list(dict.fromkeys(point.data for point in points))
    cells = {(point.format, point.data): _point_cells(point) for point in points}
    header = ["format"]
    for data in folders:
        header += [f"mean ULP, {text_name(data)}", f"distance, {text_name(data)}"]
    lines = []
    for fmt in dict.fromkeys(point.format for point in points):
        line = [f"`{fmt}`"]
        for data in folders:
            line += cells.get((fmt, data), ("-", "-"))
        lines.append(line)
    parts = [markdown(header, lines), _correlations(points, folders)]
    others = [point for point in points if point.format != COARSEST]
    if len({point.format for point in others}) >= FEWEST_FORMATS and len(others) < len(points):
        parts.append(f"Without {COARSEST}: {_correlations(others, folders)}")
    return "\n".join(parts)


def _correlations(points: Sequence[FormatPoint], folders: Sequence[str]) -> str:
    """Return a line with the correlations on every text."""
    correlations = []
    for data in folders:
        on_text = [point for point in points if point.data == data]
        correlations.append(f"{text_name(data)}: {_correlation_text(on_text)}")
    return f"{'; '.join(correlations)}.\n"


def _point_cells(point: FormatPoint) -> tuple[str, str]:
    return f"{point.ulp:.4f}", in_figures(point.distance)


def _correlation_text(points: Sequence[FormatPoint]) -> str:
    """Return the rank correlation of mean ULP and distance, and their power law.

    The power of the mean ULP is fitted to the distances above 0.
    """
    ulps = [point.ulp for point in points]
    distances = [point.distance.mean for point in points]
    text = f"rank correlation {spearmanr(ulps, distances).statistic:+.2f}"
    if not is_drawable(points):
        return text
    above = [point for point in points if point.distance.mean > 0]
    log_ulps = [math.log(point.ulp) for point in above]
    log_distances = [math.log(point.distance.mean) for point in above]
    return f"{text}, power {linregress(log_ulps, log_distances).slope:.2f}"


def is_drawable(points: Sequence[FormatPoint]) -> bool:
    """Return whether enough distances are above 0 for logarithmic axes."""
    return len(_above_lowest(points)) >= FEWEST_FORMATS


def _above_lowest(points: Sequence[FormatPoint]) -> list[FormatPoint]:
    return [point for point in points if point.distance.mean > LOWEST]


def draw_spacing(points: Sequence[FormatPoint], texts: Mapping[str, str], name: str) -> Figure:
    """Draw distances with 95% intervals over the mean ULP.

    The line is proportional, at the mean distance per ULP.
    """
    above = _above_lowest(points)
    slope = math.exp(fmean(math.log(point.distance.mean / point.ulp) for point in above))
    ulps = [point.ulp for point in points]
    ends = [min(ulps) / 1.4, max(ulps) * 2.0]
    figure, axis = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axis.plot(
        ends, [slope * ulp for ulp in ends], color="#aaaaaa", linewidth=1.2, linestyle=(0, (4, 2))
    )
    folders = dict.fromkeys(point.data for point in points)
    for data, look in zip(folders, MARKERS_OF_TEXTS, strict=False):
        on_text = [point for point in above if point.data == data]
        axis.plot(
            [point.ulp for point in on_text],
            [point.distance.mean for point in on_text],
            ls="",
            **look,
            label=texts.get(text_name(data), data),
        )
        for point in on_text:
            _draw_interval(axis, point, look["color"])
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=(LOWEST, None))
    axis.set(
        xlabel="mean ULP of the weights at the end",
        ylabel=f"final loss minus that of {name}, nats per byte",
    )
    axis.grid(color="#eeeeee", linewidth=0.8)
    axis.legend(fontsize="small", loc="upper left")
    return figure


def _draw_interval(axis: Axes, point: FormatPoint, color: str) -> None:
    """Draw the interval of a point, and the name of its format."""
    distance = point.distance
    if distance.low is not None and distance.high is not None:
        axis.vlines(point.ulp, max(distance.low, LOWEST), distance.high, color=color)
    axis.annotate(
        point.format,
        (point.ulp, distance.mean),
        (7, -11),
        textcoords="offset points",
        size=9,
    )
