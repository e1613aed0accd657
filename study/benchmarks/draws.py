"""The pull of rounding towards zero, and the decay that it adds.

    python study/benchmarks/draws.py [--steps 1000] [--rows 200] [--seed 0] [--json]
                                     [--record]

A square matrix of weights of one byte, and its copy in float32, take the library's
steps by the same gradients, whose mean is 0:

    normal        independent normal gradients of 0.3 ULP of the weights they began with
    alternating   0.3 ULP up and 0.3 ULP down, in turn
    every fifth   0.3 ULP up in every fifth step, 0.075 ULP down in the others
    AdamW         normal gradients, a learning rate of a fiftieth of the weights'
                  standard deviation
    Muon          normal gradients, a fifth of the steps
    decay         no gradients, and a weight decay of 0.005 per step; a fifth of the
                  steps

Shown is how much further from 0 the bytes are than the floats, in % of the mean
magnitude at the start: 0 up to chance if rounding is right on average, and below 0 if
it pulls towards 0. For decay it is the excess of its rate, in %. After each figure are
two standard errors, over the weights.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import fp8manifold as fm
from fp8manifold.random_bits import Draws

# All benchmarks share these modules.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from _forms import check_at_least, text_table
from _record import Cell, add_option, record
from _write_back import DRAWS

PULLED_FORMATS: Final = ("E7M0", "E5M2", "E4M3", "E3M4", "E1M6", "E2M5")
SPREAD: Final = 0.05
"""The weights' standard deviation."""


@dataclass(frozen=True)
class Stream:
    """Gradients and options that an optimizer gets, step by step."""

    optimizer: Callable[..., Any]
    options: dict[str, Any]
    #: the update that a step asks for, in ULPs of the weights at the start, from its
    #: number and from normal noise
    update: Callable[[int, Tensor], Tensor]
    #: the share of the steps that are taken
    share: float = field(default=1.0, kw_only=True)


def scaled_noise(step: int, noise: Tensor) -> Tensor:
    """Return 0.3 ULP of noise."""
    return 0.3 * noise


def up_and_down(step: int, noise: Tensor) -> Tensor:
    """Return 0.3 ULP up or down, in turn."""
    return torch.full_like(noise, 0.3 if step % 2 else -0.3)


def seldom_up(step: int, noise: Tensor) -> Tensor:
    """Return 0.3 ULP up in every fifth step, and a quarter of that down in the others."""
    return torch.full_like(noise, -0.075 if step % 5 else 0.3)


def plain_noise(step: int, noise: Tensor) -> Tensor:
    """Return the noise, whose size an optimizer like Adam does not see."""
    return noise


def nothing(step: int, noise: Tensor) -> Tensor:
    """Return zeros."""
    return torch.zeros_like(noise)


PLAIN_SGD: Final = {"lr": 1.0, "momentum": 0.0}
STREAMS: Final = {
    "normal": Stream(fm.optim.StiffnessSGD, PLAIN_SGD, scaled_noise),
    "alternating": Stream(fm.optim.StiffnessSGD, PLAIN_SGD, up_and_down),
    "every fifth": Stream(fm.optim.StiffnessSGD, PLAIN_SGD, seldom_up),
    "AdamW": Stream(
        fm.optim.StiffnessAdamW,
        {"lr": SPREAD / 50, "betas": (0.9, 0.95), "weight_decay": 0.0},
        plain_noise,
    ),
    "Muon": Stream(
        fm.optim.StiffnessMuon,
        {"lr": SPREAD / 5, "weight_decay": 0.0},
        plain_noise,
        share=0.2,
    ),
    "decay": Stream(
        fm.optim.StiffnessSGD,
        {"lr": 0.005, "momentum": 0.0, "weight_decay": 1.0},
        nothing,
        share=0.2,
    ),
}


class Distances(NamedTuple):
    """Distances of weights from 0, on the side where they began."""

    start: Tensor
    #: at the end, as floats
    exact: Tensor
    #: at the end, as bytes
    rounded: Tensor


def take_both_steps(
    fmt: str, draws: Draws, stream: Stream, options: argparse.Namespace
) -> Distances:
    """Step bytes and floats by the same gradients."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.rows, options.rows)
    values = torch.randn(shape, generator=generator) * SPREAD
    weight = fm.FP8Parameter(values, fmt, seed=options.seed)
    start = weight.dequantize()
    exact = nn.Parameter(start.clone())
    scale = weight.expanded_scale()
    ulp = fm.ulp(start / scale, fmt) * scale
    optimizers = []
    for parameter in (weight, exact):
        optimizers.append(
            stream.optimizer([parameter], **stream.options, draws=draws, seed=options.seed)
        )
    for step in range(max(round(options.steps * stream.share), 1)):
        noise = torch.randn(shape, generator=generator)
        gradient = -stream.update(step, noise) * ulp
        weight.grad = gradient
        exact.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    side = start.double().sign()
    return Distances(start * side, exact.detach() * side, weight.dequantize() * side)


class Pull(NamedTuple):
    """A figure of the table, in %."""

    value: float
    standard_error: float

    def __str__(self) -> str:
        """Return the figure and two standard errors."""
        return f"{self.value:+.1f} ± {2 * self.standard_error:.1f}"


def pull(distances: Distances) -> Pull:
    """Return how much further from 0 the bytes are, in % of the mean magnitude at the start."""
    start = float(distances.start.mean())
    error = distances.rounded - distances.exact
    deviation = float(error.std()) / math.sqrt(error.numel())
    return Pull(100 * float(error.mean()) / start, 100 * deviation / start)


def excess_decay(distances: Distances) -> Pull:
    """Return by how much the bytes' rate of decay exceeds the floats', in %."""
    start, exact, rounded = (float(part.mean()) for part in distances)
    error = distances.rounded - distances.exact
    deviation = float(error.std()) / math.sqrt(error.numel())
    exact_decay = math.log(exact / start)
    excess = math.log(rounded / start) / exact_decay - 1
    return Pull(100 * excess, 100 * deviation / exact / -exact_decay)


def pull_rows(options: argparse.Namespace) -> list[tuple[Cell, ...]]:
    """Return a line for every format and kind of draws."""
    lines: list[tuple[Cell, ...]] = []
    for fmt, draws in itertools.product(PULLED_FORMATS, DRAWS):
        print(fmt, draws, file=sys.stderr, flush=True)
        figures = []
        for name, stream in STREAMS.items():
            distances = take_both_steps(fmt, draws, stream, options)
            figures.append(excess_decay(distances) if name == "decay" else pull(distances))
        lines.append((fmt, draws, *map(str, figures)))
    return lines


def draws_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
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
    parser = draws_parser()
    options = parser.parse_args()
    check_at_least(parser, options, 1, "steps", "rows")
    torch.set_num_threads(1)
    header = ("format", "draws", *STREAMS)
    lines = pull_rows(options)
    if options.json:
        print(json.dumps([dict(zip(header, line, strict=True)) for line in lines], indent=1))
    else:
        texts = [tuple(map(str, line)) for line in lines]
        print(text_table([header, *texts], ("---",) * len(header), markdown=False))
    if options.record:
        record("", header, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
