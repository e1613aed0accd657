"""Attention entropy: how widely each head spreads its attention."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanogpt_bench.config.metrics import BELOW, LINEAR, MEAN, NATS, Metric
from nanogpt_bench.model.gpt import Attention
from nanogpt_bench.monitors.capture import Watched
from nanogpt_bench.monitors.points import Monitor, Step

_attention = partial(Metric, monitor="attention", bad=BELOW, chart=LINEAR)
ENTROPY = _attention(
    "attention/entropy",
    "Attention entropy",
    NATS,
    "Mean over heads, on a validation batch.",
    over=MEAN,
)
ENTROPY_MIN = _attention(
    "attention/entropy_min", "Lowest attention entropy", NATS, "Entropy of the most collapsed head."
)
#: the most attention scores in memory at a time
_CHUNK = 1 << 22


@torch.no_grad()
def attention_entropy(query: Tensor, key: Tensor) -> Tensor:
    """Return the mean entropy of causal attention of each head, in nats.

    The result is float32 (H,). Query and key are (B, H, T, C). An entropy is between 0
    (one key gets all attention) and ln T. NaN or Inf in a head makes its entropy NaN.
    An empty batch has entropy 0.

    >>> query = key = torch.zeros(1, 1, 2, 4)
    >>> attention_entropy(query, key)  # the mean of 0 and ln 2
    tensor([0.3466])

    Source: Zhai et al. 2023 (arXiv 2303.06296), for collapsed entropy as a sign of
    instability.
    """
    batch, heads, rows, width = query.shape
    factor = 1 / math.sqrt(max(width, 1))
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    total = torch.zeros(heads, device=query.device)
    size = max(_CHUNK // max(heads * rows * rows, 1), 1)
    for q, k in zip(query.detach().split(size), key.detach().split(size), strict=True):
        scores = (q.float() * factor) @ k.float().transpose(2, 3)
        logarithms = scores.masked_fill_(future, -math.inf).log_softmax(-1)
        # The logarithm of a future key is -Inf: clamped, 0 times it is 0 and not NaN.
        terms = logarithms.exp() * logarithms.clamp(min=-1e4)
        total += -terms.sum(-1).sum((0, 2))
    return total / max(batch * rows, 1)


class AttentionEntropy(Monitor):
    """Records `attention/entropy/BLOCK/HEAD` in nats, their mean and the smallest.

    The model runs on one validation batch in evaluation mode. The pass ends after the
    last block whose turn it is. The model's buffers, scales among them, are restored
    afterwards.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._look = watched.look

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        if not self.is_measured(step):
            return
        attentions = self._attentions_in_turn(step)
        for block, entropies in self._measure(step.model, attentions).items():
            for head, entropy in enumerate(entropies.tolist()):
                self._figures.add(ENTROPY, f"{block}/{head}", float(entropy), 1)
        self._figures.write(step)
        latest = self._figures.latest(ENTROPY)
        if latest:
            step.record[ENTROPY_MIN.name] = min(latest)

    def _attentions_in_turn(self, step: Step) -> dict[str, Attention]:
        """Return the attention layers that this step measures, by their block."""
        layers = [
            (name, module)
            for name, module in step.model.named_modules()
            if isinstance(module, Attention)
        ]
        attentions: dict[str, Attention] = {}
        for block, (name, module) in enumerate(layers):
            # Turns have a block by its name in the model, the record by its number.
            block_name = name.rpartition(".")[0]
            if self.takes(step, block_name):
                attentions[str(block)] = module
        return attentions

    def _measure(self, model: nn.Module, attentions: dict[str, Attention]) -> dict[str, Tensor]:
        """Run the model on a validation batch; return the entropies (H,) by block."""
        entropies: dict[str, Tensor] = {}
        if not attentions:
            return entropies
        last_block = list(attentions)[-1]
        handles = []
        for block, module in attentions.items():
            hook = _entropy_hook(entropies, block, module.n_head, last=block == last_block)
            handles.append(module.qkv.register_forward_hook(hook))
        try:
            with restored_buffers(model), suppress(_LastBlockMeasured):
                # on one sequence in so many, as on one layer in so many
                self._look(self._turns.count)
        finally:
            for handle in handles:
                handle.remove()
        return entropies

    def complete_record(self, step: Step) -> None:
        """Do nothing.

        The figures were written after the step, and a skipped step has none.
        """


class _LastBlockMeasured(Exception):
    """Ends a forward pass once the last block to be measured has run; no error."""


def _entropy_hook(
    entropies: dict[str, Tensor], block: str, heads: int, *, last: bool
) -> Callable[..., None]:
    """Return a forward hook of a layer `qkv` that stores its heads' entropies (H,)."""

    def measure(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        batch, time, width = output.shape
        parts = output.view(batch, time, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
        query, key = parts[0], parts[1]
        with torch.autocast(output.device.type, enabled=False):
            entropies[block] = attention_entropy(query, key)
        if last:
            raise _LastBlockMeasured

    return measure


class _SavedBuffer(NamedTuple):
    """A buffer of a module, and a copy of its values."""

    module: nn.Module
    name: str
    tensor: Tensor
    values: Tensor


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore every buffer at the end, the tensor itself and its values."""
    buffers: list[_SavedBuffer] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append(_SavedBuffer(module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        for saved in buffers:
            saved.module._buffers[saved.name] = saved.tensor.copy_(saved.values)


#: returns the monitor of a run
build = AttentionEntropy
