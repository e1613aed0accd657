"""The record of a sweep: sweep.json and runs.csv, and what an earlier start left in them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.runs.earlier import (
    OF_TRAINING,
    has_ended,
    plain,
)
from nanogpt_bench.runs.environment import command_line
from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.sweep.record import Record
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.lock import is_unused
from nanogpt_bench.system.untrusted import read_json
from nanogpt_bench.system.words import cell

if TYPE_CHECKING:
    pass

MANIFEST = "sweep.json"
TABLE = "runs.csv"
#: figures of a run, from its summary.json
OUTCOMES = (
    *("status", "steps", "final_val_loss", "best_val_loss", "first_val_loss", "bytes_per_parameter", "stall"),
    *("arrived", "tokens_per_s", "seconds"),
)
#: figures beside the loss
_BESIDE = tuple(metric.figure for metric in BESIDE_LOSS)


class SweepRecord(Record):
    """The runs of a sweep, sweep.json and runs.csv.

    `mode` is grid, random, tune, lr-limits or sensitivity, `baseline` the label that gaps are measured against.

    Raises:
        BenchError: `folder` can't be used, or holds something else than a sweep of this mode.
    """

    def __init__(self, folder: Path, mode: str, baseline: str | None = None) -> None:
        super().__init__(folder, f"nanogpt-bench sweep ({mode})", baseline)
        self.mode = mode
        self._before = self._entries_of_before()
        self.ended_before = {name for name, entry in self._before.items() if entry.get("ended")}
        #: entry in sweep.json of every added run; the figures of an ended run stay even if its folder is removed
        self._entries: dict[str, dict[str, Any]] = {}

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

    def check(self, run: PlannedRun) -> None:
        """Refuse a run that an earlier start has done with other settings.

        Raises:
            BenchError: names the first setting that differs.
        """
        before = self._before.get(run.name)
        if before is None:
            return
        now, then = plain(run.settings), before.get("settings") or {}
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                raise BenchError(
                    f"--out {str(self.folder)!r} holds {run.name!r} with {key} {then.get(key)!r}, now "
                    f"{now.get(key)!r}; give a new folder"
                )

    def note(self, run: PlannedRun, summary: Mapping[str, Any]) -> None:
        """Keep the run's entry of sweep.json."""
        self._entries[run.name] = self._entry(run, summary)

    def end(self, run: PlannedRun, error: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run, and write sweep.json."""
        super().end(run, error)
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write sweep.json and runs.csv as things stand."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = [self._entries[run.name] for run in self.planned]
        # What an earlier start did beyond today's plan stays known: its settings guard its folder.
        entries += [{**entry, "of_plan": False} for name, entry in self._before.items() if name not in self._entries]
        told = {"mode": self.mode, "baseline": self.baseline, "order": list(self.order)}
        content = {**told, "command": command_line(), "runs": entries}
        write_text(self.folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        write_text(self.folder / TABLE, self._table())

    def _entry(self, run: PlannedRun, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The entry of a run in sweep.json; before its end the figures that an earlier start had found."""
        return {
            "name": run.name,
            "label": run.label,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "axes": plain(run.axes),
            "ended": has_ended(summary),
            **_outcome(summary, self._before.get(run.name, {})),
            "settings": plain(run.settings),
        }

    def _table(self) -> str:
        axes = list(dict.fromkeys(key for run in self.planned for key in run.axes if key != "seed"))
        beside = [name for name in _BESIDE if any(name in entry for entry in self._entries.values())]
        header = ["name", "rule", "format", "seed", *(key for key in axes if key != "rule"), *OUTCOMES, *beside]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*header, "failure", "failures"])
        for run in self.planned:
            entry = self._entries[run.name]
            flat = entry["axes"] | entry
            writer.writerow(
                [*(_cell(flat.get(key)) for key in header), *map(cell, (entry["failure"], " ".join(entry["failures"])))]
            )
        return text.getvalue()


def _outcome(summary: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run: from its summary, or from an earlier sweep.json while it is trained again."""
    keys = (*OUTCOMES, "failure", "failures")
    found = before.get("status") in ("finished", "stopped") or before.get("failure") in OF_TRAINING
    if not has_ended(summary) and (found or summary.get("status") != "failed"):
        known = {key: before.get(key) for key in keys} | {key: before[key] for key in _BESIDE if key in before}
        return known | {"failures": list(before.get("failures") or ())}
    failure = (summary.get("failure") or {}).get("kind")
    failures = list(dict.fromkeys(_kinds(summary)))
    known = {key: summary.get(key) for key in OUTCOMES} | {key: summary[key] for key in _BESIDE if key in summary}
    return known | {"failure": failure, "failures": failures}


def _kinds(summary: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of failure that the classification found in a run."""
    for finding in summary.get("failures") or ():
        if isinstance(finding, Mapping) and finding.get("kind"):
            yield str(finding["kind"])


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else cell(value)
