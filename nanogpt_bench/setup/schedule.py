"""Schedules by name: the learning rate as a factor of its peak, and an option from its first value to its last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanogpt_bench.config.schema import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of `step` (counted from 0) over the peak.

    The warm-up rises linearly over `warmup_steps` to 1. Then `cosine` falls along half a cosine, and `linear` along a
    line, to `min_lr_ratio` at `max_steps`; `trapezoid` stays at 1 and falls linearly over the last `decay_share` of the
    steps; `step` stays at 1 and is `min_lr_ratio` once the share `step_at` of the steps is over; `constant` stays.

    >>> settings = OptimizerConfig(warmup_steps=1, min_lr_ratio=0.0)
    >>> [round(lr_factor(settings, step, 5), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return _fallen("step", step / max_steps, config)
    start = round(max_steps * (1 - config.decay_share)) if config.schedule == "trapezoid" else config.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    return _fallen("cosine" if config.schedule == "cosine" else "linear", progress, config)


def _fallen(course: str, progress: float, config: OptimizerConfig) -> float:
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left(course, progress, config.step_at)


def left(course: str, progress: float, step_at: float) -> float:
    """Return what is left of the way from the first value to the last, 1 to 0, at a progress of 0 to 1.

    >>> [left(course, 0.25, step_at=0.25) for course in ("linear", "step")], round(left("cosine", 0.25, 0.5), 3)
    ([0.75, 0.0], 0.854)
    """
    if course == "step":
        return float(progress < step_at)
    return 0.5 * (1 + math.cos(math.pi * progress)) if course == "cosine" else 1 - progress


@dataclass(frozen=True)
class Course:
    """A value by the number of steps taken: from `start` at none to `end` at `steps` and after.

    >>> [Course("step", 1.0, 0.0, steps=4, step_at=0.5)(step) for step in range(5)]
    [1.0, 1.0, 0.0, 0.0, 0.0]
    """

    name: str
    start: float
    end: float
    steps: int
    step_at: float

    def __call__(self, step: int) -> float:
        return self.end + (self.start - self.end) * left(self.name, min(step / self.steps, 1.0), self.step_at)


def decay_course(config: OptimizerConfig, max_steps: int) -> Course | None:
    """Return the course of weight decay, None where it stays as it is."""
    if config.weight_decay_end is None:
        return None
    name = config.weight_decay_schedule or "linear"
    return Course(name, config.weight_decay or 0.0, config.weight_decay_end, max_steps, config.step_at)
