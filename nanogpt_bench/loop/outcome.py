"""The outcome of a run, so far and at its end: progress, status, summary.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nanogpt_bench.config.endings import LOSS_FAILURES, FailureClass, RunStatus, StopKind
from nanogpt_bench.config.schema import Config, Storage
from nanogpt_bench.model.weights import is_packaged, linear_layers, quantized_layers
from nanogpt_bench.monitors.resources import peak_bytes
from nanogpt_bench.runs.load import Alert
from nanogpt_bench.setup.formats import format_summary
from nanogpt_bench.setup.memory import bytes_with_state, held_bytes
from nanogpt_bench.setup.resolve import rule_name

if TYPE_CHECKING:
    from nanogpt_bench.loop.observers import Observers
    from nanogpt_bench.loop.trainer import Trainer


@dataclass(frozen=True)
class Progress:
    """A run's progress after a step; losses are in nats per token or label."""

    step: int
    max_steps: int
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    #: mean over the measurements so far; None where a stall is no failure
    stall: float | None
    lr: float
    tokens_per_s: float
    elapsed_s: float
    #: alerts raised in this step
    alerts: tuple[Alert, ...] = ()
    #: share of the requested movement that the write-back made, mean over the
    #: measurements so far
    arrived: float | None = None


@dataclass
class Outcome:
    """A run's results beside its weights, and how it ended."""

    #: finished until the run fails, or is stopped early
    status: RunStatus = RunStatus.FINISHED
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
    #: other metrics of the last validation
    final_figures: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    training_seconds: float = 0.0
    #: bytes of model and optimizer after the last step
    held_bytes: int | None = None
    #: most bytes that the gradients of a backward pass took at once
    gradient_peak_bytes: int | None = None
    #: number of steps in a row with a loss or gradient that was not finite, and the
    #: first of them
    anomalies: int = 0
    first_anomaly: int = 0

    def __post_init__(self) -> None:
        # A checkpoint has the word.
        self.status = RunStatus(self.status)

    def ended_by(self, *kinds: StopKind) -> bool:
        """Return whether one of these ended the run early."""
        return self.stop is not None and self.stop["kind"] in kinds

    def fail(self, kind: FailureClass, message: str, step: int) -> None:
        """Record how the run failed; a failed run has no final loss."""
        assert kind in LOSS_FAILURES, kind
        self.status = RunStatus.FAILED
        self.failure = {"kind": str(kind), "message": message, "step": step}
        self.final_val_loss = self.final_val_loss_se = None
        self.final_figures = {}

    def end_early(self, kind: StopKind, message: str, step: int) -> None:
        """Record why the run ends early without having failed."""
        self.status = RunStatus.STOPPED
        self.stop = {"kind": str(kind), "message": message, "step": step}

    def end_on_disk(
        self, message: str, last_recorded: int, tokens_in: Callable[[int], int]
    ) -> None:
        """Record that a file could not be written.

        Steps after the last recorded one do not count.
        """
        self.end_early(StopKind.DISK, message, last_recorded)
        while self.steps > last_recorded:
            self.tokens -= tokens_in(self.steps)
            self.steps -= 1

    def go_on(self, stop_on: Collection[str]) -> None:
        """Forget why the earlier start stopped, if that does not stop a resumed run.

        That is what came from outside, `max_seconds`, or a plateau that `stop_on` does not
        name.
        """
        if self.stop is not None and self.stop["kind"] not in stop_on:
            self.status = RunStatus.FINISHED
            self.stop = None


def summarize(
    name: str, config: Config, trainer: Trainer, outcome: Outcome, observers: Observers
) -> dict[str, Any]:
    """Return the content of summary.json.

    Losses are in nats per token or label, None where there is none.
    """
    model = trainer.model
    loss = outcome.final_val_loss
    stall = observers.stall
    weights = _quantized_weights(model, config)
    bytes_of_weights = None
    if outcome.held_bytes is not None:
        bytes_of_weights = bytes_with_state(weights, trainer.optimizer)
    return {
        "name": name,
        "rule": rule_name(config),
        "format": format_summary(config),
        "storage": config.model.storage,
        "seed": config.seed,
        "parameters": count(model.parameters()),
        "quantized_parameters": count(weights),
        "steps": outcome.steps,
        "steps_planned": config.train.max_steps,
        "status": str(outcome.status),
        "failure": outcome.failure,
        "stop": outcome.stop,
        "alerts": dict(observers.alerts.counts) if observers.alerts else {},
        "final_val_loss": loss,
        "final_val_loss_se": outcome.final_val_loss_se,
        "best_val_loss": outcome.best_val_loss,
        "first_val_loss": outcome.first_val_loss,
        "bytes_per_parameter": _ratio(outcome.held_bytes, count(model.parameters())),
        "held_bytes": outcome.held_bytes,
        "gradient_peak_bytes": outcome.gradient_peak_bytes,
        "bytes_per_quantized_parameter": _ratio(bytes_of_weights, count(weights)),
        "stall": stall.mean if stall else None,
        "stall_metric": stall.metric if stall else None,
        "arrived": stall.arrived if stall else None,
        "tokens_per_s": _ratio(outcome.tokens, outcome.training_seconds),
        "shadow_overhead": observers.shadow.overhead if observers.shadow else None,
        "seconds": outcome.seconds,
        "tokens": outcome.tokens,
        "lr": config.optimizer.lr,
        "bits_per_byte": None if loss is None else trainer.task.bits_per_byte(loss),
        **outcome.final_figures,
        **_bytes_of_processes(trainer),
    }


def _bytes_of_processes(trainer: Trainer) -> dict[str, Any]:
    """Return the bytes in each of several processes; empty for one.

    Every process has to call it.
    """
    ranks = trainer.ranks
    if ranks.size == 1:
        return {}
    bytes_by_rank = ranks.gathered(held_bytes(trainer.model, trainer.optimizer))
    peaks_by_rank = ranks.gathered(peak_bytes(trainer.device))
    return {
        "processes": {
            "parallel": trainer.config.train.parallel,
            "count": ranks.size,
            "held_bytes": [int(size) for size in bytes_by_rank],
            "peak_bytes": [int(size) for size in peaks_by_rank],
        }
    }


def _ratio(amount: float | None, whole: float) -> float | None:
    return amount / whole if amount is not None and whole else None


def _quantized_weights(model: nn.Module, config: Config) -> list[Tensor]:
    """Return the weights that are quantised, by this library or by another package."""
    if config.model.storage == Storage.FLOAT32:
        return []
    if config.model.storage != Storage.PEER:
        return [layer.weight for layer in quantized_layers(model).values()]
    layers = linear_layers(model).values()
    return [layer.weight for layer in layers if is_packaged(layer.weight)]


def count(parameters: Iterable[Tensor]) -> int:
    """Return the number of elements.

    A shared parameter counts once, as `Module.parameters` yields it.
    """
    return sum(parameter.numel() for parameter in parameters)
