"""Run folders made of figures: what a run would have written, without a run."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

#: the settings the classification reads
CONFIG = {
    "rule": "nearest",
    "seed": 42,
    "model": {"storage": "fp8", "block_size": 64, "formats": {"*": "E4M3"}},
    "optimizer": {"writeback": "nearest"},
    "train": {"batch_size": 12, "accumulation": 1},
}


def falling(steps: int = 200) -> list[float]:
    """A healthy training loss: from 5.5 nats down to 2.5 like a power of the step, wobbling by 0.02."""
    return [2.2 + 3.3 * (step + 1) ** -0.5 + 0.02 * math.sin(7 * step) for step in range(steps)]


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a run folder: per-step series by metric, a value or a null each."""

    def folder(name="run", *, series=None, loss=None, settings=None, alerts=(), summary=None):
        path = tmp_path / name
        path.mkdir()
        config = {
            key: {**value, **(settings or {}).get(key, {})} if isinstance(value, dict) else value
            for key, value in CONFIG.items()
        }
        config |= {key: dict(value) for key, value in (settings or {}).items() if key not in config}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        records = _records({"train/loss": falling() if loss is None else loss, **(series or {})})
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (path / "alerts.jsonl").write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
        content = {"name": name, "status": "finished", "failure": None, "format": "E4M3", **(summary or {})}
        (path / "summary.json").write_text(json.dumps(content))
        return path

    return folder


def _records(series: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records of steps 1, 2, …; a mapping gives the steps at which a metric was looked at."""
    by_step = {}
    for metric, values in series.items():
        pairs = values.items() if isinstance(values, Mapping) else enumerate(values, start=1)
        for step, value in pairs:
            by_step.setdefault(step, {"step": step, "time/elapsed_s": 0.5 * step})[metric] = value
    return [by_step[step] for step in sorted(by_step)]
