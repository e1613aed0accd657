"""Scales that a step changes: doubled at the end of the range, fitted to first values,
narrowed where far too large.

A weight at the end of its range has its row, block or tensor widened after the step, if
its own gradient or first average is not 0: weights that nothing moves stay to the byte.
The scale of weights that all are 0 is fitted to the targets of the step that moves
them, which follow from the stored state alone: shards and resumed runs have the same
bits. A scale 16 times as large as that of a new parameter of these weights is narrowed,
exactly, when S_ref is due.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.storage import largest_magnitude
from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._numerics.codec import encode_finite, encode_signed, keep_nan_codes, split_codes
from fp8manifold._ranks import Ranks, local_of
from fp8manifold._triton.kinds import widest_scale
from fp8manifold.optim._slot import FOR_RESCALING, Slot, row_view, scales_in_runs
from fp8manifold.optim._step import block_noise, blocks_of, load_weights, step
from fp8manifold.random_bits import draw_of, words_at
from fp8manifold.scaling import narrowed_scale, refitted_scale
from fp8manifold.tensor import FP8Tensor

_LOG: Final = logging.getLogger("fp8manifold")
_FEW: Final = 16  #: Codes at the start of a row, one of which nearly always is not 0.
_ROOM: Final = 2.0  #: Room for a second step as long as the first, for weights that were 0.


def _held(slot: Slot) -> FP8Tensor:
    held = local_of(slot.parameter)
    assert isinstance(held, FP8Tensor)
    return held


def widen_full(optimizer: Any, slots: Sequence[Slot]) -> None:
    """Double and count the scales of one-byte parameters that a step has left a weight
    at the end of.

    A process widens the scales of its own rows; for a scale that several processes
    share the flag is all-reduced.
    """
    kept = [slot for slot in slots if slot.spec.storage == "codes"]
    found = {slot: _holds_last(slot) for slot in kept}
    shared = {
        slot: [int(found[slot])] for slot in kept if has_one_scale(slot) and slot.share is not None
    }
    found |= {slot: bool(flag) for slot, (flag,) in _largest_anywhere(shared).items()}
    for slot in kept:
        if found[slot]:
            changed = sum(slot.doubled) if slot.doubled else _widen(slot)
            optimizer.widened_scales += own_count(slot, changed)
            if changed and has_one_scale(slot):
                optimizer._refresh(slot)
    for slot in slots:  # backends report it, as they look at each code
        if slot.has_zero_rows and not any(slot.has_zero_rows):
            _fill(_held(slot))


def has_one_scale(slot: Slot) -> bool:
    """True if all weights share a scale, those of other processes too."""
    return slot.kept_scale is not None and not slot.kept_scale.dim()


def _largest_anywhere(flags: dict[Slot, list[int]]) -> dict[Slot, list[int]]:
    """The largest of each flag of sharded slots over their processes, by one all-reduce
    for each group of these.
    """
    together: dict[int, tuple[Ranks, list[Slot]]] = {}
    for slot in flags:
        together.setdefault(id(slot.ranks.group), (slot.ranks, []))[1].append(slot)
    found: dict[Slot, list[int]] = {}
    for ranks, slots in together.values():
        here = torch.tensor(
            [flags[slot] for slot in slots], dtype=torch.int32, device=slots[0].device
        )
        found |= dict(zip(slots, ranks.largest(here).tolist(), strict=True))
    return found


def _holds_last(slot: Slot) -> bool:
    """True where a code of the largest magnitude is left, by the backend's flag where
    it has one.
    """
    codes, fmt = slot.weight, slot.fmt
    if slot.saturated or not codes.numel():
        return any(slot.saturated)
    assert fmt is not None
    return bool(((codes & (fmt.sign_bit - 1)) == fmt.max_code).any())


def _widen(slot: Slot) -> int:
    """Double each scale under which a moving weight is the format's largest, and return
    how many were doubled.
    """
    held = _held(slot)
    old, fmt = held.scale, held.format
    largest = largest_magnitude(torch.where(_moved(slot), held.codes, 0), old, fmt, held.block_size)
    largest = largest if old.dim() else slot.ranks.largest(largest)
    new = torch.where((largest >= old * fmt.max) & (old * 2 <= widest_scale(fmt)), old * 2, old)
    if not (count := int((new != old).sum())):
        return 0
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(
            "%s of shape %s saturates: %s", fmt.name, tuple(held.shape), describe_change(old, new)
        )
    if held.numel():
        _rewrite(slot, scales_in_runs(held, new)[0])
    held.set_scale_(new)
    return count


def _moved(slot: Slot) -> Tensor:
    """A mask of weights with a gradient or first average that is not 0; in a steady
    step those of the parameter.
    """
    first, shape = slot.spec.first_moment, _held(slot).codes.shape
    if "gradient" in slot.tensors:
        moving = [slot.tensors["gradient"], *([slot.tensors[first]] if first else [])]
    else:
        moving = [slot.parameter.grad, *([slot.state[first]] if first else [])]  # type: ignore[list-item]
    return torch.stack([_is_not_zero(each).view(shape) for each in moving]).any(0)


def _is_not_zero(x: Tensor) -> Tensor:
    return (
        (x & 0x7F) if x.dtype is torch.uint8 else x
    ) != 0  # codes of moments have a zero of either sign


def _rewrite(slot: Slot, new: Tensor) -> None:
    """Round the weights of every scale that changes to its new grid; ``new`` is as
    :func:`scales_in_runs` has it.
    """
    fmt, scale, view, bits = (
        slot.fmt,
        slot.scale,
        slot.view_in(blocks=False),
        slot.spec.residual_bits,
    )
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
    places = (rows * weight.shape[1] + offset).unsqueeze(1) + torch.arange(
        weight.shape[1], device=x.device
    )
    draws = draw_of(words_at(places, (*slot.draw_words, FOR_RESCALING)))
    if bits:
        rounded, rest = split_codes(encode_signed(x, fmt, draws, bits), fmt, bits, arrays["weight"])
        residual[rows] = rest.to(torch.int8)
    else:
        rounded = encode_finite(x, fmt, draws)
    weight[rows] = keep_nan_codes(rounded, arrays["weight"], fmt)


def zero_scales(held: FP8Tensor) -> Tensor | None:
    """The scales whose weights all are 0, as a mask in their shape; None for none, and
    while a step has left none.
    """
    if not held.codes.numel() or (
        not held.codes.is_inference() and held.filled == held.codes._version
    ):
        return None
    if isinstance(held.block_size, tuple):
        zero = held.largest() == 0  # a NaN beside zeros stays one
    else:
        codes = held.codes.view(held.kept_scale.numel(), -1)
        zero = ~_used(held, codes[:, :_FEW])
        if (some := zero.nonzero().flatten()).numel():
            zero[some] = ~_used(held, codes[some])
        zero = zero.view(held.kept_scale.shape)
    if bool(zero.any()):
        return zero
    _fill(held)
    return None


def _fill(held: FP8Tensor) -> None:
    """Remember, until codes change, that every scale has a weight that is not 0."""
    if not held.codes.is_inference():
        held.filled = held.codes._version


def _used(held: FP8Tensor, rows: Tensor) -> Tensor:
    """Rows with a code that is neither 0 nor -0."""
    negative = held.format.sign_bit if held.format.has_negative_zero else 0
    return ((rows & (0xFF ^ negative)) != 0).any(1)


def mark_zero(slots: Sequence[Slot]) -> None:
    """Mark in each slot the scales that its step fits: their weights all are 0, in
    every process, and will move.
    """
    flags: dict[Slot, list[int]] = {}
    for slot in slots:
        if slot.spec.storage == "codes" and slot.spec.geometry == "linear":
            zero = zero_scales(_held(slot))
            moves = zero is not None and _moves(slot, zero)
            slot.fit_mask = zero if moves else None
            if has_one_scale(slot) and slot.share is not None:
                flags[slot] = [int(zero is None and slot.weight.numel() > 0), int(moves)]
    for slot, (used, moved) in _largest_anywhere(flags).items():
        slot.fit_mask = (
            torch.ones((), dtype=torch.bool, device=slot.device) if moved and not used else None
        )


def _moves(slot: Slot, zero: Tensor) -> bool:
    """True where a gradient or a first average of weights that all are 0 is not."""
    tensors = [
        slot.tensors["gradient"],
        *([slot.tensors[slot.spec.first_moment]] if slot.spec.first_moment else []),
    ]
    if zero.dim():
        view = slot.view_in(blocks=False)
        rows = row_view(scales_in_runs(_held(slot), zero)[0], slot.weight.shape, view)
        if rows.dim() and rows.shape != view.dims:
            rows = rows.flatten().nonzero().flatten()  # few, mostly: those of a padding token
        tensors = [tensor.view(view.dims)[rows] for tensor in tensors]
    return any(bool(_is_not_zero(tensor).any()) for tensor in tensors)


def fit_scales(slots: Sequence[Slot]) -> None:
    """Fit the marked scales to the targets of the steps to come."""
    for slot in slots:
        if slot.fit_mask is not None:
            _fit(slot, slot.fit_mask)


def _fit(slot: Slot, zero: Tensor) -> None:
    held = _held(slot)
    old = held.scale
    largest = torch.zeros(old.numel(), dtype=torch.float32, device=old.device)
    if slot.weight.numel():
        index = torch.arange(old.numel(), device=old.device).view(old.shape)
        groups = row_view(scales_in_runs(held, index)[0], slot.weight.shape, slot.view)
        row = 0
        for arrays, start in blocks_of(slot):
            target = step(
                slot.spec, arrays, slot.number_row, block_noise(slot, arrays["gradient"], start)
            ).target
            asked = target.abs().to(torch.float32)
            some = groups[row : row + len(target)] if groups.dim() else groups
            asked = (
                asked
                if some.shape == asked.shape
                else asked.amax(-1)
                if some.dim()
                else asked.amax()
            )
            largest.scatter_reduce_(0, some.flatten(), asked.flatten(), "amax")
            row += len(target)
    largest = largest.view(old.shape) * old
    largest = largest if old.dim() else slot.ranks.largest(largest)
    fresh = refitted_scale(largest, old, held.format, _ROOM).clamp(max=widest_scale(held.format))
    new = torch.where(zero, fresh, old)
    slot.next_scale.append(new)
    if slot.weight.numel():
        slot.arrays["next_scale"] = row_view(
            scales_in_runs(held, new)[0], slot.weight.shape, slot.view
        )


def take_fitted(optimizer: Any, slots: Sequence[Slot]) -> None:
    """Set and count the scales that steps have fitted, and compute S_ref again, as
    spacings have changed.
    """
    kept = [slot for slot in slots if slot.spec.storage == "codes"]
    fitted = {slot: sum(_change(slot, new, "begins") for new in slot.next_scale) for slot in kept}
    optimizer.fitted_scales += sum(own_count(slot, count) for slot, count in fitted.items())
    # S_ref follows at once, in every process; of rows where steps read it
    changed = {
        s: bool(n) for s, n in fitted.items() if has_one_scale(s) or s.spec.stiffness != "none"
    }
    rows = {
        s: [int(flag)]
        for s, flag in changed.items()
        if s.share is not None and not has_one_scale(s)
    }
    changed |= {slot: bool(flag) for slot, (flag,) in _largest_anywhere(rows).items()}
    for slot, flag in changed.items():
        if flag:
            optimizer._refresh(slot)


def narrow(slot: Slot) -> int:
    """Narrow the scales of codes that have become far too large, and return how many
    were; no value moves.
    """
    if slot.storage != "codes" or not slot.steps_done:  # a first step leaves given scales
        return 0
    held = _held(slot)
    largest = held.largest() if held.kept_scale.dim() else slot.ranks.largest(held.largest())
    new = narrowed_scale(largest, held.scale, held.format)
    if bool((new == held.scale).all()) or (
        slot.spec.residual_bits and "residual" not in slot.state
    ):
        return 0
    if held.numel():
        _rewrite(slot, scales_in_runs(held, new)[0])
    return own_count(slot, _change(slot, new, "has shrunk"))


def _change(slot: Slot, new: Tensor, what: str) -> int:
    """Set new scales, to which the codes have been rounded already, and return how many
    changed.
    """
    held = _held(slot)
    if not (count := int((new != held.scale).sum())):
        return 0
    _LOG.info(
        "%s of shape %s %s: %s",
        held.format.name,
        tuple(held.shape),
        what,
        describe_change(held.scale, new),
    )
    held.set_scale_(new)
    slot.kept_scale, _ = scales_in_runs(held)
    for stale in ("scale", "arrays"):
        slot.__dict__.pop(stale, None)
    return count


def own_count(slot: Slot, count: int) -> int:
    """The number of scales that this process counts: a scale that all share is counted
    by the first.
    """
    return 0 if has_one_scale(slot) and slot.ranks.rank else count
