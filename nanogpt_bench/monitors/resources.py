"""What a run uses of its machine: memory."""

from __future__ import annotations

import resource
import sys

import torch

from nanogpt_bench.config.metrics import VAL_LOSS, Metric
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Observer, Step

PEAK_BYTES = Metric(
    "memory/peak_bytes", "Peak memory", "bytes", "At validations: the GPU's, or the process's.", monitor="resources"
)


class Resources(Observer):
    """Adds `memory/peak_bytes` to the records of validations."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def written(self, step: Step) -> None:
        if VAL_LOSS.name in step.record:
            step.record[PEAK_BYTES.name] = peak_bytes(self._device)


def peak_bytes(device: torch.device) -> int:
    """Return the most memory so far: the GPU's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def build(watched: Watched) -> Resources:
    """Return the monitor of a run."""
    return Resources(watched.device)
