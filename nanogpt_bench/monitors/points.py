"""The points of a step at which observers are called, and what they see."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Anomaly:
    """What was not finite in a step."""

    step: int
    #: loss, gradient, weight, state
    kinds: tuple[str, ...]
    #: where it was first seen, such as `activation of blocks.0.mlp.fc`
    where: str

    @property
    def lasting(self) -> bool:
        """Whether weights or optimizer state hold it, so that leaving the step out would not help."""
        return "weight" in self.kinds or "state" in self.kinds


@dataclass
class Step:
    """One step in progress. Observers read it and add their figures to `record`."""

    #: number of this step, from 1: the steps completed once it is over
    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: whether this is the last step planned
    last: bool = False
    #: micro-batches in the step, and the one at hand, from 0
    micro_steps: int = 1
    micro_step: int = 0
    #: the micro-batch at hand, int64 (batch, time) each; None before the first
    batch: tuple[Tensor, Tensor] | None = None
    #: what this micro-batch's gradient was multiplied by before that of the weights was quantised
    clip_factor: float = 1.0
    #: what was not finite in this step
    anomaly: Anomaly | None = None
    #: the metrics of this step, written to metrics.jsonl after it
    record: dict[str, float | int | None] = field(default_factory=dict)

    @property
    def at_last_micro_step(self) -> bool:
        """Whether the micro-batch at hand completes the gradient."""
        return self.micro_step == self.micro_steps - 1

    def due(self, interval: int) -> bool:
        """Whether something done every `interval` steps, and at the last, is to be done in this one."""
        return self.number % interval == 0 or self.last

    def add(
        self,
        metric: str,
        figures: Mapping[str, float | None],
        sizes: Mapping[str, int] | None = None,
        over: Callable[[Iterable[float]], float] | None = None,
        of_all: Mapping[str, float | None] | None = None,
    ) -> None:
        """Record a figure of every layer, and over all layers: `over` of them, or their mean, weighted by `sizes`.

        A layer whose figure is None or not finite is recorded as null and left out of the mean. Where this step looked
        at some layers only, `of_all` has the latest figure of each.
        """
        self.record.update({f"{metric}/{layer}": value for layer, value in figures.items()})
        every = figures if of_all is None else of_all
        known = {layer: value for layer, value in every.items() if value is not None and math.isfinite(value)}
        if not known:
            return
        if over is not None:
            self.record[metric] = over(known.values())
            return
        weights = {layer: sizes[layer] if sizes else 1 for layer in known}
        self.record[metric] = sum(known[layer] * weights[layer] for layer in known) / max(sum(weights.values()), 1)


class Observer:
    """Base of all observers: override the points you need. Weights must be left as they are."""

    def before_forward(self, step: Step) -> None:
        """Called before every micro-step's forward pass."""

    def after_forward(self, step: Step) -> None:
        """Called after every micro-step's forward pass."""

    def after_backward(self, step: Step) -> None:
        """Called after every micro-step's backward pass; gradients accumulate."""

    def before_step(self, step: Step) -> None:
        """Called once a step, gradients complete and clipped."""

    def after_step(self, step: Step) -> None:
        """Called once a step, weights updated, before the record is written."""

    def written(self, step: Step) -> None:
        """Called once a step with the finished record, validation included."""

    def close(self) -> None:
        """Called once, however the run ends."""

    def state(self) -> dict[str, Any]:
        """Return what later figures depend on: what `checkpoint.capture_tree` takes. Called between two steps."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was asked for, before any step; tensors in it are the observer's own from here on."""
