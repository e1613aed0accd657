"""ULP residuals as a state keeps them: a byte a weight, half of one or a quarter, which steps take as whole bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.packed import packed_length
from fp8manifold._encoded.storage import void_remainder
from fp8manifold._ranks import local_of, spread
from fp8manifold.optim._job import Job
from fp8manifold.tensor import FP8Tensor

__all__ = ["first_residual", "pack_residual", "unpack_residual", "unpacked"]


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
    """The way back, as int8, contiguous."""
    if bits == 8:
        return packed.view(shape)
    fields = [(packed << (8 - bits - place)).view(torch.int8) >> (8 - bits) for place in range(0, 8, bits)]
    length = shape.numel() if packed.dim() == 1 else shape[1:].numel()
    return torch.stack(fields, dim=-1).flatten(-2)[..., :length].reshape(shape).contiguous()


def first_residual(parameter: Tensor, bits: int) -> Tensor:
    """What the rounding of the float weights left, where the parameter has kept it; zeros elsewhere."""
    held: Any = local_of(parameter)
    start = torch.zeros(held.shape, dtype=torch.int8, device=held.device)
    if isinstance(held, FP8Tensor) and held.remainder is not None:
        start = held.remainder.clone()
        void_remainder(held)
    return spread(parameter, pack_residual(_coarser(start, bits), bits, in_rows=held is not parameter))


def _coarser(remainder: Tensor, bits: int) -> Tensor:
    """Parts of 1/256 of a step as parts of ``2^-bits``, half up."""
    if bits == 8:
        return remainder
    cut, end = 8 - bits, 1 << (bits - 1)
    return ((remainder.to(torch.int16) + (1 << (cut - 1))) >> cut).clamp_(-end, end - 1).to(torch.int8)


@contextmanager
def unpacked(jobs: Sequence[Job], state: dict[Tensor, Any]) -> Iterator[None]:
    """Hold them as int8 while the steps are taken."""
    packed = [(job, local_of(state[job.parameter]["residual"])) for job in jobs if job.variant.rule.packs]
    for job, kept in packed:
        rows = kept if job.share is None else job.share.gathered(kept)
        job.held["residual"] = unpack_residual(rows, job.held["weight"].shape, job.variant.residual_bits)
    yield
    for job, kept in packed:
        residual = job.held["residual"] if job.share is None else job.share.own(job.held["residual"])
        kept.copy_(pack_residual(residual, job.variant.residual_bits, in_rows=kept.dim() > 1))
