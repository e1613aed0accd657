"""Wider scales for one-byte weights: doubled as soon as a step leaves a weight at the end of its range, unbiased."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._numerics.codec import encode_finite, encode_signed
from fp8manifold._ranks import Ranks, local_of, share_of
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._job import Job, row_view
from fp8manifold.optim._plan import Grid
from fp8manifold.optim._residuals import pack_residual, unpack_residual
from fp8manifold.optim._variant import Variant
from fp8manifold.optim._weights import load_weights
from fp8manifold.optim._writeback import split_codes, unless_special
from fp8manifold.random_bits import draw_of, words_at
from fp8manifold.tensor import FP8Tensor

__all__ = ["at_an_end", "widen"]

_LOG: Final = logging.getLogger("fp8manifold")
_FOR_RESCALING: Final = 2
"""A fourth key word, so that no draw of a step is used again."""


def at_an_end(jobs: Sequence[Job]) -> list[Job]:
    """The steps of one-byte parameters that have left a weight at the end of its range.

    Rows that a process holds are its own to widen.  Of one scale for the rows of several processes all of these
    processes are told.
    """
    kept = [job for job in jobs if job.variant.storage == "codes"]
    found = [_holds_last(job) for job in kept]
    shared: dict[int, tuple[Ranks, list[int]]] = {}
    for i, job in enumerate(kept):
        if job.scale is not None and not job.scale.dim() and (share := share_of(job.parameter)) is not None:
            shared.setdefault(id(share.ranks.group), (share.ranks, []))[1].append(i)
    for ranks, places in shared.values():
        flags = torch.tensor(
            [found[i] for i in places], dtype=torch.int32, device=kept[places[0]].held["weight"].device
        )
        for i, flag in zip(places, ranks.largest(flags).tolist(), strict=True):
            found[i] = bool(flag)
    return [job for job, here in zip(kept, found, strict=True) if here]


def _holds_last(job: Job) -> bool:
    """Whether one of the codes is that of the largest magnitude; native code has looked already."""
    codes, fmt = job.held["weight"], job.variant.fmt
    if job.reached or not codes.numel():
        return any(job.reached)
    assert fmt is not None
    return bool(((codes & (fmt.sign_bit - 1)) == fmt.max_code).any())


def widen(state: dict[str, Any], grid: Grid, held: FP8Tensor, variant: Variant, words: tuple[int, int, int]) -> int:
    """Double each scale whose largest weight is the format's, and return how many there were.

    Their weights, with the residual kept beside them, are rounded stochastically once, which moves none that the wider
    grid holds.  No scale becomes narrower: that is :meth:`FP8Tensor.adapt_scale_`.
    """
    old, fmt = held.scale, held.format
    widest = 2.0 ** min(127, 127 - math.floor(math.log2(fmt.max)))  # its max is still a float32
    largest = held.largest() if old.dim() else grid.ranks.largest(held.largest())
    new = torch.where(largest >= old * fmt.max, old * 2, old).clamp(max=widest).maximum(old)
    if not (count := int((new != old).sum())):
        return 0
    _LOG.info("%s of shape %s saturates: %s", fmt.name, tuple(held.shape), describe_change(old, new))
    if held.numel():
        _rewrite(state, grid, new, variant, words)
    held.set_scale_(new)
    return count


def _rewrite(state: dict[str, Any], grid: Grid, new: Tensor, variant: Variant, words: tuple[int, int, int]) -> None:
    """Round the weights of every scale that changes to its new grid."""
    layout, shape, bits = grid.layout(blocks=False), grid.weight.shape, variant.residual_bits
    assert grid.fmt is not None
    assert grid.scale is not None
    of_rows = [row_view(scale, shape, layout).reshape(-1, 1) for scale in (grid.scale, new)]
    rows = (of_rows[0] != of_rows[1]).flatten().nonzero().flatten()
    weight = grid.weight.view(len(of_rows[0]), -1)
    arrays = {"weight": weight[rows]}
    if bits:
        kept = local_of(state["residual"])
        residual = unpack_residual(kept, shape, bits).view(weight.shape)
        arrays["residual"] = residual[rows]
    x = load_weights(variant, arrays, torch.float32).x * (of_rows[0] / of_rows[1])[rows]
    places = (rows * weight.shape[1] + (0 if grid.share is None else grid.share.offset)).unsqueeze(1)
    places = places + torch.arange(weight.shape[1], device=x.device)
    draws = draw_of(words_at(places, (*words, _FOR_RESCALING)))
    codes, rest = _rounded(x, grid.fmt, draws, bits)
    weight[rows] = unless_special(codes, arrays["weight"], grid.fmt)
    if bits:
        residual[rows] = rest.to(torch.int8)
        if bits != 8:
            kept.copy_(pack_residual(residual.view(shape), bits, in_rows=kept.dim() > 1))


def _rounded(x: Tensor, fmt: FloatFormat, draws: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, and what is kept beside them."""
    if not bits:
        return (codes := encode_finite(x, fmt, draws)), codes
    return split_codes(encode_signed(x, fmt, draws, bits), fmt, bits)
