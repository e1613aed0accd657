"""Muon's steps of whole matrices: momentum, orthogonal factor, weights; by one process
or by several.
"""

import math
from collections.abc import Iterator, Sequence, Set
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fp8manifold.optim import _step
from fp8manifold.optim._backends import run_all
from fp8manifold.optim._directions import numbers_by_name
from fp8manifold.optim._scales import fit_scales
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import LARGEST

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that takes singular values of 0 .. 1 to about 1 (Jordan
et al. 2024).
"""
ADJUSTMENTS: Final = ("original", "match_rms_adamw", "spectral_unclamped")
"""Rules for the size of a step by the shape of a matrix, as ``torch.optim.Muon`` spells
them; None is ``original``.
"""
TRANSPOSED: Final = "transposed"
SHAPES: Final = ("auto", "flatten", "batch", TRANSPOSED)
"""Readings of a parameter: a matrix; of more than two dimensions one matrix, or one per
entry; a matrix, or one per entry, with a row for each input.
"""
_BUFFER = "momentum_buffer"
_STATE: Final = (_BUFFER, LARGEST)
_TOGETHER: Final = 2**20  # weights


def take_muon_steps(slots: Sequence[Slot], observed: Set[Slot]) -> list[_step.StepView]:
    r"""Take steps of the same matrices in every process, in place and in two halves, and
    show those that are observed.

    .. math:: m \leftarrow \mu m + (1 - \mu) g, \quad u = (1 - \mu) g + \mu m, \quad
              d = F \, \mathrm{factor}(F u), \quad F = (S / S_{ref})^k

    where ``u = m`` without Nesterov, and the second half is that of any other direction
    ``d``.
    """
    views = []
    sharded = [slot for slot in slots if slot.share is not None]
    for some in [sharded, *_in_turn([slot for slot in slots if slot.share is None])]:
        averaged = average(some)
        factors = _sharded_factors(some, averaged) if some is sharded else _factors(some, averaged)
        views += _write(some, [momentum for momentum, _ in averaged], factors, observed)
    return views


def _in_turn(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Some slots at a time: small ones together, as calls cost more than their work,
    large ones alone for memory.
    """
    some: list[Slot] = []
    weights = 0
    for slot in slots:
        if some and weights + slot.view.numel > _TOGETHER:
            yield some
            some, weights = [], 0
        some.append(slot)
        weights += slot.view.numel
    if some:
        yield some


# The first half: momentum


def average(slots: Sequence[Slot]) -> list[tuple[Tensor, Tensor]]:
    """Advance each momentum, and return it, as a float copy where an error is added
    later, with ``F u``.
    """
    as_torch = {
        slot for slot in slots if slot.storage == "plain" and slot.spec.moments == "float32"
    }
    halves = {
        slot: first_half(slot) for slot in slots if slot.weight.numel() and slot not in as_torch
    }
    run_all(list(halves.values()))
    return [_averaged(slot, halves.get(slot)) for slot in slots]


def first_half(slot: Slot) -> Slot:
    """The step of a slot as far as its direction; a momentum that takes an error later
    is floats beside the state.
    """
    tensors = {name: slot.tensors[name] for name in _STATE if name in slot.tensors}
    if slot.spec.injects and slot.spec.has_moments:
        tensors[_BUFFER] = tensors[_BUFFER].to(slot.dtype, copy=True)
    direction = torch.zeros(slot.view.dims, dtype=slot.dtype, device=slot.device)
    tensors |= {"weight": direction, "gradient": slot.tensors["gradient"]}
    return slot.replaced(spec=slot.spec.first_half, tensors=tensors, kept_scale=None)


def _averaged(slot: Slot, half: Slot | None) -> tuple[Tensor, Tensor]:
    if half is not None:
        mixed = half.weight
        momentum = half.tensors.get(_BUFFER, mixed).view(slot.view.dims)
    elif slot.weight.numel():
        momentum, mixed = _averaged_as_torch(slot)
    else:
        momentum = mixed = slot.weight.new_zeros((0, *slot.parameter.shape[1:]), dtype=slot.dtype)
    if slot.spec.stiffness != "none" and slot.weight.numel():
        mixed = torch.cat(
            [part * _stiffness(slot, arrays) for arrays, part, _ in _parts(slot, mixed)]
        )
    return momentum, mixed


def _averaged_as_torch(slot: Slot) -> tuple[Tensor, Tensor]:
    """Advance the momentum with torch's roundings: products in bfloat16 magnify a
    difference in the last bit.
    """
    numbers, gradient = numbers_by_name(slot.number_row), slot.arrays["gradient"].to(slot.dtype)
    gradient = -gradient if slot.spec.maximize else gradient
    if not slot.spec.has_moments:
        return gradient, gradient
    momentum = slot.arrays[_BUFFER]
    momentum.lerp_(gradient, numbers["gain1"])
    return momentum, torch.lerp(
        gradient, momentum, numbers["beta1"]
    ) if slot.spec.nesterov else momentum


# Between the halves: the orthogonal factor, and what it divides a small change of the
# momentum by


def _factors(
    slots: Sequence[Slot], averaged: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, float]]:
    found = []
    for slot, (_, mixed) in zip(slots, averaged, strict=True):
        factor = _orthogonal(slot, mixed)
        found.append((factor, _ratio(mixed, factor) if slot.spec.injects else 1.0))
    return found


def _sharded_factors(
    slots: Sequence[Slot], averaged: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, float]]:
    """Send each matrix to its owner in the dtype of products, and receive the own rows
    of its factor.
    """
    owners, parts, wholes = _owners(slots), [], []
    for slot, (_, mixed), owner in zip(slots, averaged, owners, strict=True):
        assert slot.share is not None
        part = mixed.reshape(-1, slot.share.shape[1:].numel())
        parts.append(part if slot.spec.injects else part.to(_product_dtype(slot)))
        wholes.append(slot.share.collect_rows(parts[-1], owner))
    factors = [
        None if whole is None else _orthogonal(slot, whole).to(whole.dtype).contiguous()
        for slot, whole in zip(slots, wholes, strict=True)
    ]
    found = []
    for slot, owner, part, whole, factor in zip(slots, owners, parts, wholes, factors, strict=True):
        assert slot.share is not None
        ratio = torch.ones((), dtype=torch.float64, device=part.device)
        if slot.spec.injects:
            if whole is not None and factor is not None:
                ratio.fill_(_ratio(whole, factor))
            slot.ranks.broadcast(ratio, owner)
        found.append((slot.share.scatter_rows(factor, owner, part), float(ratio)))
    return found


def _owners(slots: Sequence[Slot]) -> list[int]:
    """Ranks in turn, the largest matrices first."""
    owners = [0] * len(slots)
    by_size = sorted(range(len(slots)), key=lambda i: -slots[i].parameter.numel())
    for turn, i in enumerate(by_size):
        owners[i] = turn % slots[i].ranks.size
    return owners


def _orthogonal(slot: Slot, mixed: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of a whole parameter, in the shape that it
    is given in.
    """
    group = slot.group
    matrices = as_matrices(mixed.view(slot.parameter.shape), group["matrix_shape"])
    coefficients = tuple(group["ns_coefficients"])
    factor = orthogonal_factor(
        matrices, coefficients, group["ns_steps"], group["eps"], _product_dtype(slot)
    )
    return factor.reshape(mixed.shape)


def _product_dtype(slot: Slot) -> torch.dtype:
    dtype: torch.dtype = slot.group["ns_dtype"] or product_dtype(slot.device)
    return dtype


def _ratio(mixed: Tensor, factor: Tensor) -> float:
    return float(mixed.double().norm() / factor.double().norm().clamp(min=1e-30))


# The second half: weights


def second_half(slot: Slot, direction: Tensor) -> Slot:
    tensors = {name: tensor for name, tensor in slot.tensors.items() if name not in _STATE}
    # contiguous twice: a conversion to the dtype it has already leaves the factor of a
    # tall matrix transposed
    direction = (
        direction.to(slot.dtype, memory_format=torch.contiguous_format)
        .contiguous()
        .view(slot.view.dims)
    )
    return slot.replaced(spec=slot.spec.second_half, tensors=tensors | {"gradient": direction})


def _write(
    slots: Sequence[Slot],
    momenta: Sequence[Tensor],
    factors: Sequence[tuple[Tensor, float]],
    observed: Set[Slot],
) -> list[_step.StepView]:
    """Write weights along their factors; those of injected errors and observed ones
    eagerly, one by one.
    """
    halves = {
        slot: second_half(slot, f)
        for slot, (f, _) in zip(slots, factors, strict=True)
        if slot.weight.numel()
    }
    fit_scales([halves.get(slot, slot) for slot in slots])
    run_all([half for slot, half in halves.items() if not (slot.spec.injects or slot in observed)])
    views: list[_step.StepView] = []
    for slot, momentum, (_, ratio) in zip(slots, momenta, factors, strict=True):
        if slot in observed:
            views.append(
                _step.observe(
                    halves[slot], partial(_write_alone, slot, halves[slot], momentum, ratio)
                )
            )
        elif slot.spec.injects and slot in halves:
            _write_alone(slot, halves[slot], momentum, ratio)
    return views


def _write_alone(slot: Slot, half: Slot, momentum: Tensor, ratio: float) -> list[_step.StepOutcome]:
    """Write weights eagerly, and give the momentum the rounding error, as if the step
    were linear in it.
    """
    outcomes = _step.run_eager(half, observed=True)
    if not slot.spec.injects:
        return outcomes
    if slot.next_scale:
        slot.arrays["next_scale"] = half.arrays["next_scale"]
    inject, target = (
        ratio * numbers_by_name(slot.number_row)["inject"],
        torch.cat([outcome.target for outcome in outcomes]),
    )
    for (arrays, part, start), (_, asked, _) in zip(
        _parts(slot, momentum), _parts(slot, target), strict=True
    ):
        shift, arrays = _step.with_next_scale(arrays)
        asked = asked if shift is None else asked * shift
        error = (asked - _step.load_weights(slot.spec, arrays, slot.dtype).x) / (
            1 / arrays["scale"]
        )
        if slot.spec.stiffness != "none":
            error = error / _stiffness(slot, arrays).square()
        noise = _step.block_noise(slot, arrays["gradient"], start).get("moments")
        stored = _step.store_moments(
            slot.spec, {_BUFFER: part - error * inject}, arrays, noise, None
        )
        arrays[_BUFFER].copy_(stored[_BUFFER])
    return outcomes


def _stiffness(slot: Slot, arrays: dict[str, Tensor]) -> Tensor:
    return _step.stiffness_factor(
        slot.spec,
        _step.load_weights(slot.spec, arrays, slot.dtype),
        arrays,
        numbers_by_name(slot.number_row),
    )


def _parts(slot: Slot, whole: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, int]]:
    """The slot's arrays some rows at a time, those rows of another array, and the
    position of their first element.
    """
    row = 0
    for arrays, start in _step.blocks_of(slot):
        count = arrays["gradient"].shape[0]
        yield arrays, whole[row : row + count], start
        row += count


def orthogonal_factor(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    r"""``U V^T`` of ``U diag(s) V^T``, nearly: singular values end between about 0.7 and
    1.2, those of 0 at 0.

    .. math:: X_0 = \frac{M}{\max(\lVert M \rVert_F, \epsilon)}, \qquad
              X_{i+1} = a X_i + \left( b\, X_i X_i^T + c\, (X_i X_i^T)^2 \right) X_i

    A matrix of zeros stays one, by ``eps``. Norms are computed in ``dtype`` too, of
    float16 in float32.

    Source: Bernstein and Newhouse 2024; Jordan et al. 2024 (Muon) for the coefficients.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(
        torch.promote_types(dtype, torch.bfloat16)
    )  # in float16 the norm could overflow
    x = x.mT if tall else x
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)).to(dtype)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    with torch.autocast(x.device.type, enabled=False):  # which would have another dtype
        for _ in range(steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted_rate(lr: float, adjustment: str | None, rows: int, columns: int) -> float:
    """The learning rate that a matrix of ``rows`` x ``columns`` is stepped with.

    Source: Liu et al. 2025 (Muon is Scalable for LLM Training); Bernstein 2025
    (Deriving Muon).
    """
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjustment == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def as_matrices(x: Tensor, shape: str) -> Tensor:
    """A view of a tensor as one matrix or a batch of them: a kernel has a row per
    filter, experts are a batch.
    """
    is_batch = x.dim() == 3 and shape in ("batch", TRANSPOSED)
    return x if x.dim() == 2 or is_batch else x.flatten(1)


def product_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of products: bfloat16 where the device has it, float32
    elsewhere.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "cpu":
        there = (
            torch.backends.mkldnn.is_available()
        )  # builds for ARM Macs lack mkldnn and its operator
        return (
            torch.bfloat16
            if there and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            else torch.float32
        )
    return torch.bfloat16
