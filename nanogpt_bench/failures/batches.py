"""Does the plateau fall with the batch size? Runs that differ in nothing else, compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanogpt_bench.failures.evidence import Evidence
from nanogpt_bench.failures.finding import Facts
from nanogpt_bench.failures.losses import resting_level

#: settings in which runs of one series of batch sizes may differ
FREE = frozenset({"train.batch_size", "train.accumulation", "seed", "data.seed", "model.seed"})


@dataclass(frozen=True)
class BatchEffect:
    """The levels (nats) at which the training loss came to rest, by sequences a step, smallest batch first."""

    levels: tuple[tuple[int, float], ...]

    @property
    def fall(self) -> float:
        """Nats by which the largest batch lies below the smallest."""
        return self.levels[0][1] - self.levels[-1][1]

    @property
    def text(self) -> str:
        levels = ", ".join(f"{level:.3f} with {batch}" for batch, level in self.levels)
        return f"the training loss rests at {levels} sequences a step"

    def facts(self) -> Facts:
        """Return the effect as evidence."""
        facts: Facts = {f"level_batch_{batch}": level for batch, level in self.levels}
        return facts | {"batch_fall": self.fall}


def batch_effect(evidence: Evidence, others: Iterable[Evidence]) -> BatchEffect | None:
    """Compare a run with those of `others` that differ from it in batch size and seeds only; None without any."""
    setting = _setting(evidence)
    runs = {run.run.path: run for run in (evidence, *others) if setting is not None and _setting(run) == setting}
    levels: dict[int, list[float]] = {}
    for run in runs.values():
        batch, level = _batch(run), resting_level(run)
        if batch is not None and level is not None:
            levels.setdefault(batch, []).append(level)
    if len(levels) < 2:
        return None
    return BatchEffect(tuple((batch, statistics.fmean(levels[batch])) for batch in sorted(levels)))


def _batch(evidence: Evidence) -> int | None:
    """Sequences that one optimizer step sees."""
    size, accumulation = evidence.setting("train.batch_size"), evidence.setting("train.accumulation")
    return size * accumulation if isinstance(size, int) and isinstance(accumulation, int) else None


def _setting(evidence: Evidence) -> str | None:
    """Everything else, as a key; None when the run has no config."""
    config = evidence.run.config
    return json.dumps(_fixed(config), sort_keys=True, default=str) if config else None


def _fixed(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: _fixed(value, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in config.items()
        if f"{prefix}{key}" not in FREE
    }
