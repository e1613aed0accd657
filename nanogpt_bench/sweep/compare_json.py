"""The record of a comparison: compare.json, and whether an earlier start was of the same comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanogpt_bench.data.batches import digests_of
from nanogpt_bench.report.rows import Row, find_reference
from nanogpt_bench.runs.earlier import plain
from nanogpt_bench.sweep.plan import PlannedRun
from nanogpt_bench.sweep.record import DATE, Record
from nanogpt_bench.system.errors import BenchError, one_line
from nanogpt_bench.system.files import write_text
from nanogpt_bench.system.lock import is_unused
from nanogpt_bench.system.untrusted import read_json

MANIFEST = "compare.json"
#: the place of the corpus, which changes no number: its digests identify it
_PLACE = "data.dir"


class ComparisonRecord(Record):
    """The runs of a comparison and compare.json: what was asked for by option, and the settings of every run.

    `corpus` is where its text is, or will be: the standard library's prose is prepared there.

    Raises:
        BenchError: `folder` can't be used, or holds something else than this comparison.
    """

    def __init__(
        self,
        folder: Path,
        planned: Sequence[PlannedRun],
        corpus: Path,
        asked: Mapping[str, Any],
        baseline: str | None = None,
    ) -> None:
        super().__init__(folder, "nanogpt-bench compare", baseline)
        self.asked, self.corpus = asked, corpus
        before = read_earlier(folder)
        if before is not None:
            settings = {run.name: plain(run.settings) for run in planned}
            check_same(folder, before, asked, settings, self._corpus_digests())
            self.started = before.started

    def _corpus_digests(self) -> dict[str, Any] | None:
        """The SHA-256 of each split of the corpus, None until it is prepared.

        Raises:
            BenchError: a corpus whose meta.json can't be read.
        """
        if not self.corpus.exists():
            return None
        try:
            splits = read_json(self.corpus / "meta.json")["splits"]
            return {split: splits[split].get("sha256") for split in splits} | digests_of(splits)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"corpus {str(self.corpus)!r} can't be read: {one_line(error)}") from None

    def prepare(self, say: Callable[[str], None]) -> None:
        """Prepare the standard library's prose where there is no corpus; on any failure leave no folder behind."""
        if self.corpus.exists():
            return
        from nanogpt_bench.data import prepare_stdlib

        say("preparing the standard library's prose")
        try:
            prepare_stdlib(self.corpus)
        except BaseException:
            if not any(self.run_dir(run).exists() for run in self.planned):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.write_manifest()

    def write_manifest(self) -> None:
        """Write compare.json."""
        self._write_manifest(self.rows())

    def write_page(self, *, running: bool) -> Path:
        """Write compare.json and what a record's `write_page` does; returns the page's path."""
        rows = self.rows()
        self._write_manifest(rows)
        return self._write_report(rows, running)

    def _write_manifest(self, rows: Sequence[Row]) -> None:
        reference = find_reference(rows, self.baseline)
        manifest = {
            **{name.lower(): text for name, text in self.facts(rows).items()},
            "baseline": reference.label if reference is not None else None,
            "rows": self._entries(rows),
            "asked": dict(self.asked),
            "corpus_sha256": self._corpus_digests(),
            "settings": {run.name: run.settings for run in self.planned},
        }
        write_text(self.folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")

    def _entries(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [
            {
                "label": row.label,
                "rule": row.rule,
                "format": row.format,
                "runs": [run.name for run in runs],
                "status": {run.path.name: run.status for run in row.runs},
            }
            for row, runs in zip(rows, self.by_row(), strict=True)
        ]


@dataclass(frozen=True)
class Earlier:
    """The earlier start that compare.json records: its options, the settings of its runs, the digests of its corpus.

    The digests are None before the corpus was prepared.
    """

    asked: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]
    corpus: Mapping[str, Any] | None
    started: datetime


def read_earlier(folder: Path) -> Earlier | None:
    """Return what a comparison's folder says of its earlier start; None for a folder that is empty or not there.

    Raises:
        BenchError: the folder can't be used, or holds something else than a comparison that can be gone on with.
    """
    path = folder / MANIFEST
    try:
        if not path.exists():
            if not is_unused(folder):
                raise BenchError(f"--out {str(folder)!r} is not empty and holds no comparison; give a new folder")
            return None
        content = read_json(path, times=8)
    except OSError as error:
        raise BenchError(f"--out {str(folder)!r} can't be used: {error.strerror or error}") from None
    except BenchError:
        raise
    except ValueError as error:
        raise BenchError(f"{str(path)!r} can't be read ({one_line(error)}); give a new folder with --out") from None
    try:
        started = datetime.strptime(content["date"], DATE).replace(tzinfo=UTC)
        return Earlier(dict(content["asked"]), _by_name(content["settings"]), content["corpus_sha256"], started)
    except (KeyError, TypeError, ValueError):
        raise BenchError(f"{str(path)!r} does not say what was asked for; give a new folder with --out") from None


def _by_name(settings: Any) -> dict[str, dict[str, Any]]:
    return {str(name): dict(of_run) for name, of_run in settings.items()}


def check_same(
    folder: Path,
    before: Earlier,
    asked: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    corpus: Mapping[str, Any] | None,
) -> None:
    """Refuse to mix two comparisons: the runs that an earlier start planned have to be those planned now.

    Raises:
        BenchError: names the options that differ; the settings of the runs where no option does.
    """
    differing = list(_settings(before.settings, settings))
    if differing:
        named = list(_options(before.asked, asked)) or differing
        raise BenchError(f"--out {str(folder)!r} holds another comparison: {', '.join(named)}; give a new folder")
    if corpus is not None and before.corpus is not None and corpus != before.corpus:
        raise BenchError(
            f"--out {str(folder)!r} holds a comparison on another corpus: --data.dir was "
            f"{_shown(before.asked.get('--data.dir'))}, and its sha256 differs; give a new folder"
        )


def _options(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for option in {**before, **now}:
        then, new = before.get(option), now.get(option)
        if then != new:
            yield f"{option} was {_shown(then)}, is {_shown(new)}"


def _shown(value: Any) -> str:
    return "not given" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _settings(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name in {**before, **now}:
        if name not in before or name not in now:
            yield f"{name} was {'not ' if name not in before else ''}in it"
            continue
        for key in {**before[name], **now[name]}:
            then, new = before[name].get(key), now[name].get(key)
            if key != _PLACE and then != new:
                yield f"{key} of {name} was {then!r}, is {new!r}"
