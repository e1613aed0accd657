"""metrics.jsonl is readable after every step."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from nanogpt_bench.observers import JsonlObserver, Step


def step_with(number: int, **record: float) -> Step:
    model = torch.nn.Linear(1, 1)
    return Step(number, model, torch.optim.SGD(model.parameters()), record=dict(record))


def test_every_record_is_on_disk_at_once_and_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    observer = JsonlObserver(path)
    observer.written(step_with(1, loss=1.5))
    assert json.loads(path.read_text()) == {"step": 1, "loss": 1.5}
    observer.written(step_with(2, loss=float("nan"), norm=float("inf")))
    observer.close()
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "loss": None, "norm": None}
