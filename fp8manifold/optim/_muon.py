"""Muon's steps without a plan, by one process or by several.

    first half    momentum and the mix u of it and the gradient     `average`, by a
                  times F = (S / S_ref)^k                           backend
    in between    the orthogonal factor of the matrix F u           `_factors`, torch
    second half   w - lr a F factor, rounded once                   `_write`, by a backend

The halves are slots of `_matrices.py`. In between matrices are whole. Of a sharded one
every process has some rows: they are sent to its owner, which computes the factor and
sends its rows back (`_sharded_factors`).

Under the write-back ``momentum`` the rounding error goes into the momentum after the
second half (`_write_alone`), as if the step were linear in it, with the ratio of the
norms of ``F u`` and its factor as the slope. Such a momentum is a float copy between
the halves.
"""

from collections.abc import Iterator, Sequence, Set
from functools import partial

import torch
from torch import Tensor

from fp8manifold._interface import StiffnessPower
from fp8manifold.optim import _eager_step
from fp8manifold.optim._backends import run_all
from fp8manifold.optim._directions import numbers_by_name
from fp8manifold.optim._matrices import (
    MOMENTUM,
    averaged_as_torch,
    averages_as_torch,
    batches_of,
    dtype_of_products,
    factor_of,
    factors_of,
    first_half,
    second_half,
)
from fp8manifold.optim._scales import fit_scales
from fp8manifold.optim._slot import Slot


def take_muon_steps(slots: Sequence[Slot], observed: Set[Slot]) -> list[_eager_step.StepView]:
    r"""Take steps of matrices in place, and return views of those that are observed.

    .. math:: m \leftarrow \mu m + (1 - \mu) g, \quad u = (1 - \mu) g + \mu m, \quad
              d = F \, \mathrm{factor}(F u), \quad F = (S / S_{ref})^k

    Without Nesterov ``u = m``. The second half is that of any other direction ``d``.
    Every process must take steps of the same sharded matrices.
    """
    views = []
    # sharded ones are one batch, maybe empty: all are sent before a factor is computed
    sharded = [slot for slot in slots if slot.share is not None]
    for batch in [sharded, *batches_of([slot for slot in slots if slot.share is None])]:
        averaged = average(batch)
        if batch is sharded:
            factors = _sharded_factors(batch, averaged)
        else:
            factors = _factors(batch, averaged)
        views += _write(batch, [momentum for momentum, _ in averaged], factors, observed)
    return views


# The first half: momentum


def average(slots: Sequence[Slot]) -> list[tuple[Tensor, Tensor]]:
    """Update the momenta, and return pairs of momentum and ``F u``.

    A momentum is a float copy if an error will be injected.
    """
    halves = {
        slot: first_half(slot)
        for slot in slots
        if slot.weight.numel() and not averages_as_torch(slot)
    }
    run_all(list(halves.values()))
    return [_momentum_and_mix(slot, halves.get(slot)) for slot in slots]


def _momentum_and_mix(slot: Slot, half: Slot | None) -> tuple[Tensor, Tensor]:
    """Return the momentum and ``F u``, of the first half if a backend has taken it."""
    if half is not None:
        mix = half.weight
        momentum = half.tensors.get(MOMENTUM, mix).view(slot.view.dims)
    elif slot.weight.numel():
        momentum, mix = _average_as_torch(slot)
    else:
        momentum = mix = slot.weight.new_zeros((0, *slot.parameter.shape[1:]), dtype=slot.dtype)
    if slot.spec.stiffness != StiffnessPower.NONE and slot.weight.numel():
        mix = torch.cat(
            [rows * _stiffness(slot, arrays) for arrays, rows, _ in _with_arrays(slot, mix)]
        )
    return momentum, mix


def _average_as_torch(slot: Slot) -> tuple[Tensor, Tensor]:
    """Update the momentum with torch's roundings, and return it and ``u``."""
    gradient = slot.arrays["gradient"].to(slot.dtype)
    momentum = slot.arrays[MOMENTUM] if slot.spec.has_moments else None
    return averaged_as_torch(slot.spec, momentum, gradient, slot.number_row)


# Between the halves: the orthogonal factor, and the ratio of the norms of F u and it. A
# small change of the momentum is divided by that ratio, about, on its way into the factor.


def _factors(
    slots: Sequence[Slot], averaged: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, float]]:
    """Return the factor of each matrix, and the ratio where an error will be injected.

    Args:
        slots: of one batch of `batches_of`.
        averaged: their momenta and ``F u``.
    """
    mixes = [mix for _, mix in averaged]
    factors = factors_of(slots, mixes)
    ratios = []
    for slot, mix, factor in zip(slots, mixes, factors, strict=True):
        ratios.append(_ratio(mix, factor) if slot.spec.injects else 1.0)
    return list(zip(factors, ratios, strict=True))


def _sharded_factors(
    slots: Sequence[Slot], averaged: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, float]]:
    """Return the local rows of the factor of each matrix, and the ratio.

    Each matrix is sent to its owner, in the dtype of products unless an error will be
    injected. All are sent before the first factor is computed.
    """
    owners = _owners(slots)
    local_rows = []
    matrices = []
    for slot, (_, mix), owner in zip(slots, averaged, owners, strict=True):
        assert slot.share is not None
        rows = mix.reshape(-1, slot.share.shape[1:].numel())
        if not slot.spec.injects:
            rows = rows.to(dtype_of_products(slot))
        local_rows.append(rows)
        # None, except in the owner
        matrices.append(slot.share.collect_rows(rows, owner))
    factors = [
        None if matrix is None else factor_of(slot, matrix).to(matrix.dtype).contiguous()
        for slot, matrix in zip(slots, matrices, strict=True)
    ]
    local_factors = []
    for slot, owner, rows, matrix, factor in zip(
        slots, owners, local_rows, matrices, factors, strict=True
    ):
        assert slot.share is not None
        ratio = torch.ones((), dtype=torch.float64, device=rows.device)
        if slot.spec.injects:
            if matrix is not None and factor is not None:
                ratio.fill_(_ratio(matrix, factor))
            slot.ranks.broadcast(ratio, owner)
        local_factors.append((slot.share.scatter_rows(factor, owner, rows), float(ratio)))
    return local_factors


def _owners(slots: Sequence[Slot]) -> list[int]:
    """Return the rank that owns each matrix: in turn, the largest matrices first."""
    owners = [0] * len(slots)
    by_size = sorted(range(len(slots)), key=lambda i: -slots[i].parameter.numel())
    for turn, i in enumerate(by_size):
        owners[i] = turn % slots[i].ranks.size
    return owners


def _ratio(mix: Tensor, factor: Tensor) -> float:
    return float(mix.double().norm() / factor.double().norm().clamp(min=1e-30))


# The second half: weights


def _write(
    slots: Sequence[Slot],
    momenta: Sequence[Tensor],
    factors: Sequence[tuple[Tensor, float]],
    observed: Set[Slot],
) -> list[_eager_step.StepView]:
    """Write weights along their factors, and return views of those that are observed.

    These, and slots whose errors are injected, are stepped eagerly and one by one.
    """
    halves = {
        slot: second_half(slot, factor)
        for slot, (factor, _) in zip(slots, factors, strict=True)
        if slot.weight.numel()
    }
    # shards without rows too: processes that share a scale fit it together
    fit_scales([halves.get(slot, slot) for slot in slots])
    run_all([half for slot, half in halves.items() if not (slot.spec.injects or slot in observed)])
    views: list[_eager_step.StepView] = []
    for slot, momentum, (_, ratio) in zip(slots, momenta, factors, strict=True):
        if slot in observed:
            half = halves[slot]
            views.append(
                _eager_step.observe(half, partial(_write_alone, slot, half, momentum, ratio))
            )
        elif slot.spec.injects and slot in halves:
            _write_alone(slot, halves[slot], momentum, ratio)
    return views


def _write_alone(
    slot: Slot, half: Slot, momentum: Tensor, ratio: float
) -> list[_eager_step.StepOutcome]:
    """Write weights eagerly, and inject the rounding error into the momentum."""
    outcomes = _eager_step.run_eager(half, observed=True)
    if not slot.spec.injects:
        return outcomes
    if slot.next_scale:
        slot.arrays["next_scale"] = half.arrays["next_scale"]
    inject = ratio * numbers_by_name(slot.number_row)["inject"]
    target = torch.cat([outcome.target for outcome in outcomes])
    for (arrays, momentum_rows, start), (_, target_rows, _) in zip(
        _with_arrays(slot, momentum), _with_arrays(slot, target), strict=True
    ):
        # weights may have been written at a new scale
        shift, new_arrays = _eager_step.with_next_scale(arrays)
        if shift is not None:
            target_rows = target_rows * shift
        after = _eager_step.load_weights(slot.spec, new_arrays, slot.dtype).x
        # by the reciprocal, as in `_eager_step.py` and native code
        error = (target_rows - after) / (1 / new_arrays["scale"])
        if slot.spec.stiffness != StiffnessPower.NONE:
            # F stands before the factor and in it
            error = error / _stiffness(slot, new_arrays).square()
        noise = _eager_step.block_noise(slot, new_arrays["gradient"], start).get("moments")
        moments = {MOMENTUM: momentum_rows - error * inject}
        stored = _eager_step.store_moments(slot.spec, moments, new_arrays, noise, None)
        new_arrays[MOMENTUM].copy_(stored[MOMENTUM])
    return outcomes


def _stiffness(slot: Slot, arrays: dict[str, Tensor]) -> Tensor:
    """Return ``F`` of some rows of a slot."""
    weights = _eager_step.load_weights(slot.spec, arrays, slot.dtype)
    return _eager_step.stiffness_factor(
        slot.spec, weights, arrays, numbers_by_name(slot.number_row)
    )


def _with_arrays(slot: Slot, whole: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, int]]:
    """Yield the slot's arrays some rows at a time, with these rows of another tensor.

    The third entry is the position of their first element in the slot.
    """
    row = 0
    for arrays, start in _eager_step.blocks_of(slot):
        count = arrays["gradient"].shape[0]
        yield arrays, whole[row : row + count], start
        row += count
