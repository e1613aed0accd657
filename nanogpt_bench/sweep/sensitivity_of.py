"""`sweep --sensitivity --of runs/X`: weights of a run, one layer pattern or block rounded at a time, none trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanogpt_bench.data.batches import open_corpus
from nanogpt_bench.data.default import prepare_default
from nanogpt_bench.report.build import report
from nanogpt_bench.runs.trained import Trained, choose, is_checkpoint, load, run_folder
from nanogpt_bench.step.formats import format_name
from nanogpt_bench.step.runtime import runtime
from nanogpt_bench.sweep.file import Sensitivity, SweepFile, find_sweep, read_sweep
from nanogpt_bench.sweep.sensitivity import FILE, gaps_table
from nanogpt_bench.system.errors import BenchError, printable
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.lock import is_unused, locked
from nanogpt_bench.system.untrusted import read_json
from nanogpt_bench.training.rounded import Rounded, checked_overrides, folder_of

SHIPPED = "sensitivity.yaml"


def main_sensitivity_of(args: argparse.Namespace) -> int:
    """The command line's entry: round, measure, print the table and the report's path.

    Raises:
        BenchError: no such run, options that mean nothing here, or a text, file or folder that can't be used.
    """
    if not args.sensitivity:
        raise BenchError("--of: the weights of a run can be rounded one layer at a time, with --sensitivity")
    if args.workers:
        raise BenchError("--workers: with --of nothing is trained, one table is measured by one process; leave it out")
    if args.known:
        raise BenchError("--from: with --of nothing is trained, so no run need be taken from a file; leave it out")
    run_dir, folder = _checkpoint(args.of)
    sweep = read_sweep(find_sweep(args.file or SHIPPED))
    formats = _formats(sweep)
    if sweep.base:
        _say(f"of {sweep.path.name} only formats and patterns are taken: all else is as in {run_dir}")
    weights = Rounded(load(folder), _given(args.overrides))
    out = args.out or Path("runs") / f"sensitivity-of-{run_dir.resolve().name}"
    with locked(out, "--out"):
        _check_folder(out)
        content = measure_of(weights, sweep.sensitivity, formats)
        write_text(out / FILE, json.dumps(content, indent=1) + "\n")
        page = report([run_dir], out=out)
    print("".join(f"{printable(line)}\n" for line in gaps_table(content).splitlines()))
    print(page, flush=True)
    return 0


def _checkpoint(path: Path) -> tuple[Path, Path]:
    """Return a run's folder, and the checkpoint meant: its newest one, or the one that is named."""
    run_dir = run_folder(str(path))
    if run_dir is not None:
        return run_dir, choose(run_dir)
    if is_checkpoint(path):
        above = path.parent.parent
        return above.parent if above.name == "best" else above, path
    raise BenchError(f"--of: {str(path)!r} is no folder of a run; give runs/NAME, or one of its checkpoints")


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    given = checked_overrides(overrides)
    if "model.formats" in given:
        raise BenchError("--model.formats: what is rounded is said by sensitivity.patterns of the sweep file")
    return given


def _formats(sweep: SweepFile) -> list[str]:
    for other in sweep.axes:
        if other.key != "model.format":
            raise BenchError(f"--of takes the axis model.format alone: {other.key} can't vary once weights are trained")
    axis = sweep.axis("model.format")
    if axis is None:
        raise BenchError(f"--sensitivity needs the axis model.format in {sweep.path.name}, such as [E4M3, E7M0]")
    names = list(dict.fromkeys(format_name(name, "axes.model.format") for name in axis.grid()))
    if "none" in names:
        raise BenchError("axes.model.format: 'none' is what the gaps are measured against; leave it out")
    if sweep.sensitivity.operand == "gradient":
        raise BenchError("sensitivity.operand: 'gradient' means nothing without training; allowed: weight, activation")
    return names


def _check_folder(out: Path) -> None:
    """Take a folder that is new, or holds a table of this kind, which is then replaced."""
    if is_unused(out):
        return
    try:
        before = read_json(out / FILE)
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or not before.get("of"):
        raise BenchError(f"--out {str(out)!r} is in use and holds no table of trained weights; give a new folder")


def measure_of(weights: Rounded, options: Sensitivity, formats: Sequence[str]) -> dict[str, Any]:
    """Return the content of sensitivity.json: the gaps to the weights as floats, in nats, pattern by format.

    Raises:
        BenchError: a text that is not the run's, a pattern that matches no layer, or a tied lm_head undecided on.
    """
    prepare_default(weights.own.data.dir)
    corpus = open_corpus(weights.own)
    weights.check_text(corpus)
    blocks = [f"blocks.{index}" for index in range(weights.own.model.n_layer or 0)] if options.blocks else []
    patterns = list(dict.fromkeys([*options.patterns, *blocks]))
    cells = [[_formats_of(pattern, fmt, options.operand) for fmt in formats] for pattern in patterns]
    rounded = [bool(weights.config(row[0]).layers) for row in cells]  # a tied lm_head may be left alone
    with runtime(weights.own) as device:
        reference = weights.rounded({}, corpus, device).validate()
        gaps: list[list[float | None]] = []
        for number, (pattern, row, rounds) in enumerate(zip(patterns, cells, rounded, strict=True), 1):
            _say(f"{number} of {len(patterns)}: {pattern}")
            losses = [weights.rounded(cell, corpus, device).validate() if rounds else None for cell in row]
            gaps.append([None if loss is None else loss - reference for loss in losses])
    return {
        "patterns": patterns,
        "tied": weights.given.get("model.tied", weights.own.model.tied),
        "formats": list(formats),
        "operand": options.operand,
        "seeds": [weights.own.seed],
        "rule": "",
        "reference": "the same weights as floats",
        "reference_loss": reference,
        **_of(weights.trained),
        "gap": gaps,
        "spread": [[None] * len(formats) for _ in patterns],
        "status": [[None if rounds else "left in float"] * len(formats) for rounds in rounded],
    }


def _formats_of(pattern: str, fmt: str, operand: str) -> dict[str, Any]:
    return {pattern: fmt if operand == "weight" else {operand: fmt}}


def _of(trained: Trained) -> Mapping[str, Any]:
    """What the table says of the weights."""
    return {"of": folder_of(trained.folder), "step": trained.step, "trained_loss": trained.val_loss}


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)
