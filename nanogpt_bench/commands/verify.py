"""`nanogpt-bench verify`: checking that a run folder is as it was written, byte by
byte, its records without a gap.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.settings import read_yaml
from nanogpt_bench.runs.read import CUT_OFF, not_as_written, records
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, say
from nanogpt_bench.system.untrusted import read_json

METRICS, ALERTS = "metrics.jsonl", "alerts.jsonl"


@dataclass
class Report:
    """The findings on a run folder, one line each."""

    #: errors that no interruption explains
    problems: list[str] = field(default_factory=list)
    #: traces of an interruption, missing files, changed settings
    notes: list[str] = field(default_factory=list)
    #: the last recorded step, and the steps of checkpoints that verify
    last_step: int | None = None
    whole: list[int] = field(default_factory=list)


TEXTS = {
    "description": "Check run folders: every byte of every checkpoint, records of every step, "
    "settings and summary.\nThe exit code is 1 if anything is wrong. What an "
    "interruption leaves behind is only noted.",
    "epilog": "examples:\n  nanogpt-bench verify runs/e4m3\n  nanogpt-bench verify "
    "runs/compare-20260101-120000",
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folders, or folders of them at any depth",
    )


def main(args: argparse.Namespace) -> int:
    """Print what is wrong with run folders, or those below other folders; return 1 if
    anything is, else 0.
    """
    from nanogpt_bench.runs.load import (
        find_runs,  # not at the top: it imports torch, as the modules below
    )

    failed = False
    for path in find_runs(args.runs, say):
        found = check_run(path)
        failed |= bool(found.problems)
        recorded = "no steps" if found.last_step is None else f"steps up to {found.last_step:,}"
        whole = counted(len(found.whole), "whole checkpoint")
        print(
            printable(f"{path}: {'not whole' if found.problems else 'whole'}, {recorded}, {whole}")
        )
        for kind, lines in (("problem", found.problems), ("note", found.notes)):
            for line in lines:
                print(f"  {kind}: {printable(line)}")
    return int(failed)


def check_run(path: Path) -> Report:
    """Check that a run folder can be read, that its records have no gap, and that its
    files are as written.
    """
    from nanogpt_bench.runs.environment import history_lines

    found = Report()
    try:
        read_yaml(path / "config.yaml")
    except BenchError as error:
        found.problems.append(one_line(error))
    found.notes.extend(history_lines(_mapping(path / "environment.json", found)))
    summary = _mapping(path / "summary.json", found, optional="the run has not ended")
    ended = summary.get("status") == "finished"
    _check_metrics(path / METRICS, ended, found)
    _check_alerts(path / ALERTS, ended, found)
    _check_checkpoints(path, found)
    for name, wrong in not_as_written(path, ended=(path / "summary.json").exists()):
        if not any(name in problem for problem in found.problems):
            found.problems.append(f"{name} {wrong}")
    return found


def _mapping(path: Path, found: Report, optional: str | None = None) -> dict[str, Any]:
    try:
        content = read_json(path)
        if isinstance(content, dict):
            return content
        found.problems.append(f"{path.name} holds no mapping")
    except FileNotFoundError:
        if optional:
            found.notes.append(f"{path.name} is missing: {optional}")
        else:
            found.problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        found.problems.append(f"{path.name} can't be read: {one_line(error)}")
    return {}


def _check_metrics(path: Path, ended: bool, found: Report) -> None:
    """Check that every step from 0 on has one record."""
    expected = 0
    for number, step in _records(path, ended, found):
        if step != expected:
            found.problems.append(
                f"{path.name}: line {number} is of step {step}, where step {expected} is expected"
            )
        found.last_step, expected = step, step + 1


def _check_alerts(path: Path, ended: bool, found: Report) -> None:
    """Check that alerts are in the order of steps, none after the last step of the
    metrics or an interrupted one.
    """
    if not path.exists():
        return
    before = 0
    for number, step in _records(path, ended, found):
        if step < before:
            found.problems.append(
                f"{path.name}: line {number} is of step {step}, after step {before}"
            )
        before = step
    last = found.last_step or 0
    if before > last:
        lines = found.problems if ended or before > last + 1 else found.notes
        lines.append(f"{path.name} ends with step {before}, {METRICS} with step {found.last_step}")


def _records(path: Path, ended: bool, found: Report) -> Iterator[tuple[int, Any]]:
    """Yield line number and step of every record; add lines that are no records to the
    report.
    """
    others: list[str] = []
    yield from ((number, record["step"]) for number, record in records(path, others))
    for line in others:
        # An interruption may cut off the last line; a resumed run goes on behind the
        # last whole one.
        (found.notes if CUT_OFF in line and not ended else found.problems).append(line)


def _check_checkpoints(path: Path, found: Report) -> None:
    from nanogpt_bench.checkpoint import verify
    from nanogpt_bench.checkpoint.format import (
        CHECKPOINTS,
        BrokenCheckpoint,
        check_layout,
        step_file,
        steps,
        stray,
    )

    for step in steps(path):
        file = step_file(path, step)
        try:
            verify(file)
        except BrokenCheckpoint as error:
            found.problems.append(str(error))
            continue
        found.whole.append(step)
        if step > (found.last_step or 0):
            found.problems.append(
                f"checkpoint {str(file)!r}: {METRICS} ends with step {found.last_step}"
            )
    try:
        check_layout(path)
    except BenchError as error:
        found.problems.append(str(error))
    if not (path / CHECKPOINTS).is_dir():
        found.notes.append("there are no checkpoints")
        return
    known = [step_file(path, step).name for step in steps(path)]
    extra = sorted(
        set(os.listdir(path / CHECKPOINTS)) - {*known, *(f"{name}.sha256" for name in known)}
    )
    going = {file.name for file in stray(path)}
    what = ("no checkpoint, and is ignored", "left by an interruption; the next start removes it")
    found.notes.extend(f"{CHECKPOINTS}/{name[:80]} is {what[name in going]}" for name in extra)
