"""ULP residuals as a state keeps them: a byte a weight or half of one, which steps take as whole bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8manifold._encoded.storage import void_remainder
from fp8manifold._ranks import local_of, spread
from fp8manifold.optim._job import Job
from fp8manifold.tensor import FP8Tensor

__all__ = ["first_residual", "pack_nibbles", "unpack_nibbles", "unpacked"]


def pack_nibbles(values: Tensor, *, in_rows: bool = False) -> Tensor:
    """Signed 4-bit values, two a byte, the even position in the low half: flat, or each row in bytes of its own."""
    flat = values.reshape(values.shape[0], values.shape[1:].numel()) if in_rows else values.reshape(-1)
    if flat.shape[-1] % 2:
        flat = torch.cat([flat, flat.new_zeros((*flat.shape[:-1], 1))], dim=-1)
    pairs = flat.to(torch.int16) & 15
    return (pairs[..., 0::2] | (pairs[..., 1::2] << 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor, shape: torch.Size) -> Tensor:
    """The way back, as int8, contiguous."""
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    length = shape.numel() if packed.dim() == 1 else shape[1:].numel()
    return torch.stack([low, high], dim=-1).flatten(-2)[..., :length].reshape(shape).contiguous()


def first_residual(parameter: Tensor, bits: int) -> Tensor:
    """What the rounding of the float weights left, where the parameter has kept it; zeros elsewhere."""
    held: Any = local_of(parameter)
    start = torch.zeros(held.shape, dtype=torch.int8, device=held.device)
    if isinstance(held, FP8Tensor) and held.remainder is not None:
        start = held.remainder.clone()
        void_remainder(held)
    packed = start if bits == 8 else pack_nibbles(_coarser(start), in_rows=held is not parameter)
    return spread(parameter, packed)


def _coarser(remainder: Tensor) -> Tensor:
    """Parts of 1/256 of a step as parts of 1/16."""
    return ((remainder.to(torch.int16) + 8) >> 4).clamp_(-8, 7).to(torch.int8)


@contextmanager
def unpacked(jobs: Sequence[Job], state: dict[Tensor, Any]) -> Iterator[None]:
    """Hold them as int8 while the steps are taken."""
    packed = [(job, local_of(state[job.parameter]["residual"])) for job in jobs if job.variant.residual_bits == 4]
    for job, kept in packed:
        rows = kept if job.share is None else job.share.gathered(kept)
        job.held["residual"] = unpack_nibbles(rows, job.held["weight"].shape)
    yield
    for job, kept in packed:
        residual = job.held["residual"] if job.share is None else job.share.own(job.held["residual"])
        kept.copy_(pack_nibbles(residual, in_rows=kept.dim() > 1))
