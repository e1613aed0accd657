"""The figures as PNG, SVG and PDF files, drawn by matplotlib without a display."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nanogpt_bench.report import map_figures, series
from nanogpt_bench.report.figure_legend import legend_below
from nanogpt_bench.report.palette import MATPLOTLIB_DASHES, MATPLOTLIB_MARKERS, Look, figure_label
from nanogpt_bench.report.results import Result, Row, reference_name
from nanogpt_bench.report.studies import Studies
from nanogpt_bench.runs.metrics import COSINE, TRAIN_LOSS, VAL_LOSS
from nanogpt_bench.system.files import replacing

NO_STUDIES = Studies()
# What is left out of each kind of file so that the same figure gives the same bytes.
METADATA: dict[str, dict[str, Any] | None] = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 140,
    "pdf.fonttype": 42,
    # Text stays text in SVG, and the same figure gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "nanogpt-bench",
}


def write_figures(
    results: Sequence[Result], looks: Mapping[str, Look], folder: Path, studies: Studies = NO_STUDIES
) -> list[Path]:
    """Draw every figure there is data for into `folder`, as NAME.png, .svg and .pdf; returns the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with drawing():
        for name, draw in _figures(results, looks, studies).items():
            drawn = draw()
            written += _save(drawn, folder / name) if drawn is not None else []
    return written


def _figures(
    results: Sequence[Result], looks: Mapping[str, Look], studies: Studies
) -> dict[str, Callable[[], Figure | None]]:
    rows = [result.row for result in results]
    reference = next((result.row.label for result in results if result.reference), None)
    # Each is drawn when its turn comes: a figure of many rows takes tens of megabytes.
    return {
        "loss_curves": lambda: loss_curves(rows, looks, reference),
        "gap": lambda: gap_bars(results, looks),
        "stall": lambda: stall_over_steps(rows, looks),
        "gradient_cosine": lambda: cosine_over_steps(rows, looks),
        "weights": lambda: weight_histograms(results, looks),
        "code_use": lambda: map_figures.code_use(results),
        "stiffness": lambda: map_figures.stiffness(results),
        "learning_rates": lambda: map_figures.learning_rates(rows, looks),
        **{
            "sensitivity" + (f"_{i}" if i else ""): partial(map_figures.sensitivity, study)
            for i, study in enumerate(studies.sensitivities)
        },
    }


@contextmanager
def drawing() -> Iterator[None]:
    """The style of all figures, while the block lasts."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A run may be named in a script that the font lacks; the figure then shows boxes, which is no error.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _save(drawn: Figure, stem: Path) -> list[Path]:
    paths = []
    for suffix, metadata in METADATA.items():
        path = stem.with_suffix(f".{suffix}")
        with replacing(path) as file:
            # The strongest compression takes as long as the drawing and saves a tenth.
            packed = {"pil_kwargs": {"compress_level": 3}} if suffix == "png" else {}
            drawn.savefig(file, format=suffix, metadata=metadata, **packed)
        # The layout found for the first file holds for the others; to find it costs as much as to draw.
        drawn.set_layout_engine("none")
        paths.append(path)
    return paths


def loss_curves(rows: Sequence[Row], looks: Mapping[str, Look], reference: str | None = None) -> Figure | None:
    """Validation loss, the same magnified near the reference, and (smoothed) training loss over the steps."""
    val, train = series.lines(rows, VAL_LOSS.name), series.lines(rows, TRAIN_LOSS.name, smoothed=True)
    if not val and not train:
        return None
    close = series.close_range(val, reference)
    panels = [("Validation loss", val, series.loss_range(val))]
    panels += [("Validation loss near the reference", val, close)] if close else []
    panels += [("Training loss, smoothed", train, series.loss_range(train))]
    drawn = Figure(figsize=(5.2 * len(panels), 4.5), layout="constrained")
    for axes, (title, lines, limits) in zip(drawn.subplots(1, len(panels)), panels, strict=True):
        _plot(axes, lines, looks, markers=lines is val)
        axes.set(title=title, xlabel="step", ylabel="nats per token")
        if limits is not None:
            axes.set_ylim(limits)
    _legend(drawn, [*val, *train], looks)
    return drawn


def stall_over_steps(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """The share of weights that a requested update left where they were, over the steps."""
    lines = series.stall_lines(rows)
    if not lines:
        return None
    drawn = Figure(figsize=(9, 4.7), layout="constrained")
    axes = drawn.subplots()
    _plot(axes, lines, looks, markers=True)
    axes.set(title="Stall: weights a requested update did not move", xlabel="step", ylabel="share of weights")
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(drawn, lines, looks)
    return drawn


def cosine_over_steps(rows: Sequence[Row], looks: Mapping[str, Look]) -> Figure | None:
    """The gradients' mean cosine against the float32 shadow, over the steps."""
    lines = series.lines(rows, COSINE.name)
    if not lines:
        return None
    drawn = Figure(figsize=(9, 4.7), layout="constrained")
    axes = drawn.subplots()
    _plot(axes, lines, looks, markers=True)
    axes.set(title="Gradient cosine against the float32 shadow", xlabel="step", ylabel="cosine, mean over layers")
    _legend(drawn, lines, looks)
    return drawn


def _plot(axes: Axes, lines: Sequence[series.Line], looks: Mapping[str, Look], *, markers: bool) -> None:
    for line in lines:
        look = looks[line.label]
        ys = [float("nan") if y is None else y for y in line.ys]
        marker = MATPLOTLIB_MARKERS[look.marker] if markers and len(line.xs) <= 60 else ""
        axes.plot(line.xs, ys, marker=marker, markersize=3.5, linestyle=MATPLOTLIB_DASHES[look.dash], **_pen(look))


def _pen(look: Look) -> dict[str, Any]:
    return {"color": look.hex(), "linewidth": 0.85 * look.width, "zorder": 2.5 if look.colour is None else 2}


def _legend(drawn: Figure, lines: Sequence[series.Line], looks: Mapping[str, Look]) -> None:
    """One legend under the axes, a row once however many seeds it has."""
    labels = list(dict.fromkeys(line.label for line in lines))
    keys = [Line2D([], [], linestyle=MATPLOTLIB_DASHES[looks[label].dash], **_pen(looks[label])) for label in labels]
    legend_below(drawn, keys, [figure_label(label) for label in labels])


def gap_bars(results: Sequence[Result], looks: Mapping[str, Look]) -> Figure | None:
    """The final validation loss above the reference's, a bar a row, seeds' spread as a whisker."""
    others = [result for result in results if not result.reference]
    if not any(result.gap for result in others):
        return None
    drawn = Figure(figsize=(9, 1.4 + 0.46 * len(others)), layout="constrained")
    axes = drawn.subplots()
    for place, result in enumerate(others):
        _gap_bar(axes, place, result, looks[result.row.label])
    axes.axvline(0, color=_ink(), linewidth=1)
    axes.set_yticks(range(len(others)), [figure_label(result.row.label) for result in others])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    reference = figure_label(reference_name(results))
    axes.set(title=f"Final validation loss above that of {reference}", xlabel="nats per token")
    axes.margins(x=0.2)
    return drawn


def _gap_bar(axes: Axes, place: int, result: Result, look: Look) -> None:
    if result.gap is None:
        axes.annotate(" " + figure_label(result.verdict.text), (0, place), va="center", color="#666666")
        return
    spread = result.gap.spread
    hatch = None if look.dash == "solid" else "///"
    axes.barh(place, result.gap.mean, xerr=spread, height=0.62, color=look.hex(), hatch=hatch, edgecolor="white")
    end = max(0.0, result.gap.mean + (spread or 0.0))
    share = f" ({result.gap_share:+z.1%})" if result.gap_share is not None else ""
    axes.annotate(
        f"{result.gap.mean:+z.3f}{share}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=10
    )


def _ink() -> str:
    return Look(None, "solid", "circle", 1.0).hex()


def weight_histograms(results: Sequence[Result], looks: Mapping[str, Look]) -> Figure | None:
    """Where on the grid the weights ended, one panel a row, over the grid's codes."""
    histograms = series.grid_histograms(results)
    if not histograms:
        return None
    across = min(3, len(histograms))
    down = -(-len(histograms) // across)
    drawn = Figure(figsize=(4.2 * across, 2.6 * down), layout="constrained")
    panels = drawn.subplots(down, across, squeeze=False).ravel()
    for axes, histogram in zip(panels, histograms, strict=False):
        _histogram_panel(axes, histogram, looks[histogram.label].hex())
    for axes in panels[len(histograms) :]:
        axes.remove()
    drawn.supxlabel("value on the grid (in units of the row's scale)", fontsize=11)
    drawn.supylabel("share of weights", fontsize=11)
    return drawn


def _histogram_panel(axes: Axes, histogram: series.GridHistogram, colour: str) -> None:
    edges = [position - 0.5 for position in [*histogram.positions, histogram.positions[-1] + 1]]
    axes.stairs(histogram.shares, edges, fill=True, color=colour)
    axes.set_title(figure_label(histogram.label), fontsize=11)
    axes.set_xticks(*series.position_ticks(histogram, 2), fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.tick_params(axis="y", labelsize=9)
    axes.grid(axis="x", visible=False)
