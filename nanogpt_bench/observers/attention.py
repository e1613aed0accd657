"""Attention entropy: how widely each head looks, on a validation batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm
from nanogpt_bench.config.metrics import ENTROPY, ENTROPY_MIN
from nanogpt_bench.config.schema import Config
from nanogpt_bench.model.gpt import Attention
from nanogpt_bench.observers.figures import ALL, Figures, Turns
from nanogpt_bench.training.points import Observer, Step
from nanogpt_bench.training.trainer import Trainer


def build(config: Config, trainer: Trainer, turns: Turns) -> Observer:
    """Return the monitor of a run."""
    monitor = config.monitor
    return AttentionEntropy(lambda: trainer.look(monitor.turns), monitor.interval, turns)


class AttentionEntropy(Observer):
    """Records `attention/entropy/BLOCK/HEAD` in nats every `interval` steps, with their mean and the smallest.

    `forward` runs the model on one validation batch, in evaluation mode, as far as the last block whose turn it is.
    Whatever that leaves in the model's buffers, scales among them, is put back.
    """

    def __init__(self, forward: Callable[[], object], interval: int, turns: Turns = ALL) -> None:
        self._forward, self._interval, self._turns = forward, interval, turns
        self._figures = Figures(turns, interval)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        if not step.due(self._interval):
            return
        found: dict[str, Tensor] = {}
        blocks = [(name, module) for name, module in step.model.named_modules() if isinstance(module, Attention)]
        looked_at = [
            (str(index), module)
            for index, (name, module) in enumerate(blocks)
            if self._turns.takes(step, self._interval, name.rpartition(".")[0])
        ]
        handles = [
            module.qkv.register_forward_hook(_measure(found, block, module.n_head, last=block == looked_at[-1][0]))
            for block, module in looked_at
        ]
        try:
            with buffers_kept(step.model), suppress(_SeenAll):
                if handles:
                    self._forward()
        finally:
            for handle in handles:
                handle.remove()
        self._write(step, found)

    def _write(self, step: Step, found: dict[str, Tensor]) -> None:
        for block, entropies in found.items():
            for head, entropy in enumerate(entropies.tolist()):
                self._figures.add(ENTROPY, f"{block}/{head}", float(entropy), 1)
        self._figures.write(step)
        if latest := self._figures.latest(ENTROPY):
            step.record[ENTROPY_MIN.name] = min(latest)

    def state(self) -> dict[str, Any]:
        return self._figures.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._figures.load_state(state)


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
