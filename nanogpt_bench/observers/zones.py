"""Zero-gradient zones: weights whose layer answers the same whichever way they move by half an ULP."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import fp8manifold as fm
from nanogpt_bench.config.metrics import ZERO_GRADIENT_ZONE
from nanogpt_bench.observers.capture import Capture
from nanogpt_bench.observers.figures import Monitor
from nanogpt_bench.observers.turns import ALL, Turns
from nanogpt_bench.step.layers import forward_weight, is_rounded
from nanogpt_bench.step.points import Step

#: tokens whose outputs are compared: the time grows with them
ROWS = 16


class Zones(Monitor):
    """Records `stall/zero_gradient_zone` every `interval` steps, on some tokens spread over the batch."""

    def __init__(
        self, layers: Mapping[str, fm.QuantizedLinear], capture: Capture, interval: int, turns: Turns = ALL
    ) -> None:
        super().__init__(interval, turns)
        self._layers, self._capture = layers, capture

    @torch.no_grad()
    def after_backward(self, step: Step) -> None:
        if not step.due(self.interval) or not step.at_last_micro_step:
            return
        for name, layer in self._layers.items():
            inputs, fmt = self._capture.inputs.get(name), layer.weight_format
            if inputs is None or fmt is None or not is_rounded(layer):
                continue
            rows = layer.quantized_input(inputs).reshape(-1, inputs.shape[-1])
            some = rows[:: max(1, len(rows) // ROWS)][:ROWS].float()
            share = fm.monitor.zero_gradient_zone(
                forward_weight(layer),
                some,
                fmt,
                layer.weight_scale().detach(),
                output=self._capture.output_dtypes[name],
                bias=layer.bias,
            )
            self._figures.add(ZERO_GRADIENT_ZONE, name, share, layer.weight.numel())
