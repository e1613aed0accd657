"""The tensors that layers quantise, or might, each with the format and the scale it is measured at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import MonitorConfig
from nanogpt_bench.observers.capture import Capture

Own = Literal["activation", "activation_gradient", "weight_gradient"]
BLOCK = 32
#: what a layer calls them
_OWN: dict[str, Own] = {
    "activation": "activation",
    "gradient": "activation_gradient",
    "weight_gradient": "weight_gradient",
}


@dataclass(frozen=True)
class Operand:
    """One operand of one layer in one step: weight, activation, gradient, weight_gradient or residual."""

    kind: str
    layer: str
    values: Tensor
    #: None where it has none and is measured against none
    format: fm.FloatFormat | None = None
    scale: Tensor | float = 1.0
    #: whether the layer quantises it, or it is only measured
    quantized: bool = False


def flowing(layers: Mapping[str, nn.Linear], capture: Capture, monitor: MonitorConfig) -> Iterator[Operand]:
    """Yield what flows through the layers, before it is quantised.

    These are their inputs, the gradients at their outputs, those of their weights where they are quantised, and the
    blocks' outputs.
    """
    for name, layer in layers.items():
        if name in capture.inputs:
            yield _operand("activation", name, layer, capture.inputs[name], monitor.activation_format)
        if name in capture.gradients:
            yield _operand("gradient", name, layer, capture.gradients[name], monitor.gradient_format)
        if name in capture.weight_gradients:
            yield _operand("weight_gradient", name, layer, capture.weight_gradients[name], monitor.gradient_format)
    for name, output in capture.residuals.items():
        yield _measured("residual", name, _rows(output), monitor.activation_format)


def of_weight(name: str, layer: nn.Linear, values: Tensor) -> Operand:
    """Return a layer's weight, `values` being what is to be quantised: its master copy, or what a step asked for."""
    if isinstance(layer, fm.QuantizedLinear) and layer.weight_format is not None:
        return Operand("weight", name, values, layer.weight_format, layer.weight_scale().detach(), True)
    return Operand("weight", name, values)


def _operand(kind: str, name: str, layer: nn.Linear, values: Tensor, otherwise: str | None) -> Operand:
    own = _OWN[kind]
    spec = layer.spec.operand(own) if isinstance(layer, fm.QuantizedLinear) else None
    rows = _rows(values)
    if spec is None:
        return _measured(kind, name, rows, otherwise)
    scale = getattr(layer, f"{own}_scaler").value
    if spec.granularity == "block":
        scale = scale.reshape(len(rows), -1).repeat_interleave(BLOCK, -1)
    return Operand(kind, name, rows, spec.format, scale, True)


def _measured(kind: str, name: str, rows: Tensor, fmt: str | None) -> Operand:
    """A tensor that nothing quantises, at the scale that a format would be given for it."""
    if fmt is None:
        return Operand(kind, name, rows)
    return Operand(kind, name, rows, fm.FloatFormat.from_string(fmt), fm.amax_scale(rows, fmt))


def _rows(values: Tensor) -> Tensor:
    """(batch, time, features) as the rows that scales are measured for, in a dtype that is measured fast."""
    rows = values.reshape(-1, values.shape[-1])
    return rows.float() if rows.dtype.itemsize < 4 else rows
