"""Gaps of trainings in one byte beside the floors of float runs, by batch and momentum.

A file of this kind has float runs with several batches or momenta that recorded
`floor/loss/FORMAT` (`monitor.floor_formats` of the bench, law 1 of docs/laws.md), and
beside each of them runs in one byte with the same batch and momentum.
"""

from collections.abc import Sequence
from typing import Any

from _floors import ALL_LAYERS, Cell, floors_of, median_share, rank_correlation
from _markdown import markdown
from _paired import in_figures, losses_of

from nanogpt_bench.report.paired import difference
from nanogpt_bench.report.results_file import Exported
from nanogpt_bench.report.rows import Row

#: what a training is told apart by
KEYS = (("train", "batch_size"), ("optimizer", "momentum"))
#: the float rule whose runs have the floors
FLOATS = "muon"


def cells_by_training(file: Exported) -> list[Cell]:
    """Return gap and floor of each training and format; [] for a file without floors."""
    floats: dict[tuple[Any, ...], Row] = {}
    for row in file.rows:
        if row.rule == FLOATS and row.runs and floors_of(row):
            floats[_training(row)] = row
    cells = []
    for row in file.rows:
        twin = floats.get(_training(row)) if row.runs else None
        if twin is None or row.format == "none":
            continue
        gap = difference(losses_of(row), losses_of(twin))
        floor = floors_of(twin).get((ALL_LAYERS, row.format))
        if gap is not None and floor:
            cells.append(Cell(_words(row), row.format, gap, floor))
    return cells


def law_table(cells: Sequence[Cell]) -> str:
    """Return a line per training and format: gap, floor, and the gap as a share of it."""
    lines = []
    for cell in cells:
        lines.append(
            [
                cell.pattern,
                cell.format,
                in_figures(cell.gap),
                f"{cell.floor:.3f}",
                f"{cell.share:.2f}",
            ]
        )
    table = markdown(("training", "format", "gap, nats", "floor, nats", "gap / floor"), lines)
    shares = sorted(cell.share for cell in cells)
    return (
        f"{table}\nRank correlation of gap and floor over {len(cells)} cells: "
        f"{rank_correlation(cells):+.2f}. Gap as a share of the floor: median "
        f"{median_share(cells):.2f}, from {shares[0]:.2f} to {shares[-1]:.2f}.\n"
    )


def _training(row: Row) -> tuple[Any, ...]:
    config = row.runs[0].config
    return tuple(config[section][key] for section, key in KEYS)


def _words(row: Row) -> str:
    batch, momentum = _training(row)
    return f"{batch} sequences, momentum {momentum}"
