"""Scales that double: a weight at the end of its range has its row, block or tensor widened after the step."""

import logging
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._numerics.codec import encode_finite, encode_signed, split_codes, unless_special
from fp8manifold._ranks import Ranks, local_of
from fp8manifold._triton.kinds import widest_scale
from fp8manifold.formats import FloatFormat
from fp8manifold.optim._slot import FOR_RESCALING, Slot, row_view, scales_in_runs
from fp8manifold.optim._step import load_weights
from fp8manifold.random_bits import draw_of, words_at
from fp8manifold.tensor import FP8Tensor

_LOG: Final = logging.getLogger("fp8manifold")


def at_an_end(slots: Sequence[Slot]) -> list[Slot]:
    """The slots of one-byte parameters with a weight at the end of its range after the step.

    A process widens the scales of its own rows.  Of one scale for the rows of several processes the flag is
    all-reduced.
    """
    kept = [slot for slot in slots if slot.spec.storage == "codes"]
    found = {slot: _holds_last(slot) for slot in kept}
    shared = {slot: [int(found[slot])] for slot in kept if has_one_scale(slot) and slot.share is not None}
    found |= {slot: bool(flag) for slot, (flag,) in largest_anywhere(shared).items()}
    return [slot for slot in kept if found[slot]]


def has_one_scale(slot: Slot) -> bool:
    """True where all weights share a scale, those of other processes too."""
    return slot.kept_scale is not None and not slot.kept_scale.dim()


def largest_anywhere(flags: dict[Slot, list[int]]) -> dict[Slot, list[int]]:
    """The largest of each flag of sharded slots over their processes, by one all-reduce for each group of these.

    Args:
        flags: as many for each slot.
    """
    together: dict[int, tuple[Ranks, list[Slot]]] = {}
    for slot in flags:
        together.setdefault(id(slot.ranks.group), (slot.ranks, []))[1].append(slot)
    found: dict[Slot, list[int]] = {}
    for ranks, slots in together.values():
        here = torch.tensor([flags[slot] for slot in slots], dtype=torch.int32, device=slots[0].device)
        found |= dict(zip(slots, ranks.largest(here).tolist(), strict=True))
    return found


def _holds_last(slot: Slot) -> bool:
    """True where a code of the largest magnitude is left, by the backend's flag where it has one."""
    codes, fmt = slot.weight, slot.fmt
    if slot.reached or not codes.numel():
        return any(slot.reached)
    assert fmt is not None
    return bool(((codes & (fmt.sign_bit - 1)) == fmt.max_code).any())


def widen(slot: Slot) -> int:
    """Double each scale whose largest weight is the format's, and return how many there were.

    Their weights, with the residual kept beside them, are rounded stochastically once, which moves none that the wider
    grid holds.  No scale becomes narrower: that is :meth:`FP8Tensor.adapt_scale_`.
    """
    held = local_of(slot.parameter)
    assert isinstance(held, FP8Tensor)
    old, fmt = held.scale, held.format
    largest = held.largest() if old.dim() else slot.ranks.largest(held.largest())
    new = torch.where(largest >= old * fmt.max, old * 2, old).clamp(max=widest_scale(fmt)).maximum(old)
    if not (count := int((new != old).sum())):
        return 0
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s of shape %s saturates: %s", fmt.name, tuple(held.shape), describe_change(old, new))
    if held.numel():
        rewrite(slot, scales_in_runs(held, new)[0])
    held.set_scale_(new)
    return count


def rewrite(slot: Slot, new: Tensor) -> None:
    """Round the weights of every scale that changes to its new grid.

    Args:
        slot: of codes.
        new: scales as :func:`scales_in_runs` has them, in floats.
    """
    fmt, scale, view, bits = slot.fmt, slot.scale, slot.view_in(blocks=False), slot.spec.residual_bits
    assert fmt is not None
    assert scale is not None
    codes = local_of(slot.parameter).codes
    of_rows = [row_view(each, codes.shape, view).reshape(-1, 1) for each in (scale, new)]
    rows = (of_rows[0] != of_rows[1]).flatten().nonzero().flatten()
    weight = codes.view(len(of_rows[0]), -1)
    arrays = {"weight": weight[rows]}
    if bits:
        residual = local_of(slot.state["residual"]).view(weight.shape)
        arrays["residual"] = residual[rows]
    x = load_weights(slot.spec, arrays, torch.float32).x * (of_rows[0] / of_rows[1])[rows]
    offset = 0 if slot.share is None else slot.share.offset
    places = (rows * weight.shape[1] + offset).unsqueeze(1) + torch.arange(weight.shape[1], device=x.device)
    draws = draw_of(words_at(places, (*slot.key, FOR_RESCALING)))
    rounded, rest = _rounded(x, fmt, draws, bits)
    weight[rows] = unless_special(rounded, arrays["weight"], fmt)
    if bits:
        residual[rows] = rest.to(torch.int8)


def _rounded(x: Tensor, fmt: FloatFormat, draws: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes, and the residual beside them."""
    if not bits:
        return (codes := encode_finite(x, fmt, draws)), codes
    return split_codes(encode_signed(x, fmt, draws, bits), fmt, bits)
