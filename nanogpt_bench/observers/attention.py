"""Attention entropy: how widely each head looks, on a validation batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.model import Attention
from nanogpt_bench.observers.base import Observer, Step


class AttentionEntropy(Observer):
    """Records `attention/entropy/BLOCK/HEAD` in nats every `interval` steps, with their mean and the smallest.

    `forward` runs the model on one validation batch, in evaluation mode. Whatever that leaves in the model's buffers,
    scales among them, is put back.
    """

    def __init__(self, forward: Callable[[], object], interval: int) -> None:
        self._forward, self._interval = forward, interval

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        found: dict[str, Tensor] = {}
        blocks = [module for module in step.model.modules() if isinstance(module, Attention)]
        handles = [
            module.qkv.register_forward_hook(_measure(found, str(index), module.n_head, last=module is blocks[-1]))
            for index, module in enumerate(blocks)
        ]
        try:
            with buffers_kept(step.model), suppress(_SeenAll):
                self._forward()
        finally:
            for handle in handles:
                handle.remove()
        _write(step, found)


class _SeenAll(Exception):  # no error: nothing that comes later in the forward pass is looked at
    """Ends a forward pass whose rest would be thrown away."""


def _measure(found: dict[str, Tensor], block: str, heads: int, *, last: bool) -> Callable[..., None]:
    def measure(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        batch, time, width = output.shape
        parts = output.view(batch, time, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
        with torch.autocast(output.device.type, enabled=False):
            found[block] = fm.monitor.attention_entropy(parts[0], parts[1])
        if last:
            raise _SeenAll

    return measure


def _write(step: Step, found: dict[str, Tensor]) -> None:
    figures = {
        f"{block}/{head}": float(entropy)
        for block, entropies in found.items()
        for head, entropy in enumerate(entropies.tolist())
    }
    step.add("attention/entropy", figures)
    if figures:
        step.record["attention/entropy_min"] = min(figures.values())


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put every buffer back as it was: its tensor, for some are replaced, and what the tensor held."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, content in kept:
            module._buffers[name] = buffer.copy_(content)
