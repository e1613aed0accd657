"""What the monitors of a run are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import fp8manifold as fm
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.gpt import Block
from nanogpt_bench.model.layers import linear_layers, quantized_layers
from nanogpt_bench.monitors.capture import Capture
from nanogpt_bench.monitors.figures import Turns


@dataclass(frozen=True)
class Watched:
    """A resolved configuration with its model; the function `build` of every monitor takes it."""

    config: Config
    model: nn.Module
    device: torch.device
    #: runs the model on one validation batch, or one in so many of its sequences
    look: Callable[[int], object]
    layers: Mapping[str, nn.Linear]
    quantized: Mapping[str, fm.QuantizedLinear]
    turns: Turns
    capture: Capture

    @classmethod
    def of(
        cls, config: Config, model: nn.Module, device: torch.device, look: Callable[[int], object] = lambda one_in: None
    ) -> Watched:
        """Return what is watched of a model."""
        layers, monitor = linear_layers(model), config.monitor
        blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
        turns = Turns(monitor.turns, [layers, blocks], monitor.interval)
        return cls(config, model, device, look, layers, quantized_layers(model), turns, Capture(turns))
