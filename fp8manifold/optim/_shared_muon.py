"""Muon's steps of matrices whose rows several processes hold: one of them orthogonalises each, all step their rows."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fp8manifold._ranks import Share, share_of
from fp8manifold.optim._job import Job
from fp8manifold.optim._muon import FactorOf, along, mixed_of, product_dtype, ratio_of, take_along
from fp8manifold.optim._run import run_all, tables_of
from fp8manifold.optim._views import StepView, viewed

__all__ = ["take_shared_steps"]


def take_shared_steps(
    jobs: Sequence[Job],
    factor_of: FactorOf,
    is_observed: Callable[[Job], bool],
) -> list[StepView]:
    """Take the steps of the own rows.

    What is orthogonalised is sent to the matrix' owner in the dtype of its products, and the factor comes back in it;
    owners work at the same time, each on its own matrices.

    Args:
        jobs: of every process the same parameters in the same order, with its rows, or none.
        factor_of: function of group, parameter and whole matrix to its orthogonal factor.
        is_observed: whether somebody looks on.

    Returns:
        What those who look on see of the own rows.
    """
    rows = {id(job): (n[i], k[i]) for together, n, k in tables_of(jobs) for i, job in enumerate(together)}
    shares, owners = [_share(job) for job in jobs], _owners(jobs)
    averages, parts, wholes = [], [], []
    for job, share, owner in zip(jobs, shares, owners, strict=True):
        average, part = _mixed(job, share, *rows[id(job)])
        averages.append(average)
        parts.append(part)
        wholes.append(share.collected(part, owner))
    factors: list[Tensor | None] = []
    for job, whole in zip(jobs, wholes, strict=True):
        factor = None if whole is None else factor_of(job.group, job.parameter, whole)
        factors.append(None if whole is None or factor is None else factor.to(whole.dtype).contiguous())
    views = []
    for i, (job, share, owner) in enumerate(zip(jobs, shares, owners, strict=True)):
        ratio, whole, factor = torch.ones((), dtype=torch.float64, device=parts[i].device), wholes[i], factors[i]
        if job.variant.injects:
            if whole is not None and factor is not None:
                ratio.fill_(ratio_of(whole, factor))
            share.ranks.sent(ratio, owner)
        own = share.handed_out(factor, owner, parts[i])
        if not job.held["weight"].numel():
            continue
        numbers, keys = rows[id(job)]
        factor = own.reshape(job.layout.dims)
        if not (job.variant.injects or is_observed(job)):
            run_all([along(job, factor.to(numbers.dtype))], numbers[None], keys[None], [job.group["compile"]])
            continue
        take = partial(take_along, job, numbers, averages[i], factor, float(ratio))
        if is_observed(job):
            views.append(viewed(job.parameter, along(job, job.held["gradient"]), numbers, take))
        else:
            take()
    return views


def _share(job: Job) -> Share:
    share = share_of(job.parameter)
    assert share is not None
    return share


def _owners(jobs: Sequence[Job]) -> list[int]:
    """Ranks in turn, the largest matrices first."""
    owners = [0] * len(jobs)
    by_size = sorted(range(len(jobs)), key=lambda i: -jobs[i].parameter.numel())
    for turn, i in enumerate(by_size):
        owners[i] = turn % _share(jobs[i]).ranks.size
    return owners


def _mixed(job: Job, share: Share, numbers: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The own rows of what is orthogonalised, as a matrix in what it is sent in."""
    columns = share.shape[1:].numel()
    if job.held["weight"].numel():
        ((average, mixed),) = mixed_of([job], numbers[None], keys[None])
    else:
        average = mixed = torch.zeros(0, columns, dtype=numbers.dtype, device=job.held["weight"].device)
    dtype = job.group["ns_dtype"] or product_dtype(mixed.device)
    return average, mixed.reshape(-1, columns).to(mixed.dtype if job.variant.injects else dtype)
