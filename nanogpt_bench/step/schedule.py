"""The course of the learning rate: a factor of the peak for every step."""

from __future__ import annotations

import math

from nanogpt_bench.config.schema import OptimizerConfig


def lr_factor(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of `step` (counted from 0) over the peak.

    The warm-up rises linearly over `warmup_steps` to 1; `cosine` then falls along half a cosine to `min_lr_ratio` at
    `max_steps`, `trapezoid` stays at 1 and falls linearly over the last `decay_share` of the steps, `constant` stays.

    >>> settings = OptimizerConfig(warmup_steps=1, min_lr_ratio=0.0)
    >>> [round(lr_factor(settings, step, 5), 3) for step in range(6)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    start = config.warmup_steps if config.schedule == "cosine" else round(max_steps * (1 - config.decay_share))
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * fall
