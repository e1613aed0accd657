"""`sweep --sensitivity`: training with one layer pattern, or block, quantised at a
time.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.config.rules import reference_settings
from nanogpt_bench.config.schema import Config
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.evaluation.measurement import FILE
from nanogpt_bench.setup.formats import format_name
from nanogpt_bench.setup.resolve import resolve
from nanogpt_bench.sweep.axes import grid_points
from nanogpt_bench.sweep.file import SensitivityOptions, SweepFile
from nanogpt_bench.sweep.plan import PlannedRun, check_count, check_seeds, named_once, plan_point
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

AXES = ("model.format", "seed")


@dataclass(frozen=True)
class Study:
    """The runs of a sensitivity table: for every seed the reference, and every pattern
    x format.
    """

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    operand: str
    reference: tuple[PlannedRun, ...]
    #: runs by (pattern, format), one per seed
    cells: Mapping[tuple[str, str], tuple[PlannedRun, ...]]

    @property
    def planned(self) -> list[PlannedRun]:
        return named_once([*self.reference, *itertools.chain.from_iterable(self.cells.values())])


def plan_study(sweep: SweepFile) -> Study:
    """Return the study that a sweep file describes; its axes may only be model.format
    and seed.
    """
    for axis in sweep.axes:
        if axis.key not in AXES:
            raise BenchError(
                f"--sensitivity takes the axes {' and '.join(AXES)}; "
                f"give {axis.key} in the settings of {sweep.path.name}"
            )
    formats = sweep.axis("model.format")
    if formats is None:
        raise BenchError(
            f"--sensitivity needs the axis model.format in {sweep.path.name}, such as [E4M3, E7M0]"
        )
    seeds = sweep.axis("seed")
    source = f"{sweep.path.name} (--sensitivity)"
    check_count(formats.size * (1 if seeds is None else seeds.size), source)
    names = tuple(dict.fromkeys(format_name(name, "axes.model.format") for name in formats.grid()))
    if "none" in names:
        raise BenchError(
            "axes.model.format: 'none' is what the gaps are measured against; leave it out"
        )
    points = list(grid_points(() if seeds is None else (seeds,)))
    base = {
        key: value
        for key, value in sweep.base.items()
        if key not in ("model.format", "model.formats")
    }
    config = resolve(build_config({**base, "model.format": names[0]}))
    options = sweep.sensitivity
    all_patterns = list(options.patterns)
    if options.blocks:
        all_patterns += [f"blocks.{index}" for index in range(config.model.n_layer or 0)]
    patterns = tuple(dict.fromkeys(all_patterns))
    check_count(len(patterns) * len(names) * len(points), source)
    cells = {}
    for pattern, name in itertools.product(patterns, names):
        runs = [_cell_run(base, options, pattern, name, point) for point in points]
        cells[pattern, name] = tuple(runs)
    references = _references(sweep, base, config, points)
    check_seeds(references, itertools.chain.from_iterable(cells.values()))
    return Study(patterns, names, options.operand, references, cells)


def _references(
    sweep: SweepFile, base: Mapping[str, Any], config: Config, points: Sequence[Mapping[str, Any]]
) -> tuple[PlannedRun, ...]:
    """The same training with float weights: by the file's reference, or AdamW in the
    precision of the others.
    """
    own = sweep.reference
    if own is None:
        own = {"rule": "fp32" if config.train.precision == "float32" else "bf16-mixed"}
    if isinstance(own, str):
        raise BenchError(
            f"reference: {own!r} names a row; --sensitivity takes settings, such as {{rule: fp32}}"
        )
    settings = reference_settings(base, own)
    return tuple(plan_point(settings, point) for point in points)


def _cell_run(
    base: Mapping[str, Any],
    options: SensitivityOptions,
    pattern: str,
    fmt: str,
    point: Mapping[str, Any],
) -> PlannedRun:
    settings = {
        **base,
        "model.formats": {pattern: fmt if options.operand == "weight" else {options.operand: fmt}},
    }
    where = {"pattern": pattern, "model.format": fmt}
    run = plan_point(settings, point, f"{fmt} {pattern}")
    return replace(run, format=fmt, axes={**where, **run.axes})


def measure_gaps(study: Study, record: SweepRecord) -> dict[str, Any]:
    """Return the content of sensitivity.json: gaps in nats, pattern by format, null
    where no run has a final loss.

    A gap is the mean over seeds of the final validation loss minus that of the
    reference at the same seed; `spread` is its sample standard deviation, null with one
    seed; `status` names the ends of a cell's unfinished runs.
    """
    base = {run.seed: record.final_loss(run) for run in study.reference}
    run = study.cells[study.patterns[0], study.formats[0]][0]
    content: dict[str, Any] = {
        "patterns": list(study.patterns),
        "tied": run.settings.get("model.tied"),
        "formats": list(study.formats),
        "operand": study.operand,
        "seeds": list(base),
        "rule": run.rule,
        "reference": study.reference[0].label,
        "reference_loss": _mean([loss for loss in base.values() if loss is not None]),
    }
    gaps: dict[tuple[str, str], list[float]] = {}
    for place, runs in study.cells.items():
        pairs = [(record.final_loss(run), base[run.seed]) for run in runs]
        gaps[place] = [loss - of for loss, of in pairs if loss is not None and of is not None]
    rows = [[gaps[pattern, name] for name in study.formats] for pattern in study.patterns]
    return content | {
        "gap": [[_mean(cell) for cell in row] for row in rows],
        "spread": [
            [statistics.stdev(cell) if len(cell) > 1 else None for cell in row] for row in rows
        ],
        "status": [
            [_status(record, study.cells[p, name]) for name in study.formats]
            for p in study.patterns
        ],
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _status(record: SweepRecord, runs: Sequence[PlannedRun]) -> str | None:
    """The ends of a cell's unfinished runs: the kind of failure, or the status; None if
    all finished.
    """
    ends = []
    for run in runs:
        summary = record.summary(run)
        status = summary.get("status") or "not run"
        ends += (
            [] if status == "finished" else [(summary.get("failure") or {}).get("kind") or status]
        )
    return ", ".join(dict.fromkeys(ends)) or None


def write_gaps(study: Study, record: SweepRecord) -> Path:
    """Write sensitivity.json as of now."""
    return write_text(
        record.folder / FILE, json.dumps(measure_gaps(study, record), indent=1) + "\n"
    )
