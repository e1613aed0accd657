"""The runs of a sweep on disk: their folders, their outcomes, and sweep.json.

    OUT/sweep.json             an entry per run: its settings and its outcome
    OUT/NAME/                  the folder of a run
    OUT/trials/NAME/           that of a trial of a search
    OUT/report.html, tables    written from the folders of the runs

sweep.json is written after every run, so that it is true whenever a sweep is cut off.
When the sweep is started again it says which settings the runs were trained with, and
the folders say how far they came.
"""

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nanogpt_bench.config.endings import OUTSIDE_STOPS, RunStatus, StopKind
from nanogpt_bench.config.metrics import BESIDE_LOSS
from nanogpt_bench.config.renamed import with_current_values
from nanogpt_bench.config.schema import DEFAULT_DATA_DIR
from nanogpt_bench.failures import failures_of
from nanogpt_bench.report import report_facts, write_report
from nanogpt_bench.report.merged import with_given_up
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.studies import read_studies
from nanogpt_bench.runs.environment import at, command_line
from nanogpt_bench.runs.load import (
    SWEEP,
    Run,
    as_json,
    drop_checkpoints,
    failures_in,
    has_ended,
    is_run_folder,
    load_run,
    make_ready,
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
    "status",
    "steps",
    "final_val_loss",
    "best_val_loss",
    "first_val_loss",
    "bytes_per_parameter",
    "stall",
    "arrived",
    "tokens_per_s",
    "seconds",
)


class SweepMode(StrEnum):
    """What the runs of a sweep are for, as sweep.json names it."""

    GRID = "grid"
    RANDOM = "random"
    COMPARE = "compare"
    TUNE = "tune"
    SENSITIVITY = "sensitivity"


class SweepRecord:
    """The runs of a sweep in `folder`: a folder per run, sweep.json, the report.

    Runs are added one by one, since some are planned from the results of others. Gaps
    are measured to the row labelled `baseline`, without one to the first BF16 row. The
    table has the rows labelled `order` first.
    """

    def __init__(self, folder: Path, mode: str, baseline: str | None = None) -> None:
        """Read what an earlier start left in the folder; `mode` is a `SweepMode`."""
        self.folder = folder
        self.mode = mode
        self.baseline = baseline
        self.order: Sequence[str] = ()
        self.planned: list[PlannedRun] = []
        #: digests of the corpora as the sweep has begun with them, by their folders
        self.texts: dict[str, dict[str, Any]] = {}
        self._started = datetime.now(UTC)
        #: whether a run has ended by itself, by its name
        self._ended: dict[str, bool] = {}
        #: names of runs with a checkpoint to go on from
        self._resumed: set[str] = set()
        #: entries of sweep.json, by the name of the run
        self._entries: dict[str, dict[str, Any]] = {}
        #: entries that an earlier start left in sweep.json
        self._earlier_entries = self._read_earlier_entries()

    def add(self, run: PlannedRun) -> bool:
        """Add a run; return whether it has ended already.

        If not, its folder is removed, unless it has a checkpoint.
        """
        self.check(run)
        self.planned.append(run)
        if self._read_outcome(run):
            return True
        if make_ready(self.run_dir(run)):
            self._resumed.add(run.name)
        return False

    def _read_outcome(self, run: PlannedRun) -> bool:
        """Read a run's folder; return whether the run has ended by itself."""
        summary = self.summary(run)
        ended = has_ended(summary)
        entry: dict[str, Any] = {
            "name": run.name,
            "label": run.label,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "axes": as_json(run.axes),
            "ended": ended,
        }
        for key in OUTCOMES:
            entry[key] = summary.get(key)
        for metric in BESIDE_LOSS:
            if metric.figure in summary:
                entry[metric.figure] = summary[metric.figure]
        failures = [failure.kind for failure in failures_in(summary)]
        entry["failure"] = (summary.get("failure") or {}).get("kind")
        entry["failures"] = list(dict.fromkeys(failures))
        entry["settings"] = as_json(run.settings)
        self._entries[run.name] = entry
        self._ended[run.name] = ended
        if ended:
            drop_checkpoints(self.run_dir(run), run.settings)
        return ended

    def resumes(self, run: PlannedRun) -> bool:
        """Return whether a run goes on from its checkpoint."""
        return run.name in self._resumed

    def run_dir(self, run: PlannedRun) -> Path:
        return self.folder / run.name

    def summary(self, run: PlannedRun) -> dict[str, Any]:
        return summary_of(self.run_dir(run))

    def final_loss(self, run: PlannedRun) -> float | None:
        """Return the final loss of a run; None if it failed or ended early."""
        summary = self.summary(run)
        if summary.get("status") != RunStatus.FINISHED:
            return None
        return finite(summary.get("final_val_loss"))

    def end(self, run: PlannedRun, error: Mapping[str, Any] | None = None) -> None:
        """Record the end of a run, and write sweep.json.

        `error` is that of a run that could not write its own summary.
        """
        if error is not None:
            self.note_failure(run, error)
        self._read_outcome(run)
        self.write_manifest()

    def ended(self, run: PlannedRun) -> bool:
        """Return whether a run ended by itself, and not from outside."""
        return self._ended[run.name]

    def unfinished(self) -> list[PlannedRun]:
        """Return runs that have not ended by themselves, or whose results are gone."""
        return [run for run in self.planned if not has_ended(self.summary(run))]

    def interrupt(self) -> None:
        """Record the state of every run once all workers have stopped.

        It covers runs whose end was not reported.
        """
        for run in self.planned:
            if not self.ended(run):
                self._read_outcome(run)
        for run in self.planned:
            if is_run_folder(self.run_dir(run)):
                self._write_summary(run, RunStatus.STOPPED)
        self.write_manifest()

    def rows(self) -> list[Row]:
        """Return the rows in the order of the table, with the runs that have begun.

        A row that was given up has none.
        """
        by_label: dict[str, list[PlannedRun]] = {label: [] for label in self.order}
        for run in self.planned:
            if not run.is_trial:
                by_label.setdefault(run.label, []).append(run)
        rows = []
        for planned in by_label.values():
            if planned:
                folders = [self.run_dir(run) for run in planned]
                runs = tuple(load_run(folder) for folder in folders if is_run_folder(folder))
                rows.append(Row(planned[0].label, planned[0].rule, planned[0].format, runs))
        return with_given_up(rows, read_studies([self.folder]).tunings, self.order)

    def results(self) -> list[Result]:
        rows = self.rows()
        return measure(rows, find_reference(rows, self.baseline))

    def write_page(self) -> Path:
        """Write the tables, the page and the figures; return the page's path."""
        rows = self.rows()
        runs: list[Run] = []
        for row in rows:
            runs += row.runs
        command = command_line()
        date = self._started.strftime(DATE)
        facts = {"Command": command, "Machine": platform.platform(), "Date": date}
        facts |= report_facts(runs)
        # Not those of the first run, which an earlier start may have trained.
        facts |= {"Command": command, "Date": date}
        kind = self.mode if self.mode == SweepMode.COMPARE else f"sweep ({self.mode})"
        return write_report(
            rows,
            self.folder,
            title=f"nanogpt-bench {kind}",
            facts=facts,
            baseline=self.baseline,
        )

    def note_failure(self, run: PlannedRun, error: Mapping[str, Any]) -> None:
        """Write the summary of a run that could not write it, with how it failed.

        A kill or a full disk is no failure of the run, which can be resumed. Nothing
        more is written to a full disk. Any other error is a failure and is written with
        its traceback; that run is tried again, too.
        """
        ending = {"kind": error["kind"], "message": one_line(str(error["message"]))}
        if error["kind"] == StopKind.KILLED:
            self._write_summary(run, RunStatus.STOPPED, stop=ending)
        if error["kind"] in OUTSIDE_STOPS:
            return
        self._write_summary(run, RunStatus.FAILED, failure=ending)
        if error.get("traceback"):
            write_text(self.run_dir(run) / "traceback.txt", error["traceback"])

    def _write_summary(
        self,
        run: PlannedRun,
        status: RunStatus,
        *,
        failure: dict[str, Any] | None = None,
        stop: dict[str, Any] | None = None,
    ) -> None:
        """Write the summary of a run from its records, unless it has one."""
        folder = self.run_dir(run)
        if (folder / "summary.json").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        recorded = load_run(folder) if is_run_folder(folder) else Run(folder)
        summary: dict[str, Any] = {
            "name": run.name,
            "rule": run.rule,
            "format": run.format,
            "seed": run.seed,
            "steps": recorded.last_step or 0,
            "steps_planned": run.config.train.max_steps,
            **recorded.summary,
            "status": str(status),
            # None stays None.
            "failure": failure and {**failure, "step": recorded.last_step},
            "stop": stop and {**stop, "step": recorded.last_step},
        }
        if status is RunStatus.FAILED:
            summary["final_val_loss"] = None
        summary["failures"] = failures_of(replace(recorded, summary=summary))
        (folder / SUMS).unlink(missing_ok=True)
        write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        write_sums(folder)

    def _read_earlier_entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of sweep.json by name; refuse a folder of other files."""
        path = self.folder / SWEEP
        if not path.exists():
            if not is_unused(self.folder):
                raise BenchError(
                    f"--out {str(self.folder)!r} is in use and does not hold a sweep; give a new "
                    "folder"
                )
            return {}
        try:
            manifest = read_json(path, times=8)
            entries = {entry["name"]: entry for entry in manifest["runs"]}
            mode = manifest["mode"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out"
            ) from None
        if mode != self.mode:
            raise BenchError(
                f"--out {str(self.folder)!r} holds a sweep of mode {mode!r}, not {self.mode!r}; "
                "give a new folder"
            )
        return entries

    def check(self, run: PlannedRun) -> None:
        """Refuse a run that an earlier start trained with other settings."""
        earlier_entry = self._earlier_entries.get(run.name)
        if earlier_entry is None:
            return
        settings = as_json(run.settings)
        earlier_settings = with_current_values(earlier_entry.get("settings") or {})
        for key in {**settings, **earlier_settings}:
            if settings.get(key) != earlier_settings.get(key):
                raise BenchError(
                    f"--out {str(self.folder)!r} holds {run.name!r} with {key} "
                    f"{earlier_settings.get(key)!r}, but now it would be {settings.get(key)!r}; "
                    "give a new folder"
                )

    def check_texts(self, folders: Collection[str]) -> None:
        """Refuse a corpus that was prepared anew since an earlier start trained on it.

        The digests of all are kept in `texts`.
        """
        from nanogpt_bench.data.batches import digests_in, digests_of

        self.texts = {folder: digests_in(Path(folder)) for folder in folders}
        for name, entry in self._earlier_entries.items():
            folder = (entry.get("settings") or {}).get("data.dir", DEFAULT_DATA_DIR)
            if folder not in self.texts:
                continue
            environment = mapping(self.folder / name / "environment.json", [])
            splits = at(environment, "corpus.splits")
            if splits and self.texts[folder] != digests_of(splits):
                raise BenchError(
                    f"data.dir: {folder!r} is not the text that {name!r} in {str(self.folder)!r} "
                    f"was trained on (its sha256 differs); give that one, or a new folder with "
                    f"--out"
                )

    def write_manifest(self) -> None:
        """Write sweep.json as of now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = [self._entries[run.name] for run in self.planned]
        # Entries of earlier starts beyond this plan stay: `check` compares their
        # settings when they are planned again.
        for name, entry in self._earlier_entries.items():
            if name not in self._entries:
                entries.append({**entry, "of_plan": False})
        content = {
            "mode": self.mode,
            "baseline": self.baseline,
            "order": list(self.order),
            "command": command_line(),
            "runs": entries,
        }
        write_text(self.folder / SWEEP, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
