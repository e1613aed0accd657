"""How widely attention looks."""

import math

import torch
from torch import Tensor

from fp8manifold._base.float_bits import working_dtype

__all__ = ["attention_entropy"]

_CHUNK = 1 << 22  # scores held at a time


@torch.no_grad()
def attention_entropy(query: Tensor, key: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
    """Mean entropy of the attention of each head, in nats.

    .. math:: H_h = -\\overline{\\sum_j p_{hij} \\ln p_{hij}}, \\qquad
              p_{hi} = \\mathrm{softmax}(\\mathrm{scale} \\; q_{hi} \\cdot k_h)

    Args:
        query: (B, H, T, C), what is given to ``scaled_dot_product_attention``.
        key: (B, H, U, C).
        causal: query ``i`` sees keys ``0`` to ``i`` only.
        scale: of the scores; None takes ``1 / sqrt(C)``.

    Returns:
        float32 tensor (H,), the mean over batch and queries, between 0 (one key has it all) and ln U.  A NaN or Inf in
        a head gives NaN there, -0 is 0; an empty batch gives 0.

    Raises:
        TypeError: not float tensors.
        ValueError: shapes that don't belong together.

    Example:
        >>> attention_entropy(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))  # 0 and ln 2
        tensor([0.3466])

    Source: Zhai et al. 2023 (arXiv 2303.06296), for its collapse as a sign of instability.
    """
    for name, x in (("query", query), ("key", key)):
        working_dtype(x, name)
    if query.dim() != 4 or key.dim() != 4 or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must be (B, H, T, C) and (B, H, U, C): got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    batch, heads, rows, width = query.shape
    factor = 1 / math.sqrt(max(width, 1)) if scale is None else scale
    total = torch.zeros(heads, device=query.device)
    size = max(_CHUNK // max(heads * rows * key.shape[2], 1), 1)
    for q, k in zip(query.detach().split(size), key.detach().split(size), strict=True):
        total += _entropy(_scores(q.float() * factor, k.float(), causal)).sum((0, 2))
    return total / max(batch * rows, 1)


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query @ key.transpose(2, 3)
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores


def _entropy(scores: Tensor) -> Tensor:
    """Of each row: -sum p ln p, where a hidden key adds nothing."""
    logarithms = scores.log_softmax(-1)
    return -(logarithms.exp() * logarithms.clamp(min=-1e4)).sum(-1)
