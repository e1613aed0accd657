"""The length that a step of Adam gains by the rounding of its second moment.

    python study/benchmarks/second_moment.py [--elements 32768] [--lookbacks 4]
                                             [--seed 1] [--json] [--record]

A step of Adam is proportional to ``1 / sqrt(v)``. Gradients of independent weights,
with sizes within a factor of eight, are averaged over ``lookbacks / (1 - beta2)``
steps, exactly and in every way that a column names. Shown is the mean of
``sqrt(exact / v) - 1`` in percent, for the ``v`` that a step reads, over the last
quarter of the steps and the weights that have had a gradient.

The first three columns store the root of ``v`` in E4M3, rounded up or down with odds
that preserve the mean of ``v``, of its root, or of its fourth root. The last are the
library's: ``moments="8bit"`` with the mean of its ``v``, and ``bfloat16``. Gradients
are normal, except those of *constant size* and those of which *one in ten* is not 0.
The variance of *falling* and *rising* ones changes by 30% in ``1 / (1 - beta2)`` steps;
under *a sixteenth* it falls to a sixteenth where the last quarter begins.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import fp8manifold as fm
from fp8manifold.optim._eager_step import scale_of_bound

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, add_option, record

BETA2S: Final = (0.95, 0.99, 0.999)
COLUMN_COUNT: Final = 256
LOOK_COUNT: Final = 10
KINDS: Final = ("steady", "falling", "rising", "a sixteenth", "constant size", "one in ten")
POWERS: Final = {"right for v": 2.0, "for its root": 1.0, "for its fourth root": 0.5}
SECOND_MOMENT_HEADER: Final = ("gradients", "beta2", *POWERS, "8bit", "8bit, mean of v", "bfloat16")


def rounded_root(root: Tensor, power: float, draws: Tensor) -> Tensor:
    """Round to E4M3's spacing above its lowest binade.

    The odds preserve the mean of ``root ** power``.
    """
    spacing = torch.exp2(torch.floor(torch.log2(root)) - 3)
    steps = root / spacing
    below = steps.floor()
    low, high = below**power, (below + 1) ** power
    odds_of_up = (steps**power - low) / (high - low)
    return (below + (draws < odds_of_up).to(root.dtype)) * spacing


class LibrarySecondMoment:
    """The second moment of an optimizer of the library, as it is in its state."""

    def __init__(self, sizes: Tensor, moments: str, beta2: float, seed: int) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(sizes.shape))
        options: dict[str, Any] = {
            "lr": 0.0,
            "betas": (0.9, beta2),
            "moments": moments,
            "seed": seed,
        }
        self.optimizer = fm.optim.StiffnessAdamW([self.weight], **options)

    def read(self) -> Tensor:
        """Return the present value."""
        state = self.optimizer.state.get(self.weight)
        if not state:
            return torch.zeros(self.weight.shape, dtype=torch.float64)
        stored = state["exp_avg_sq"]
        if stored.dtype is torch.uint8:
            root = fm.decode(stored, "E4M3") * scale_of_bound(state["sq_bound"], of_root=True)
            return root.double().square()
        return stored.double()

    def step(self, gradient: Tensor) -> None:
        """Take a step."""
        self.weight.grad = gradient.float()
        self.optimizer.step()


def gradient_of(
    kind: str, sizes: Tensor, share: float, beta2: float, t: int, draw: torch.Generator
) -> Tensor:
    """Return the gradients of step ``t``, before which ``share`` of all is done."""
    normal = torch.randn(sizes.shape, generator=draw, dtype=torch.float64) * sizes
    if kind == "constant size":
        return sizes * normal.sign()
    if kind == "one in ten":
        return normal * (torch.rand(sizes.shape, generator=draw) < 0.1) * math.sqrt(10)
    if kind == "a sixteenth":
        return normal / 4 if share >= 0.75 else normal
    drift = {"steady": 0.0, "falling": -0.3, "rising": 0.3}[kind]
    return normal * math.exp(drift * (1 - beta2) * t / 2)


def update_lengths(kind: str, beta2: float, options: argparse.Namespace) -> list[float]:
    """Return the figures of one line, in percent."""
    draw = torch.Generator().manual_seed(options.seed)
    shape = (options.elements // COLUMN_COUNT, COLUMN_COUNT)
    sizes = torch.exp2(torch.rand(shape, generator=draw, dtype=torch.float64) * 3)
    steps = round(options.lookbacks / (1 - beta2))
    interval = max(1, steps // 4 // LOOK_COUNT)
    exact = torch.zeros(shape, dtype=torch.float64)
    by_power = {power: torch.zeros(shape, dtype=torch.float64) for power in POWERS.values()}
    in_8_bits = LibrarySecondMoment(sizes, "8bit", beta2, options.seed)
    in_bfloat16 = LibrarySecondMoment(sizes, "bfloat16", beta2, options.seed)
    looks: list[list[float]] = []
    for t in range(steps):
        gradient = gradient_of(kind, sizes, t / steps, beta2, t, draw)
        new = gradient.square() * (1 - beta2)
        exact = exact * beta2 + new
        by_power = {power: moment * beta2 + new for power, moment in by_power.items()}
        is_last_quarter = 4 * (t + 1) > 3 * steps
        if is_last_quarter and (steps - 1 - t) % interval == 0:
            moment_8_bits = in_8_bits.read() * beta2 + new
            moment_bfloat16 = in_bfloat16.read() * beta2 + new
            figures = [gained_length(exact, moment) for moment in by_power.values()]
            figures.append(gained_length(exact, moment_8_bits))
            figures.append(excess(exact, moment_8_bits))
            figures.append(gained_length(exact, moment_bfloat16))
            looks.append(figures)
        draws = torch.rand(shape, generator=draw)
        for power, moment in by_power.items():
            root = rounded_root(moment.sqrt().clamp(min=1e-30), power, draws)
            by_power[power] = torch.where(moment > 0, root, 0.0).square()
        in_8_bits.step(gradient)
        in_bfloat16.step(gradient)
    return [math.fsum(column) / len(column) for column in zip(*looks, strict=True)]


def gained_length(exact: Tensor, moment: Tensor) -> float:
    """Return how much longer steps are by a moment, over weights that had a gradient."""
    ratios = (exact / moment)[exact > 0]
    return 100 * (ratios.sqrt().mean().item() - 1)


def excess(exact: Tensor, moment: Tensor) -> float:
    """Return by how much a moment exceeds the exact one, in the mean."""
    ratios = (moment / exact)[exact > 0]
    return 100 * (ratios.mean().item() - 1)


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=int, default=1 << 15, help=f"weights, a multiple of {COLUMN_COUNT}"
    )
    parser.add_argument("--lookbacks", type=float, default=4.0, help="steps, in 1 / (1 - beta2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    add_option(parser)
    options = parser.parse_args()
    if options.elements < COLUMN_COUNT or options.elements % COLUMN_COUNT:
        parser.error(f"--elements {options.elements}: a multiple of {COLUMN_COUNT}")
    if not 0.2 <= options.lookbacks < math.inf:
        parser.error(f"--lookbacks {options.lookbacks}: at least 0.2")
    torch.set_num_threads(1)
    rows: list[list[Cell]] = []
    for kind, beta2 in itertools.product(KINDS, BETA2S):
        print(f"{kind}, {beta2}", file=sys.stderr, flush=True)
        figures = [round(figure, 2) for figure in update_lengths(kind, beta2, options)]
        rows.append([kind, str(beta2), *figures])
    if options.json:
        print(json.dumps(rows))
    else:
        steps = f"{options.lookbacks} / (1 - beta2) steps"
        print(f"torch {torch.__version__}, {options.elements} weights, {steps}; percent\n")
        texts = [SECOND_MOMENT_HEADER]
        for kind, beta2, *figures in rows:
            texts.append((kind, beta2, *(f"{figure:.2f}" for figure in figures)))
        print(
            text_table(texts, ("---", *["---:"] * (len(SECOND_MOMENT_HEADER) - 1)), markdown=True)
        )
    if options.record:
        record("", SECOND_MOMENT_HEADER, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
