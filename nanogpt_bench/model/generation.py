"""What going on with a text takes: the keys and values of the tokens so far, and the choice of the next one."""

from __future__ import annotations

import torch
from torch import Tensor


class Cached:
    """Keys and values (B, H, T, C / H) of one block's attention."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of new tokens in and return those of all."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = key, value
        return key, value


class KeyValueCache:
    """The keys and values of every block, for tokens that come one at a time."""

    def __init__(self, n_layer: int) -> None:
        self.blocks = [Cached() for _ in range(n_layer)]

    @property
    def length(self) -> int:
        """How many tokens have passed."""
        key = self.blocks[0].key
        return 0 if key is None else key.shape[2]


def sample(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Return a token (B,) int64 for every row of logits (B, V) float32, drawn from softmax(logits / temperature).

    Of the `top_k` largest alone where it is given; the largest at temperature 0. The draw is made on the CPU, so that a
    seed means the same tokens everywhere.

    Raises:
        FloatingPointError: logits that are not finite.

    >>> sample(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0)
    tensor([1])
    """
    if not torch.isfinite(logits).all():
        raise FloatingPointError("the logits are not finite")
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    scaled = (logits - logits.max(-1, keepdim=True).values).cpu().double() / temperature
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0].to(logits.device)
