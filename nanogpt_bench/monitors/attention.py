"""Attention entropy: how widely each head spreads its attention, on a validation batch."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

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
    "attention/entropy_min", "Lowest attention entropy", NATS, "The most collapsed head."
)
#: the most attention scores in memory at a time
_CHUNK = 1 << 22


@torch.no_grad()
def attention_entropy(query: Tensor, key: Tensor) -> Tensor:
    """Return the mean entropy of causal attention of each head, in nats: float32 (H,),
    from (B, H, T, C) each.

    It is between 0 (one key gets all attention) and ln T. NaN or Inf in a head gives
    NaN for it; an empty batch 0.

    >>> attention_entropy(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))  # 0 and ln 2
    tensor([0.3466])

    Source: Zhai et al. 2023 (arXiv 2303.06296), for collapsed entropy as a sign of
    instability.
    """
    batch, heads, rows, width = query.shape
    factor, hidden = (
        1 / math.sqrt(max(width, 1)),
        torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1),
    )
    total = torch.zeros(heads, device=query.device)
    size = max(_CHUNK // max(heads * rows * rows, 1), 1)
    for q, k in zip(query.detach().split(size), key.detach().split(size), strict=True):
        scores = (q.float() * factor) @ k.float().transpose(2, 3)
        logarithms = scores.masked_fill_(hidden, -math.inf).log_softmax(-1)
        total += (
            -(logarithms.exp() * logarithms.clamp(min=-1e4)).sum(-1).sum((0, 2))
        )  # a hidden key adds nothing
    return total / max(batch * rows, 1)


class AttentionEntropy(Monitor):
    """Records `attention/entropy/BLOCK/HEAD` in nats, with their mean and the smallest.

    The model runs on one validation batch, in evaluation mode, as far as the last block
    whose turn it is. Its buffers, scales among them, are restored afterwards.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched.turns)
        self._look = watched.look

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        if not self.looks(step):
            return
        found: dict[str, Tensor] = {}
        blocks = [
            (name, module)
            for name, module in step.model.named_modules()
            if isinstance(module, Attention)
        ]
        looked_at = [
            (str(index), module)
            for index, (name, module) in enumerate(blocks)
            if self.takes(step, name.rpartition(".")[0])
        ]
        handles = [
            module.qkv.register_forward_hook(
                _measure(found, block, module.n_head, last=block == looked_at[-1][0])
            )
            for block, module in looked_at
        ]
        try:
            with buffers_kept(step.model), suppress(_SeenAll):
                if handles:
                    self._look(self._turns.count)
        finally:
            for handle in handles:
                handle.remove()
        for block, entropies in found.items():
            for head, entropy in enumerate(entropies.tolist()):
                self._figures.add(ENTROPY, f"{block}/{head}", float(entropy), 1)
        self._figures.write(step)
        if latest := self._figures.latest(ENTROPY):
            step.record[ENTROPY_MIN.name] = min(latest)

    def written(self, step: Step) -> None:
        """Do nothing: the figures were written after the step, and a skipped step has
        none.
        """


class _SeenAll(Exception):  # not an error
    """Ends a forward pass once the last block to be measured has run."""


def _measure(
    found: dict[str, Tensor], block: str, heads: int, *, last: bool
) -> Callable[..., None]:
    def measure(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        batch, time, width = output.shape
        parts = output.view(batch, time, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
        with torch.autocast(output.device.type, enabled=False):
            found[block] = attention_entropy(parts[0], parts[1])
        if last:
            raise _SeenAll

    return measure


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore every buffer: the tensor itself, since a pass may replace it, and its
    values.
    """
    saved = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, content in saved:
            module._buffers[name] = buffer.copy_(content)


#: returns the monitor of a run
build = AttentionEntropy
