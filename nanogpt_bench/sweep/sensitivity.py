"""`sweep --sensitivity`: one layer pattern, or one block, quantised at a time, in every format: the loss gaps."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanogpt_bench.compare.plan import check_count
from nanogpt_bench.config.rules import float_rule, reference_settings
from nanogpt_bench.config.settings import build_config
from nanogpt_bench.runs.read import finite
from nanogpt_bench.step.formats import format_name
from nanogpt_bench.step.resolve import resolve
from nanogpt_bench.step.rounding import EMBEDDINGS
from nanogpt_bench.sweep.file import Sensitivity, SweepFile
from nanogpt_bench.sweep.plan import PlannedPoint, named_once, plan_point
from nanogpt_bench.sweep.record import SweepRecord
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import write_text

FILE = "sensitivity.json"
AXES = ("model.format", "seed")


@dataclass(frozen=True)
class Study:
    """What is trained: the reference at every seed, and every pattern x format at every seed."""

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    operand: str
    reference: tuple[PlannedPoint, ...]
    #: by (pattern, format), one run a seed
    cells: Mapping[tuple[str, str], tuple[PlannedPoint, ...]]

    @property
    def planned(self) -> list[PlannedPoint]:
        """Every run, the references first."""
        return named_once([*self.reference, *(run for runs in self.cells.values() for run in runs)])


def plan_study(sweep: SweepFile) -> Study:
    """Return the study that a sweep file asks for: its axes are formats, and seeds if several are wanted.

    Raises:
        BenchError: no formats, or an axis that has no place in the table.
    """
    for axis in sweep.axes:
        if axis.key not in AXES:
            raise BenchError(
                f"--sensitivity takes the axes {' and '.join(AXES)}; "
                f"give {axis.key} in the settings of {sweep.path.name}"
            )
    formats = sweep.axis("model.format")
    if formats is None:
        raise BenchError(f"--sensitivity needs the axis model.format in {sweep.path.name}, such as [E4M3, E7M0]")
    seeds = sweep.axis("seed")
    repeats = seeds.size if seeds is not None else 1
    check_count(formats.size * repeats, f"{sweep.path.name} (--sensitivity)")
    names = tuple(dict.fromkeys(format_name(name, "axes.model.format") for name in formats.grid()))
    if "none" in names:
        raise BenchError("axes.model.format: 'none' is what the gaps are measured against; leave it out")
    points = [{"seed": seed} for seed in seeds.grid()] if seeds is not None else [{}]
    base = {key: value for key, value in sweep.base.items() if key not in ("model.format", "model.formats")}
    patterns = _patterns(sweep, base, names[0])
    check_count(len(patterns) * len(names) * len(points), f"{sweep.path.name} (--sensitivity)")
    cells = {
        (pattern, name): tuple(_cell_run(base, sweep.sensitivity, pattern, name, point) for point in points)
        for pattern in patterns
        for name in names
    }
    return Study(patterns, names, sweep.sensitivity.operand, _references(sweep, base, names[0], points), cells)


def _patterns(sweep: SweepFile, base: Mapping[str, Any], fmt: str) -> tuple[str, ...]:
    """The patterns asked for and, unless turned off, every block of the model."""
    config = resolve(build_config({**base, "model.format": fmt}))
    blocks = [f"blocks.{index}" for index in range(config.model.n_layer or 0)] if sweep.sensitivity.blocks else []
    return tuple(dict.fromkeys([*sweep.sensitivity.patterns, *blocks]))


def _references(
    sweep: SweepFile, base: Mapping[str, Any], fmt: str, points: Sequence[Mapping[str, Any]]
) -> tuple[PlannedPoint, ...]:
    """The same training with float weights: as the file says, or AdamW at the precision of the others."""
    own = sweep.reference
    if own is None:
        own = {"rule": float_rule(resolve(build_config({**base, "model.format": fmt})).train.precision)}
    if isinstance(own, str):
        raise BenchError(f"reference: {own!r} names a row; --sensitivity takes settings, such as {{rule: fp32}}")
    settings = reference_settings(base, own)
    return tuple(plan_point(settings, point) for point in points)


def _cell_run(
    base: Mapping[str, Any], options: Sensitivity, pattern: str, fmt: str, point: Mapping[str, Any]
) -> PlannedPoint:
    value = fmt if options.operand == "weight" else {options.operand: fmt}
    settings = {**base, "model.formats": {pattern: value}}
    where = {"pattern": pattern, "model.format": fmt}
    run = plan_point(settings, point, f"{fmt} {pattern}")
    return replace(run, format=fmt, axes={**where, **run.axes})


def measure_gaps(study: Study, record: SweepRecord) -> dict[str, Any]:
    """Return the content of sensitivity.json: gaps in nats, pattern by format, null where a run has no final loss.

    A gap is the mean over seeds of the final val loss less that of the reference at the same seed; `spread` is its
    sample standard deviation, null with one seed; `status` names how a cell's runs ended that did not finish.
    """
    base = {run.seed: _loss(record, run) for run in study.reference}
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
    gaps = {place: _gaps(record, runs, base) for place, runs in study.cells.items()}
    rows = [[gaps[pattern, name] for name in study.formats] for pattern in study.patterns]
    return content | {
        "gap": [[_mean(cell) for cell in row] for row in rows],
        "spread": [[statistics.stdev(cell) if len(cell) > 1 else None for cell in row] for row in rows],
        "status": [[_status(record, study.cells[p, name]) for name in study.formats] for p in study.patterns],
    }


def _gaps(record: SweepRecord, runs: Sequence[PlannedPoint], base: Mapping[int, float | None]) -> list[float]:
    pairs = [(_loss(record, run), base[run.seed]) for run in runs]
    return [loss - of for loss, of in pairs if loss is not None and of is not None]


def _loss(record: SweepRecord, run: PlannedPoint) -> float | None:
    summary = record.summary(run)
    return finite(summary.get("final_val_loss")) if summary.get("status") == "finished" else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _status(record: SweepRecord, runs: Sequence[PlannedPoint]) -> str | None:
    """How the cell's runs ended, by the failure's kind where there is one; null when all finished."""
    ends = []
    for run in runs:
        summary = record.summary(run)
        status = summary.get("status") or "not run"
        ends += [] if status == "finished" else [(summary.get("failure") or {}).get("kind") or status]
    return ", ".join(dict.fromkeys(ends)) or None


def write_gaps(study: Study, record: SweepRecord) -> Path:
    """Write sensitivity.json as things stand."""
    return write_text(record.folder / FILE, json.dumps(measure_gaps(study, record), indent=1) + "\n")


def gaps_table(content: Mapping[str, Any]) -> str:
    """Return the gaps as a Markdown table, and below it the settings of the mixture that they foretell."""
    lines = [f"| quantised alone | {' | '.join(content['formats'])} |", "|---|" + "---:|" * len(content["formats"])]
    for pattern, gaps, ends in zip(content["patterns"], content["gap"], content["status"], strict=True):
        cells = [end or "-" if gap is None else f"{gap:+.3f}" for gap, end in zip(gaps, ends, strict=True)]
        lines.append(f"| {'all layers' if pattern == '*' else pattern} | {' | '.join(cells)} |")
    told = shlex.join(_settings(content)) if content["operand"] == "weight" else ""
    return "\n".join(lines) + "\n" + (f"\nlowest gaps: {told}\n" if told else "")


def _settings(content: Mapping[str, Any]) -> list[str]:
    """The words of the mixture, as commands take them: with what the table was measured under, or they refuse some."""
    found, keys = mixture(content), content.get("keys", {})
    formats = {key: name for pattern, name in found.items() for key in keys.get(pattern, (pattern,))}
    if not formats:
        return []
    formats |= {pattern: value for pattern, value in content.get("given", {}).items() if pattern != EMBEDDINGS}
    values = [(pattern, value if isinstance(value, str) else json.dumps(value)) for pattern, value in formats.items()]
    tied = ["--model.tied", content["tied"]] if content.get("tied") else []
    return [*(word for pattern, value in values for word in (f"--model.formats.{pattern}", value)), *tied]


def mixture(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the format of the lowest gap by layer pattern; single blocks and all layers at once are left out.

    So are embeddings, which no setting of a run rounds.
    """
    left_out = ("*", EMBEDDINGS)
    patterns = [name for name in content["patterns"] if name not in left_out and not name.startswith("blocks.")]
    rows = dict(zip(content["patterns"], content["gap"], strict=True))
    known = {
        pattern: [(gap, name) for gap, name in zip(rows[pattern], content["formats"], strict=True) if gap is not None]
        for pattern in patterns
    }
    return {pattern: min(cells)[1] for pattern, cells in known.items() if cells}
