"""The state in which a run first met something that is not finite."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_bench.checkpoint import CheckpointNotWritten, commit
from nanogpt_bench.monitors.points import Observer, Step
from nanogpt_bench.training.run_state import capture

if TYPE_CHECKING:
    from nanogpt_bench.training.trainer import Trainer

_LOG = logging.getLogger("nanogpt_bench")


class AnomalyObserver(Observer):
    """Commits one checkpoint as anomaly/checkpoints/step-N, apart from those that a run goes on from.

    Where step N was left out, it holds the weights and the optimizer state that the step began with. Without a folder
    another process does so.
    """

    def __init__(self, run_dir: Path | None, trainer: Trainer) -> None:
        self._folder, self._trainer = None if run_dir is None else run_dir / "anomaly", trainer
        self._saved = False

    def written(self, step: Step) -> None:
        if self._saved or step.anomaly is None:
            return
        self._saved = True
        facts = {"anomaly": dataclasses.asdict(step.anomaly)}
        contents = capture(step.number, self._trainer, [], facts)
        if self._folder is None or contents is None:
            return
        self._folder.mkdir(exist_ok=True)
        try:
            commit(self._folder, contents, keep_last=1)
        except CheckpointNotWritten as error:
            _LOG.warning("anomaly: %s", error)  # it is for debugging: the run does without

    def state(self) -> dict[str, Any]:
        return {"saved": self._saved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._saved = state["saved"]
