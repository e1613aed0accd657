"""One patch: some entries of a tensor, and what they become."""

from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8manifold._encoded.dispatch import EncodedTensor

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes by which entries are compared and copied, by their bytes."""
_INDICES: Final = (torch.int32, torch.int64)


class Patch(NamedTuple):
    """Entries of one tensor that have changed.

    Attributes:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        dtype: the tensor's dtype.
        indices: positions of the entries in the flat tensor, int32 or int64, ascending.
        values: the entries as they are now, in the tensor's dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices: Tensor
    values: Tensor


def as_integers(tensor: Tensor) -> Tensor:
    """Return the flat entries of a contiguous tensor as integers, on its memory."""
    return tensor.view(-1).view(_INTEGERS[tensor.element_size()])


def check_patch(patch: Patch) -> None:
    """Refuse a patch that could fit no tensor."""
    if not isinstance(patch, Patch):
        raise TypeError(f"a patch must be an fm.Patch, not {type(patch).__name__}")
    indices, values = patch.indices, patch.values
    if indices.dtype not in _INDICES or indices.dim() != 1 or values.dim() != 1:
        raise TypeError(
            f"the patch of {patch.name!r} has indices of {indices.dtype} and shape "
            f"{tuple(indices.shape)}, and values of shape {tuple(values.shape)}: int32 or int64, "
            "and one dimension are needed"
        )
    if values.dtype != patch.dtype or len(values) != len(indices):
        raise ValueError(
            f"the patch of {patch.name!r} has {len(values)} values of {values.dtype} for "
            f"{len(indices)} indices of a tensor of {patch.dtype}"
        )
    if not len(indices):
        return
    size = prod(patch.shape)
    is_ascending = bool((indices[1:] > indices[:-1]).all())
    if not is_ascending or int(indices[0]) < 0 or int(indices[-1]) >= size:
        raise ValueError(
            f"the patch of {patch.name!r} has indices from {int(indices.min())} to "
            f"{int(indices.max())}: ascending ones from 0 to {size - 1} are needed"
        )


def check_fits(patch: Patch, tensor: Tensor | None) -> None:
    """Refuse a patch of another tensor than this; None where there is none."""
    if tensor is None:
        raise ValueError(f"there is no tensor {patch.name!r}, for which there is a patch")
    if isinstance(tensor, EncodedTensor):
        raise TypeError(
            f"{patch.name!r} is a model's weight in codes, which can't be patched: patch the "
            "tensors of fm.served_weights"
        )
    if tuple(tensor.shape) != tuple(patch.shape) or tensor.dtype != patch.dtype:
        raise ValueError(
            f"the patch of {patch.name!r} is for {patch.dtype} of shape {tuple(patch.shape)}, but "
            f"the tensor is {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{patch.name!r} is not contiguous: patch a contiguous tensor")


@torch.no_grad()
def write_patch(patch: Patch, tensor: Tensor) -> None:
    """Copy the bits of a patch into the tensor that it fits."""
    indices = patch.indices.to(tensor.device, torch.int64)
    as_integers(tensor)[indices] = as_integers(patch.values.contiguous()).to(tensor.device)
