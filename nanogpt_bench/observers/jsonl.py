"""metrics.jsonl and histograms.jsonl: one JSON object a line, complete after every step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TextIO

from nanogpt_bench.observers.base import Observer, Step


class JsonlObserver(Observer):
    """Appends every step's record to a file and flushes it; a value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def written(self, step: Step) -> None:
        record = {key: _finite(value) for key, value in step.record.items()}
        self._file.write(json.dumps({"step": step.number, **record}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class HistogramObserver(Observer):
    """Appends the distributions of every step that has some to a file; without any there is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def written(self, step: Step) -> None:
        if not step.histograms:
            return
        if self._file is None:
            self._file = self._path.open("w", encoding="utf-8")
        self._file.writelines(json.dumps(histogram, allow_nan=False) + "\n" for histogram in step.histograms)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
