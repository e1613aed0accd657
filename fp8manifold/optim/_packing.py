"""Residuals of 4 and 2 bits: weights share a byte in the state, and most backends step them with a byte each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import packed_length
from fp8manifold._ranks import local_of
from fp8manifold.optim._slot import Slot

__all__ = ["is_packed", "pack_residual", "stay_packed", "unpack_residual", "unpacked"]

_NAME: Final = "residual"


def pack_residual(values: Tensor, bits: int, *, in_rows: bool = False) -> Tensor:
    """Signed values (int8) of 8 bits as they are; of 4 or 2 bits uint8, the first in a byte's lowest bits.

    They are packed flat, or each row in bytes of its own.
    """
    if bits == 8:
        return values
    flat = values.reshape(values.shape[0], values.shape[1:].numel()) if in_rows else values.reshape(-1)
    length, each = flat.shape[-1], 8 // bits
    padding = each * packed_length(length, bits) - length
    if padding:
        flat = torch.cat([flat, flat.new_zeros((*flat.shape[:-1], padding))], dim=-1)
    fields = flat.to(torch.int16) & ((1 << bits) - 1)
    packed = fields[..., 0::each]
    for place in range(1, each):
        packed = packed | (fields[..., place::each] << (bits * place))
    return packed.to(torch.uint8)


def unpack_residual(packed: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """Unpack to int8, contiguous."""
    if bits == 8:
        return packed.view(shape)
    fields = [(packed << (8 - bits - place)).view(torch.int8) >> (8 - bits) for place in range(0, 8, bits)]
    length = shape.numel() if packed.dim() == 1 else shape[1:].numel()
    return torch.stack(fields, dim=-1).flatten(-2)[..., :length].reshape(shape).contiguous()


def is_packed(slot: Slot) -> bool:
    """Whether a step finds a residual of which several share a byte."""
    return slot.spec.packs and slot.tensors[_NAME].dtype is torch.uint8


def stay_packed(slots: Sequence[Slot]) -> set[Slot]:
    """Those whose residual a kernel reads as the state has it: packed flat, or in rows that fill their bytes.

    Muon's steps have more to do with it, and those of gathered rows are of another residual.
    """
    return {slot for slot in slots if slot.spec.packs and slot.spec.direction != "muon" and _lies_flat(slot)}


def _lies_flat(slot: Slot) -> bool:
    kept = local_of(slot.state[_NAME])
    fills = kept.dim() == 1 or kept.shape[1] * 8 == slot.weight.shape[1:].numel() * slot.spec.residual_bits
    return fills and not slot.whole


@contextmanager
def unpacked(slots: Sequence[Slot]) -> Iterator[None]:
    """Give each weight of packed residuals a byte, and pack them again after the step."""
    homes = {slot: slot.tensors[_NAME] for slot in slots if is_packed(slot)}
    for slot, home in homes.items():
        slot.tensors[_NAME] = unpack_residual(home, slot.weight.shape, slot.spec.residual_bits)
    yield
    for slot, home in homes.items():
        home.copy_(pack_residual(slot.tensors[_NAME], slot.spec.residual_bits, in_rows=home.dim() > 1))
        slot.tensors[_NAME] = home
