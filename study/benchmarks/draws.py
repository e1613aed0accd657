"""The pull of rounding towards zero, and the decay that it adds: the library's steps on
bytes and on floats.

    python study/benchmarks/draws.py [--steps 1000] [--rows 200] [--seed 0] [--json]
    [--record]

A square matrix of weights of one byte, and its copy in float32, take steps by the same
gradients, whose mean is 0:

    normal independent normal gradients of 0.3 ULP of the weights they began with
    alternating 0.3 ULP up and 0.3 ULP down, in turn every fifth 0.3 ULP up in every
    fifth step, 0.075 ULP down in the others AdamW normal gradients, a learning rate of
    a fiftieth of the weights' standard deviation Muon normal gradients, a fifth of the
    steps decay no gradients, and a weight decay of 0.005 per step; a fifth of the steps

Shown is how much further from 0 the bytes are than the floats, in % of the mean
magnitude at the start: 0 up to chance if rounding is right on average, and below 0 if
it pulls towards 0. For decay it is the excess of its rate, in %. After each figure are
two standard errors, over the weights.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.random_bits import Draws

# modules that all benchmarks share
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import text_table
from _record import Cell, add_option, record

FORMATS: Final = ("E7M0", "E5M2", "E4M3", "E3M4", "E1M6", "E2M5")
DRAWS: Final[tuple[Draws, ...]] = ("independent", "dither")
SPREAD: Final = 0.05
"""The weights' standard deviation."""


@dataclass(frozen=True)
class Stream:
    """Gradients and options that an optimizer gets, step by step."""

    optimizer: Callable[..., Any]
    options: dict[str, Any]
    #: what a step asks for by its number and by noise of its own, in ULPs of the
    #: weights at the start
    asked: Callable[[int, Tensor], Tensor]
    #: the share of the steps that are taken
    share: float = field(default=1.0, kw_only=True)


SGD: Final = (fm.optim.StiffnessSGD, {"lr": 1.0, "momentum": 0.0})
STREAMS: Final = {
    "normal": Stream(*SGD, lambda step, noise: 0.3 * noise),
    "alternating": Stream(
        *SGD, lambda step, noise: torch.full_like(noise, 0.3 if step % 2 else -0.3)
    ),
    "every fifth": Stream(
        *SGD, lambda step, noise: torch.full_like(noise, -0.075 if step % 5 else 0.3)
    ),
    "AdamW": Stream(
        fm.optim.StiffnessAdamW,
        {"lr": SPREAD / 50, "betas": (0.9, 0.95), "weight_decay": 0.0},
        lambda step, noise: noise,
    ),
    "Muon": Stream(
        fm.optim.StiffnessMuon,
        {"lr": SPREAD / 5, "weight_decay": 0.0},
        lambda step, noise: noise,
        share=0.2,
    ),
    "decay": Stream(
        fm.optim.StiffnessSGD,
        {"lr": 0.005, "momentum": 0.0, "weight_decay": 1.0},
        lambda step, noise: torch.zeros_like(noise),
        share=0.2,
    ),
}


def ends(
    fmt: str, draws: Draws, stream: Stream, options: argparse.Namespace
) -> tuple[Tensor, Tensor, Tensor]:
    """Distances of weights from 0, on the side where they began: at the start, and at
    the end as floats and bytes.
    """
    generator = torch.Generator().manual_seed(options.seed)
    shape = options.rows, options.rows
    weight = fm.FP8Parameter(
        torch.randn(shape, generator=generator) * SPREAD, fmt, seed=options.seed
    )
    start = weight.dequantize()
    exact = nn.Parameter(start.clone())
    ulp = fm.ulp(start / weight.expanded_scale(), fmt) * weight.expanded_scale()
    optimizers = [
        stream.optimizer([each], **stream.options, draws=draws, seed=options.seed)
        for each in (weight, exact)
    ]
    for step in range(max(round(options.steps * stream.share), 1)):
        weight.grad = exact.grad = (
            -stream.asked(step, torch.randn(shape, generator=generator)) * ulp
        )
        for optimizer in optimizers:
            optimizer.step()
    side = start.double().sign()
    return start * side, exact.detach() * side, weight.dequantize() * side


def figure(name: str, start: Tensor, exact: Tensor, rounded: Tensor) -> tuple[float, float]:
    """A figure of the table and its standard error, in %."""
    error = rounded - exact
    found, deviation = float(error.mean()), float(error.std()) / math.sqrt(error.numel())
    if name != "decay":
        return 100 * found / float(start.mean()), 100 * deviation / float(start.mean())
    asked = math.log(float(exact.mean() / start.mean()))
    excess = math.log(float(rounded.mean() / start.mean())) / asked - 1
    return 100 * excess, 100 * deviation / float(exact.mean()) / -asked


def rows(options: argparse.Namespace) -> list[tuple[Cell, ...]]:
    """A line for every format and kind of draws."""
    found: list[tuple[Cell, ...]] = []
    for fmt in FORMATS:
        for draws in DRAWS:
            print(fmt, draws, file=sys.stderr, flush=True)
            figures = [
                figure(name, *ends(fmt, draws, stream, options)) for name, stream in STREAMS.items()
            ]
            found.append(
                (fmt, draws, *(f"{each:+.1f} ± {2 * deviation:.1f}" for each, deviation in figures))
            )
    return found


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200, help="of the matrix, and its columns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_option(parser)
    return parser


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = build_parser()
    options = parser.parse_args()
    for name in ("steps", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    torch.set_num_threads(1)
    header, found = ("format", "draws", *STREAMS), rows(options)
    if options.json:
        print(json.dumps([dict(zip(header, line, strict=True)) for line in found], indent=1))
    else:
        print(
            text_table(
                [header, *(tuple(map(str, line)) for line in found)], ("---",) * len(header), False
            )
        )
    if options.record:
        record("", header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
