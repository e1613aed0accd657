"""What a sweep found beside its runs, read from its folder: sensitivity.json, lr_limits.json and tuning.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_bench.runs.read import finite, mapping


@dataclass(frozen=True)
class Sensitivity:
    """The loss gap (nats) when one layer pattern alone is quantised to one format; None where there is none."""

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    gap: tuple[tuple[float | None, ...], ...]
    operand: str = ""
    rule: str = ""
    status: tuple[tuple[str, ...], ...] = ()
    #: the checkpoint whose weights were rounded; empty where every cell was trained
    of: str = ""

    def ending(self, pattern: int, fmt: int) -> str:
        """How the runs of a cell without a gap ended, in a word or two."""
        known = self.status[pattern][fmt] if self.status else ""
        return known or "no loss"


@dataclass(frozen=True)
class LearningRateLimit:
    """Between which learning rates one format and rule becomes unstable; None where a side was not found."""

    format: str
    rule: str
    stable: float | None
    unstable: float | None


@dataclass(frozen=True)
class Studies:
    """Everything of that kind in the folders of a report."""

    sensitivities: tuple[Sensitivity, ...] = ()
    limits: tuple[LearningRateLimit, ...] = ()
    #: the rows of every tuning.json, as they stand there
    tunings: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_studies(folders: Iterable[Path]) -> Studies:
    """The studies in those folders; a file that does not fit is named in `notes`, one that is not there is not."""
    notes: list[str] = []
    sensitivities: list[Sensitivity] = []
    limits: list[LearningRateLimit] = []
    tunings: list[tuple[Mapping[str, Any], ...]] = []
    for folder in dict.fromkeys(folders):
        sensitivities += _sensitivity(folder / "sensitivity.json", notes)
        limits += map(_limit, _rows(folder / "lr_limits.json", notes))
        tunings += [tuned] if (tuned := tuple(_rows(folder / "tuning.json", notes))) else []
    return Studies(tuple(sensitivities), tuple(dict.fromkeys(limits)), tuple(tunings), tuple(notes))


def _sensitivity(path: Path, notes: list[str]) -> list[Sensitivity]:
    if not path.is_file():
        return []
    content = mapping(path, notes)
    patterns, formats, gap = (content.get(key) for key in ("patterns", "formats", "gap"))
    if not _is_table(patterns, formats, gap):
        notes.append(f"{path.name}: expected patterns, formats and a gap for each pair; left out")
        return []
    rows = tuple(tuple(finite(cell) for cell in line) for line in gap or ())
    operand, rule = (str(content.get(key) or "") for key in ("operand", "rule"))
    return [
        Sensitivity(
            tuple(map(str, patterns or ())),
            tuple(map(str, formats or ())),
            rows,
            operand,
            rule,
            _status(content),
            str(content.get("of") or ""),
        )
    ]


def _status(content: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """How the runs of every cell ended, where the file says so for the whole table."""
    table = content.get("status")
    if not _is_table(content.get("patterns"), content.get("formats"), table):
        return ()
    return tuple(tuple(str(cell or "") for cell in line) for line in table or ())


def _is_table(patterns: Any, formats: Any, gap: Any) -> bool:
    if not all(isinstance(part, list) and part for part in (patterns, formats, gap)):
        return False
    return len(gap) == len(patterns) and all(isinstance(row, list) and len(row) == len(formats) for row in gap)


def _rows(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    if not path.is_file():
        return []
    rows = mapping(path, notes).get("rows")
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        notes.append(f"{path.name}: expected rows; left out")
        return []
    return [row for row in rows if isinstance(row, Mapping)]


def _limit(row: Mapping[str, Any]) -> LearningRateLimit:
    return LearningRateLimit(
        str(row.get("format") or "none"),
        str(row.get("rule") or "unknown"),
        finite(row.get("largest_stable_lr")),
        finite(row.get("smallest_unstable_lr")),
    )
