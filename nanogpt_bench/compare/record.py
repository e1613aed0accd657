"""The comparison on disk: which run folders it has, what became of them, and the report over them."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.compare.plan import PlannedRun
from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.failures import failures_of
from nanogpt_bench.report.build import facts_of, write_report
from nanogpt_bench.report.results import Result, measure
from nanogpt_bench.report.results_file import with_given_up
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.report.sweep_charts import read_studies
from nanogpt_bench.runs.earlier import DATE, MANIFEST, drop_checkpoints, has_ended, summary_of
from nanogpt_bench.runs.environment import command_line
from nanogpt_bench.runs.load import Run, is_run_folder, load_run
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.untrusted import read_json


@dataclass(frozen=True)
class Record:
    """Everything a comparison writes lies in `folder`: a folder a run, and the report beside them."""

    folder: Path
    planned: Sequence[PlannedRun]
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    title: str = "nanogpt-bench compare"
    #: label of the row that the others are measured against; None: the first BF16 row
    baseline: str | None = None
    #: labels of rows in the order of the table, where that is not the order of the runs
    order: Sequence[str] = ()
    #: what the command was asked for, by option
    asked: Mapping[str, Any] = field(default_factory=dict)
    #: where the corpus is, or will be
    corpus: Path | None = None

    def run_dir(self, run: PlannedRun) -> Path:
        return self.folder / run.name

    def corpus_digests(self) -> dict[str, Any] | None:
        """The SHA-256 of each split of the corpus, None until it is prepared.

        Raises:
            BenchError: a corpus whose meta.json can't be read.
        """
        if self.corpus is None or not self.corpus.exists():
            return None
        try:
            splits = read_json(self.corpus / "meta.json")["splits"]
            return {split: splits[split].get("sha256") for split in splits} | digests_of(splits)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"corpus {str(self.corpus)!r} can't be read: {one_line(error)}") from None

    def left(self) -> list[PlannedRun]:
        """The runs that have not come to their own end, in the order of the table."""
        return [run for run in self.planned if not has_ended(summary_of(self.run_dir(run)))]

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of the runs that have finished."""
        for run in self.planned:
            drop_checkpoints(self.run_dir(run), run.settings)

    def rows(self) -> list[Row]:
        """The rows in the order of the table, each with those of its runs that have begun; one given up has none."""
        begun = [Row(runs[0].label, runs[0].rule, runs[0].format, tuple(self._loaded(runs))) for runs in self._by_row()]
        return with_given_up(begun, read_studies([self.folder]).tunings, self.order)

    def _by_row(self) -> list[list[PlannedRun]]:
        grouped: dict[str, list[PlannedRun]] = {label: [] for label in self.order}
        for run in self.planned:
            if not run.aside:
                grouped.setdefault(run.label, []).append(run)
        return [runs for runs in grouped.values() if runs]

    def _loaded(self, runs: Sequence[PlannedRun]) -> Iterator[Run]:
        for run in runs:
            if is_run_folder(self.run_dir(run)):
                yield load_run(self.run_dir(run))

    def results(self) -> list[Result]:
        """The table as it stands."""
        rows = self.rows()
        return measure(rows, find_reference(rows, self.baseline))

    def write(self, *, running: bool) -> Path:
        """Write compare.json, tables and page, and the figures when nothing is running; returns the page's path."""
        rows = self.rows()
        facts = self._write_manifest(rows)
        return write_report(rows, self.folder, title=self.title, facts=facts, baseline=self.baseline, running=running)

    def write_manifest(self) -> None:
        """Write compare.json: what was asked for, which runs that makes, and how they stand."""
        self._write_manifest(self.rows())

    def _write_manifest(self, rows: Sequence[Row]) -> dict[str, str]:
        facts = self._facts([run for row in rows for run in row.runs])
        reference = find_reference(rows, self.baseline)
        manifest = {
            **{name.lower(): text for name, text in facts.items()},
            "baseline": reference.label if reference is not None else None,
            "rows": self._entries(rows),
            "asked": dict(self.asked),
            "corpus_sha256": self.corpus_digests(),
            "settings": {run.name: run.settings for run in self.planned},
        }
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        return facts

    def write_page(self, *, running: bool) -> Path:
        """Write what `write` does, compare.json apart; returns the page's path."""
        rows = self.rows()
        facts = self._facts([run for row in rows for run in row.runs])
        return write_report(rows, self.folder, title=self.title, facts=facts, baseline=self.baseline, running=running)

    def _facts(self, runs: Sequence[Run]) -> dict[str, str]:
        own = {
            "Command": command_line(),
            "Machine": platform.platform(),
            "Date": self.started.strftime(DATE),
        }
        return own | facts_of(runs) | {"Command": own["Command"], "Date": own["Date"]}

    def _entries(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [
            {
                "label": row.label,
                "rule": row.rule,
                "format": row.format,
                "runs": [run.name for run in runs],
                "status": {run.path.name: run.status for run in row.runs},
            }
            for row, runs in zip(rows, self._by_row(), strict=True)
        ]

    def note_failure(self, run: PlannedRun, error: Mapping[str, Any]) -> None:
        """Write down how a run failed that could not do so itself, so that the folder alone tells the story.

        A full disk or a kill is no failure of the run, which goes on when it is started again. Of a full disk the run
        has told what it could, and nothing more is written to it. Any other error is told as one, with its traceback,
        and the run is tried again as well.
        """
        told = {"kind": error["kind"], "message": one_line(str(error["message"]))}
        if error["kind"] == "killed":
            self._write_summary(run, "stopped", stop=told)
        if error["kind"] in ("killed", "signal", "disk"):
            return
        self._write_summary(run, "failed", failure=told)
        if error.get("traceback"):
            write_text(self.run_dir(run) / "traceback.txt", error["traceback"])

    def note_interruption(self) -> None:
        """Mark as stopped what had begun and could not write its own summary in time."""
        for run in self.planned:
            if is_run_folder(self.run_dir(run)):
                self._write_summary(run, "stopped")

    def _write_summary(
        self,
        run: PlannedRun,
        status: str,
        *,
        failure: dict[str, Any] | None = None,
        stop: dict[str, Any] | None = None,
    ) -> None:
        """Write the summary of a run that wrote none."""
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
        write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
