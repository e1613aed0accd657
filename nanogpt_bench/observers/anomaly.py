"""The weights as they were before the first step whose loss or gradient was not finite."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file

import fp8manifold as fm
from nanogpt_bench.observers.base import Observer, Step


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
        folder.mkdir(parents=True)
        tensors, metadata = fm.flatten_state_dict(_without_shared(step))
        partial = folder / ".model.safetensors.partial"
        save_file(tensors, partial, metadata)
        os.replace(partial, folder / "model.safetensors")


def _without_shared(step: Step) -> dict[str, object]:
    """Return the state without the second names of tied weights, which safetensors has no way to write."""
    named = dict(step.model.named_parameters())  # a shared parameter once, under its first name
    buffers = {name for name, _ in step.model.named_buffers()}
    state = step.model.state_dict()
    return {name: value for name, value in state.items() if name in named or name in buffers}
