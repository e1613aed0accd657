"""What a report finds beside its runs: sensitivity.json and tuning.json of a sweep."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_bench.runs.read import finite, mapping


@dataclass(frozen=True)
class SensitivityMap:
    """The table of loss gaps (nats) with one layer pattern alone in one format."""

    patterns: tuple[str, ...]
    formats: tuple[str, ...]
    #: a line per pattern; None without a loss
    gaps: tuple[tuple[float | None, ...], ...]
    operand: str = ""
    rule: str = ""
    #: how the runs of a cell ended, a line per pattern
    status: tuple[tuple[str, ...], ...] = ()
    #: the checkpoint whose weights were rounded; "" if every cell was trained
    checkpoint: str = ""

    def ending(self, pattern: int, fmt: int) -> str:
        """Return in a word or two how the runs of a cell without a gap ended."""
        known = self.status[pattern][fmt] if self.status else ""
        return known or "no loss"


#: the rows of one tuning.json, unchanged
TuningRows = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Studies:
    """The contents of all sensitivity.json and tuning.json in the folders of a report."""

    sensitivities: tuple[SensitivityMap, ...] = ()
    tunings: tuple[TuningRows, ...] = ()
    notes: tuple[str, ...] = ()


def read_studies(folders: Iterable[Path]) -> Studies:
    """Read sensitivity.json and tuning.json of folders; `notes` names each malformed file."""
    notes: list[str] = []
    sensitivities: list[SensitivityMap] = []
    tunings: list[TuningRows] = []
    for folder in dict.fromkeys(folders):
        sensitivity = _read_sensitivity(folder / "sensitivity.json", notes)
        if sensitivity is not None:
            sensitivities.append(sensitivity)
        tuning = _read_tuning_rows(folder / "tuning.json", notes)
        if tuning:
            tunings.append(tuning)
    return Studies(tuple(sensitivities), tuple(tunings), tuple(notes))


def _read_sensitivity(path: Path, notes: list[str]) -> SensitivityMap | None:
    if not path.is_file():
        return None
    content = mapping(path, notes)
    patterns = content.get("patterns") or ()
    formats = content.get("formats") or ()
    gaps = content.get("gap") or ()
    status = content.get("status") or ()
    if not _is_table(patterns, formats, gaps):
        notes.append(
            f"{path.name} is left out: it does not hold patterns, formats and a gap for each pair"
        )
        return None
    if not _is_table(patterns, formats, status):
        status = ()
    return SensitivityMap(
        patterns=tuple(map(str, patterns)),
        formats=tuple(map(str, formats)),
        gaps=tuple(tuple(map(finite, line)) for line in gaps),
        operand=str(content.get("operand") or ""),
        rule=str(content.get("rule") or ""),
        status=tuple(tuple(map(_text_or_empty, line)) for line in status),
        checkpoint=str(content.get("of") or ""),
    )


def _text_or_empty(value: Any) -> str:
    return str(value or "")


def _is_table(patterns: Any, formats: Any, lines: Any) -> bool:
    """Return whether `lines` has a cell for each pattern and format."""
    for part in (patterns, formats, lines):
        if not isinstance(part, list) or not part:
            return False
    if len(lines) != len(patterns):
        return False
    return all(isinstance(line, list) and len(line) == len(formats) for line in lines)


def _read_tuning_rows(path: Path, notes: list[str]) -> TuningRows:
    if not path.is_file():
        return ()
    rows = mapping(path, notes).get("rows")
    if not isinstance(rows, list):
        notes.append(f"{path.name} is left out: it does not hold rows")
        return ()
    return tuple(row for row in rows if isinstance(row, Mapping))
