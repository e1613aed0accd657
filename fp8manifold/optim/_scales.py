"""Scales of one-byte weights that a step changes: widened, fitted or narrowed.

    narrowed  before a step, when S_ref is due: a scale at least 16 times as large as
              that of a new parameter of these weights. No value moves.
    fitted    in a step: the scale of weights that all are 0, to the targets of the step
              that moves them. `mark_zero` finds such scales before the step,
              `fit_scales` computes the new ones, `take_fitted` sets them after it.
    widened   after a step: doubled, if it leaves a weight at the end of the range, and
              that weight moves (`widen_full`). Weights that nothing moves stay to the
              byte.

A scale belongs to a row, a block, a square or the whole tensor. All decisions follow
from the stored state alone, so shards and resumed runs have the same bits. Where
several processes share one scale they agree by an all-reduce (`_largest_over_processes`).
When spacings change, S_ref is computed again. `ManifoldOptimizer._take` and
``_prepare`` call these functions; kernels on a GPU widen most scales by themselves.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._encoded.stored_scale import describe_change
from fp8manifold._interface import Geometry, StiffnessPower, WeightStorage
from fp8manifold._ranks import Ranks, local_of
from fp8manifold._triton.kinds import widest_scale
from fp8manifold.optim._eager_step import block_noise, blocks_of, row_of, step
from fp8manifold.optim._rescaling import rescale_codes
from fp8manifold.optim._slot import Slot, row_view, scales_in_runs
from fp8manifold.scaling import narrowed_scale, refitted_scale
from fp8manifold.tensor import FP8Tensor

_LOG: Final = logging.getLogger("fp8manifold")
_FEW: Final = 16
"""Codes at the start of a row, one of which nearly always is not 0."""
_ROOM: Final = 2.0
"""Room for a second step as long as the first, for weights that were 0."""


def _encoded(slot: Slot) -> FP8Tensor:
    """Return the part of a slot's parameter that this process has."""
    tensor = local_of(slot.parameter)
    assert isinstance(tensor, FP8Tensor)
    return tensor


def widen_full(optimizer: Any, slots: Sequence[Slot]) -> None:
    """Double the scales under which a step has left a weight at the end of the range.

    The optimizer counts them. A process widens the scales of its own rows, and those
    that several processes share together with them.
    """
    coded = [slot for slot in slots if slot.spec.storage == WeightStorage.CODES]
    is_full = {slot: _has_largest_code(slot) for slot in coded}
    shared = {
        slot: [int(is_full[slot])]
        for slot in coded
        if has_one_scale(slot) and slot.share is not None
    }
    is_full |= {slot: bool(flag) for slot, (flag,) in _largest_over_processes(shared).items()}
    for slot in coded:
        if is_full[slot]:
            # a GPU's kernel may have doubled them
            changed = sum(slot.doubled) if slot.doubled else _widen(slot)
            optimizer.widened_scales += counted_here(slot, changed)
            if changed and has_one_scale(slot):
                optimizer._refresh(slot)
    for slot in slots:
        # backends report it, as they look at each code
        if slot.has_zero_rows and not any(slot.has_zero_rows):
            _remember_filled(_encoded(slot))


def has_one_scale(slot: Slot) -> bool:
    """Return True if all weights share a scale, those of other processes too."""
    return slot.kept_scale is not None and not slot.kept_scale.dim()


def _largest_over_processes(flags: dict[Slot, list[int]]) -> dict[Slot, list[int]]:
    """Return the largest of each flag of sharded slots over the processes.

    There is one all-reduce for all slots of the same group of processes.
    """
    slots_by_group: dict[int, tuple[Ranks, list[Slot]]] = {}
    for slot in flags:
        slots_by_group.setdefault(id(slot.ranks.group), (slot.ranks, []))[1].append(slot)
    largest: dict[Slot, list[int]] = {}
    for ranks, slots in slots_by_group.values():
        rows = [flags[slot] for slot in slots]
        local = torch.tensor(rows, dtype=torch.int32, device=slots[0].device)
        largest |= dict(zip(slots, ranks.largest(local).tolist(), strict=True))
    return largest


def _has_largest_code(slot: Slot) -> bool:
    """Return True if a step has left a code of the largest magnitude.

    A backend that has looked at the codes says so in ``saturated``.
    """
    codes, fmt = slot.weight, slot.fmt
    if slot.saturated or not codes.numel():
        return any(slot.saturated)
    assert fmt is not None
    return bool(((codes & (fmt.sign_bit - 1)) == fmt.max_code).any())


def _widen(slot: Slot) -> int:
    """Double each scale under which a moving weight is the format's largest.

    Returns:
        The number of scales that were doubled.
    """
    tensor = _encoded(slot)
    old, fmt = tensor.scale, tensor.format
    is_full = _are_full(slot, tensor)
    if not old.dim():
        is_full = slot.ranks.largest(is_full.to(torch.int32)).to(torch.bool)
    doubles = is_full & (old * 2 <= widest_scale(fmt))
    count = int(doubles.sum())
    if not count:
        return 0
    new = torch.where(doubles, old * 2, old)
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(
            "%s of shape %s saturates: %s", fmt.name, tuple(tensor.shape), describe_change(old, new)
        )
    if tensor.numel():
        rescale_codes(slot, scales_in_runs(tensor, new)[0])
    tensor.set_scale_(new)
    return count


def _are_full(slot: Slot, tensor: FP8Tensor) -> Tensor:
    """Return a mask of the scales under which a moving weight is the format's largest.

    Mostly few rows have such a weight. Gradients and averages are looked at in these
    alone, so that the cost is that of one look at the codes.
    """
    codes, scale, fmt = tensor.codes, tensor.scale, tensor.format
    is_full = torch.zeros(scale.shape, dtype=torch.bool, device=scale.device)
    if not codes.numel():
        return is_full
    width = codes.shape[-1] if codes.dim() else 1
    magnitudes = (codes & (fmt.sign_bit - 1)).view(-1, width)
    # codes of NaN are above the largest
    rows = (magnitudes.amax(1) >= fmt.max_code).nonzero().flatten()
    is_largest = (magnitudes[rows] == fmt.max_code) & _are_moving(slot, rows, width)
    indices = torch.arange(scale.numel(), device=scale.device).view(scale.shape)
    in_runs = scales_in_runs(tensor, indices)[0]
    index_by_run = row_view(in_runs, codes.shape, slot.view_in(blocks=False)).flatten()
    run = codes.numel() // index_by_run.numel()
    # a row has several runs, or a run several rows
    part = math.gcd(run, width)
    starts = (rows * width).unsqueeze(1) + torch.arange(0, width, part, device=rows.device)
    has_largest = is_largest.view(len(rows), width // part, part).any(2)
    is_full.view(-1)[index_by_run[starts[has_largest] // run]] = True
    return is_full


def _are_moving(slot: Slot, rows: Tensor, width: int) -> Tensor:
    """Return a mask of the weights in some rows that a step moves.

    Their gradient or first average is not 0.
    """
    if "gradient" in slot.tensors:
        tensors: Mapping[str, Any] = slot.tensors
    else:
        # a plan of steady steps holds no tensors
        tensors = {**slot.state, "gradient": slot.parameter.grad}
    are_moving = _is_not_zero(tensors["gradient"].reshape(-1, width)[rows])
    if slot.spec.first_moment:
        are_moving |= _is_not_zero(tensors[slot.spec.first_moment].reshape(-1, width)[rows])
    return are_moving


def _is_not_zero(x: Tensor) -> Tensor:
    # codes of moments have a zero of either sign
    magnitude = (x & 0x7F) if x.dtype is torch.uint8 else x
    return magnitude != 0


def zero_scales(tensor: FP8Tensor) -> Tensor | None:
    """Return a mask of the scales under which every weight is zero, or None.

    None is returned if there is no such scale. That is remembered until codes change.
    """
    if not tensor.codes.numel() or (
        not tensor.codes.is_inference() and tensor.filled == tensor.codes._version
    ):
        return None
    if isinstance(tensor.block_size, tuple):
        # a NaN beside zeros is not 0
        zero = tensor.largest() == 0
    else:
        codes = tensor.codes.view(tensor.kept_scale.numel(), -1)
        # a look at the first few codes rules most rows out
        zero = ~_has_nonzero(tensor, codes[:, :_FEW])
        candidates = zero.nonzero().flatten()
        if candidates.numel():
            zero[candidates] = ~_has_nonzero(tensor, codes[candidates])
        zero = zero.view(tensor.kept_scale.shape)
    if bool(zero.any()):
        return zero
    _remember_filled(tensor)
    return None


def _remember_filled(tensor: FP8Tensor) -> None:
    """Remember, until codes change, that every scale has a weight that is not 0."""
    if not tensor.codes.is_inference():
        tensor.filled = tensor.codes._version


def _has_nonzero(tensor: FP8Tensor, rows: Tensor) -> Tensor:
    """Return a mask of the rows with a code that is neither 0 nor -0."""
    sign_bit_of_zero = tensor.format.sign_bit if tensor.format.has_negative_zero else 0
    return ((rows & (0xFF ^ sign_bit_of_zero)) != 0).any(1)


def mark_zero(slots: Sequence[Slot]) -> None:
    """Mark in each slot the scales that its step fits, in ``slot.fit_mask``.

    Their weights all are 0, in every process, and some will move.
    """
    flags: dict[Slot, list[int]] = {}
    for slot in slots:
        if slot.spec.storage == WeightStorage.CODES and slot.spec.geometry == Geometry.LINEAR:
            zero = zero_scales(_encoded(slot))
            moves = zero is not None and _moves(slot, zero)
            slot.fit_mask = zero if moves else None
            if has_one_scale(slot) and slot.share is not None:
                is_used = zero is None and slot.weight.numel() > 0
                flags[slot] = [int(is_used), int(moves)]
    for slot, (used_anywhere, moves_anywhere) in _largest_over_processes(flags).items():
        is_fitted = moves_anywhere and not used_anywhere
        slot.fit_mask = torch.ones((), dtype=torch.bool, device=slot.device) if is_fitted else None


def _moves(slot: Slot, zero: Tensor) -> bool:
    """Return True if weights under the scales of the mask ``zero`` will move.

    They do if a gradient or a first average is not 0.
    """
    tensors = [slot.tensors["gradient"]]
    if slot.spec.first_moment:
        tensors.append(slot.tensors[slot.spec.first_moment])
    if zero.dim():
        view = slot.view_in(blocks=False)
        rows = row_view(scales_in_runs(_encoded(slot), zero)[0], slot.weight.shape, view)
        if rows.dim() and rows.shape != view.dims:
            # a mask of rows becomes indices: mostly few, those of a padding token
            rows = rows.flatten().nonzero().flatten()
        tensors = [tensor.view(view.dims)[rows] for tensor in tensors]
    return any(bool(_is_not_zero(tensor).any()) for tensor in tensors)


def fit_scales(slots: Sequence[Slot]) -> None:
    """Fit the marked scales to the targets of the steps to come."""
    for slot in slots:
        if slot.fit_mask is not None:
            _fit(slot, slot.fit_mask)


def _fit(slot: Slot, zero: Tensor) -> None:
    """Fit the scales of the mask ``zero`` to the targets of the step to come.

    The step is computed, and only its largest target under each scale is used.
    """
    tensor = _encoded(slot)
    old = tensor.scale
    largest = torch.zeros(old.numel(), dtype=torch.float32, device=old.device)
    if slot.weight.numel():
        indices = torch.arange(old.numel(), device=old.device).view(old.shape)
        # the index of the scale of each row of the view, of each weight, or of all
        index_by_row = row_view(scales_in_runs(tensor, indices)[0], slot.weight.shape, slot.view)
        row = 0
        for arrays, start in blocks_of(slot):
            noise = block_noise(slot, arrays["gradient"], start)
            target = step(slot.spec, arrays, row_of(slot), noise).target
            magnitude = target.abs().to(torch.float32)
            index = index_by_row
            if index_by_row.dim():
                index = index_by_row[row : row + len(target)]
            if index.shape != magnitude.shape:
                magnitude = magnitude.amax(-1) if index.dim() else magnitude.amax()
            largest.scatter_reduce_(0, index.flatten(), magnitude.flatten(), "amax")
            row += len(target)
    # from units of the old scale to values
    largest = largest.view(old.shape) * old
    if not old.dim():
        largest = slot.ranks.largest(largest)
    widest = widest_scale(tensor.format)
    fresh = refitted_scale(largest, old, tensor.format, _ROOM).clamp(max=widest)
    new = torch.where(zero, fresh, old)
    slot.next_scale.append(new)
    if slot.weight.numel():
        slot.arrays["next_scale"] = row_view(
            scales_in_runs(tensor, new)[0], slot.weight.shape, slot.view
        )


def take_fitted(optimizer: Any, slots: Sequence[Slot]) -> None:
    """Set the scales that steps have fitted, count them, and compute S_ref again."""
    coded = [slot for slot in slots if slot.spec.storage == WeightStorage.CODES]
    counts = {
        slot: sum(_set_scale(slot, new, "begins") for new in slot.next_scale) for slot in coded
    }
    optimizer.fitted_scales += sum(counted_here(slot, count) for slot, count in counts.items())
    # S_ref of a parameter with one scale always follows; with more, if steps read it
    has_changed = {
        slot: bool(count)
        for slot, count in counts.items()
        if has_one_scale(slot) or slot.spec.stiffness != StiffnessPower.NONE
    }
    # S_ref is that of all rows, so it follows in every process if one has changed a scale
    local_changes = {
        slot: [int(flag)]
        for slot, flag in has_changed.items()
        if slot.share is not None and not has_one_scale(slot)
    }
    has_changed |= {
        slot: bool(flag) for slot, (flag,) in _largest_over_processes(local_changes).items()
    }
    for slot, flag in has_changed.items():
        if flag:
            optimizer._refresh(slot)


def narrow(slot: Slot) -> int:
    """Narrow the scales of codes that have become far too large; no value moves.

    Returns:
        The number of scales that this process counts.
    """
    # a first step leaves given scales as they are
    if slot.storage != WeightStorage.CODES or not slot.steps_done:
        return 0
    tensor = _encoded(slot)
    largest = tensor.largest()
    if not tensor.kept_scale.dim():
        largest = slot.ranks.largest(largest)
    new = narrowed_scale(largest, tensor.scale, tensor.format)
    lacks_residual = slot.spec.residual_bits and "residual" not in slot.state
    if bool((new == tensor.scale).all()) or lacks_residual:
        return 0
    if tensor.numel():
        rescale_codes(slot, scales_in_runs(tensor, new)[0])
    return counted_here(slot, _set_scale(slot, new, "has shrunk"))


def _set_scale(slot: Slot, new: Tensor, event: str) -> int:
    """Set new scales, to which the codes have been rounded already.

    Returns:
        The number of scales that have changed.
    """
    tensor = _encoded(slot)
    count = int((new != tensor.scale).sum())
    if not count:
        return 0
    _LOG.info(
        "%s of shape %s %s: %s",
        tensor.format.name,
        tuple(tensor.shape),
        event,
        describe_change(tensor.scale, new),
    )
    tensor.set_scale_(new)
    slot.kept_scale, _ = scales_in_runs(tensor)
    for stale in ("scale", "arrays"):
        slot.__dict__.pop(stale, None)
    return count


def counted_here(slot: Slot, count: int) -> int:
    """Return the number of scales that this process counts.

    A scale that all processes share is counted by the first of them.
    """
    return 0 if has_one_scale(slot) and slot.ranks.rank else count
