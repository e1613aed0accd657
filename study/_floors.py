"""Gaps of a sensitivity map beside the floors that its float runs predict.

A file of this kind has one layer pattern in one format in each row, and float runs that
recorded `floor/loss/FORMAT/KIND` (`monitor.floor_formats` of the bench, law 1 of
docs/laws.md). A cell of the map is a pattern and a format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from _maps import formats_of
from _markdown import markdown
from _paired import in_figures, losses_of
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from nanogpt_bench.monitors.floor import FLOOR
from nanogpt_bench.report.paired import Difference, difference
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row, find_reference

ALL_LAYERS = "*"
RESAMPLES = 9999
SEED = 0
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "v", "D", "*")


@dataclass(frozen=True)
class Cell:
    """A cell of the map: its gap in nats, and the floor as a mean over the seeds."""

    pattern: str
    format: str
    gap: Difference
    floor: float

    @property
    def share(self) -> float:
        """The gap as a share of the floor."""
        return self.gap.mean / self.floor


def cells_of(file: Exported) -> list[Cell]:
    """Return the cells with a gap and a floor; [] for a map without floors."""
    reference = find_reference(file.rows, file.baseline)
    if reference is None:
        return []
    floors = floors_of(reference)
    losses = losses_of(reference)
    cells = []
    for row in file.rows:
        patterns = tuple(formats_of(row))
        if row.format == "none" or len(patterns) != 1:
            continue
        gap = difference(losses_of(row), losses)
        floor = floors.get((patterns[0], row.format))
        if gap is not None and floor:
            cells.append(Cell(patterns[0], row.format, gap, floor))
    return cells


def floors_of(reference: Row) -> dict[tuple[str, str], float]:
    """Return the floors by pattern and format, means over the float runs."""
    values: dict[tuple[str, str], list[float]] = {}
    for run in reference.runs:
        last = run.looks[max(run.looks)] if run.looks else {}
        for name, value in last.items():
            if name.startswith(f"{FLOOR.name}/"):
                fmt, _, kind = name.removeprefix(f"{FLOOR.name}/").partition("/")
                values.setdefault((kind or ALL_LAYERS, fmt), []).append(value)
    return {place: fmean(floors) for place, floors in values.items()}


def floors_table(cells: Sequence[Cell]) -> str:
    """Return a line per pattern and, for each format, the gap and the floor below it.

    Under the table stand the sums over patterns and the rank correlation.
    """
    formats = _formats(cells)
    by_place = {(cell.pattern, cell.format): cell for cell in cells}
    header = ["in that format alone"]
    for fmt in formats:
        header += [fmt, f"floor, {fmt}"]
    lines = []
    for pattern in _patterns(cells):
        line = ["all layers" if pattern == ALL_LAYERS else f"`{pattern}`"]
        for fmt in formats:
            cell = by_place.get((pattern, fmt))
            line += ["-", "-"] if cell is None else [in_figures(cell.gap), f"{cell.floor:.3f}"]
        lines.append(line)
    parts = [
        markdown(header, lines),
        _sums_line(by_place, formats),
        _correlation_line(cells),
        _within_formats_line(cells),
    ]
    return "\n".join(part for part in parts if part)


def _formats(cells: Sequence[Cell]) -> list[str]:
    """Return the formats, from the lowest floor to the highest."""
    highest: dict[str, float] = {}
    for cell in cells:
        highest[cell.format] = max(cell.floor, highest.get(cell.format, 0.0))
    return sorted(highest, key=lambda fmt: highest[fmt])


def _patterns(cells: Sequence[Cell]) -> list[str]:
    names = dict.fromkeys(cell.pattern for cell in cells)
    parts = [name for name in names if name != ALL_LAYERS]
    return [*parts, ALL_LAYERS] if ALL_LAYERS in names else parts


def _sums_line(by_place: Mapping[tuple[str, str], Cell], formats: Sequence[str]) -> str:
    """Return the sum of the patterns' gaps as a share of that of all layers."""
    shares = []
    for fmt in formats:
        whole = by_place.get((ALL_LAYERS, fmt))
        parts = []
        for (pattern, name), cell in by_place.items():
            if name == fmt and pattern != ALL_LAYERS:
                parts.append(cell.gap.mean)
        if whole is not None and parts:
            shares.append(f"{fmt} {sum(parts):.3f} of {whole.gap.mean:.3f}")
    return f"Sum of the patterns, and all layers at once: {'; '.join(shares)}.\n" if shares else ""


def _correlation_line(cells: Sequence[Cell]) -> str:
    """Return the rank correlation of gap and floor over cells, without all layers."""
    single = [cell for cell in cells if cell.pattern != ALL_LAYERS]
    if len(single) < 4:
        return ""
    correlation = rank_correlation(single)
    low, high = correlation_interval(single)
    shares = sorted(cell.share for cell in single)
    return (
        f"Rank correlation of gap and floor over {len(single)} cells: {correlation:+.2f}, "
        f"95% [{low:+.2f}, {high:+.2f}] by bootstrap over cells. Gap as a share of the floor: "
        f"median {median_share(single):.2f}, from {shares[0]:.2f} to {shares[-1]:.2f}.\n"
    )


def _within_formats_line(cells: Sequence[Cell]) -> str:
    """Return the rank correlation over the patterns of each format.

    Over all cells it is high for any figure that is proportional to a format's spacing.
    """
    parts = []
    for fmt in _formats(cells):
        single = [cell for cell in cells if cell.format == fmt and cell.pattern != ALL_LAYERS]
        if len(single) >= 4:
            parts.append(f"{fmt} {rank_correlation(single):+.2f}")
    return f"Over the patterns of one format: {'; '.join(parts)}.\n" if parts else ""


def rank_correlation(cells: Sequence[Cell]) -> float:
    """Return Spearman's rank correlation of gap and floor.

    >>> def cell(gap, floor):
    ...     return Cell("mlp.fc", "E4M3", Difference(gap, 1), floor)
    >>> round(rank_correlation([cell(0.1, 1.0), cell(0.2, 3.0), cell(0.3, 2.0)]), 3)
    0.5
    """
    gaps = [cell.gap.mean for cell in cells]
    return float(spearmanr(gaps, [cell.floor for cell in cells]).statistic)


def median_share(cells: Sequence[Cell]) -> float:
    """Return the median of the cells' shares of their floors."""
    return float(np.median([cell.share for cell in cells]))


def correlation_interval(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the ends of the 95% interval of the rank correlation, by bootstrap."""
    generator = np.random.default_rng(SEED)
    correlations = []
    for _ in range(RESAMPLES):
        drawn = [cells[place] for place in generator.integers(len(cells), size=len(cells))]
        if len({cell.floor for cell in drawn}) > 1 and len({cell.gap.mean for cell in drawn}) > 1:
            correlations.append(rank_correlation(drawn))
    low, high = np.quantile(correlations, [0.025, 0.975])
    return float(low), float(high)


def draw_floors(cells: Sequence[Cell]) -> Figure:
    """Draw the gap of each cell with its interval against its floor.

    A colour is a format, and a marker a pattern. The line is the median share.
    """
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    colours = dict(zip(_formats(cells), COLOURS, strict=False))
    markers = dict(zip(_patterns(cells), MARKERS, strict=False))
    share = median_share(cells)
    floors = np.geomspace(min(cell.floor for cell in cells), max(cell.floor for cell in cells))
    axis.axhline(0, color="#999999", linewidth=1)
    axis.plot(floors, share * floors, color="#aaaaaa", linewidth=1.2, linestyle=(0, (4, 2)))
    for cell in cells:
        colour = colours[cell.format]
        axis.plot(cell.floor, cell.gap.mean, markers[cell.pattern], color=colour, markersize=6)
        if not cell.gap.is_lead:
            axis.vlines(cell.floor, cell.gap.low, cell.gap.high, color=colour)
    for fmt, colour in colours.items():
        axis.plot([], [], "o", color=colour, label=fmt)
    for pattern, marker in markers.items():
        label = "all layers" if pattern == ALL_LAYERS else pattern
        axis.plot([], [], marker, color="#555555", label=label)
    axis.set_xscale("log")
    axis.set_yscale("symlog", linthresh=0.01)
    axis.margins(y=0.1)
    axis.set(
        xlabel="floor of the float run, nats",
        ylabel="final loss minus that of float Muon, nats per byte",
    )
    axis.grid(color="#eeeeee", linewidth=0.8)
    axis.legend(fontsize="small", loc="upper left", ncols=2)
    return figure
