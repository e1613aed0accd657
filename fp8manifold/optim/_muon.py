"""A step of Muon: of its momentum, and then of the weights along the orthogonal factor of that."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fp8manifold.optim._eager_step import block_noise, blocks_of, run_eager
from fp8manifold.optim._geometry import stiffness_factor
from fp8manifold.optim._hyper import HYPER, Hyper
from fp8manifold.optim._job import Job
from fp8manifold.optim._moments import store_averages
from fp8manifold.optim._run import run
from fp8manifold.optim._step import Outcome
from fp8manifold.optim._variant import BOUNDS, Variant
from fp8manifold.optim._weights import load_weights, reciprocal_scale

__all__ = ["along", "take_muon_step"]

_BUFFER = "momentum_buffer"
_STATE: Final = (_BUFFER, BOUNDS[_BUFFER])
_RATE: Final = HYPER.index("rate")


def take_muon_step(
    job: Job,
    numbers: Tensor,
    keys: Tensor,
    orthogonal: Callable[[Tensor], Tensor],
    *,
    compile: bool | None,  # noqa: A002  # torch's word
    observed: bool = False,
) -> list[Outcome]:
    """Take the step in place.

    .. math:: m \\leftarrow \\mu m + (1 - \\mu) g, \\quad u = (1 - \\mu) g + \\mu m, \\quad
              d = F \\, \\mathrm{factor}(F u), \\quad F = (S / S_{ref})^k

    where ``u = m`` without Nesterov, and all that follows is that of any other direction ``d``.

    Args:
        job: what to step, its variant's direction ``muon``.
        numbers: a row of hyperparameters, in the dtype that is computed in.
        keys: a row of round keys.
        orthogonal: from ``F u``, in the dims of the job's layout, to its orthogonal factor in the same.
        compile: True, False, or None for what pays.
        observed: whether to return what each part asked for, for which the step is taken eagerly.
    """
    injects = job.variant.injects
    average, mixed = _averaged(job, numbers, keys, compile, keep=injects)
    if job.variant.stiffness != "none":
        mixed = torch.cat([part * _stiffness(job, arrays, numbers) for arrays, part, _ in _parts(job, mixed)])
    factor = orthogonal(mixed).to(numbers.dtype)
    if not (observed or injects):
        run(along(job, factor), numbers, keys, compile=compile)
        return []
    outcomes = run_eager(along(job, factor), numbers, observed=True)
    if injects:
        _inject(job, average, torch.cat([outcome.target for outcome in outcomes]), _ratio(mixed, factor), numbers)
    return outcomes


def _averaged(
    job: Job,
    numbers: Tensor,
    keys: Tensor,
    compile: bool | None,  # noqa: A002
    *,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Advance the momentum, where it is to be kept as floats beside the state, and give what is orthogonalised.

    It is a step of a float weight of 0 by -1 along ``u``.
    """
    variant, held = job.variant, {name: job.held[name] for name in _STATE if name in job.held}
    if variant.storage == "plain" and variant.moments == "float32":
        return _averaged_as_torch(job, numbers)
    if keep and variant.averages:
        held[_BUFFER] = job.held[_BUFFER].to(numbers.dtype, copy=True)
    alone = _of_the_average(replace(variant, moments="float32") if keep else variant)
    weight = torch.zeros(job.layout.dims, dtype=numbers.dtype, device=numbers.device)
    held |= {"weight": weight, "gradient": job.held["gradient"]}
    numbers = numbers.clone()
    numbers[_RATE] = -1
    run(Job(alone, job.layout, held, job.words, offset=job.offset), numbers, keys, compile=compile)
    return held.get(_BUFFER, weight).view(job.layout.dims), weight


def _averaged_as_torch(job: Job, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """With the roundings of ``torch.optim.Muon``: products in bfloat16 magnify a difference in the last bit."""
    hyper, gradient = Hyper(numbers), job.arrays["gradient"].to(numbers.dtype)
    gradient = -gradient if job.variant.maximize else gradient
    if not job.variant.averages:
        return gradient, gradient
    average = job.arrays[_BUFFER].lerp_(gradient, hyper["gain1"])
    return average, torch.lerp(gradient, average, hyper["beta1"]) if job.variant.nesterov else average


def along(job: Job, direction: Tensor) -> Job:
    """The job of a step along a direction that is given: SGD's of that gradient, without an average."""
    held = {name: tensor for name, tensor in job.held.items() if name not in _STATE} | {
        "gradient": direction.contiguous()
    }
    return replace(job, variant=_of_the_weights(job.variant), held=held)


@cache
def _of_the_average(variant: Variant) -> Variant:
    return replace(variant, storage="plain", writeback="nearest", fmt=None, stiffness="none", decays=False)


@cache
def _of_the_weights(variant: Variant) -> Variant:
    writeback = variant.rule.rounding if variant.rule.injects else variant.writeback
    plain = replace(variant, averages=False, nesterov=False, maximize=False, moments="float32")
    return replace(plain, direction="sgd", writeback=writeback)


def _stiffness(job: Job, arrays: dict[str, Tensor], numbers: Tensor) -> Tensor:
    return stiffness_factor(job.variant, load_weights(job.variant, arrays, numbers.dtype), arrays, Hyper(numbers))


def _ratio(mixed: Tensor, factor: Tensor) -> float:
    """What a small change of the momentum is divided by in the step: the factor is a matrix of another size."""
    return float(mixed.double().norm() / factor.double().norm().clamp(min=1e-30))


def _inject(job: Job, average: Tensor, target: Tensor, ratio: float, numbers: Tensor) -> None:
    """Give what the rounding took from the weights to their momentum, as if the step were linear in it."""
    inject = ratio * Hyper(numbers)["inject"]
    for (arrays, part, start), (_, asked, _) in zip(_parts(job, average), _parts(job, target), strict=True):
        weights = load_weights(job.variant, arrays, numbers.dtype)
        error = (asked - weights.x) / reciprocal_scale(job.variant, arrays)
        if job.variant.stiffness != "none":
            error = error / _stiffness(job, arrays, numbers).square()
        noise = block_noise(job, arrays["gradient"], start).get("moments")
        stored = store_averages(job.variant, {_BUFFER: part - error * inject}, arrays, noise, None)
        arrays[_BUFFER].copy_(stored[_BUFFER])


def _parts(job: Job, whole: Tensor) -> Iterator[tuple[dict[str, Tensor], Tensor, int]]:
    """The job's arrays some rows at a time, those rows of another array, and the position of their first element."""
    row = 0
    for arrays, start in blocks_of(job):
        count = arrays["gradient"].shape[0]
        yield arrays, whole[row : row + count], start
        row += count
