"""The host's time for a step of small parameters, beside torch's fused AdamW.

Muon's is beside that of StiffnessAdamW, and without its products. These are cases of
`overhead.py`.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from _timing import Step
from torch import Tensor

import fp8manifold as fm
from fp8manifold._base import reading
from fp8manifold._triton import launch
from fp8manifold.optim import _backends, _matrices, _native_step, _plan, _steady

PARAMETER_COUNTS: Final = (8, 60, 172, 290)
MATRIX_COUNTS: Final = (60, 290)
MUONS_GOAL: Final = 1.5
"""The largest ratio of Muon's time without products to that of StiffnessAdamW."""


@dataclass(frozen=True)
class StepPath:
    """A way that a step takes through the library."""

    name: str
    #: the shape of each parameter
    shape: tuple[int, int]
    lr: float
    #: the largest time per parameter, in microseconds
    goal_us: float


#: On a CPU parameters have 32 elements, so that the arithmetic is nearly nothing.
CPU_PATH: Final = StepPath("a CPU's path", (1, 32), lr=1e-5, goal_us=15.0)
CARD_PATH: Final = StepPath("a card's path", (8, 256), lr=1e-3, goal_us=20.0)


@dataclass(frozen=True)
class StepCase:
    """A step of ours and another one over as many parameters."""

    name: str
    step: Step
    reference: Step
    parameters: int
    #: the largest time per parameter, in microseconds
    goal_us: float | None = None
    #: the largest ratio
    goal: float | None = None


def one_byte_parameters(count: int, shape: tuple[int, int]) -> list[fm.FP8Parameter]:
    """Return weights in one byte, with gradients."""
    torch.manual_seed(0)
    parameters = [fm.FP8Parameter(torch.randn(shape) * 0.02, "E4M3", seed=i) for i in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(shape)
    return parameters


def fused_step(count: int, shape: tuple[int, int]) -> Step:
    """Return the step of torch's fused AdamW."""
    parameters = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(shape)
    return torch.optim.AdamW(parameters, 1e-3, fused=True).step


class IdleKernel:
    """A kernel that can be launched over any grid and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: None


def pretend_gpu_steps(until: ExitStack) -> None:
    """Let steps take the path that they take on a GPU, to kernels that do nothing."""
    kernel = IdleKernel()
    replacements: list[tuple[Any, str, Any]] = [
        (_plan, "on_gpu", lambda device: True),
        (_steady, "is_triton", lambda slot: True),
        (_matrices, "multiplies_together", lambda device: True),
        (_backends, "is_native", lambda slot: False),
        (reading, "is_read_at_once", lambda x: False),
        (launch, "_kernels", lambda: (kernel, kernel, kernel)),
        (launch, "_factor_kernels", lambda: launch.FactorKernels(*[kernel] * 6)),
        (launch, "options", dict),
    ]
    for module, name, replacement in replacements:
        until.enter_context(patch.object(module, name, replacement))


def step_cases(until: ExitStack) -> Iterator[StepCase]:
    """Yield the cases of a CPU, then pretend that there is a GPU and yield those of one."""
    yield from _cases_of(CPU_PATH)
    # From here on: the cases above have been measured by now.
    pretend_gpu_steps(until)
    yield from _cases_of(CARD_PATH)


def muon_cases(until: ExitStack) -> Iterator[StepCase]:
    """Yield the cases of Muon's steps, on either path, whose products do nothing."""

    def unchanged(matrices: Tensor, *_: object) -> Tensor:
        return matrices

    # native steps have imported it
    for module in (_matrices, _native_step):
        until.enter_context(patch.object(module, "orthogonal_factor", unchanged))
    yield from _muon_cases_of(CPU_PATH)
    pretend_gpu_steps(until)
    yield from _muon_cases_of(CARD_PATH)


def _muon_cases_of(path: StepPath) -> Iterator[StepCase]:
    for count in MATRIX_COUNTS:
        matrices = one_byte_parameters(count, path.shape)
        others = one_byte_parameters(count, path.shape)
        yield StepCase(
            f"{count} matrices without products, {path.name}, 8bit",
            fm.optim.StiffnessMuon(matrices, path.lr, moments="8bit").step,
            fm.optim.StiffnessAdamW(others, path.lr, moments="8bit").step,
            count,
            goal=MUONS_GOAL,
        )


def _cases_of(path: StepPath) -> Iterator[StepCase]:
    for moments, count in itertools.product(("float32", "8bit"), PARAMETER_COUNTS):
        parameters = one_byte_parameters(count, path.shape)
        yield StepCase(
            f"{count} parameters, {path.name}, {moments}",
            fm.optim.StiffnessAdamW(parameters, path.lr, moments=moments).step,
            fused_step(count, path.shape),
            count,
            goal_us=path.goal_us,
        )
