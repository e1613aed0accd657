"""The weights as they were before the first step whose loss or gradient was not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanogpt_bench.observers.base import Observer, Step
from nanogpt_bench.weights import save_weights


class AnomalyObserver(Observer):
    """Saves the model once, as anomaly/step-N/model.safetensors: step N was skipped, so these are its weights."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "anomaly"
        self._saved = False

    def written(self, step: Step) -> None:
        if self._saved or not (step.record.get("loss_is_nan") or step.record.get("grad_has_nan")):
            return
        self._saved = True
        folder = self._folder / f"step-{step.number}"
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(step.model, folder / "model.safetensors")

    def state(self) -> dict[str, Any]:
        return {"saved": self._saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._saved = state["saved"]
