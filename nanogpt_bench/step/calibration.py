"""Scales of rounded weights, chosen by what a layer is given: of a few powers of two, that of the least error."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model.causal import is_linear

#: powers of two that a scale is multiplied by; the headroom that weights are trained with is 16 at most
SHIFTS = (0, -1, -2, -3, -4, -5, -6, 1)


@torch.no_grad()
def mean_squares(model: nn.Module, windows: Tensor, batch: int) -> dict[str, Tensor]:
    """Return the mean square of every input of each linear layer, (in,), by the layer's name, over windows of text."""
    sums: dict[str, Tensor] = {}

    def add(_: nn.Module, inputs: tuple[Any, ...], *, name: str) -> None:
        rows = inputs[0].detach().flatten(0, -2).double()
        sums[name] = sums.get(name, torch.zeros(())) + rows.square().sum(0).cpu()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if is_linear(module):
                hook = module.register_forward_pre_hook(partial(add, name=name))
                stack.callback(hook.remove)
        for rows in windows.split(batch):
            model.eval()(rows[:, :-1])
    count = windows.shape[0] * (windows.shape[1] - 1)
    return {name: (total / count).float() for name, total in sums.items()}


@torch.no_grad()
def calibrate(model: nn.Module, before: Mapping[str, nn.Module], energies: Mapping[str, Tensor]) -> None:
    """Give the one-byte weights of a model the scales of the least expected error of their layers' outputs.

    .. math:: \\min_k \\sum_j (w_{ij} - Q_{2^k s}(w_{ij}))^2 \\, E[x_j^2]

    over each group of weights that share a scale: as if the inputs were independent of each other and of mean 0.

    Args:
        model: with `fm.QuantizedLinear` layers whose weights are stored in codes, scaled by their largest.
        before: the float layers that they were made from, by name.
        energies: what `mean_squares` gave.

    Source: the diagonal of the second moments of the inputs is what llama.cpp calls an importance matrix.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, fm.QuantizedLinear) and isinstance(layer.weight, fm.FP8Tensor) and name in energies:
            energy = energies[name].to(layer.weight.device)
            layer.weight = _least(layer.weight, _values(before[name]), energy)


def _values(layer: Any) -> Tensor:
    """The float weight, (out, in)."""
    weight: Tensor = layer.weight.detach()
    return weight if isinstance(layer, nn.Linear) else weight.mT.contiguous()


def _least(weight: Any, values: Tensor, energy: Tensor) -> fm.FP8Parameter:
    """The parameter with, for each scale, the power of two of the least error."""
    scale, granularity = weight.scale, _granularity(weight)
    best = torch.full_like(scale, torch.inf)
    chosen = scale.clone()
    for shift in SHIFTS:
        tried = scale * 2.0**shift
        codes = fm.FP8Tensor(values, weight.format, granularity=granularity, scale=tried, seed=0)
        error = _summed((codes.dequantize() - values).square() * energy, weight)
        chosen = torch.where(error < best, tried, chosen)
        best = torch.minimum(error, best)
    options = {"granularity": granularity, "scale": chosen, "rounding": weight.rounding, "seed": weight.seed}
    return fm.FP8Parameter(values, weight.format, **options)


def _granularity(weight: Any) -> Literal["tensor", "channel", "block"]:
    if weight.block_size is not None:
        return "block"
    return "channel" if weight.scale.dim() else "tensor"


def _summed(errors: Tensor, weight: Any) -> Tensor:
    """The sum over each group that shares a scale, in the scale's shape."""
    if weight.block_size is not None:
        return errors.unflatten(-1, (-1, weight.block_size)).sum(-1)
    return errors.sum(-1, keepdim=True) if weight.scale.dim() else errors.sum()
