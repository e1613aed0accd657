"""What the host pays for a step of small parameters: on a card's path, with kernels that do nothing, and on a CPU's.

    python benchmarks/_overhead_step.py [--rounds 25] [--sizes 8 60 172 290]

Beside each torch's fused AdamW over as many float32 parameters, in the same run, in turn.  One thread; the least
process CPU time of a call, in microseconds a parameter.  On a CPU the parameters have 32 elements, so that the
arithmetic is nearly nothing.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import torch
from _timing import seconds

import fp8manifold as fm
from fp8manifold._base import reading
from fp8manifold._triton import launch
from fp8manifold.optim import _backends, _steady

Step = Callable[[], object]
SIZES: Final = (8, 60, 172, 290)
WARM_UP: Final = 4


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
    """Steps go the way that they go on a card, to kernels that do nothing."""

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


def cases(sizes: tuple[int, ...], until: ExitStack) -> Iterator[tuple[str, int, Step, Step]]:
    """What is measured, the number of parameters, our step and torch's; after a CPU's a card is pretended."""
    for moments in ("float32", "8bit"):
        for count in sizes:
            step = fm.optim.StiffnessAdamW(parameters(count, (1, 32)), 1e-5, moments=moments).step
            yield f"a CPU, {moments}", count, step, fused(count, (1, 32))
    pretend_a_card(until)
    for moments in ("float32", "8bit"):
        for count in sizes:
            step = fm.optim.StiffnessAdamW(parameters(count, (8, 256)), 1e-3, moments=moments).step
            yield f"a card, {moments}", count, step, fused(count, (8, 256))


def least(calls: list[Step], rounds: int) -> list[float]:
    """The least seconds of each, taken in turn."""
    for call in calls * WARM_UP:
        call()
    cpu = torch.device("cpu")
    return [min(times) for times in zip(*([seconds(call, cpu) for call in calls] for _ in range(rounds)), strict=True)]


def main() -> None:
    """Print microseconds a parameter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as until:
        for what, count, ours, theirs in cases(tuple(options.sizes), until):
            ours_us, theirs_us = (1e6 * s / count for s in least([ours, theirs], options.rounds))
            print(f"{what:20s} {count:4d} parameters: {ours_us:7.1f} us a parameter, fused AdamW {theirs_us:6.1f}")


if __name__ == "__main__":
    main()
