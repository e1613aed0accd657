"""`nanogpt-bench verify`: is a run folder what was written? Checkpoints byte by byte, records without a gap.

The summary is set against the records and the last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import CHECKPOINTS, BrokenCheckpoint, read, steps, verify
from nanogpt_bench.checkpoint.bounded_json import parse
from nanogpt_bench.commands.verified_summary import Added, contradictions
from nanogpt_bench.config.settings import read_yaml
from nanogpt_bench.runs.find import find_runs, say_aside
from nanogpt_bench.runs.history import history_lines
from nanogpt_bench.runs.trained import BEST
from nanogpt_bench.system.errors import BenchError, one_line, printable

#: bytes of a JSON file, and of one line of a file of records
LIMIT = 1 << 25
METRICS = "metrics.jsonl"
#: written at some steps only, several lines a step
SPARSE = ("histograms.jsonl", "alerts.jsonl")


@dataclass
class Findings:
    """What is to be said of a run folder, one line each."""

    #: what should not be so in any run folder
    problems: list[str] = field(default_factory=list)
    #: what an interruption leaves, and what is not there
    notes: list[str] = field(default_factory=list)
    #: steps recorded, and checkpoints that verify
    last_step: int | None = None
    whole: list[int] = field(default_factory=list)
    #: what the records come to
    added: Added = field(default_factory=Added)


def verify_command(paths: Sequence[Path]) -> int:
    """Print what is wrong with run folders, or those below other folders; return 1 if anything is, else 0."""
    failed = False
    for path in find_runs(paths, say_aside):
        found = check_run(path)
        failed |= bool(found.problems)
        print(printable(_headline(path, found)))
        for kind, lines in (("problem", found.problems), ("note", found.notes)):
            for line in lines:
                print(f"  {kind}: {printable(line)}")
    return int(failed)


def _headline(path: Path, found: Findings) -> str:
    recorded = "no steps" if found.last_step is None else f"steps up to {found.last_step:,}"
    whole = f"{len(found.whole)} whole checkpoint{'' if len(found.whole) == 1 else 's'}"
    return f"{path}: {'not whole' if found.problems else 'whole'}, {recorded}, {whole}"


def check_run(path: Path) -> Findings:
    """Check a run folder: its settings, records and summary can be read and agree, its checkpoints verify."""
    found = Findings()
    try:
        read_yaml(path / "config.yaml")
    except BenchError as error:
        found.problems.append(one_line(error))
    found.notes.extend(history_lines(_mapping(path / "environment.json", found)))
    summary = _mapping(path / "summary.json", found, optional="the run has not ended")
    ended = summary.get("status") == "finished"
    _check_metrics(path / METRICS, ended, found)
    for name in SPARSE:
        _check_sparse(path / name, ended, found)
    _check_summary(summary, found)
    _check_checkpoints(path, found)
    _check_bytes(path, summary, found)
    return found


def _mapping(path: Path, found: Findings, optional: str | None = None) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = parse(file.read(LIMIT + 1), limit=LIMIT)
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


def _check_metrics(path: Path, ended: bool, found: Findings) -> None:
    """Every step has one record, from 0 on."""
    expected = 0
    for number, step, record in _records(path, ended, found):
        found.added.take(record)
        if step != expected:
            found.problems.append(
                f"{path.name}: line {number} is of step {step}, after {expected - 1} comes {expected}"
            )
        found.last_step, expected = step, step + 1


def _check_sparse(path: Path, ended: bool, found: Findings) -> None:
    """Records come in the order of their steps, none after the last step of the metrics, or the one interrupted."""
    if not path.exists():
        return
    before = 0
    for number, step, _ in _records(path, ended, found):
        if step < before:
            found.problems.append(f"{path.name}: line {number} is of step {step}, after step {before}")
        before = step
    last = found.last_step or 0
    if before > last:
        said = found.problems if ended or before > last + 1 else found.notes
        said.append(f"{path.name} goes on to step {before}, {METRICS} to {found.last_step}")


def _records(path: Path, ended: bool, found: Findings) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield number, step and record of every whole line; what is no record is said."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LIMIT):
                number += 1
                record = _record(line)
                if line.endswith(b"\n") and record is not None:
                    yield number, record["step"], record
                elif line.endswith(b"\n"):
                    found.problems.append(f"{path.name}: line {number} is no record with a step")
                else:
                    # Only an interruption leaves a line without its end, and a run goes on behind the last whole one.
                    said = found.problems if ended or file.read(1) else found.notes
                    said.append(f"{path.name}: line {number} is cut off")
                    return
    except OSError as error:
        found.problems.append(f"{path.name} can't be read: {error.strerror or error}")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse(line, limit=LIMIT)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    step = record.get("step")
    return record if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _check_summary(summary: dict[str, Any], found: Findings) -> None:
    """A summary says what the records say; steps that were skipped have one and are not counted.

    Where a disk or an interrupt ended the run, the last validation may be one that could not be recorded.
    """
    counted = summary.get("steps")
    if summary and (not isinstance(counted, int) or counted > (found.last_step or 0)):
        found.problems.append(f"summary.json counts {counted!r} steps, {METRICS} ends with {found.last_step}")
    stop = summary.get("stop")
    broken_off = summary.get("status") == "stopped" and (not isinstance(stop, dict) or stop.get("kind") == "disk")
    (found.notes if broken_off else found.problems).extend(contradictions(summary, found.added))


def _check_bytes(path: Path, summary: dict[str, Any], found: Findings) -> None:
    """The bytes held are those that the checkpoint of the last step knows of."""
    if not summary or found.last_step is None or found.last_step not in found.whole:
        return
    outcome = read(path / CHECKPOINTS / f"step-{found.last_step}", only=()).facts.get("outcome")
    held = outcome.get("held_bytes") if isinstance(outcome, dict) else None
    if held is not None and summary.get("held_bytes") != held:
        found.problems.append(f"summary.json has held_bytes {summary.get('held_bytes')!r}, the last checkpoint {held}")


def _check_checkpoints(path: Path, found: Findings) -> None:
    folders = [(step, where / CHECKPOINTS / f"step-{step}") for where in (path, path / BEST) for step in steps(where)]
    for step, folder in folders:
        try:
            verify(folder)
        except BrokenCheckpoint as error:
            found.problems.append(str(error))
            continue
        if folder.parent.parent == path:
            found.whole.append(step)
        if step > (found.last_step or 0):
            found.problems.append(f"checkpoint {str(folder)!r}: {METRICS} ends with step {found.last_step}")
    if not (path / CHECKPOINTS).is_dir():
        found.notes.append("there are no checkpoints")
        return
    known = {f"step-{step}" for step in steps(path)}
    extra = sorted(set(os.listdir(path / CHECKPOINTS)) - known)
    found.notes.extend(f"{CHECKPOINTS}/{name[:80]} is no checkpoint; the next start removes litter" for name in extra)
