"""A quantised layer is called, whatever holds it: no fused operator reads its weight instead, and input may be nested.

``nn.TransformerEncoderLayer`` hands the weights of its linear layers to one fused operator in evaluation, where nothing
has a hook.  What those layers do to weight and input would be passed over without a word, so each of them has a hook.
``nn.TransformerEncoder`` goes on to make nested tensors of a padded batch; the layers then see these.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["forbid_fused_operators", "is_our_hook", "over_nested"]


def forbid_fused_operators(layer: nn.Module) -> None:
    """Give the layer a hook that does nothing: torch's fused operators pass by a module that has one."""
    layer.register_forward_pre_hook(_is_called)


def is_our_hook(hook: object) -> bool:
    """Whether a forward pre-hook is the one of :func:`forbid_fused_operators`."""
    return hook is _is_called


def _is_called(layer: nn.Module, args: Any) -> None:
    """A forward pre-hook; a function of the module, so that copies and pickles of the layer keep it."""


def over_nested(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``forward`` of the rows of a nested tensor, which has no padding among them, in the same nesting."""
    if x.layout == torch.jagged:
        jagged: Any = x
        rows = forward(jagged.values())
        return torch.nested.nested_tensor_from_jagged(rows, offsets=jagged.offsets(), lengths=jagged.lengths())
    parts = x.unbind()
    rows = forward(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]))
    split = rows.split([part.numel() // part.shape[-1] for part in parts])
    return torch.nested.as_nested_tensor(
        [row.view(*part.shape[:-1], -1) for row, part in zip(split, parts, strict=True)]
    )
