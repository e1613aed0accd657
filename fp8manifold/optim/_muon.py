"""Steps of whole matrices, by one process or by several."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold._ranks import Share, share_of
from fp8manifold.optim._backends import block_noise, blocks_of, run_all, run_eager, tables_of
from fp8manifold.optim._directions import NUMBERS, named
from fp8manifold.optim._geometry import load_weights, reciprocal_scale, stiffness_factor
from fp8manifold.optim._slot import Slot
from fp8manifold.optim._spec import LARGEST, Spec
from fp8manifold.optim._step import Outcome, store_averages
from fp8manifold.optim._views import StepView, viewed
from fp8manifold.random_bits import mixed_word

FactorOf = Callable[[dict[str, Any], Tensor, Tensor], Tensor]
"""Of group, parameter and what has the layout of its step: the orthogonal factor, in that layout."""

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Of the quintic that takes singular values of 0 .. 1 to about 1 (Jordan et al. 2024)."""

ADJUSTMENTS: Final = ("original", "match_rms_adamw", "spectral_unclamped")
"""How a step's size follows from the shape of a matrix, as ``torch.optim.Muon`` spells it; None is ``original``."""

SHAPES: Final = ("auto", "flatten", "batch")
"""What a parameter of more than two dimensions is: nothing that can be known, one matrix, or one matrix an entry."""

ALL_TAKEN_IN: Final = {"beta1": 1.0, "gain1": 0.0}
"""The numbers of a step whose momentum is complete, along a gradient of zeros."""

_BUFFER = "momentum_buffer"
_STATE: Final = (_BUFFER, LARGEST)
_RATE: Final = NUMBERS.index("rate")
_TOGETHER: Final = 2**20  # weights


def take_muon_steps(slots: Sequence[Slot], numbers: Tensor, keys: Tensor, factor_of: FactorOf) -> None:
    """Take steps in place.

    .. math:: m \\leftarrow \\mu m + (1 - \\mu) g, \\quad u = (1 - \\mu) g + \\mu m, \\quad
              d = F \\, \\mathrm{factor}(F u), \\quad F = (S / S_{ref})^k

    where ``u = m`` without Nesterov, and all that follows is that of any other direction ``d``.

    Args:
        slots: what to step, their specs' direction ``muon``; none injects errors.
        numbers: a row of hyperparameters each, in the dtype that is computed in.
        keys: a row of round keys each.
        factor_of: from ``F u``, in the dims of a slot's layout, to its orthogonal factor in the same.
    """
    for some in _in_turn(slots):
        part, rows, words = slots[some], numbers[some], keys[some]
        mixed = [mixed for _, mixed in mixed_of(part, rows, words)]
        steps = [
            along(slot, _as_gradient(factor_of(slot.group, slot.parameter, each), numbers))
            for slot, each in zip(part, mixed, strict=True)
        ]
        run_all(steps, rows, words, [slot.group["compile"] for slot in part])


def take_muon_step(slot: Slot, numbers: Tensor, keys: Tensor, factor_of: FactorOf) -> list[Outcome]:
    """Take one such step eagerly, injecting errors or not: what each part of it asked for."""
    ((average, mixed),) = mixed_of([slot], numbers[None], keys[None])
    factor = factor_of(slot.group, slot.parameter, mixed)
    return take_along(slot, numbers, average, factor, ratio_of(mixed, factor) if slot.spec.injects else 1.0)


def take_in(slot: Slot, before: int) -> None:
    """Take one of several gradients into a momentum, and no step: those of a step count as their sum.

    .. math:: m \\leftarrow \\mu m + (1 - \\mu) g_1, \\qquad m \\leftarrow m + (1 - \\mu) g_i

    Args:
        slot: of a step with the gradient; its numbers are those of one.
        before: how many gradients of the step there were; each rounding of the momentum has draws of its own.
    """
    slot.numbers |= {"beta1": 1.0 if before else slot.group["momentum"], "gain1": 1 - slot.group["momentum"]}
    slot.key = slot.key._replace(stream=mixed_word(slot.key.stream, before)) if before else slot.key
    if slot.spec.injects:
        slot.spec = replace(slot.spec, writeback=slot.spec.rule.rounding)
    ((_, numbers, keys),) = tables_of([slot])
    mixed_of([slot], numbers, keys)


def mixed_of(slots: Sequence[Slot], numbers: Tensor, keys: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Advance each momentum; it, as floats where it is to be kept beside the state, and what is orthogonalised.

    It is a step of a float weight of 0 by -1 along ``u``.
    """
    averaging = [None if _is_as_torch(slot) else _averaging(slot, numbers.dtype) for slot in slots]
    steps = [i for i, step in enumerate(averaging) if step is not None]
    if steps:
        rows = numbers[steps]
        rows[:, _RATE] = -1
        run_all(
            [step for step in averaging if step is not None],
            rows,
            keys[steps],
            [slots[i].group["compile"] for i in steps],
        )
    found = []
    for slot, step, on_host in zip(slots, averaging, numbers, strict=True):
        row = on_host.to(slot.tensors["weight"].device, non_blocking=True)
        if step is None:
            average, mixed = _averaged_as_torch(slot, row)
        else:
            mixed = step.tensors["weight"]
            average = step.tensors.get(_BUFFER, mixed).view(slot.view.dims)
        if slot.spec.stiffness != "none":
            mixed = torch.cat([part * _stiffness(slot, arrays, row) for arrays, part, _ in _parts(slot, mixed)])
        found.append((average, mixed))
    return found


def take_along(slot: Slot, numbers: Tensor, average: Tensor, factor: Tensor, ratio: float) -> list[Outcome]:
    """Take the weights along an orthogonal factor, eagerly, and give the momentum what the rounding took.

    Args:
        slot, numbers: as in :func:`take_muon_step`.
        average: what :func:`mixed_of` gave.
        factor: in the dims of the slot's layout.
        ratio: :func:`ratio_of` the whole matrix, where an error is injected.
    """
    numbers = numbers.to(slot.tensors["weight"].device, non_blocking=True)
    outcomes = run_eager(along(slot, _as_gradient(factor, numbers)), numbers, observed=True)
    if slot.spec.injects:
        _inject(slot, average, torch.cat([outcome.target for outcome in outcomes]), ratio, numbers)
    return outcomes


def _in_turn(slots: Sequence[Slot]) -> Iterator[slice]:
    """Some slots at a time: small ones together, for calls cost more than they do, and large ones alone for memory."""
    first, weights = 0, 0
    for i, slot in enumerate(slots):
        if i > first and weights + slot.view.numel > _TOGETHER:
            yield slice(first, i)
            first, weights = i, 0
        weights += slot.view.numel
    if len(slots) > first:
        yield slice(first, len(slots))


def _as_gradient(factor: Tensor, numbers: Tensor) -> Tensor:
    return factor.to(numbers.dtype, memory_format=torch.contiguous_format)


def _is_as_torch(slot: Slot) -> bool:
    return slot.spec.storage == "plain" and slot.spec.moments == "float32"


def _averaging(slot: Slot, dtype: torch.dtype) -> Slot:
    """The slot of the momentum alone; where errors are injected it is kept as floats beside the state."""
    spec, tensors = slot.spec, {name: slot.tensors[name] for name in _STATE if name in slot.tensors}
    if spec.injects and spec.averages:
        tensors[_BUFFER] = slot.tensors[_BUFFER].to(dtype, copy=True)
    alone = _of_the_average(replace(spec, moments="float32") if spec.injects else spec)
    weight = torch.zeros(slot.view.dims, dtype=dtype, device=slot.tensors["weight"].device)
    tensors |= {"weight": weight, "gradient": slot.tensors["gradient"]}
    return Slot(alone, slot.view, tensors, slot.key, offset=slot.offset)


def _averaged_as_torch(slot: Slot, row: Tensor) -> tuple[Tensor, Tensor]:
    """With the roundings of ``torch.optim.Muon``: products in bfloat16 magnify a difference in the last bit."""
    gradient = slot.arrays["gradient"].to(row.dtype)
    gradient = -gradient if slot.spec.maximize else gradient
    if not slot.spec.averages:
        return gradient, gradient
    numbers, average = named(row), slot.arrays[_BUFFER]
    if slot.numbers.get("beta1") == 1:  # one more gradient of a step, or none that is left
        average.add_(gradient * numbers["gain1"])
    else:
        average.lerp_(gradient, numbers["gain1"])
    return average, torch.lerp(gradient, average, numbers["beta1"]) if slot.spec.nesterov else average


def along(slot: Slot, direction: Tensor) -> Slot:
    """The slot of a step along a direction that is given: SGD's of that gradient, without an average."""
    tensors = {name: tensor for name, tensor in slot.tensors.items() if name not in _STATE} | {
        "gradient": direction.contiguous()
    }
    return replace(slot, spec=_of_the_weights(slot.spec), tensors=tensors)


@cache
def _of_the_average(spec: Spec) -> Spec:
    return replace(spec, storage="plain", writeback="nearest", fmt=None, stiffness="none", decays=False)


@cache
def _of_the_weights(spec: Spec) -> Spec:
    writeback = spec.rule.rounding if spec.rule.injects else spec.writeback
    plain = replace(spec, averages=False, nesterov=False, maximize=False, moments="float32")
    return replace(plain, direction="sgd", writeback=writeback)


def _stiffness(slot: Slot, arrays: dict[str, Tensor], numbers: Tensor) -> Tensor:
    return stiffness_factor(slot.spec, load_weights(slot.spec, arrays, numbers.dtype), arrays, named(numbers))


def ratio_of(mixed: Tensor, factor: Tensor) -> float:
    """What a small change of the momentum is divided by in the step: the factor is a matrix of another size."""
    return float(mixed.double().norm() / factor.double().norm().clamp(min=1e-30))


def _inject(slot: Slot, average: Tensor, target: Tensor, ratio: float, numbers: Tensor) -> None:
    """Give what the rounding took from the weights to their momentum, as if the step were linear in it."""
    inject = ratio * named(numbers)["inject"]
    for (arrays, part, start), (_, asked, _) in zip(_parts(slot, average), _parts(slot, target), strict=True):
        weights = load_weights(slot.spec, arrays, numbers.dtype)
        error = (asked - weights.x) / reciprocal_scale(slot.spec, arrays)
        if slot.spec.stiffness != "none":
            error = error / _stiffness(slot, arrays, numbers).square()
        noise = block_noise(slot, arrays["gradient"], start).get("moments")
        stored = store_averages(slot.spec, {_BUFFER: part - error * inject}, arrays, noise, None)
        arrays[_BUFFER].copy_(stored[_BUFFER])


def _parts(slot: Slot, whole: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, int]]:
    """The slot's arrays some rows at a time, those rows of another array, and the position of their first element."""
    row = 0
    for arrays, start in blocks_of(slot):
        count = arrays["gradient"].shape[0]
        yield arrays, whole[row : row + count], start
        row += count


def orthogonal_factor(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """``U V^T`` of ``U diag(s) V^T``, nearly: singular values end between about 0.7 and 1.2, those of 0 at 0.

    .. math:: X_0 = \\frac{M}{\\max(\\lVert M \\rVert_F, \\epsilon)}, \\qquad
              X_{i+1} = a X_i + \\left( b\\, X_i X_i^T + c\\, (X_i X_i^T)^2 \\right) X_i

    Args:
        matrices: one matrix, or a batch of them along the first dimension; not changed.
        coefficients: a, b and c.
        steps: number of iterations.
        eps: lower bound of the norm: a matrix of zeros stays one.
        dtype: what the products are computed in; the matrices are divided by their norms in it too, but for float16,
            whose range neither may exceed: in float32 there.

    Returns:
        The factors, in ``dtype``.

    Source: Bernstein and Newhouse 2024; Jordan et al. 2024 (Muon) for the coefficients.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.promote_types(dtype, torch.bfloat16))  # with float16's range there would be no norm yet
    x = x.mT if tall else x
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)).to(dtype)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adjusted_rate(lr: float, adjustment: str | None, rows: int, columns: int) -> float:
    """The learning rate that a matrix of ``rows`` x ``columns`` is stepped with.

    ``match_rms_adamw`` gives a step the root mean square that AdamW's has, so that AdamW's rate serves.

    Source: Liu et al. 2025 (Muon is Scalable for LLM Training); Bernstein 2025 (Deriving Muon).
    """
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    if adjustment == "spectral_unclamped":
        return lr * math.sqrt(rows / columns)
    return lr * math.sqrt(max(1, rows / columns))


def as_matrices(x: Tensor, shape: str) -> Tensor:
    """A view of a tensor as one matrix or a batch of them: a kernel is one row a filter, experts are a batch."""
    return x if x.dim() == 2 or (x.dim() == 3 and shape == "batch") else x.flatten(1)


def product_dtype(device: torch.device) -> torch.dtype:
    """What products are computed in where nobody says: bfloat16 where the device has it, float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type == "cpu":
        return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.bfloat16


# ---------------------------------------------------------------------------------------------------------- shared muon


def take_shared_steps(
    slots: Sequence[Slot],
    factor_of: FactorOf,
    is_observed: Callable[[Slot], bool],
) -> list[StepView]:
    """Take the steps of the own rows.

    What is orthogonalised is sent to the matrix' owner in the dtype of its products, and the factor comes back in it;
    owners work at the same time, each on its own matrices.

    Args:
        slots: of every process the same parameters in the same order, with its rows, or none.
        factor_of: function of group, parameter and whole matrix to its orthogonal factor.
        is_observed: whether somebody looks on.

    Returns:
        What those who look on see of the own rows.
    """
    rows = {id(slot): (n[i], k[i]) for together, n, k in tables_of(slots) for i, slot in enumerate(together)}
    shares, owners = [_share(slot) for slot in slots], _owners(slots)
    averages, parts, wholes = [], [], []
    for slot, share, owner in zip(slots, shares, owners, strict=True):
        average, part = _mixed(slot, share, *rows[id(slot)])
        averages.append(average)
        parts.append(part)
        wholes.append(share.collected(part, owner))
    factors: list[Tensor | None] = []
    for slot, whole in zip(slots, wholes, strict=True):
        factor = None if whole is None else factor_of(slot.group, slot.parameter, whole)
        factors.append(None if whole is None or factor is None else factor.to(whole.dtype).contiguous())
    views = []
    for i, (slot, share, owner) in enumerate(zip(slots, shares, owners, strict=True)):
        ratio, whole, factor = torch.ones((), dtype=torch.float64, device=parts[i].device), wholes[i], factors[i]
        if slot.spec.injects:
            if whole is not None and factor is not None:
                ratio.fill_(ratio_of(whole, factor))
            share.ranks.sent(ratio, owner)
        own = share.handed_out(factor, owner, parts[i])
        if not slot.tensors["weight"].numel():
            continue
        numbers, keys = rows[id(slot)]
        factor = own.reshape(slot.view.dims)
        if not (slot.spec.injects or is_observed(slot)):
            run_all([along(slot, factor.to(numbers.dtype))], numbers[None], keys[None], [slot.group["compile"]])
            continue
        take = partial(take_along, slot, numbers, averages[i], factor, float(ratio))
        if is_observed(slot):
            views.append(viewed(slot.parameter, along(slot, slot.tensors["gradient"]), numbers, take))
        else:
            take()
    return views


def _share(slot: Slot) -> Share:
    share = share_of(slot.parameter)
    assert share is not None
    return share


def _owners(slots: Sequence[Slot]) -> list[int]:
    """Ranks in turn, the largest matrices first."""
    owners = [0] * len(slots)
    by_size = sorted(range(len(slots)), key=lambda i: -slots[i].parameter.numel())
    for turn, i in enumerate(by_size):
        owners[i] = turn % _share(slots[i]).ranks.size
    return owners


def _mixed(slot: Slot, share: Share, numbers: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The own rows of what is orthogonalised, as a matrix in what it is sent in."""
    columns = share.shape[1:].numel()
    if slot.tensors["weight"].numel():
        ((average, mixed),) = mixed_of([slot], numbers[None], keys[None])
    else:
        average = mixed = torch.zeros(0, columns, dtype=numbers.dtype, device=slot.tensors["weight"].device)
    dtype = slot.group["ns_dtype"] or product_dtype(mixed.device)
    return average, mixed.reshape(-1, columns).to(mixed.dtype if slot.spec.injects else dtype)
