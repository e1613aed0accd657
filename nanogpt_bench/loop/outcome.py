"""How a run is going, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanogpt_bench.observers import Alert
from nanogpt_bench.runs.earlier import OF_TRAINING


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; losses in nats a token, or a label."""

    step: int
    max_steps: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    #: mean over the looks so far; None where it says nothing of what is lost
    stall: float | None
    lr: float
    tokens_per_s: float
    elapsed_s: float
    #: raised in this step
    alerts: tuple[Alert, ...] = ()
    #: mean over the looks so far of the share of the requested movement that arrived
    arrived: float | None = None


@dataclass
class Outcome:
    """What the loop found out, beside the weights."""

    status: str = "finished"
    failure: dict[str, Any] | None = None
    #: why a run that did not fail ended before its last step
    stop: dict[str, Any] | None = None
    steps: int = 0
    tokens: int = 0
    first_val_loss: float | None = None
    final_val_loss: float | None = None
    best_val_loss: float | None = None
    #: standard error of the last validation, over its batches or documents
    final_val_loss_se: float | None = None
    #: what the last validation found beside the loss
    final_figures: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    training_seconds: float = 0.0
    #: bytes of model and optimizer after the last step
    held_bytes: int | None = None
    #: the most that the gradients of a backward pass took at once
    gradient_peak_bytes: int | None = None
    #: steps in a row with a loss or gradient that was not finite, and where they began
    anomalies: int = 0
    first_anomaly: int = 0
    #: {"step", "to", "why"} of every return to a checkpoint
    rollbacks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal asked for the end."""
        return self.stop is not None and self.stop["kind"] == "signal"

    @property
    def batches_left_out(self) -> int:
        """By how many steps the batches are ahead: those of steps that were undone are not read again."""
        return sum(gone_back["step"] - gone_back["to"] for gone_back in self.rollbacks)

    @property
    def ended_by_disk(self) -> bool:
        """Whether a file could not be written."""
        return self.stop is not None and self.stop["kind"] == "disk"

    def go_back(self, rollbacks: list[dict[str, Any]]) -> None:
        """Take up what was committed, after these rollbacks, the last of which led here."""
        self.status, self.failure, self.stop = "finished", None, None
        self.rollbacks, self.anomalies = rollbacks, 0

    def fail(self, kind: str, message: str, step: int) -> None:
        """Record how the run failed; a failed run has no final loss."""
        assert kind in OF_TRAINING, kind
        self.status = "failed"
        self.failure = {"kind": kind, "message": message, "step": step}
        self.final_val_loss = self.final_val_loss_se = None
        self.final_figures = {}

    def end_early(self, kind: str, message: str, step: int) -> None:
        """Record why the run ends where nothing has failed."""
        self.status = "stopped"
        self.stop = {"kind": kind, "message": message, "step": step}

    def end_on_disk(self, message: str, done: int, tokens_in: Callable[[int], int]) -> None:
        """Record that a file could not be written; a step after `done`, the last that was recorded, does not count."""
        self.end_early("disk", message, done)
        while self.steps > done:
            self.tokens -= tokens_in(self.steps)
            self.steps -= 1

    def go_on(self) -> None:
        """Forget that the run was ended from outside: by the clock, a signal or the disk."""
        if self.stop is not None and self.stop["kind"] in ("time", "signal", "disk"):
            self.status, self.stop = "finished", None

    def skip(self, step: int) -> None:
        """Count a step that was skipped."""
        self.first_anomaly = self.first_anomaly if self.anomalies else step
        self.anomalies += 1
