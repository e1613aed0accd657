"""The runs of a sweep on disk: their folders, their outcomes, and sweep.json."""

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.failures import failures_of
from nanogpt_bench.report import facts_of, write_report
from nanogpt_bench.report.merged import with_given_up
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.studies import read_studies
from nanogpt_bench.runs.environment import at, command_line
from nanogpt_bench.runs.load import (
    SWEEP,
    Run,
    drop_checkpoints,
    failures_in,
    has_ended,
    is_run_folder,
    load_run,
    make_ready,
    plain,
    summary_of,
)
from nanogpt_bench.runs.read import SUMS, finite, mapping, write_sums
from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import is_unused, write_text
from nanogpt_bench.system.untrusted import read_json

DATE = "%Y-%m-%d %H:%M UTC"
#: entries of a run's summary.json that sweep.json repeats
OUTCOMES = (
    *(
        "status",
        "steps",
        "final_val_loss",
        "best_val_loss",
        "first_val_loss",
        "bytes_per_parameter",
        "stall",
    ),
    *("arrived", "tokens_per_s", "seconds"),
)


class SweepRecord:
    """The runs of a sweep in `folder`: a folder per run, sweep.json, the report.

    Runs are added one by one, since some are planned from the results of others. `mode`
    is grid, random, compare, tune or sensitivity. Gaps are measured to the row labelled
    `baseline`, without one to the first BF16 row. The table has the rows labelled
    `order` first.
    """

    def __init__(self, folder: Path, mode: str, baseline: str | None = None) -> None:
        self.folder, self.mode, self.baseline = folder, mode, baseline
        self.order: Sequence[str] = ()
        self.planned: list[PlannedRun] = []
        self._started = datetime.now(UTC)
        self._ended: dict[str, bool] = {}
        self._resumed: set[str] = set()
        self._before = self._entries_of_before()
        #: digests of the corpora as the sweep has begun with them, by their folders
        self.texts: dict[str, dict[str, Any]] = {}
        #: entries of sweep.json, by the name of the run
        self._entries: dict[str, dict[str, Any]] = {}

    def add(self, run: PlannedRun) -> bool:
        """Add a run; return whether it has ended already. Else remove its folder,
        unless it has a checkpoint.
        """
        self.check(run)
        self.planned.append(run)
        if self._read(run):
            return True
        if make_ready(self.run_dir(run)):
            self._resumed.add(run.name)
        return False

    def _read(self, run: PlannedRun) -> bool:
        """Read a run's folder; return whether the run has ended by itself."""
        summary = self.summary(run)
        self._ended[run.name] = has_ended(summary)
        self._entries[run.name] = {
            "name": run.name,
            "label": run.label,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "axes": plain(run.axes),
            "ended": self._ended[run.name],
            **{key: summary.get(key) for key in OUTCOMES},
            **{
                metric.figure: summary[metric.figure]
                for metric in BESIDE_LOSS
                if metric.figure in summary
            },
            "failure": (summary.get("failure") or {}).get("kind"),
            "failures": list(dict.fromkeys(finding.kind for finding in failures_in(summary))),
            "settings": plain(run.settings),
        }
        if self._ended[run.name]:
            drop_checkpoints(self.run_dir(run), run.settings)
        return self._ended[run.name]

    def resumes(self, run: PlannedRun) -> bool:
        return run.name in self._resumed

    def run_dir(self, run: PlannedRun) -> Path:
        return self.folder / run.name

    def summary(self, run: PlannedRun) -> dict[str, Any]:
        return summary_of(self.run_dir(run))

    def final_loss(self, run: PlannedRun) -> float | None:
        """Return the final loss of a run that reached its last step; None if it failed
        or ended early.
        """
        summary = self.summary(run)
        return (
            finite(summary.get("final_val_loss")) if summary.get("status") == "finished" else None
        )

    def end(self, run: PlannedRun, error: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run, and its `error` if it could not write its own
        summary; write sweep.json.
        """
        if error is not None:
            self.note_failure(run, error)
        self._read(run)
        self.write_manifest()

    def ended(self, run: PlannedRun) -> bool:
        """Return whether a run ended by itself, and not from outside."""
        return self._ended[run.name]

    def left(self) -> list[PlannedRun]:
        """Return the runs that have not ended by themselves, and those whose results
        are gone.
        """
        return [run for run in self.planned if not has_ended(self.summary(run))]

    def interrupt(self) -> None:
        """Record the state of every run once all workers have stopped, also of runs
        whose end was not reported.
        """
        for run in self.planned:
            if not self.ended(run):
                self._read(run)
        for run in self.planned:
            if is_run_folder(self.run_dir(run)):
                self._write_summary(run, "stopped")
        self.write_manifest()

    def rows(self) -> list[Row]:
        """Return the rows in the order of the table, each with its runs that have
        begun; a row given up has none.
        """
        grouped: dict[str, list[PlannedRun]] = {label: [] for label in self.order}
        for run in self.planned:
            if not run.is_trial:
                grouped.setdefault(run.label, []).append(run)
        begun = []
        for runs in filter(None, grouped.values()):
            loaded = (
                load_run(self.run_dir(run)) for run in runs if is_run_folder(self.run_dir(run))
            )
            begun.append(Row(runs[0].label, runs[0].rule, runs[0].format, tuple(loaded)))
        return with_given_up(begun, read_studies([self.folder]).tunings, self.order)

    def results(self) -> list[Result]:
        rows = self.rows()
        return measure(rows, find_reference(rows, self.baseline))

    def write_page(self) -> Path:
        """Write the tables, the page and the figures; return the page's path."""
        rows, now = self.rows(), {"Command": command_line(), "Date": self._started.strftime(DATE)}
        title = f"nanogpt-bench {self.mode if self.mode == 'compare' else f'sweep ({self.mode})'}"
        first = {"Command": now["Command"], "Machine": platform.platform(), "Date": now["Date"]}
        facts = first | facts_of([run for row in rows for run in row.runs]) | now
        return write_report(rows, self.folder, title=title, facts=facts, baseline=self.baseline)

    def note_failure(self, run: PlannedRun, error: Mapping[str, Any]) -> None:
        """Write a summary for a run that could not do so itself, so that its folder
        shows how it failed.

        A kill or a full disk is no failure of the run, which can be resumed; nothing
        more is written to a full disk. Any other error is a failure and is written with
        its traceback; that run is tried again, too.
        """
        known = {"kind": error["kind"], "message": one_line(str(error["message"]))}
        if error["kind"] == "killed":
            self._write_summary(run, "stopped", stop=known)
        if error["kind"] in ("killed", "signal", "disk"):
            return
        self._write_summary(run, "failed", failure=known)
        if error.get("traceback"):
            write_text(self.run_dir(run) / "traceback.txt", error["traceback"])

    def _write_summary(
        self,
        run: PlannedRun,
        status: str,
        *,
        failure: dict[str, Any] | None = None,
        stop: dict[str, Any] | None = None,
    ) -> None:
        folder = self.run_dir(run)
        if (folder / "summary.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        seen = load_run(folder) if is_run_folder(folder) else Run(folder)
        summary: dict[str, Any] = {
            "name": run.name,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "steps": seen.last_step or 0,
            "steps_planned": run.settings["train.max_steps"],
            **seen.summary,
            "status": status,
            "failure": failure and {**failure, "step": seen.last_step},
            "stop": stop and {**stop, "step": seen.last_step},
        }
        if status == "failed":
            summary["final_val_loss"] = None
        summary["failures"] = failures_of(replace(seen, summary=summary))
        (folder / SUMS).unlink(missing_ok=True)
        write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        write_sums(folder)

    def _entries_of_before(self) -> dict[str, dict[str, Any]]:
        path = self.folder / SWEEP
        if not path.exists():
            if not is_unused(self.folder):
                raise BenchError(
                    f"--out {str(self.folder)!r} is in use and holds no sweep; give a new folder"
                )
            return {}
        try:
            before = read_json(path, times=8)
            entries, mode = {entry["name"]: entry for entry in before["runs"]}, before["mode"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out"
            ) from None
        if mode != self.mode:
            raise BenchError(
                f"--out {str(self.folder)!r} holds a sweep of mode {mode!r}; give a new folder"
            )
        return entries

    def check(self, run: PlannedRun) -> None:
        """Refuse a run that an earlier start of the sweep has trained with other
        settings.
        """
        before = self._before.get(run.name)
        if before is None:
            return
        now, then = plain(run.settings), before.get("settings") or {}
        for key in {**now, **then}:
            if now.get(key) != then.get(key):
                raise BenchError(
                    f"--out {str(self.folder)!r} holds {run.name!r} with {key} {then.get(key)!r}, "
                    f"now {now.get(key)!r}; give a new folder"
                )

    def check_texts(self, folders: Collection[str]) -> None:
        """Refuse a corpus that has been prepared anew since an earlier start of the
        sweep trained on it. Keep the digests of all in `texts`.
        """
        from nanogpt_bench.data.batches import digests_in, digests_of

        now = self.texts = {folder: digests_in(Path(folder)) for folder in folders}
        for name, entry in self._before.items():
            folder = (entry.get("settings") or {}).get("data.dir", DEFAULT_DATA_DIR)
            then = at(mapping(self.folder / name / "environment.json", []), "corpus.splits")
            if then and now.get(folder, digests_of(then)) != digests_of(then):
                raise BenchError(
                    f"data.dir: {folder!r} is not the text that {name!r} in {str(self.folder)!r} "
                    f"was trained on (its "
                    "sha256 differs); give that one, or a new folder with --out"
                )

    def write_manifest(self) -> None:
        """Write sweep.json as of now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = [self._entries[run.name] for run in self.planned]
        # Entries of earlier starts beyond this plan stay: `check` compares their
        # settings when they are planned again.
        entries += [
            {**entry, "of_plan": False}
            for name, entry in self._before.items()
            if name not in self._entries
        ]
        facts = {"mode": self.mode, "baseline": self.baseline, "order": list(self.order)}
        content = {**facts, "command": command_line(), "runs": entries}
        write_text(self.folder / SWEEP, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
