"""metrics.jsonl: one JSON object a line, complete after every step."""

from __future__ import annotations

import json
import math
from pathlib import Path

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


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
