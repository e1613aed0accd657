"""`nanogpt-bench verify`: checking that a run folder is as it was written.

Every byte is compared with the recorded digests, and records may have no gap.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.config.endings import RunStatus
from nanogpt_bench.config.settings import read_settings_file
from nanogpt_bench.runs.read import ALERTS_FILE, CUT_OFF, METRICS_FILE, not_as_written, records
from nanogpt_bench.system.errors import BenchError, counted, one_line, printable, say
from nanogpt_bench.system.untrusted import read_json


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
    "description": (
        "Check run folders: every byte of every checkpoint, the records of every step, settings "
        "and summary.\nThe exit code is 1 if anything is wrong. What an interruption left behind "
        "is a note, not an error."
    ),
    "epilog": (
        "examples:\n"
        "  nanogpt-bench verify runs/e4m3\n"
        "  nanogpt-bench verify runs/compare-20260101-120000"
    ),
}


def add_options(parser: Any) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folders, or folders that contain them at any depth",
    )


def main(args: argparse.Namespace) -> int:
    """Print what is wrong with run folders, or those below other folders.

    Return 1 if anything is, else 0.
    """
    # not at the top: it imports torch, as the modules below
    from nanogpt_bench.runs.load import find_runs

    failed = False
    for path in find_runs(args.runs, say):
        report = check_run(path)
        failed = failed or bool(report.problems)
        state = "not whole" if report.problems else "whole"
        steps = "no steps" if report.last_step is None else f"steps up to {report.last_step:,}"
        checkpoints = counted(len(report.whole), "whole checkpoint")
        print(printable(f"{path}: {state}, {steps}, {checkpoints}"))
        for line in report.problems:
            print(f"  problem: {printable(line)}")
        for line in report.notes:
            print(f"  note: {printable(line)}")
    return int(failed)


def check_run(path: Path) -> Report:
    """Check a run folder: files that can be read, no gaps, and nothing changed."""
    from nanogpt_bench.runs.environment import history_lines

    report = Report()
    try:
        read_settings_file(path / "config.yaml")
    except BenchError as error:
        report.problems.append(one_line(error))
    report.notes.extend(history_lines(_mapping(path / "environment.json", report)))
    summary = _mapping(path / "summary.json", report, reason="the run has not ended")
    ended = summary.get("status") == RunStatus.FINISHED
    _check_metrics(path / METRICS_FILE, ended, report)
    _check_alerts(path / ALERTS_FILE, ended, report)
    _check_checkpoints(path, report)
    for name, error_text in not_as_written(path, ended=(path / "summary.json").exists()):
        # A file is named once.
        if not any(name in problem for problem in report.problems):
            report.problems.append(f"{name} {error_text}")
    return report


def _mapping(path: Path, report: Report, reason: str | None = None) -> dict[str, Any]:
    """Return the mapping in a file; `reason` is why it may be missing."""
    try:
        content = read_json(path)
        if isinstance(content, dict):
            return content
        report.problems.append(f"{path.name} does not hold a mapping")
    except FileNotFoundError:
        if reason:
            report.notes.append(f"{path.name} is missing: {reason}")
        else:
            report.problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        report.problems.append(f"{path.name} can't be read: {one_line(error)}")
    return {}


def _check_metrics(path: Path, ended: bool, report: Report) -> None:
    """Check that every step from 0 on has one record."""
    expected = 0
    for number, step in _records(path, ended, report):
        if step != expected:
            report.problems.append(
                f"{path.name}: line {number} has step {step}; step {expected} was expected"
            )
        report.last_step = step
        expected = step + 1


def _check_alerts(path: Path, ended: bool, report: Report) -> None:
    """Check that alerts are in the order of steps.

    None may be later than the last step of the metrics. If the run has not finished,
    one of the next step is a note and no problem.
    """
    if not path.exists():
        return
    last_alert = 0
    for number, step in _records(path, ended, report):
        if step < last_alert:
            report.problems.append(
                f"{path.name}: line {number} has step {step}, but follows step {last_alert}"
            )
        last_alert = step
    last_step = report.last_step or 0
    if last_alert > last_step:
        line = (
            f"{path.name} ends with step {last_alert}, but {METRICS_FILE} with step "
            f"{report.last_step}"
        )
        is_interruption = not ended and last_alert <= last_step + 1
        lines = report.notes if is_interruption else report.problems
        lines.append(line)


def _records(path: Path, ended: bool, report: Report) -> Iterator[tuple[int, Any]]:
    """Yield line number and step of every record; report lines that are no records."""
    damaged: list[str] = []
    for number, record in records(path, damaged):
        yield number, record["step"]
    for line in damaged:
        # An interruption may cut off the last line; a resumed run goes on behind the
        # last whole one.
        is_interruption = CUT_OFF in line and not ended
        lines = report.notes if is_interruption else report.problems
        lines.append(line)


def _check_checkpoints(path: Path, report: Report) -> None:
    from nanogpt_bench.checkpoint import verify
    from nanogpt_bench.checkpoint.format import (
        CHECKPOINTS,
        BrokenCheckpoint,
        refuse_checkpoint_folders,
        step_file,
        steps,
        stray,
    )

    for step in steps(path):
        file = step_file(path, step)
        try:
            verify(file)
        except BrokenCheckpoint as error:
            report.problems.append(str(error))
            continue
        report.whole.append(step)
        if step > (report.last_step or 0):
            report.problems.append(
                f"checkpoint {str(file)!r} is later than the last step of {METRICS_FILE}, "
                f"{report.last_step}"
            )
    try:
        refuse_checkpoint_folders(path)
    except BenchError as error:
        report.problems.append(str(error))
    if not (path / CHECKPOINTS).is_dir():
        report.notes.append("there are no checkpoints")
        return
    expected: set[str] = set()
    for step in steps(path):
        name = step_file(path, step).name
        expected |= {name, f"{name}.sha256"}
    interrupted = {file.name for file in stray(path)}
    for name in sorted(set(os.listdir(path / CHECKPOINTS)) - expected):
        if name in interrupted:
            state = "left by an interruption; the next start removes it"
        else:
            state = "not a checkpoint, and is ignored"
        report.notes.append(f"{CHECKPOINTS}/{name[:80]} is {state}")
