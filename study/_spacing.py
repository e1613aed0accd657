"""Distance of a rule from its float baseline, by the mean ULP of its weights, over the
formats of a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from _looks import STOCHASTIC
from _markdown import markdown
from _paired import in_figures
from _weights import at_end, data_of
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import linregress, spearmanr

from nanogpt_bench.report.paired import Difference
from nanogpt_bench.report.results import measure
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import find_reference

MEAN_ULP = "geometry/stiffness_mean"
FORMATS = 3
"""Fewer formats than this make no line."""
LOWEST = 0.002
"""Lower end of the figure's axis, in nats."""
OF_TEXTS = ({"marker": "o", "color": STOCHASTIC}, {"marker": "s", "color": "#E69F00"})


@dataclass(frozen=True)
class Spaced:
    """A format on a text: the mean ULP of the weights at the end of the training, and
    the distance to the baseline.
    """

    text: str
    format: str
    ulp: float
    distance: Difference


def spaced(file: Exported) -> list[Spaced]:
    """The formats of a file's only quantised rule, by mean ULP; [] for several such
    rules or few formats.
    """
    reference = find_reference(file.rows, file.baseline)
    quantised = [row for row in file.rows if row.format != "none" and row.runs]
    if reference is None or len({row.rule for row in quantised}) != 1:
        return []
    found = [
        Spaced(data_of(result.row), result.row.format, ulp, result.difference)
        for result in measure(file.rows, reference)
        if result.row in quantised
        and result.difference
        and (ulp := at_end(result.row, MEAN_ULP)) is not None
    ]
    return (
        sorted(found, key=lambda each: each.ulp)
        if len({each.format for each in found}) >= FORMATS
        else []
    )


def spacing_table(each: Sequence[Spaced]) -> str:
    """A line per format: its mean ULP and its distance on every text. Below the table,
    how the two correlate.
    """
    texts = list(dict.fromkeys(point.text for point in each))
    cells = {(point.format, point.text): point for point in each}
    header = [
        "format",
        *(
            f"{words}, {text.split('/')[-1]}"
            for text in texts
            for words in ("mean ULP", "distance")
        ),
    ]
    lines = [
        [f"`{name}`", *(cell for text in texts for cell in _cells(cells.get((name, text))))]
        for name in dict.fromkeys(point.format for point in each)
    ]
    told = (
        f"{text.split('/')[-1]}: {_told([point for point in each if point.text == text])}"
        for text in texts
    )
    return f"{markdown(header, lines)}\n{'; '.join(told)}.\n"


def _cells(point: Spaced | None) -> tuple[str, str]:
    return ("-", "-") if point is None else (f"{point.ulp:.4f}", in_figures(point.distance))


def _told(each: Sequence[Spaced]) -> str:
    """Rank correlation of mean ULP and distance, and the power of the mean ULP that
    fits the distances above 0.
    """
    rank = spearmanr(
        [point.ulp for point in each], [point.distance.mean for point in each]
    ).statistic
    above = [
        (math.log(point.ulp), math.log(point.distance.mean))
        for point in each
        if point.distance.mean > 0
    ]
    power = f", power {linregress(*zip(*above, strict=True)).slope:.2f}" if is_drawn(each) else ""
    return f"rank correlation {rank:+.2f}{power}"


def is_drawn(each: Sequence[Spaced]) -> bool:
    """Return whether enough distances are above 0 for logarithmic axes."""
    return sum(point.distance.mean > LOWEST for point in each) >= FORMATS


def drawn_spacing(each: Sequence[Spaced], texts: Mapping[str, str], name: str) -> Figure:
    """Distances with 95% intervals over the mean ULP; the line is proportional, at the
    mean distance per ULP.
    """
    above = [point for point in each if point.distance.mean > LOWEST]
    slope = math.exp(fmean(math.log(point.distance.mean / point.ulp) for point in above))
    ends = [min(point.ulp for point in each) / 1.4, max(point.ulp for point in each) * 2.0]
    figure, axis = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axis.plot(
        ends, [slope * ulp for ulp in ends], color="#aaaaaa", linewidth=1.2, linestyle=(0, (4, 2))
    )
    for text, look in zip(dict.fromkeys(point.text for point in each), OF_TEXTS, strict=False):
        own = [point for point in above if point.text == text]
        place = text.split("/")[-1]
        axis.plot(
            [p.ulp for p in own],
            [p.distance.mean for p in own],
            ls="",
            **look,
            label=texts.get(place, text),
        )
        for point in own:
            if point.distance.low is not None and point.distance.high is not None:
                axis.vlines(
                    point.ulp,
                    max(point.distance.low, LOWEST),
                    point.distance.high,
                    color=look["color"],
                )
            axis.annotate(
                point.format,
                (point.ulp, point.distance.mean),
                (7, -11),
                textcoords="offset points",
                size=9,
            )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=(LOWEST, None))
    axis.set(
        xlabel="mean ULP of the weights at the end",
        ylabel=f"final loss minus that of {name}, nats per byte",
    )
    axis.grid(color="#eeeeee", linewidth=0.8)
    axis.legend(fontsize="small", loc="upper left")
    return figure
