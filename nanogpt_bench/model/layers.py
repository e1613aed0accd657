"""The layers that are watched, and the tensors that they hold as plain float32."""

from __future__ import annotations

import fp8manifold as fm  # before geoopt, whose first import warns of what it does to torch

# isort: split
import geoopt
import torch
from torch import Tensor, nn

from nanogpt_bench.model.weights import is_packaged


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return every linear layer by name, quantised or not; a head that shares the embedding's weight is one of them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def quantized_layers(model: nn.Module) -> dict[str, fm.QuantizedLinear]:
    """Return the layers whose weights are quantised, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, fm.QuantizedLinear)}
    return {name: layer for name, layer in layers.items() if layer.weight_format is not None}


def constrained_weights(model: nn.Module) -> dict[str, geoopt.ManifoldParameter]:
    """Return the parameters on geoopt's Stiefel manifold or sphere, by name."""
    kinds = (geoopt.Stiefel, geoopt.Sphere)
    return {name: p for name, p in model.named_parameters() if isinstance(getattr(p, "manifold", None), kinds)}


def is_rounded(layer: fm.QuantizedLinear) -> bool:
    """Whether the layer multiplies by values of its format: not so where only the format's geometry is used."""
    continuous = isinstance(layer.manifold, fm.StiffnessManifold) and not isinstance(layer.manifold, fm.FP8Manifold)
    return layer.weight_format is not None and not continuous


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values without its subclass, detached; a copy only where codes have to be decoded."""
    if isinstance(tensor, fm.FP8Tensor) or is_packaged(tensor):
        return tensor.detach().dequantize()
    return tensor.detach().as_subclass(Tensor)


@torch.no_grad()
def forward_weight(layer: nn.Linear) -> Tensor:
    """Return the weight that the forward pass multiplies by, in float32."""
    weight = layer.quantized_weight() if isinstance(layer, fm.QuantizedLinear) else layer.weight
    return plain(weight).float()
