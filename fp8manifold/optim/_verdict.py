"""Steps on a GPU whose verdict the card finds itself: the host plans meanwhile, and waits once, at the end."""

from typing import Any, Final

import torch
from torch import Tensor

from fp8manifold import _triton
from fp8manifold._ranks import local_of, share_of
from fp8manifold.optim._finite import all_finite, squares_are_finite
from fp8manifold.optim._job import Job, Member
from fp8manifold.optim._residuals import unpacked
from fp8manifold.optim._run import note_changes, tables_of
from fp8manifold.optim._triton_step import is_triton, run_triton

__all__ = ["is_steady", "take_steady"]

_OWN: Final = ("_gradient", "_plan", "_planned", "_ready", "_take", "_take_many", "_take_together")
_BASES: Final = ("fp8manifold.optim._optimizer", "fp8manifold.optim._grid_optimizer")
_GRADIENTS: Final = (torch.float32, torch.bfloat16, torch.float16)


def is_steady(optimizer: Any, members: list[Member]) -> bool:
    """Whether planning a step changes nothing but the counts of steps: these are counted back if it is refused.

    On one GPU with kernels, in one process, unobserved, with nothing due: no first step, no refresh, no reset.
    """
    parameters = [p for _, p in members]
    if not parameters or not on_gpu(parameters[0].device):
        return False
    devices = {p.device for p in parameters} | {p.grad.device for p in parameters if p.grad is not None}
    if len(devices) != 1 or optimizer.observer is not None:
        return False
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return alone and _is_ordinary(type(optimizer)) and all(_is_even(optimizer, *member) for member in members)


def on_gpu(device: torch.device) -> bool:
    """Whether kernels run there."""
    return device.type == "cuda" and _triton.is_available()


def _is_ordinary(kind: type) -> bool:
    """Whether an optimizer plans and takes steps as the base does: Muon, Fisher and Riemannian steps do more."""
    owners = (next(base for base in kind.__mro__ if name in vars(base)) for name in _OWN)
    return all(owner.__module__ in _BASES for owner in owners)


def _is_even(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> bool:
    state, gradient = optimizer.state.get(parameter, {}), parameter.grad
    step = state.get("step")
    if not isinstance(step, Tensor) or not step.is_cpu or "stream" not in state or share_of(parameter) is not None:
        return False
    if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.dtype not in _GRADIENTS:
        return False
    if (
        group["compile"] is not None
        or not parameter.numel()
        or getattr(local_of(parameter), "remainder", None) is not None
    ):
        return False
    done = int(step)
    due = [group[name] for name in ("refresh_every", "stabilize_every", "reset_every") if group[name]]
    return bool(done) and all(done % every for every in due)


def take_steady(optimizer: Any, members: list[Member]) -> bool:
    """Take the step of all, or of none where a gradient or its square is not finite, as the result says.

    Raises:
        FloatingPointError: one is not, and its group has ``on_nonfinite="raise"``.
    """
    optimizer._check_options()
    optimizer._check_schedules(optimizer._taken(members))
    jobs = optimizer._planned(members)
    taken = _on_card(optimizer, jobs)
    if taken is None:
        if taken := _all_finite_or_back(optimizer, members):
            optimizer._take(jobs)
    elif not taken:
        _count_back(optimizer, members)
        for group, parameter in members:
            squares_are_finite(group, parameter)  # which raises where it is asked to
    if taken:
        optimizer.skipped_in_row = 0
    return bool(taken)


def _all_finite_or_back(optimizer: Any, members: list[Member]) -> bool:
    """The verdict after planning, without which all counts are what they were."""
    try:
        verdict = all_finite(optimizer, members)
    except (FloatingPointError, ValueError):
        _count_back(optimizer, members)
        raise
    if not verdict:
        _count_back(optimizer, members)
    return verdict


def _on_card(optimizer: Any, jobs: list[Job]) -> bool | None:
    """Whether the step was taken; None, with nothing changed, where kernels don't take all of it."""
    tables = tables_of(jobs)
    if len(tables) != 1 or not all(job.in_place and is_triton(job, tables[0][1].dtype) for job in jobs):
        return None
    _, numbers, keys = tables[0]
    with unpacked(jobs, optimizer.state):
        launched = run_triton(jobs, numbers.numpy(), keys.numpy(), check=True)
    if launched is None:
        return None
    if launched.refused:
        return False
    note_changes([tensor for job in jobs for tensor in job.changed])
    optimizer._widen(jobs)
    note_changes([job.parameter for job in jobs])
    return True


def _count_back(optimizer: Any, members: list[Member]) -> None:
    torch._foreach_add_([optimizer.state[parameter]["step"] for _, parameter in members], -1)
