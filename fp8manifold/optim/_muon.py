"""Muon's steps of whole matrices, by one process or by several.

    first half    momentum and the mix u of it and the gradient     `average`, by a
                  times F = (S / S_ref)^k                           backend
    in between    the orthogonal factor of the matrix F u           `_factors`, torch
    second half   w - lr a F factor, rounded once                   `_write`, by a backend

Both halves are ordinary steps of a slot with another spec (`Spec.first_half`,
`Spec.second_half`): the first writes a direction in place of weights, the second takes
one in place of the gradient. In between matrices are whole. Of a sharded one every
process has some rows: they are sent to its owner, which computes the factor and sends
its rows back (`_sharded_factors`).

In C and Triton the first half is of the direction ``muon``, the second one of ``sgd``
without a moment, whose direction is the gradient: here the factor.

Under the write-back ``momentum`` the rounding error goes into the momentum after the
second half (`_write_alone`), as if the step were linear in it, with the ratio of the
norms of ``F u`` and its factor as the slope. Such a momentum is a float copy between
the halves. `StiffnessMuon._run` calls `take_muon_steps` for steps without a plan. Planned
ones are `NativeMuonBatch` on a CPU, `TritonMuonStep` on a GPU.
"""

import math
from collections.abc import Iterator, Sequence, Set
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8manifold._interface import MomentStorage, StiffnessPower, WeightStorage
from fp8manifold.optim import _eager_step
from fp8manifold.optim._backends import run_all
from fp8manifold.optim._directions import numbers_by_name
from fp8manifold.optim._scales import fit_scales
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import LARGEST, Spec

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of a quintic that takes singular values of 0 .. 1 to about 1.

Source: Jordan et al. 2024.
"""
ADJUSTMENTS: Final = ("original", "match_rms_adamw", "spectral_unclamped")
"""Rules for the size of a step by the shape of a matrix, named as in ``torch.optim.Muon``.

None is ``original``.
"""


class MatrixShape(StrEnum):
    """A reading of a parameter as matrices; the option ``matrix_shape`` is the plain word."""

    #: matrices as they are; other shapes are refused
    AUTO = "auto"
    #: a row for each index of the first dimension
    FLATTEN = "flatten"
    #: a matrix for each index of the first of three dimensions
    BATCH = "batch"
    #: stored with inputs before outputs
    TRANSPOSED = "transposed"


MATRIX_SHAPES: Final = tuple(shape.value for shape in MatrixShape)
_BUFFER = "momentum_buffer"
_STATE: Final = (_BUFFER, LARGEST)
_LARGEST_BATCH: Final = 2**20  # weights
_LARGEST_PRODUCT: Final = 2**24  # weights
"""A GPU multiplies matrices of one shape together, up to this size. The float32 copies of
such a batch are all that a step holds at once."""


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


def batches_of(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield the slots in batches.

    Small matrices go together, as calls cost more than their work. Large ones go alone,
    for memory. Those of a batch on a GPU have one shape, and their factors are computed
    together.
    """
    slots_by_product: dict[_Product | None, list[Slot]] = {}
    for slot in slots:
        slots_by_product.setdefault(_product_of(slot), []).append(slot)
    for product, alike in slots_by_product.items():
        yield from _portions(alike, _LARGEST_BATCH if product is None else _LARGEST_PRODUCT)


def _portions(slots: Sequence[Slot], most: int) -> Iterator[list[Slot]]:
    """Yield slots in their order, together at most so many weights, or one slot."""
    portion: list[Slot] = []
    weights = 0
    for slot in slots:
        if portion and weights + slot.view.numel > most:
            yield portion
            portion = []
            weights = 0
        portion.append(slot)
        weights += slot.view.numel
    if portion:
        yield portion


class Iterations(NamedTuple):
    """The options of `orthogonal_factor`, in its order."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float
    dtype: torch.dtype


def iterations_of(slot: Slot) -> Iterations:
    """Return the options by which the factor of a slot's matrices is computed."""
    group = slot.group
    return Iterations(
        coefficients=tuple(group["ns_coefficients"]),
        steps=group["ns_steps"],
        eps=group["eps"],
        dtype=_product_dtype(slot),
    )


class _Product(NamedTuple):
    """What matrices have in common that a GPU multiplies together."""

    device: torch.device
    shape: torch.Size
    matrix_shape: str
    iterations: Iterations


def _product_of(slot: Slot) -> _Product | None:
    """Return the product that a slot's factor is computed by; None for one of its own.

    On a CPU a product of many small matrices is no faster, and its last bits depend on
    how many there are.
    """
    if not multiplies_together(slot.device):
        return None
    return _Product(
        device=slot.device,
        shape=slot.parameter.shape,
        matrix_shape=slot.group["matrix_shape"],
        iterations=iterations_of(slot),
    )


def multiplies_together(device: torch.device) -> bool:
    """Return True if matrices of one shape are multiplied together on a device."""
    return device.type == "cuda"


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


def averages_as_torch(slot: Slot) -> bool:
    """Return True for float weights and momenta, whose sums have torch's roundings."""
    return slot.storage == WeightStorage.PLAIN and slot.spec.moments == MomentStorage.FLOAT32


def first_half(slot: Slot, direction: Tensor | None = None) -> Slot:
    """Return a slot whose step ends with the direction, in place of weights.

    A momentum that will take an error is a float copy of that of the state. The direction
    is written into zeros: those given, or new ones.
    """
    tensors = {name: slot.tensors[name] for name in _STATE if name in slot.tensors}
    if slot.spec.injects and slot.spec.has_moments:
        tensors[_BUFFER] = tensors[_BUFFER].to(slot.dtype, copy=True)
    if direction is None:
        direction = torch.zeros(slot.view.dims, dtype=slot.dtype, device=slot.device)
    tensors |= {"weight": direction, "gradient": slot.tensors["gradient"]}
    return slot.replaced(spec=slot.spec.first_half, tensors=tensors, kept_scale=None)


def _momentum_and_mix(slot: Slot, half: Slot | None) -> tuple[Tensor, Tensor]:
    """Return the momentum and ``F u``, of the first half if a backend has taken it."""
    if half is not None:
        mix = half.weight
        momentum = half.tensors.get(_BUFFER, mix).view(slot.view.dims)
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
    momentum = slot.arrays[_BUFFER] if slot.spec.has_moments else None
    return averaged_as_torch(slot.spec, momentum, gradient, slot.number_row)


def averaged_as_torch(
    spec: Spec, momentum: Tensor | None, gradient: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """Update a momentum in place with torch's roundings, and return it and ``u``.

    Products in bfloat16 magnify a difference in the last bit, so the sums have to be
    those of ``torch.optim.Muon``.

    Args:
        spec: of the step.
        momentum: None for a step without one.
        gradient: in the dtype of the momentum.
        row: the numbers of the step.
    """
    gradient = -gradient if spec.maximize else gradient
    if momentum is None:
        return gradient, gradient
    numbers = numbers_by_name(row)
    momentum.lerp_(gradient, numbers["gain1"])
    if spec.nesterov:
        return momentum, torch.lerp(gradient, momentum, numbers["beta1"])
    return momentum, momentum


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
    if len(slots) > 1 and _product_of(slots[0]) is not None:
        factors = list(factors_of_batch(slots[0], torch.stack(mixes)))
    else:
        factors = list(map(_factor_of, slots, mixes))
    ratios = []
    for slot, mix, factor in zip(slots, mixes, factors, strict=True):
        ratios.append(_ratio(mix, factor) if slot.spec.injects else 1.0)
    return list(zip(factors, ratios, strict=True))


def factors_of_batch(slot: Slot, mixes: Tensor) -> Tensor:
    """Return the orthogonal factors of several parameters that are alike, as `mixes` has them.

    One alone is multiplied as on its own.

    Args:
        slot: of one of the parameters.
        mixes: ``F u`` of each, (parameters, *dims of a view).
    """
    if len(mixes) == 1:
        return _factor_of(slot, mixes[0]).unsqueeze(0)
    group = slot.group
    shape = slot.parameter.shape
    rows, columns = as_matrices(mixes[0].view(shape), group["matrix_shape"]).shape[-2:]
    matrices = mixes.reshape(-1, rows, columns)
    return orthogonal_factor(matrices, *iterations_of(slot)).reshape(mixes.shape)


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
            rows = rows.to(_product_dtype(slot))
        local_rows.append(rows)
        # None, except in the owner
        matrices.append(slot.share.collect_rows(rows, owner))
    factors = [
        None if matrix is None else _factor_of(slot, matrix).to(matrix.dtype).contiguous()
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


def _factor_of(slot: Slot, mix: Tensor) -> Tensor:
    """Return the orthogonal factor of each matrix of a whole parameter, like ``mix``."""
    matrices = as_matrices(mix.view(slot.parameter.shape), slot.group["matrix_shape"])
    return orthogonal_factor(matrices, *iterations_of(slot)).reshape(mix.shape)


def _product_dtype(slot: Slot) -> torch.dtype:
    dtype: torch.dtype = slot.group["ns_dtype"] or product_dtype(slot.parameter.device)
    return dtype


def _ratio(mix: Tensor, factor: Tensor) -> float:
    return float(mix.double().norm() / factor.double().norm().clamp(min=1e-30))


# The second half: weights


def second_half(slot: Slot, direction: Tensor) -> Slot:
    """Return a slot whose step follows a direction, in place of the gradient."""
    tensors = {name: tensor for name, tensor in slot.tensors.items() if name not in _STATE}
    tensors["gradient"] = _in_rows(slot, direction)
    return slot.replaced(spec=slot.spec.second_half, tensors=tensors)


def _in_rows(slot: Slot, direction: Tensor) -> Tensor:
    """Return a direction as the second half reads it: contiguous, in the slot's view."""
    # contiguous twice: a conversion to the dtype it has already leaves the factor of a
    # tall matrix transposed
    direction = direction.to(slot.dtype, memory_format=torch.contiguous_format).contiguous()
    return direction.view(slot.view.dims)


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
        moments = {_BUFFER: momentum_rows - error * inject}
        stored = _eager_step.store_moments(slot.spec, moments, new_arrays, noise, None)
        new_arrays[_BUFFER].copy_(stored[_BUFFER])
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


# Matrices alone: the factor, the rate that follows from their size, and how a parameter
# is read as matrices


def orthogonal_factor(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    r"""Return ``U V^T`` of ``U diag(s) V^T``, nearly, by Newton-Schulz iterations.

    Singular values end between about 0.7 and 1.2, those of 0 at 0.

    .. math:: X_0 = \frac{M}{\max(\lVert M \rVert_F, \epsilon)}, \qquad
              X_{i+1} = a X_i + \left( b\, X_i X_i^T + c\, (X_i X_i^T)^2 \right) X_i

    A matrix of zeros stays one, by ``eps``. Norms are computed in ``dtype`` too, for
    float16 in float32.

    Args:
        matrices: a matrix, or a batch of them.
        coefficients: ``a``, ``b`` and ``c``.
        steps: the number of iterations.
        eps: the least norm to divide by.
        dtype: that of the products and of the result.

    Source: Bernstein and Newhouse 2024; Jordan et al. 2024 (Muon) for the coefficients.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # in float16 the norm could overflow
    x = matrices.to(torch.promote_types(dtype, torch.bfloat16))
    x = x.mT if is_tall else x
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)).to(dtype)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    # autocast would choose another dtype
    with torch.autocast(x.device.type, enabled=False):
        for _ in range(steps):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def adjusted_rate(lr: float, adjustment: str | None, rows: int, columns: int) -> float:
    """Return the learning rate that a matrix of ``rows`` x ``columns`` is stepped with.

    Source: Liu et al. 2025 (Muon is Scalable for LLM Training); Bernstein 2025
    (Deriving Muon).
    """
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjustment == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def size_of_matrices(shape: Sequence[int], matrix_shape: str) -> tuple[int, int]:
    """Return rows and columns of each matrix of `as_matrices`."""
    is_batch = len(shape) == 3 and matrix_shape in (MatrixShape.BATCH, MatrixShape.TRANSPOSED)
    if len(shape) == 2 or is_batch:
        return shape[-2], shape[-1]
    return shape[0], math.prod(shape[1:])


def as_matrices(x: Tensor, matrix_shape: str) -> Tensor:
    """Return a view of a tensor as one matrix, or a batch of them.

    A kernel has a row for each filter; experts are a batch.
    """
    is_batch = x.dim() == 3 and matrix_shape in (MatrixShape.BATCH, MatrixShape.TRANSPOSED)
    return x if x.dim() == 2 or is_batch else x.flatten(1)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype of products: bfloat16 if the device has it, or float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "cpu":
        # builds for ARM Macs lack mkldnn and its operator
        has_mkldnn = torch.backends.mkldnn.is_available()
        if has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return torch.bfloat16
        return torch.float32
    return torch.bfloat16
