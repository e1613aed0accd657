"""Resources of a run: peak memory, and the share of a GPU's arithmetic that is used."""

import re
import resource
import sys
from functools import partial

import torch
from torch import nn

from nanogpt_bench.config.metrics import SHARE, SPEED, VAL_LOSS, Metric
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.weights import linear_layers
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Observer, Step

_resources = partial(Metric, monitor="resources")
PEAK_BYTES = _resources(
    "memory/peak_bytes", "Peak memory", "bytes", "At validations: the GPU's, or the process's."
)
MFU = _resources(
    "mfu", "Model FLOPs utilisation", SHARE, "At validations, where the GPU's speed is known."
)

#: dense bfloat16 (V100, T4: float16) operations per second of GPUs, by a part of their
#: name, from NVIDIA's data sheets
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


class Resources(Observer):
    """Adds `memory/peak_bytes` to the records of validations, and `mfu`.

    `mfu` is added where the GPU's speed is known.
    """

    def __init__(self, watched: Watched) -> None:
        self._device = watched.device
        self._flops = flops_per_token(watched.model, watched.config)
        self._peak = _peak_flops(watched.device)
        if self._peak is not None and torch.distributed.is_initialized():
            # The speed is that of all processes, which have a GPU each.
            self._peak *= torch.distributed.get_world_size()
        if watched.device.type == "cuda":
            # A sweep trains run after run in a process.
            torch.cuda.reset_peak_memory_stats(watched.device)

    def complete_record(self, step: Step) -> None:
        if VAL_LOSS.name not in step.record:
            return
        step.record[PEAK_BYTES.name] = peak_bytes(self._device)
        speed = step.record.get(SPEED.name)
        if self._peak is not None and speed is not None:
            step.record[MFU.name] = speed * self._flops / self._peak


def flops_per_token(model: nn.Module, config: Config) -> float:
    """Return the multiplications and additions of training per token.

    They are 6 per weight, and those of attention's products.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    weights = sum(layer.weight.numel() for layer in linear_layers(model).values())
    settings = config.model
    layers = settings.n_layer or 0
    width = settings.n_embd or 0
    positions = settings.block_size or 0
    return 6.0 * weights + 12.0 * layers * width * positions


def _peak_flops(device: torch.device) -> float | None:
    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> float | None:
    """Return the peak of a GPU by its name; None where it is not known.

    >>> peak_of_name("NVIDIA L4"), peak_of_name("NVIDIA L40")
    (121000000000000.0, None)
    """
    for model, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{model}\b", name):
            return flops
    return None


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: the GPU's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


#: returns the monitor of a run
build = Resources
