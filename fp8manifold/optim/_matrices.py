"""Muon's matrices: the parts of a step that planned and unplanned steps share.

    a parameter -> matrices       `as_matrices`, and the rate that follows from their shape
    batches of them               `batches_of`: which step, and are multiplied, together
    first half                    momentum and the mix u of it and the gradient
    in between                    the orthogonal factor of u: `orthogonal_factor`
    second half                   w - lr factor, rounded once

Both halves are ordinary steps of a slot with another spec (`Spec.first_half`,
`Spec.second_half`): the first writes a direction in place of weights, the second takes
one in place of the gradient. So any backend takes them.

In C and Triton the first half is of the direction ``muon``, the second one of ``sgd``
without a moment, whose direction is the gradient: here the factor.

Without a plan `take_muon_steps` of `_muon.py` puts the parts together. In planned steps
`NativeMuonBatch` does on a CPU, and `TritonMuonStep` on a GPU.
"""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fp8manifold._interface import MomentStorage, WeightStorage
from fp8manifold.optim._directions import numbers_by_name
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
MOMENTUM: Final = "momentum_buffer"
"""The entry of the state that has the momentum."""
_MOMENTUM_ENTRIES: Final = (MOMENTUM, LARGEST)
_LARGEST_BATCH: Final = 2**20  # weights
_LARGEST_PRODUCT: Final = 2**24  # weights
"""A GPU multiplies matrices of one shape together, up to this size. The float32 copies of
such a batch are all that a step holds at once."""


# How a parameter is read as matrices, and the rate that follows from their size


def as_matrices(x: Tensor, matrix_shape: str) -> Tensor:
    """Return a view of a tensor as one matrix, or a batch of them.

    A kernel has a row for each filter; experts are a batch.
    """
    is_batch = x.dim() == 3 and matrix_shape in (MatrixShape.BATCH, MatrixShape.TRANSPOSED)
    return x if x.dim() == 2 or is_batch else x.flatten(1)


def size_of_matrices(shape: Sequence[int], matrix_shape: str) -> tuple[int, int]:
    """Return rows and columns of each matrix of `as_matrices`."""
    is_batch = len(shape) == 3 and matrix_shape in (MatrixShape.BATCH, MatrixShape.TRANSPOSED)
    if len(shape) == 2 or is_batch:
        return shape[-2], shape[-1]
    return shape[0], math.prod(shape[1:])


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


# Their orthogonal factors, which are computed between the halves of a step


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
        dtype=dtype_of_products(slot),
    )


def factors_of(slots: Sequence[Slot], mixes: Sequence[Tensor]) -> list[Tensor]:
    """Return the orthogonal factor of each mix, of the slots of one batch of `batches_of`."""
    if len(slots) > 1 and multiplies_together(slots[0].device):
        return list(factors_of_batch(slots[0], torch.stack(list(mixes))))
    return list(map(factor_of, slots, mixes))


def factors_of_batch(slot: Slot, mixes: Tensor) -> Tensor:
    """Return the orthogonal factors of parameters that are alike.

    One alone is multiplied as on its own.

    Args:
        slot: of one of the parameters.
        mixes: ``F u`` of each, (parameters, *dims of a view).
    """
    if len(mixes) == 1:
        return factor_of(slot, mixes[0]).unsqueeze(0)
    group = slot.group
    shape = slot.parameter.shape
    rows, columns = as_matrices(mixes[0].view(shape), group["matrix_shape"]).shape[-2:]
    matrices = mixes.reshape(-1, rows, columns)
    return orthogonal_factor(matrices, *iterations_of(slot)).reshape(mixes.shape)


def factor_of(slot: Slot, mix: Tensor) -> Tensor:
    """Return the orthogonal factor of each matrix of a whole parameter, like ``mix``."""
    matrices = as_matrices(mix.view(slot.parameter.shape), slot.group["matrix_shape"])
    return orthogonal_factor(matrices, *iterations_of(slot)).reshape(mix.shape)


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


def dtype_of_products(slot: Slot) -> torch.dtype:
    dtype: torch.dtype = slot.group["ns_dtype"] or product_dtype(slot.parameter.device)
    return dtype


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


# Which matrices step, and are multiplied, together


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


# The halves: momentum, and weights


def first_half(slot: Slot, direction: Tensor | None = None) -> Slot:
    """Return a slot whose step ends with the direction, in place of weights.

    A momentum that will take an error is a float copy of that of the state. The direction
    is written into zeros: those given, or new ones.
    """
    tensors: dict[str, Tensor] = {
        name: slot.tensors[name] for name in _MOMENTUM_ENTRIES if name in slot.tensors
    }
    if slot.spec.injects and slot.spec.has_moments:
        tensors[MOMENTUM] = tensors[MOMENTUM].to(slot.dtype, copy=True)
    if direction is None:
        direction = torch.zeros(slot.view.dims, dtype=slot.dtype, device=slot.device)
    tensors |= {"weight": direction, "gradient": slot.tensors["gradient"]}
    return slot.replaced(spec=slot.spec.first_half, tensors=tensors, kept_scale=None)


def second_half(slot: Slot, direction: Tensor) -> Slot:
    """Return a slot whose step follows a direction, in place of the gradient."""
    tensors = {name: x for name, x in slot.tensors.items() if name not in _MOMENTUM_ENTRIES}
    tensors["gradient"] = _in_rows(slot, direction)
    return slot.replaced(spec=slot.spec.second_half, tensors=tensors)


def _in_rows(slot: Slot, direction: Tensor) -> Tensor:
    """Return a direction as the second half reads it: contiguous, in the slot's view."""
    # contiguous twice: a conversion to the dtype it has already leaves the factor of a
    # tall matrix transposed
    direction = direction.to(slot.dtype, memory_format=torch.contiguous_format).contiguous()
    return direction.view(slot.view.dims)


def averages_as_torch(slot: Slot) -> bool:
    """Return True for float weights and momenta, whose sums have torch's roundings."""
    return slot.storage == WeightStorage.PLAIN and slot.spec.moments == MomentStorage.FLOAT32


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
