"""`sweep --sensitivity`: training with one layer pattern or block quantised at a time.

A cell of the table is a pattern and a format. Its gap is the mean over seeds of

    final validation loss of the cell - that of the reference at the same seed

and the reference is the same training with float weights.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.rules import reference_settings
from nanogpt_bench.config.schema import NO_FORMAT, Config, Precision
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.evaluation.measurement import GAPS_FILE
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.axes import FORMAT_KEY, FORMATS_KEY, Axis, Point, grid_points
from nanogpt_bench.sweep.file import SensitivityOptions, SweepFile
from nanogpt_bench.sweep.plan import PlannedRun, check_count, check_seeds, named_once, plan_point
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

AXES = (FORMAT_KEY, "seed")


class StudyCell(NamedTuple):
    """A cell of a sensitivity table: the quantised layers and their format."""

    pattern: str
    format: str


@dataclass(frozen=True)
class Study:
    """The runs of a sensitivity table: at every seed a reference and all cells."""

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    operand: str
    #: runs of the reference, one per seed
    reference: tuple[PlannedRun, ...]
    #: runs of every cell, one per seed
    cells: Mapping[StudyCell, tuple[PlannedRun, ...]]

    @property
    def planned(self) -> list[PlannedRun]:
        """All runs, each once."""
        return named_once([*self.reference, *itertools.chain.from_iterable(self.cells.values())])


def plan_study(sweep: SweepFile) -> Study:
    """Return the study that a sweep file describes.

    Its axes may only be model.format and seed.
    """
    format_axis = _format_axis(sweep)
    seed_axis = sweep.axis("seed")
    source = f"{sweep.path.name} (--sensitivity)"
    check_count(format_axis.size * (1 if seed_axis is None else seed_axis.size), source)
    formats = _format_names(format_axis)
    points = list(grid_points(() if seed_axis is None else (seed_axis,)))
    base = {key: value for key, value in sweep.base.items() if key not in (FORMAT_KEY, FORMATS_KEY)}
    config = resolve(build_config({**base, FORMAT_KEY: formats[0]}))
    options = sweep.sensitivity
    patterns = list(options.patterns)
    if options.blocks:
        patterns += [f"blocks.{index}" for index in range(config.model.n_layer or 0)]
    patterns = list(dict.fromkeys(patterns))
    check_count(len(patterns) * len(formats) * len(points), source)
    cells = {}
    for cell in itertools.starmap(StudyCell, itertools.product(patterns, formats)):
        cells[cell] = tuple(_cell_run(base, options, cell, point) for point in points)
    references = _references(sweep, base, config, points)
    check_seeds(references, itertools.chain.from_iterable(cells.values()))
    return Study(tuple(patterns), formats, options.operand, references, cells)


def _format_axis(sweep: SweepFile) -> Axis:
    for axis in sweep.axes:
        if axis.key not in AXES:
            raise BenchError(
                f"--sensitivity takes the axes {' and '.join(AXES)} only; give {axis.key} in the "
                f"settings of {sweep.path.name}"
            )
    format_axis = sweep.axis(FORMAT_KEY)
    if format_axis is None:
        raise BenchError(
            f"--sensitivity needs the axis model.format in {sweep.path.name}, such as [E4M3, E7M0]"
        )
    return format_axis


def _format_names(axis: Axis) -> tuple[str, ...]:
    names = [format_name(name, "axes.model.format") for name in axis.grid()]
    if NO_FORMAT in names:
        raise BenchError(
            "axes.model.format: gaps are measured against 'none' already; leave it out"
        )
    return tuple(dict.fromkeys(names))


def _references(
    sweep: SweepFile, base: Mapping[str, Any], config: Config, points: Sequence[Point]
) -> tuple[PlannedRun, ...]:
    """Return runs of the same training with float weights.

    They have the settings of the file's reference or, without one, are AdamW in the
    precision of the cells.
    """
    reference = sweep.reference
    if reference is None:
        is_float32 = config.train.precision == Precision.FLOAT32
        reference = {"rule": "fp32" if is_float32 else "bf16-mixed"}
    if isinstance(reference, str):
        raise BenchError(
            f"reference: {reference!r} names a row; --sensitivity takes settings, such as "
            f"{{rule: fp32}}"
        )
    settings = reference_settings(base, reference)
    return tuple(plan_point(settings, point) for point in points)


def _cell_run(
    base: Mapping[str, Any], options: SensitivityOptions, cell: StudyCell, point: Point
) -> PlannedRun:
    is_weight = options.operand == "weight"
    layer_format = cell.format if is_weight else {options.operand: cell.format}
    settings = {**base, FORMATS_KEY: {cell.pattern: layer_format}}
    run = plan_point(settings, point, f"{cell.format} {cell.pattern}")
    axes = {"pattern": cell.pattern, FORMAT_KEY: cell.format, **run.axes}
    return replace(run, format=cell.format, axes=axes)


def measure_gaps(study: Study, record: SweepRecord) -> dict[str, Any]:
    """Return the content of sensitivity.json, with one list per pattern.

    A list has one value per format: `gap` in nats, null where no run has a final loss;
    `spread`, its sample standard deviation over seeds, null with one seed; `status`,
    the ends of unfinished runs.
    """
    reference_losses = {run.seed: record.final_loss(run) for run in study.reference}
    known_losses = [loss for loss in reference_losses.values() if loss is not None]
    first_cell_run = study.cells[StudyCell(study.patterns[0], study.formats[0])][0]
    gap_rows = []
    spread_rows = []
    status_rows = []
    for pattern in study.patterns:
        runs_by_format = [study.cells[StudyCell(pattern, name)] for name in study.formats]
        gaps = [_gaps(record, runs, reference_losses) for runs in runs_by_format]
        gap_rows.append([_mean_or_none(cell_gaps) for cell_gaps in gaps])
        spread_rows.append([_deviation(cell_gaps) for cell_gaps in gaps])
        status_rows.append([_status(record, runs) for runs in runs_by_format])
    return {
        "patterns": list(study.patterns),
        "tied": first_cell_run.settings.get("model.tied"),
        "formats": list(study.formats),
        "operand": study.operand,
        "seeds": list(reference_losses),
        "rule": first_cell_run.rule,
        "reference": study.reference[0].label,
        "reference_loss": _mean_or_none(known_losses),
        "gap": gap_rows,
        "spread": spread_rows,
        "status": status_rows,
    }


def _gaps(
    record: SweepRecord,
    runs: Sequence[PlannedRun],
    reference_losses: Mapping[int, float | None],
) -> list[float]:
    """Return the gaps of a cell at the seeds where both losses are known."""
    gaps = []
    for run in runs:
        loss = record.final_loss(run)
        reference_loss = reference_losses[run.seed]
        if loss is not None and reference_loss is not None:
            gaps.append(loss - reference_loss)
    return gaps


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _status(record: SweepRecord, runs: Sequence[PlannedRun]) -> str | None:
    """Return the ends of a cell's unfinished runs; None if all finished.

    An end is the kind of a failure, or the status.
    """
    ends = []
    for run in runs:
        summary = record.summary(run)
        status = summary.get("status") or "not run"
        if status != RunStatus.FINISHED:
            ends.append((summary.get("failure") or {}).get("kind") or status)
    return ", ".join(dict.fromkeys(ends)) or None


def write_gaps(study: Study, record: SweepRecord) -> Path:
    """Write sensitivity.json as of now."""
    content = json.dumps(measure_gaps(study, record), indent=1)
    return write_text(record.folder / GAPS_FILE, content + "\n")
