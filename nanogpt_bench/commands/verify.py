"""`nanogpt-bench verify`: is a run folder what was written? Checkpoints byte by byte, records without a gap.

The summary is set against the records and the last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.checkpoint import CHECKPOINTS, BrokenCheckpoint, check_layout, read, step_file, steps, verify
from nanogpt_bench.config.metrics import BESIDE_LOSS, SPEED, TOKENS, VAL_BITS_PER_BYTE, VAL_LOSS, VAL_LOSS_SE
from nanogpt_bench.config.settings import read_yaml
from nanogpt_bench.monitors.stall import ARRIVED, STALLS
from nanogpt_bench.runs.environment import history_lines
from nanogpt_bench.runs.find import find_runs, say_aside
from nanogpt_bench.runs.read import finite
from nanogpt_bench.runs.sums import not_as_written
from nanogpt_bench.system.errors import BenchError, one_line, printable
from nanogpt_bench.system.untrusted import Refused, open_file, parse_json, read_json
from nanogpt_bench.system.words import counted

#: bytes of one line of a file of records
LIMIT = 1 << 25
METRICS, WEIGHTS = "metrics.jsonl", "weights.json"
#: written at some steps only, several lines a step
SPARSE = ("histograms.jsonl", "alerts.jsonl")


#: beyond what adding up in another order can change
TOLERANCE = 1e-9
#: figures of the last validation by their name in the summary
OF_LAST = {
    "final_val_loss_se": VAL_LOSS_SE.name,
    "bits_per_byte": VAL_BITS_PER_BYTE.name,
    **{metric.figure: metric.name for metric in BESIDE_LOSS},
}


@dataclass
class Added:
    """What the records come to, taken in one by one."""

    losses: array[float] = field(default_factory=lambda: array("d"))
    last: Mapping[str, Any] = field(default_factory=dict)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    tokens: float = 0.0
    seconds: float = 0.0

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one more record."""
        if VAL_LOSS.name in record:
            loss = finite(record[VAL_LOSS.name])
            self.losses.append(math.nan if loss is None else loss)
            self.last = {name: record.get(name) for name in OF_LAST.values()}
        for name in (*(metric.name for metric in STALLS), ARRIVED.name, SPEED.name):
            if (value := record.get(name)) is not None:
                total, looks = self.sums.get(name, (0.0, 0))
                known = finite(value)
                self.sums[name] = total + (math.nan if known is None else known), looks + 1
        tokens, speed = finite(record.get(TOKENS.name)), finite(record.get(SPEED.name))
        if tokens is not None:
            self.seconds += (tokens - self.tokens) / speed if speed else 0.0
            self.tokens = tokens

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the records that have it; None where there is none."""
        total, looks = self.sums.get(name, (0.0, 0))
        return total / looks if looks else None

    def is_known(self, name: str) -> bool:
        """Whether all values of a figure are numbers, if it has any."""
        return math.isfinite(self.sums.get(name, (0.0, 0))[0])


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


def add_parser(commands: Any, text: str) -> Any:
    """Add the command and return its parser."""
    parser = commands.add_parser(
        "verify",
        help=text,
        description="Check run folders: every byte of every checkpoint, records of every step, settings and summary.\n"
        "The exit code is 1 if anything is wrong. What an interruption leaves is noted and nothing wrong.",
        epilog="examples:\n  nanogpt-bench verify runs/e4m3\n  nanogpt-bench verify runs/compare-20260101-120000",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of them at any depth"
    )
    return parser


def main(args: argparse.Namespace) -> int:
    """Check the runs that are named."""
    return verify_command(args.runs)


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
    whole = counted(len(found.whole), "whole checkpoint")
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
    if (path / WEIGHTS).exists():
        _mapping(path / WEIGHTS, found)
    _check_summary(summary, found)
    _check_checkpoints(path, found)
    _check_bytes(path, summary, found)
    _check_sums(path, found, ended=(path / "summary.json").exists())
    return found


def _mapping(path: Path, found: Findings, optional: str | None = None) -> dict[str, Any]:
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
        with open_file(path) as file:
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
    except (OSError, Refused) as error:
        found.problems.append(f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
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
    steps = summary.get("steps")
    if summary and (not isinstance(steps, int) or steps > (found.last_step or 0)):
        told = f"{steps!r} steps" if not isinstance(steps, int) else counted(steps, "step")
        found.problems.append(f"summary.json counts {told}, {METRICS} ends with {found.last_step}")
    stop = summary.get("stop")
    broken_off = summary.get("status") == "stopped" and (not isinstance(stop, dict) or stop.get("kind") == "disk")
    (found.notes if broken_off else found.problems).extend(_contradictions(summary, found.added))


def _check_bytes(path: Path, summary: dict[str, Any], found: Findings) -> None:
    """The bytes held are those that the checkpoint of the last step knows of."""
    if not summary or found.last_step is None or found.last_step not in found.whole:
        return
    outcome = read(step_file(path, found.last_step), only=()).facts.get("outcome")
    held = outcome.get("held_bytes") if isinstance(outcome, dict) else None
    if held is not None and summary.get("held_bytes") != held:
        found.problems.append(f"summary.json has held_bytes {summary.get('held_bytes')!r}, the last checkpoint {held}")


def _check_sums(path: Path, found: Findings, *, ended: bool) -> None:
    """Every file is the one that was written; what was said of a file already is not said again."""
    for name, wrong in not_as_written(path, ended=ended):
        if not any(name in problem for problem in found.problems):
            found.problems.append(f"{name} {wrong}")


def _check_checkpoints(path: Path, found: Findings) -> None:
    for step in steps(path):
        file = step_file(path, step)
        try:
            verify(file)
        except BrokenCheckpoint as error:
            found.problems.append(str(error))
            continue
        found.whole.append(step)
        if step > (found.last_step or 0):
            found.problems.append(f"checkpoint {str(file)!r}: {METRICS} ends with step {found.last_step}")
    try:
        check_layout(path)
    except BenchError as error:
        found.problems.append(str(error))
    if not (path / CHECKPOINTS).is_dir():
        found.notes.append("there are no checkpoints")
        return
    known = [step_file(path, step).name for step in steps(path)]
    extra = sorted(set(os.listdir(path / CHECKPOINTS)) - {*known, *(f"{name}.sha256" for name in known)})
    found.notes.extend(f"{CHECKPOINTS}/{name[:80]} is no checkpoint; the next start removes litter" for name in extra)


def _contradictions(summary: Mapping[str, Any], added: Added) -> Iterator[str]:
    """Yield what a summary says otherwise than the records do, or than its own figures make it.

    What the records do not hold is not judged: runs of older versions wrote fewer figures.
    """
    expected = {**_losses(summary, added), **_shares(summary, added), **_bytes(summary)}
    for name, (value, source) in expected.items():
        if name in summary and not _same(summary[name], value):
            yield f"summary.json has {name} {_shown(summary[name])}, {source} {_shown(value)}"


def _losses(summary: Mapping[str, Any], added: Added) -> dict[str, tuple[float | None, str]]:
    """The losses; a failed run has no final one, nor what belongs to it."""
    if not added.losses:
        return {}
    failed = summary.get("status") == "failed"
    known = [loss for loss in added.losses if math.isfinite(loss)]
    final = None if failed else finite(added.losses[-1])
    found = {
        "final_val_loss": (final, "a failed run has" if failed else "the last validation"),
        "best_val_loss": (min(known, default=None), "the lowest validation"),
        "first_val_loss": (finite(added.losses[0]), "the first validation"),
    }
    if final is not None:
        found |= {name: (value, "the last validation") for name, key in OF_LAST.items() if (value := added.last[key])}
    return found


def _shares(summary: Mapping[str, Any], added: Added) -> dict[str, tuple[float | None, str]]:
    """The shares and the speed, as means over the records."""
    named = str(summary.get("stall_metric"))
    stall = next((metric.name for metric in STALLS if named in (metric.name, metric.figure)), "")
    found: dict[str, tuple[float | None, str]] = {
        key: (added.mean(name), "the mean of the records")
        for key, name in (("stall", stall), ("arrived", ARRIVED.name))
        if added.is_known(name)
    }
    if "seconds" not in summary:  # told by `compare` of a run that could not tell it itself
        found["tokens_per_s"] = added.mean(SPEED.name), "the mean of the records"
    elif added.seconds:
        found["tokens_per_s"] = added.tokens / added.seconds, "the records come to"
    return found | ({"tokens": (added.tokens, "the last record")} if added.tokens else {})


def _bytes(summary: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """The bytes a parameter, of the bytes and the parameters beside them."""
    held, parameters = (finite(summary.get(name)) for name in ("held_bytes", "parameters"))
    if held is None or not parameters:
        return {}
    return {"bytes_per_parameter": (held / parameters, "held_bytes over parameters is")}


def _same(said: Any, value: float | None) -> bool:
    number = finite(said)
    if number is None or value is None:
        return said is None and value is None
    return math.isclose(number, value, rel_tol=TOLERANCE, abs_tol=1e-12)


def _shown(value: Any) -> str:
    number = finite(value)
    return "none" if value is None else f"{value!r:.40}" if number is None else f"{number:.10g}"
