"""Tensors of other packages that hold plain ones: what is inside them, for monitors and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fp8manifold as fm

#: between the name of a packaged tensor and that of a plain one inside it, in a checkpoint
PART = "::"


def is_packaged(value: Any) -> bool:
    """Whether a tensor is another package's: plain tensors inside, and a `dequantize`.

    >>> is_packaged(torch.zeros(2)), is_packaged(fm.FP8Parameter(torch.zeros(2, 2), "E4M3"))
    (False, False)
    """
    own = value.data if isinstance(value, nn.Parameter) else value
    if not hasattr(own, "__tensor_flatten__") or isinstance(own, fm.FP8Tensor):
        return False
    return type(own).__module__.partition(".")[0] in ("sdnq", "torchao")


def parts_of(value: Any) -> dict[str, Tensor]:
    """Return the plain tensors inside another package's, by name."""
    return {name: getattr(value, name) for name in sorted(value.__tensor_flatten__()[0])}


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the plain tensors of other packages' ones in their place; they share their memory.

    >>> taken_apart({"bias": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return dict(_plain(state))


def _plain(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if is_packaged(value):
            yield from ((f"{name}{PART}{part}", tensor) for part, tensor in parts_of(value).items())
        else:
            yield name, value


@torch.no_grad()
def put_back(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the parts in a state that was taken apart into the tensors of `own`, and return it with those."""
    kept = {name: value for name, value in state.items() if PART not in name}
    for name, value in own.items():
        if is_packaged(value):
            for part, tensor in parts_of(value).items():
                tensor.copy_(state[f"{name}{PART}{part}"])
            kept[name] = value
    return kept
