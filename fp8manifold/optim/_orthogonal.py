"""The orthogonal factor of a matrix, by products alone, and the size that a step along it is given."""

import math
from typing import Final

import torch
from torch import Tensor

__all__ = [
    "ADJUSTMENTS",
    "COEFFICIENTS",
    "SHAPES",
    "adjusted_rate",
    "as_matrices",
    "orthogonal_factor",
    "product_dtype",
]

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic that takes singular values of 0 .. 1 to about 1 (Jordan et al. 2024)."""

ADJUSTMENTS: Final = ("original", "match_rms_adamw", "spectral_unclamped")
"""How a step's size follows from the shape of a matrix, as ``torch.optim.Muon`` spells it; None is ``original``."""

SHAPES: Final = ("auto", "flatten", "batch")
"""What a parameter of more than two dimensions is: nothing that can be known, one matrix, or one matrix an entry."""


def orthogonal_factor(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """``U V^T`` of ``U diag(s) V^T``, nearly: singular values end between about 0.7 and 1.2, those of 0 at 0.

    .. math:: X_0 = \\frac{M}{\\max(\\lVert M \\rVert_F, \\epsilon)}, \\qquad
              X_{i+1} = a X_i + \\left( b\\, X_i X_i^T + c\\, (X_i X_i^T)^2 \\right) X_i

    Args:
        matrices: one matrix, or a batch of them along the first dimension; not changed.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: lower bound of the norm: a matrix of zeros stays one.
        dtype: what the products are computed in.

    Returns:
        The factors, in ``dtype``.

    Source: Bernstein and Newhouse 2024; Jordan et al. 2024 (Muon) for the coefficients.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted_rate(lr: float, adjustment: str | None, rows: int, columns: int) -> float:
    """The learning rate that a matrix of ``rows`` x ``columns`` is stepped with.

    ``match_rms_adamw`` gives a step the root mean square that AdamW's has, so that AdamW's rate serves.

    Source: Liu et al. 2025 (Muon is Scalable for LLM Training); Bernstein 2025 (Deriving Muon).
    """
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjustment == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def as_matrices(x: Tensor, shape: str) -> Tensor:
    """A view of a tensor as one matrix or a batch of them: a kernel is one row a filter, experts are a batch."""
    return x if x.dim() == 2 or (x.dim() == 3 and shape == "batch") else x.flatten(1)


def product_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in where nobody says: bfloat16 where the device has it, float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "cpu":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.bfloat16
