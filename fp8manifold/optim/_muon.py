"""A step of Muon in two passes over a matrix: its momentum, and the step along the orthogonal factor of that."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fp8manifold.optim._engine import Job, block_noise, blocks_of, run_eager
from fp8manifold.optim._geometry import stiffness_factor
from fp8manifold.optim._hyper import Hyper
from fp8manifold.optim._moments import BOUNDS, load_averages, prepare, store_averages
from fp8manifold.optim._step import Outcome
from fp8manifold.optim._weights import load_weights, reciprocal_scale

__all__ = ["along", "take_muon_step"]

_BUFFER = "momentum_buffer"


def take_muon_step(
    job: Job, numbers: Tensor, orthogonal: Callable[[Tensor], Tensor], *, observed: bool = False
) -> list[Outcome]:
    """Take the step in place, eagerly.

    .. math:: m \\leftarrow \\mu m + (1 - \\mu) g, \\quad u = (1 - \\mu) g + \\mu m, \\quad
              d = F \\, \\mathrm{factor}(F u), \\quad F = (S / S_{ref})^k

    where ``u = m`` without Nesterov, and all that follows is that of any other direction ``d``.

    Args:
        job: what to step, its variant's direction ``muon``.
        numbers: a row of hyperparameters, in the dtype that is computed in.
        orthogonal: from ``F u``, in the dims of the job's layout, to its orthogonal factor in the same.
        observed: whether to return what each part asked for.
    """
    hyper = Hyper(numbers)
    injects = job.variant.writeback == "momentum" and job.variant.storage in ("codes", "grid")
    averages, mixed = _averaged(job, numbers, keep=injects)
    factor = orthogonal(mixed).to(numbers.dtype)
    outcomes = run_eager(along(job, factor), numbers, observed=observed or injects)
    if injects:
        target = torch.cat([outcome.target for outcome in outcomes])
        _inject(job, averages, target, _ratio(mixed, factor), hyper)
    return outcomes


def _averaged(job: Job, numbers: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Advance the momentum; where it is to be kept, as floats beside the state. And what is to be orthogonalised."""
    kept, mixed = [], []
    for arrays, start in blocks_of(job):
        average, direction, prepared = _advance(job, arrays, numbers)
        mixed.append(direction)
        if keep:
            kept.append(average)
        elif job.variant.averages:
            _store(job, arrays, prepared, average, start)
    return torch.cat(kept) if kept else torch.empty(0), torch.cat(mixed)


def _advance(job: Job, arrays: dict[str, Tensor], numbers: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    variant, hyper, dtype = job.variant, Hyper(numbers), numbers.dtype
    gradient = arrays["gradient"].to(dtype)
    gradient = -gradient if variant.maximize else gradient
    prepared = prepare(variant, arrays, gradient, hyper) if job.blockwise else {}
    average = direction = gradient
    if variant.averages:
        before = load_averages(variant, arrays | prepared, dtype)[_BUFFER]
        average = _mixture(job, before, gradient, hyper["beta1"], hyper["gain1"])
        direction = _mixture(job, gradient, average, hyper["gain1"], hyper["beta1"]) if variant.nesterov else average
    if variant.stiffness != "none":
        direction = direction * stiffness_factor(variant, load_weights(variant, arrays, dtype), arrays, hyper)
    return average, direction, prepared


def _mixture(job: Job, x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
    """``of_x x + of_y y``; for floats with the rounding of ``torch.optim.Muon``, which bfloat16 products magnify."""
    if job.variant.storage == "plain" and job.variant.moments == "float32":
        return torch.lerp(x, y, of_y)
    return x * of_x + y * of_y


def _store(job: Job, arrays: dict[str, Tensor], prepared: dict[str, Tensor], average: Tensor, start: int) -> None:
    noise = block_noise(job, arrays["gradient"], start).get("moments")
    stored = store_averages(job.variant, {_BUFFER: average}, arrays | prepared, noise, None)
    for name, value in stored.items():
        arrays[name].copy_(value)
    if BOUNDS[_BUFFER] in prepared:
        arrays[BOUNDS[_BUFFER]].copy_(prepared[BOUNDS[_BUFFER]])


def along(job: Job, direction: Tensor) -> Job:
    """The job of a step along a direction that is given: SGD's of that gradient, without an average."""
    variant = replace(
        job.variant,
        direction="sgd",
        averages=False,
        nesterov=False,
        maximize=False,
        moments="float32",
        writeback="stochastic" if job.variant.writeback == "momentum" else job.variant.writeback,
    )
    arrays = {name: a for name, a in job.arrays.items() if name not in (_BUFFER, BOUNDS[_BUFFER])}
    return Job(variant, job.layout, arrays | {"gradient": direction}, job.words, job.offset)


def _ratio(mixed: Tensor, factor: Tensor) -> float:
    """What a small change of the momentum is divided by in the step: the factor is a matrix of another size."""
    return float(mixed.double().norm() / factor.double().norm().clamp(min=1e-30))


def _inject(job: Job, average: Tensor, target: Tensor, ratio: float, hyper: Hyper) -> None:
    """Give what the rounding took from the weights to their momentum, as if the step were linear in it."""
    for arrays, part, asked, start in _with_parts(job, average, target):
        weights = load_weights(job.variant, arrays, hyper["rate"].dtype)
        error = (asked - weights.x) / reciprocal_scale(job.variant, arrays)
        if job.variant.stiffness != "none":
            factor = stiffness_factor(job.variant, weights, arrays, hyper)
            error = error / (factor * factor)
        _store(job, arrays, {}, part - error * (ratio * hyper["inject"]), start)


def _with_parts(job: Job, *wholes: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor, int]]:
    row = 0
    for arrays, start in blocks_of(job):
        count = arrays["gradient"].shape[0]
        average, target = (whole[row : row + count] for whole in wholes)
        yield arrays, average, target, start
        row += count
