"""The host's time for a step of small parameters: the cases of `overhead.py`, beside
torch's fused AdamW.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import torch

import fp8manifold as fm
from fp8manifold._base import reading
from fp8manifold._triton import launch
from fp8manifold.optim import _backends, _steady

Step = Callable[[], object]
SIZES: Final = (8, 60, 172, 290)


def parameters(count: int, shape: tuple[int, int]) -> list[fm.FP8Parameter]:
    """Weights in one byte, with gradients."""
    torch.manual_seed(0)
    made = [fm.FP8Parameter(torch.randn(shape) * 0.02, "E4M3", seed=i) for i in range(count)]
    for p in made:
        p.grad = torch.randn(shape)
    return made


def fused(count: int, shape: tuple[int, int]) -> Step:
    """torch's fused AdamW."""
    made = [torch.nn.Parameter(torch.randn(shape)) for _ in range(count)]
    for p in made:
        p.grad = torch.randn(shape)
    return torch.optim.AdamW(made, 1e-3, fused=True).step


def pretend_a_card(until: ExitStack) -> None:
    """Let steps take the path that they take on a GPU, to kernels that do nothing."""

    class Idle:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: None

    kernel = Idle()
    places: list[tuple[Any, str, Any]] = [
        (_steady, "on_gpu", lambda device: True),
        (_steady, "is_triton", lambda slot: True),
        (_backends, "is_native", lambda slot: False),
        (reading, "is_read_at_once", lambda x: False),
        (launch, "_kernels", lambda: (kernel, kernel, kernel)),
        (launch, "options", dict),
    ]
    for owner, name, instead in places:
        until.enter_context(patch.object(owner, name, instead))


def cases(until: ExitStack) -> Iterator[tuple[str, Step, Step, int, float]]:
    """Cases: a name, our step and torch's, the parameters and the goal; after a CPU's
    cases a GPU is pretended.

    On a CPU parameters have 32 elements, so that the arithmetic is nearly nothing.
    """
    for place, shape, rate, goal in (
        ("a CPU's", (1, 32), 1e-5, 15.0),
        ("a card's", (8, 256), 1e-3, 20.0),
    ):
        if place == "a card's":
            pretend_a_card(until)
        for moments, count in itertools.product(("float32", "8bit"), SIZES):
            step = fm.optim.StiffnessAdamW(parameters(count, shape), rate, moments=moments).step
            yield (
                f"{count} parameters, {place} path, {moments}",
                step,
                fused(count, shape),
                count,
                goal,
            )
