"""A GPT-2-style model that predicts the next token, or a document's labels.

Pre-norm transformer blocks, learned positions, causal attention through
`scaled_dot_product_attention`, GELU. Shapes and initial values follow GPT-2 as nanoGPT
trains it. The model has no code for quantisation: its linear layers (`attn.qkv`,
`attn.proj`, `mlp.fc`, `mlp.proj`, `lm_head`) are replaced after construction.

Shapes: B batch, T time (<= block_size), C width (n_embd), H heads, V vocabulary, L
labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

#: a function from keys and values of new tokens to those of all tokens
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
#: fills a batch behind the end of a shorter document; no token has this number
PADDING = -1
#: standard deviation of GPT-2's initial weights
INIT_STD = 0.02


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT; parameters: about 12 n_layer n_embd^2 plus the embeddings."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int = 257
    dropout: float = 0.0
    bias: bool = False
    tie_weights: bool = False
    #: exact: x Phi(x); tanh: the approximation that GPT-2 was trained with
    gelu: str = "exact"
    #: number of labels; 0 for a language model
    labels: int = 0
    #: standard deviation of initial weights; of projections onto the residual stream, which
    #: are added up 2 n_layer times, times sqrt(2 n_layer)
    init_std: float = INIT_STD


#: named sizes; the name counts parameters with a byte vocabulary. 124M is GPT-2 itself,
#: with its 50257 tokens
GPT_SIZES: dict[str, GPTShape] = {
    "0.8M": GPTShape(n_layer=4, n_head=4, n_embd=128, block_size=64),
    "10M": GPTShape(n_layer=6, n_head=6, n_embd=384, block_size=256),
    "50M": GPTShape(n_layer=16, n_head=8, n_embd=512, block_size=1024),
    "124M": GPTShape(
        n_layer=12,
        n_head=12,
        n_embd=768,
        block_size=1024,
        vocab_size=50257,
        bias=True,
        tie_weights=True,
        gelu="tanh",
    ),
}


#: modules that stay float, with their kinds; block 0 stands for all blocks
FLOATS = {
    "token_embedding": "Embedding",
    "position_embedding": "Embedding",
    "dropout": "Dropout",
    "blocks.0.norm1": "LayerNorm",
    "blocks.0.norm2": "LayerNorm",
    "final_norm": "LayerNorm",
}


def linear_sizes(n_layer: int, n_embd: int, vocab_size: int = 0) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of a GPT's linear layers by name, in their order."""
    sizes: dict[str, tuple[int, int]] = {}
    for index in range(n_layer):
        block = f"blocks.{index}"
        sizes[f"{block}.attn.qkv"] = (n_embd, 3 * n_embd)
        sizes[f"{block}.attn.proj"] = (n_embd, n_embd)
        sizes[f"{block}.mlp.fc"] = (n_embd, 4 * n_embd)
        sizes[f"{block}.mlp.proj"] = (4 * n_embd, n_embd)
    sizes["lm_head"] = (n_embd, vocab_size)
    return sizes


class Attention(nn.Module):
    """Causal multi-head self-attention: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.n_head = shape.n_head
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor, extend: Extend | None = None) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_head, width // self.n_head)
        # (B, H, T, C / H) each
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if extend is not None:
            key, value = extend(key, value)
        # New tokens come all at first, then one at a time: that one attends to all.
        causal = extend is None or time == key.shape[2]
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, dropout_p=self.dropout if self.training else 0.0
        )
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them: (B, T, C) -> (B, T, C)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.fc = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.proj = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.approximate = "tanh" if shape.gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(functional.gelu(self.fc(x), approximate=self.approximate))


class Block(nn.Module):
    """One transformer block: x + attn(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attn = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, extend: Extend | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), extend))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, V).

    >>> model = GPT(GPTShape(1, 2, 8, 16, vocab_size=11))
    >>> model(torch.zeros(3, 5, dtype=torch.long)).shape
    torch.Size([3, 5, 11])
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.position_embedding = nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.final_norm = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.lm_head = nn.Linear(shape.n_embd, shape.labels or shape.vocab_size, bias=False)
        if shape.tie_weights:
            self.lm_head.weight = self.token_embedding.weight
        self._init_weights()

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        return self.lm_head(self.hidden(tokens, cache))

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the input of the head for every token (B, T, C)."""
        begin = 0 if cache is None else cache.length
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for index, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, partial(cache.extend, index))
        return self.final_norm(x)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of predicting `targets` from `tokens`.

        Both are (B, T).
        """
        return functional.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield `count` tokens (B,) int64, one after another, that continue `tokens`.

        `tokens` are (B, T >= 1). p(next) = softmax(logits / temperature) over the
        `top_k` largest logits; temperature 0 takes the largest. A token attends to the
        last `block_size` before it: up to that length keys and values are cached, and
        beyond it every token takes a whole pass. Layers that scale activations by their
        input see a single token here.

        Raises:
            FloatingPointError: logits that are not finite.
        """
        was_training = self.training
        self.eval()
        cache = KeyValueCache(self.shape.n_layer)
        try:
            new_tokens = tokens[:, -self.shape.block_size :]
            for _ in range(count):
                logits = self(new_tokens, cache)[:, -1].float()
                chosen = sample(logits, temperature=temperature, top_k=top_k, generator=generator)
                yield chosen
                new_tokens = chosen[:, None]
                tokens = torch.cat([tokens, new_tokens], 1)
                if cache.length == self.shape.block_size:
                    # No positions are left: the window moves, from position 0.
                    new_tokens = tokens[:, -self.shape.block_size :]
                    cache = KeyValueCache(self.shape.n_layer)
        finally:
            self.train(was_training)

    def _init_weights(self) -> None:
        # The residual stream sums 2 n_layer projections: scaled down so that the
        # variance of the sum is 1 (GPT-2).
        init_std = self.shape.init_std
        residual_std = init_std / math.sqrt(2 * self.shape.n_layer)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith(".proj") else init_std
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class Classifier(GPT):
    """Documents (B, T) int64 -> logits (B, L) of their labels.

    `PADDING` stands behind the shorter documents. The body is that of a language model.
    Its head, still called `lm_head` so that patterns of layers mean the same, gets the
    mean vector of each document. With causal attention no token attends to the padding
    behind it.

    >>> classifier = Classifier(GPTShape(1, 2, 8, 16, vocab_size=11, labels=4))
    >>> classifier(torch.tensor([[1, 2, -1]])).shape
    torch.Size([1, 4])
    """

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if cache is not None:
            raise TypeError("a classifier can't write text, so it takes no cache")
        in_document = tokens != PADDING
        x = self.hidden(tokens.clamp(min=0))
        sums = (x * in_document.unsqueeze(2)).sum(1)
        return self.lm_head(sums / in_document.sum(1, keepdim=True))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross-entropy, in nats per label.

        It is that of `targets` (B, L), 0 or 1, for `tokens` (B, T).
        """
        return functional.binary_cross_entropy_with_logits(self(tokens).float(), targets)


def build_model(shape: GPTShape, seed: int) -> GPT:
    """Return a GPT, or a classifier, whose initial weights depend on `seed` only.

    torch's generator stays as it was.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Classifier(shape) if shape.labels else GPT(shape)


class KeyValueCache:
    """The keys and values (B, H, T, C / H) of every block's attention.

    It is for tokens that come one at a time.
    """

    def __init__(self, n_layer: int) -> None:
        self._blocks: list[tuple[Tensor, Tensor] | None] = [None] * n_layer

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of new tokens to a block's; return those of all."""
        cached = self._blocks[block]
        if cached is not None:
            cached_key, cached_value = cached
            key = torch.cat([cached_key, key], 2)
            value = torch.cat([cached_value, value], 2)
        self._blocks[block] = (key, value)
        return key, value

    @property
    def length(self) -> int:
        """The number of cached tokens."""
        cached = self._blocks[0]
        if cached is None:
            return 0
        key, _ = cached
        return key.shape[2]


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a token (B,) int64 for every row of logits (B, V) float32.

    It is drawn from softmax(logits / temperature). With `top_k` only the largest so
    many are drawn from; temperature 0 takes the largest. The draw is made on the CPU,
    so that a seed gives the same tokens on every device.

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
