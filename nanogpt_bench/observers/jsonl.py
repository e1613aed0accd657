"""metrics.jsonl: one JSON object a line, complete after every step."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.system.errors import BenchError
from nanogpt_bench.system.files import NO_LINKS


class LineFile:
    """A file that grows by whole lines, made with its first one; a run that is taken up cuts it back first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Add lines; whoever reads the file sees them.

        Raises:
            OSError: the disk does not take them; it names the file.
        """
        if self._file is None:
            self._file = os.fdopen(self._open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
        try:
            self._file.writelines(line + "\n" for line in lines)
            self._file.flush()
        except OSError as error:  # which does not say what it was that could not be written
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def _open(self, flags: int) -> int:
        """A file to be changed: one that leads elsewhere, in a folder that someone else has made, is left alone."""
        try:
            return os.open(self._path, flags | NO_LINKS, 0o666)
        except OSError:
            if self._path.is_symlink():
                raise BenchError(f"{str(self._path)!r} is a symbolic link; lines are added to a file only") from None
            raise

    def length(self) -> int:
        """Return the bytes written so far, once they are on the disk: a checkpoint must not know of later ones."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return self._path.stat().st_size

    def cut(self, length: int) -> None:
        """Drop what came after the first `length` bytes.

        Raises:
            BenchError: the file is shorter.
        """
        self.close()
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < length:
            raise BenchError(
                f"{str(self._path)!r} has {size} bytes, {length} when the checkpoint was taken: lines are lost"
            )
        if size > length:
            with os.fdopen(self._open(os.O_WRONLY), "wb") as file:
                file.truncate(length)
        if size and not length:
            self._path.unlink()

    def close(self) -> None:
        """Close the file, if it was ever opened."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonlObserver(Observer):
    """Appends every step's record to a file and flushes it; a value that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def close(self) -> None:
        self._lines.close()

    def state(self) -> dict[str, Any]:
        return {"bytes": self._lines.length()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lines.cut(state["bytes"])

    def written(self, step: Step) -> None:
        record = {key: _finite(value) for key, value in step.record.items()}
        self._lines.append([json.dumps({"step": step.number, **record}, allow_nan=False)])


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None
