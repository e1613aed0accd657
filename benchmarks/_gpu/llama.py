"""Llama and Qwen2.5 in PyTorch alone, for machines without transformers."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["LLAMA_SHAPES", "Llama", "LlamaBlock", "LlamaShape"]


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    base: float = 10_000.0
    #: of queries, keys and values
    biases: bool = False


LLAMA_SHAPES: Final = {
    "Llama-3.1-8B": LlamaShape(4096, 14_336, 32, 32, 8, 128_256, 500_000.0),
    "Llama-2-7B": LlamaShape(4096, 11_008, 32, 32, 32, 32_000),
    "Qwen2.5-14B": LlamaShape(5120, 13_824, 48, 40, 8, 152_064, 1_000_000.0, biases=True),
    "tiny": LlamaShape(64, 128, 2, 4, 2, 512),
}


class LlamaBlock(nn.Module):
    """Attention and a gated layer, each after a norm and added: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.heads
        self.head, self.base = head, shape.base
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=shape.biases)
        self.o = nn.Linear(width, width, bias=False)
        self.k, self.v = (
            nn.Linear(width, shape.kv_heads * head, bias=shape.biases) for _ in range(2)
        )
        self.gate, self.up = (nn.Linear(width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q = rotated(self._heads(self.q(normed)), self.base)
        k = rotated(self._heads(self.k(normed)), self.base)
        v = self._heads(self.v(normed))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, x: Tensor) -> Tensor:
        """Split the channels of all heads: (B, T, C) -> (B, heads, T, head)."""
        return x.unflatten(2, (-1, self.head)).transpose(1, 2)


def rotated(x: Tensor, base: float) -> Tensor:
    """Turn each pair of values (i, i + half) of a head by its position.

    The angle is the position times ``base^(-i / half)``.
    """
    half = x.shape[-1] // 2
    turns = base ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * turns
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Llama(nn.Module):
    """Tokens and the next ones (B, T) int64 -> the mean cross-entropy.

    It is computed in chunks, so that all logits never exist at once.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, chunk: int = 256) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        hidden = self.norm(x).flatten(0, 1).split(chunk)
        chunks = zip(hidden, targets.flatten().split(chunk), strict=True)
        sums = [checkpoint(self._loss_sum, h, t, use_reentrant=False) for h, t in chunks]
        return torch.stack(sums).sum() / targets.numel()

    def _loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.lm_head(hidden).float(), targets, reduction="sum")
