"""How far a run has come, out of the records that it writes, wherever it trains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.config import metrics
from nanogpt_bench.config.keys import FIELDS

#: of a file that has grown more, the last bytes are read
MOST_BYTES = 1 << 16
_NAMES = {
    "train_loss": metrics.TRAIN_LOSS.name,
    "val_loss": metrics.VAL_LOSS.name,
    "lr": metrics.LR.name,
    "tokens_per_s": metrics.SPEED.name,
    "elapsed_s": metrics.ELAPSED.name,
}


class Records:
    """The records of one job's run, read as they come."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._path = Path(job.get("run_dir", "")) / "metrics.jsonl"
        steps = job.get("settings", {}).get("train.max_steps", FIELDS["train.max_steps"].default)
        self._known: dict[str, Any] = {"max_steps": steps}
        self._read = 0

    def new(self) -> dict[str, Any] | None:
        """Return the newest figures, None where there are no new ones."""
        try:
            size = self._path.stat().st_size
            with self._path.open("rb") as file:
                file.seek(max(self._read if self._read <= size else 0, size - MOST_BYTES))
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return None
        whole = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
        if size == self._read or not whole:
            return None
        self._read = size - (0 if lines[-1].endswith(b"\n") else len(lines[-1]))
        for line in whole:
            record = json.loads(line)
            found = {name: record.get(key) for name, key in _NAMES.items()}
            self._known |= {"step": record["step"], **{name: x for name, x in found.items() if x is not None}}
        return dict(self._known)
