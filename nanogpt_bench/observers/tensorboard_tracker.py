"""TensorBoard's event files, in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from nanogpt_bench.observers.alerts import Alert
from nanogpt_bench.observers.tracking import Distribution

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Scalars of every step, distributions of weights and gradients, alerts as text.

    What was written of steps beyond `after` is withdrawn.
    """

    def __init__(self, run_dir: Path, after: int = -1) -> None:
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=after + 1 if after >= 0 else None)

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": "tensorboard", "folder": FOLDER}

    def log(self, step: int, record: Mapping[str, float]) -> None:
        for key, value in record.items():
            self._writer.add_scalar(key, value, step)

    def distributions(self, step: int, found: Mapping[str, Distribution]) -> None:
        for name, spread in found.items():
            self._writer.add_histogram_raw(
                name,
                min=spread.edges[0],
                max=spread.edges[-1],
                num=sum(spread.counts),
                sum=spread.total,
                sum_squares=spread.squares,
                bucket_limits=spread.edges[1:],
                bucket_counts=spread.counts,
                global_step=step,
            )

    def alert(self, alert: Alert) -> None:
        self._writer.add_text(f"alerts/{alert.kind}", f"{alert.level}: {alert.message}", alert.step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._writer.close()
