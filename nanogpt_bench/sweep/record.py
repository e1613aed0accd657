"""A sweep on disk: which runs it has, how each ended, and what is left to do when it is started again."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.compare.earlier import drop_checkpoints, has_ended, make_ready, plain, summary_of
from nanogpt_bench.compare.record import Record
from nanogpt_bench.csv_cells import cell
from nanogpt_bench.environment import command_line
from nanogpt_bench.errors import BenchError, one_line
from nanogpt_bench.files import write_text
from nanogpt_bench.lock import is_unused
from nanogpt_bench.sweep.plan import PlannedPoint
from nanogpt_bench.untrusted import read_json

MANIFEST = "sweep.json"
TABLE = "runs.csv"
#: what is told of a run, from its summary.json
OUTCOMES = (
    *("status", "steps", "final_val_loss", "best_val_loss", "first_val_loss", "bytes_per_parameter", "stall"),
    *("arrived", "tokens_per_s", "seconds"),
)


class SweepRecord:
    """Everything a sweep writes lies in `folder`: a folder a run, sweep.json, runs.csv and the report.

    `mode` is grid, random, lr-limits or sensitivity, `baseline` the label that gaps are measured against. Runs are
    added one by one, since some are planned by what others found out.

    Raises:
        BenchError: `folder` can't be used, or holds something else than a sweep of this mode.
    """

    def __init__(self, folder: Path, mode: str, baseline: str | None = None) -> None:
        self.folder, self.mode = folder, mode
        self.planned: list[PlannedPoint] = []
        self.record = Record(folder, self.planned, title=f"nanogpt-bench sweep ({mode})", baseline=baseline)
        self._known = self._entries_of_before()
        self._ended: set[str] = set()
        self._resumed: set[str] = set()

    def _entries_of_before(self) -> dict[str, dict[str, Any]]:
        path = self.folder / MANIFEST
        if not path.exists():
            if not is_unused(self.folder):
                raise BenchError(f"--out {str(self.folder)!r} is in use and holds no sweep; give a new folder")
            return {}
        try:
            before = read_json(path, times=8)
            entries, mode = {entry["name"]: entry for entry in before["runs"]}, before["mode"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out") from None
        if mode != self.mode:
            raise BenchError(f"--out {str(self.folder)!r} holds a sweep of mode {mode!r}; give a new folder")
        return entries

    def check(self, run: PlannedPoint) -> None:
        """Refuse a run that an earlier start has done with other settings.

        Raises:
            BenchError: names the first setting that differs.
        """
        before = self._known.get(run.name)
        if before is None:
            return
        now, then = plain(run.settings), before.get("settings") or {}
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                raise BenchError(
                    f"--out {str(self.folder)!r} holds {run.name!r} with {key} {then.get(key)!r}, now "
                    f"{now.get(key)!r}; give a new folder"
                )

    def add(self, run: PlannedPoint) -> bool:
        """Take in a run; True when an earlier start has brought it to its end.

        Otherwise what it left is removed, unless it has checkpoints to go on from.
        """
        self.check(run)
        self.planned.append(run)
        before = self._known.get(run.name, {})
        if before.get("ended") or has_ended(self.summary(run)):
            self._ended.add(run.name)
            drop_checkpoints(self.run_dir(run), run.settings)
            return True
        if make_ready(self.run_dir(run)):
            self._resumed.add(run.name)
        return False

    def resumes(self, run: PlannedPoint) -> bool:
        """Whether a run that was added goes on from a checkpoint."""
        return run.name in self._resumed

    def run_dir(self, run: PlannedPoint) -> Path:
        return self.record.run_dir(run)

    def summary(self, run: PlannedPoint) -> dict[str, Any]:
        """The content of the run's summary.json; {} while there is none."""
        return summary_of(self.run_dir(run))

    def end(self, run: PlannedPoint, error: Mapping[str, Any] | None = None) -> None:
        """Note that a run has come to its end, with the error of one that could not write its own summary."""
        if error is not None:
            self.record.note_failure(run, error)
        if has_ended(self.summary(run)):
            self._ended.add(run.name)
            drop_checkpoints(self.run_dir(run), run.settings)
        self.write_manifest()

    def ended(self, run: PlannedPoint) -> bool:
        """Whether a run has come to its own end, as one that was ended from outside has not."""
        return run.name in self._ended

    def left(self) -> list[PlannedPoint]:
        """The runs that have not come to their own end."""
        return [run for run in self.planned if not self.ended(run)]

    def interrupt(self) -> None:
        """Note where the runs stand once all workers have stopped, those included whose end was not yet reported."""
        self._ended |= {run.name for run in self.planned if has_ended(self.summary(run))}
        self.record.note_interruption()
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write sweep.json and runs.csv as things stand."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = [self._entry(run) for run in self.planned]
        added = {entry["name"] for entry in entries}
        # What an earlier start did beyond today's plan stays known: its settings guard its folder.
        entries += [entry for name, entry in self._known.items() if name not in added]
        content = {"mode": self.mode, "command": command_line(), "runs": entries}
        write_text(self.folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        write_text(self.folder / TABLE, self._table())

    def _entry(self, run: PlannedPoint) -> dict[str, Any]:
        summary = self.summary(run) if run.name in self._ended else {}
        return {
            "name": run.name,
            "label": run.label,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "axes": plain(run.axes),
            "ended": run.name in self._ended,
            **{key: summary.get(key) for key in OUTCOMES},
            "failure": (summary.get("failure") or {}).get("kind"),
            "failures": list(dict.fromkeys(_kinds(summary))),
            "settings": plain(run.settings),
        }

    def _table(self) -> str:
        axes = list(dict.fromkeys(key for run in self.planned for key in run.axes if key != "seed"))
        header = ["name", "rule", "format", "seed", *(key for key in axes if key != "rule"), *OUTCOMES]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*header, "failure", "failures"])
        for run in self.planned:
            entry = self._entry(run)
            flat = entry["axes"] | entry
            writer.writerow(
                [*(_cell(flat.get(key)) for key in header), *map(cell, (entry["failure"], " ".join(entry["failures"])))]
            )
        return text.getvalue()

    def write_page(self, *, running: bool) -> Path:
        """Write the report over what there is; returns the page's path."""
        return self.record.write_page(running=running)


def _kinds(summary: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of failure that the classification found in a run."""
    for finding in summary.get("failures") or ():
        if isinstance(finding, Mapping) and finding.get("kind"):
            yield str(finding["kind"])


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else cell(value)
