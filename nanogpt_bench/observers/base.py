"""The points of a step at which observers are called, and what they see."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Step:
    """One step in progress. Observers read it and add their figures to `record`."""

    #: number of this step, from 1: the steps completed once it is over
    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: whether this is the last step planned
    last: bool = False
    #: the metrics of this step, written to metrics.jsonl after it
    record: dict[str, float | int | None] = field(default_factory=dict)


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
