"""How a tensor uses the codes of a format."""

import torch
from torch import Tensor

from fp8manifold.formats import FormatLike, as_format
from fp8manifold.grid import encode

__all__ = ["code_histogram"]


def code_histogram(x: Tensor, fmt: FormatLike, scale: Tensor | float = 1.0) -> Tensor:
    """How many elements have each code, after rounding ``x / scale`` to the nearest value.

    Args:
        x: float tensor of any shape.
        fmt: a format or its name.
        scale: positive, broadcasting against ``x``.

    Returns:
        int64 tensor of ``2**bits`` counts in code order; all zero for an empty tensor.

    Raises:
        ValueError: a NaN in a format that has none, or a scale that does not fit ``x``.

    Example:
        >>> code_histogram(torch.tensor([1.0, 1.0, -6.0]), "E2M1").nonzero().flatten().tolist()
        [2, 15]
    """
    fmt = as_format(fmt)
    codes = encode(x.detach() / _fitting(scale, x), fmt)
    return torch.bincount(codes.flatten().int(), minlength=2 * fmt.sign_bit)


def _fitting(scale: Tensor | float, x: Tensor) -> Tensor | float:
    if isinstance(scale, Tensor):
        try:
            fits = torch.broadcast_shapes(x.shape, scale.shape) == x.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"scale of shape {tuple(scale.shape)} does not fit x of shape {tuple(x.shape)}")
    return scale
